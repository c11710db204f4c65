"""How much a function does, counted in calls: the same on every machine, slow or busy, where seconds are not."""

import gc
import sys
from collections.abc import Callable


def python_calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, until `function` returns."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls the finalizers of whatever other tests left
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
