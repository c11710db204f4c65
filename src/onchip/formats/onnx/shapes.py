"""Input shapes of an ONNX file: its own sizes, and the caller's for dynamic axes."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from onchip.errors import FormatError, InputError
from onchip.formats.onnx.tensors import text
from onchip.network.names import did_you_mean
from onchip.network.reading import MAX_RANK, show
from onchip.network.types import BATCH, Dim

# By input name: sizes, with a string for the batch, which is first. A file with one input needs no name.
Shapes = Mapping[str, Sequence[Dim]] | Sequence[Dim]
Sizes = tuple[int | None, ...]  # of an input; None: any batch size
_Found = tuple[Dim | None, ...]  # of an input in the file: a size, a symbol or None

_EXAMPLE = (BATCH, 3, 224, 224)
_IMAGE_SIZE, _OTHER_SIZE = 224, 128  # suggested by the error for a dynamic axis


def input_sizes(
    values: Sequence[Any], shapes: Shapes | None, one_row: bool = False
) -> dict[str, tuple[int | None, tuple[int, ...]]]:
    """The batch and row shape of each input. `shapes` sets dynamic axes, directly or through a shared symbol.

    values   ValueInfoProtos
    one_row  axis 0 is not a batch, so it needs a size too
    """
    files = {text(value.name): _file_sizes(value) for value in values}
    requested = _requested(shapes, list(files))
    known = _symbols(files, requested)
    first = 0 if one_row else 1  # first axis of a row
    found: dict[str, _Found] = {}
    for name, of_file in files.items():
        sizes = _merged(name, of_file, requested.get(name))
        if not first <= len(sizes) < MAX_RANK + first:
            got, expected = f"{len(sizes)} axes", f"{first} to {MAX_RANK}"
            raise FormatError(f"input {show(name)} has no batch", got=got, expected=expected)
        found[name] = tuple(known.get(d, d) if isinstance(d, str) and i >= first else d for i, d in enumerate(sizes))
    rows = {name: tuple(d for d in sizes[first:] if isinstance(d, int)) for name, sizes in found.items()}
    if any(len(rows[name]) + first < len(sizes) for name, sizes in found.items()):
        raise _dynamic_error(found, first)
    batches = {name: None if one_row else sizes[0] for name, sizes in found.items()}
    return {name: (batch if isinstance(batch, int) and batch else None, rows[name]) for name, batch in batches.items()}


def _file_sizes(value: Any) -> _Found | None:
    """The file's size or symbol per axis; None if it has no shape."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else _symbol(text(dim.dim_param))
        for dim in value.type.tensor_type.shape.dim
    )


def _symbol(name: str) -> str | None:
    """A symbol has one size everywhere; some exporters write '?', '-1' or 'None' on every dynamic axis."""
    return name if name != "None" and any(letter.isalpha() for letter in name) else None


def _requested(shapes: Shapes | None, names: Sequence[str]) -> dict[str, Sizes]:
    """The caller's sizes by input name, checked."""
    if shapes is None:
        return {}
    if not isinstance(shapes, Mapping):
        if len(names) != 1:
            raise InputError(
                "a shape needs the name of its input", got=show(shapes),
                expected=f"a shape for one of {', '.join(map(show, names))}", hint=_suggestion({names[0]: shapes}),
            )  # fmt: skip
        shapes = {names[0]: shapes}
    for name in shapes:
        if name not in names:
            raise InputError(
                "the file has no such input", got=show(name),
                expected=", ".join(map(show, names)), hint=did_you_mean(str(name), names),
            )  # fmt: skip
    return {name: _checked(name, shape) for name, shape in shapes.items()}


def _checked(name: str, shape: Sequence[Dim]) -> Sizes:
    try:
        sizes = [None if i == 0 and isinstance(d, str) else operator.index(d) for i, d in enumerate(shape)]  # type: ignore[arg-type]
    except TypeError:  # None, a float, or a string after axis 0
        sizes = []
    if isinstance(shape, str) or not 1 <= len(sizes) <= MAX_RANK or any(d is not None and d < 1 for d in sizes):
        expected = f"sizes of at least 1, after {BATCH!r} for the batch"
        raise InputError(f"bad shape for input {show(name)}", got=show(shape), expected=expected, hint=str(_EXAMPLE))
    return tuple(sizes)


def _symbols(files: Mapping[str, _Found | None], requested: Mapping[str, Sizes]) -> dict[str, int]:
    """The size of each symbol that has one; InputError if it has two."""
    known: dict[str, int] = {}
    for name, sizes in requested.items():
        for symbol, size in zip(files[name] or (), sizes, strict=False):
            if isinstance(symbol, str) and size is not None and known.setdefault(symbol, size) != size:
                raise InputError(
                    f"two sizes for {show(symbol)}", got=f"{known[symbol]} and {size}, for input {show(name)}",
                    expected="one size: both axes have the same symbol in the file",
                    hint=f"{known[symbol]} for both, or {size}",
                )  # fmt: skip
    return known


def _merged(name: str, of_file: _Found | None, given: Sizes | None) -> _Found:
    """The file's sizes, completed with the caller's; InputError if they contradict each other."""
    if of_file is None and given is None:
        expected = "a tensor of known rank, the batch first"
        raise FormatError(f"input {show(name)} has no shape", expected=expected, hint=_suggestion({name: _EXAMPLE}))
    if of_file is None or given is None:
        return of_file or given or ()
    pairs = list(zip(of_file, given, strict=False))
    # Some exporters write 0 for a dynamic axis. In other files 0 is a real size, so only the caller knows.
    if len(of_file) != len(given) or any(isinstance(size, int) and d not in (None, size) and size for size, d in pairs):
        raise InputError(
            f"wrong shape for input {show(name)}", got=_text(given), expected=_text(of_file),
            hint="set only the dynamic axes",
        )  # fmt: skip
    return tuple(size if d is None else d for size, d in pairs)


def _text(sizes: Sequence[Dim | None]) -> str:
    return f"({', '.join('dynamic' if size is None else str(size) for size in sizes)})"


def _dynamic_error(found: Mapping[str, _Found], first: int) -> FormatError:
    """All dynamic axes by input, with a line to paste."""
    axes_of: list[str] = []
    shapes: dict[str, tuple[Dim, ...]] = {}
    for name, sizes in found.items():
        axes = [axis for axis, size in enumerate(sizes) if axis >= first and not isinstance(size, int)]
        if axes:
            symbols = [f"axis {axis}" + (f" ({show(sizes[axis])})" if sizes[axis] else "") for axis in axes]
            axes_of.append(f"input {show(name)}: {', '.join(symbols)}")
            guess = _IMAGE_SIZE if len(sizes) > 3 else _OTHER_SIZE
            shapes[name] = (BATCH, *(size if isinstance(size, int) else guess for size in sizes[1:]))
    expected = "a size for each axis after the batch"
    hint = f"{_suggestion(shapes)}, with your sizes"
    return FormatError("only the batch may be dynamic", got="; ".join(axes_of), expected=expected, hint=hint)


def _suggestion(shapes: Mapping[str, Sequence[Dim]]) -> str:
    """The shapes in the syntax of `onchip.load` and of the command line."""
    options = [shlex.quote(f"{name}={','.join(map(str, shape))}") for name, shape in shapes.items()]
    return f"shapes={dict(shapes)}, or {' '.join(f'--shape {option}' for option in options)}"
