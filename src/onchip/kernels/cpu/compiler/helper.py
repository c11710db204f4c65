"""The helper process of compile_ahead.py: it compiles linked functions into the cache that both processes read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from onchip.kernels.cpu.compiler import jit
from onchip.kernels.cpu.compiler.compile_ahead import become_helper, compile_together


def compile_ahead(names: Sequence[str]) -> None:
    """Compile the linked functions that these need, until the process that started this one ends."""
    os.environ["ONCHIP_QUIET"] = "1"
    if not become_helper(jit.cache_folder()):
        return
    parent, found = os.getppid(), []
    for path in names:
        module, _, name = path.partition(":")
        if "." not in name:  # not a nested function
            found.append(getattr(importlib.import_module(module), name))
    needed = jit.all_linked_below([getattr(thing, "code", thing) for thing in found])
    compile_together(needed, should_continue=lambda: os.getppid() == parent)
