"""The values of arguments and options, converted without pydantic.

Typer 0.29 and later import pydantic to convert values, which adds 0.1 s to every start. Errors read as in Typer 0.28.
"""

from __future__ import annotations

import functools
from typing import Any, get_args, get_origin

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _convert_here(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _convert_here(super().get_params(ctx))


def _convert_here(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if hasattr(parameter, "get_runtime_param"):  # Typer 0.29 and later
            parameter.get_runtime_param = functools.partial(_Values, parameter.type_descriptor.annotation)
    return parameters


class _Values:
    """Converts the values of one parameter, as Typer's RuntimeParam does. Typer converts the flags itself."""

    def __init__(self, annotation: Any) -> None:
        self._is_list = get_origin(annotation) is list
        self._type = get_args(annotation)[0] if self._is_list else annotation

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if self._is_list else None
        if self._is_list:
            return [_convert(self._type, each, param, ctx) for each in value]
        if get_origin(self._type) is tuple:
            types = zip(get_args(self._type), value, strict=True)
            return tuple(_convert(kind, each, param, ctx) for kind, each in types)
        return _convert(self._type, value, param, ctx)


def _convert(kind: Any, text: Any, param: Any, ctx: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise BadParameter(f"{text!r} is not a valid {kind.__name__}.", ctx=ctx, param=param) from None
