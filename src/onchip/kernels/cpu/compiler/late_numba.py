"""Numba, loaded when something is compiled: loading it takes longer than a whole run from a warm cache.

Kernel modules use Numba's decorators and type names when they are imported. Here are stand-ins for them; in functions
that Numba calls while it compiles, the names are Numba's own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


class LateModule:
    """A module that is loaded when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class TypeName(str):
    """A Numba type by its name; "float32*" is a pointer."""

    def real(self) -> Any:
        types = importlib.import_module("numba.types")
        return types.CPointer(TypeName(self[:-1]).real()) if self.endswith("*") else getattr(types, self)


class _Types(LateModule):
    """numba.types; until Numba is loaded, names of scalar types."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if "numba" in sys.modules else TypeName(name)


class LateFunction:
    """A function that `make` builds with Numba when compiled code first uses its global name."""

    needs: Any = None  # the linked function that its code calls

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make, self.__name__, self.__qualname__ = make, name, name

    @functools.cached_property
    def _numba_type_(self) -> Any:
        """Its Numba type: Numba reads this attribute of objects that it does not know."""
        from numba.core.registry import cpu_target

        self._function, typing_context = self._make(), cpu_target.typing_context  # Numba's reference is weak
        typing_context.refresh()
        return typing_context.resolve_value_type(self._function)


def intrinsic(function: Callable[..., Any] | None = None, *, prefer_literal: bool = False) -> Any:
    """numba.extending.intrinsic, applied when the first caller is compiled."""
    if function is None:
        return functools.partial(intrinsic, prefer_literal=prefer_literal)

    def make() -> Any:
        from numba.extending import intrinsic

        return intrinsic(prefer_literal=prefer_literal)(function)

    late = LateFunction(make, function.__name__)
    functools.update_wrapper(late, function)  # type: ignore[arg-type]
    return late


types: Any = _Types("numba.types")
cgutils: Any = LateModule("numba.core.cgutils")
