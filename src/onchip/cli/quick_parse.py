"""Typer commands with fast value conversion: Typer imports pydantic for it, a fifth of a second at start-up.

Only values that are clearly valid are converted here. Typer converts the rest and reports errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from typer.core import TyperCommand, TyperGroup

_CONVERTERS: dict[type, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    str: (re.compile(r"(?s).*"), str),
    Path: (re.compile(r"(?s).+"), Path),
    int: (re.compile(r"-?[0-9]{1,18}"), int),
    float: (re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?"), float),
}


class QuickCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return convert_quickly(super().get_params(ctx), self.callback)


class QuickGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return convert_quickly(super().get_params(ctx), self.callback)


def convert_quickly(parameters: list[Any], function: Callable[..., Any] | None) -> list[Any]:
    """Wrap each parameter of a command; `function` has their types by name."""
    types = {} if function is None else get_type_hints(function)
    for parameter in parameters:
        if not isinstance(parameter.process_value, _Quick):
            parameter.process_value = _Quick(parameter, _convertible_type(types.get(parameter.name)))
    return parameters


def _convertible_type(hint: Any) -> type | None:
    """`str` and `str | None` -> str; None for types that are not in _CONVERTERS."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if isinstance(hint, UnionType) else [hint]
    return kinds[0] if len(kinds) == 1 and kinds[0] in _CONVERTERS else None


class _Quick:
    """The conversion of one parameter; replaces its process_value."""

    def __init__(self, parameter: Any, kind: type | None) -> None:
        self.parameter, self.kind, self.slow = parameter, kind, parameter.process_value

    def __call__(self, context: Any, value: Any) -> Any:
        if value is None and not self.parameter.required:
            takes_many = self.parameter.multiple or self.parameter.nargs != 1
            value, called = () if takes_many else None, self.parameter.callback
            return value if called is None else called(context, self.parameter, value)
        if self.kind is not None and self.parameter.callback is None:
            if type(value) is self.kind or (self.kind is Path and isinstance(value, Path)):
                return value
            pattern, convert = _CONVERTERS[self.kind]
            if isinstance(value, str) and pattern.fullmatch(value):
                return convert(value)
        return self.slow(context, value)
