"""Numba, loaded when something is compiled: that alone takes longer than a whole run from a warm cache.

Kernels are decorated, and name types, when their modules are loaded. What does so here is a stand-in until then; in
functions that Numba calls, while it compiles, the names are Numba's own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


class LateModule:
    """A module that is loaded for the first of its names that somebody wants."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class TypeName(str):
    """A type of Numba's by its name; "float32*" is a pointer to some."""

    def real(self) -> Any:
        types = importlib.import_module("numba.types")
        return types.CPointer(TypeName(self[:-1]).real()) if self.endswith("*") else getattr(types, self)


class _Types(LateModule):
    """numba.types; as long as Numba is not loaded, of plain types the names."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if "numba" in sys.modules else TypeName(name)


class LateFunction:
    """A function of Numba's own, or one that is made with it, which compiled code finds under a global name."""

    needs: Any = None  # the linked function that its code calls

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make, self.__name__, self.__qualname__ = make, name, name

    @functools.cached_property
    def _numba_type_(self) -> Any:
        """Asked by Numba of whatever it does not know."""
        from numba.core.registry import cpu_target

        self._made, known = self._make(), cpu_target.typing_context  # kept: Numba knows it as long as somebody has it
        known.refresh()
        return known.resolve_value_type(self._made)


def intrinsic(function: Callable[..., Any] | None = None, *, prefer_literal: bool = False) -> Any:
    """numba.extending.intrinsic, when the first caller is compiled."""
    if function is None:
        return functools.partial(intrinsic, prefer_literal=prefer_literal)

    def make() -> Any:
        from numba.extending import intrinsic

        return intrinsic(prefer_literal=prefer_literal)(function)

    made = LateFunction(make, function.__name__)
    functools.update_wrapper(made, function)  # type: ignore[arg-type]
    return made


types: Any = _Types("numba.types")
cgutils: Any = LateModule("numba.core.cgutils")
