"""NVTX ranges: names of a profile on the timeline of Nsight Systems."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

DOMAIN = "onchip"


def named_range(name: str) -> AbstractContextManager[None]:
    """A range of this thread; nothing without the package nvtx."""
    annotate = _annotate()
    return nullcontext() if annotate is None else annotate(name, domain=DOMAIN)


@functools.cache
def _annotate() -> Callable[..., AbstractContextManager[None]] | None:
    try:
        from nvtx import annotate
    except ImportError:
        return None
    found: Callable[..., AbstractContextManager[None]] = annotate
    return found
