"""Load and save networks; the suffix selects the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from onchip.errors import InputError
from onchip.formats.foreign_formats import foreign_format_error
from onchip.formats.weights.safetensors_file import read_safetensors, write_safetensors
from onchip.network.graph import Network, check_network

if TYPE_CHECKING:
    from onchip.formats.onnx.shapes import Shapes


def _read_onnx(path: Path, shapes: Shapes | None = None) -> Network:
    from onchip.formats.onnx.reader import read_onnx  # slow to import

    return read_onnx(path, shapes)


def _write_onnx(net: Network, path: Path) -> None:
    from onchip.formats.onnx.writer import write_onnx

    write_onnx(net, path)


READERS: dict[str, Callable[[Path], Network]] = {".onnx": _read_onnx, ".safetensors": read_safetensors}
WRITERS: dict[str, Callable[[Network, Path], None]] = {".onnx": _write_onnx, ".safetensors": write_safetensors}
SUFFIXES = tuple(READERS)


def load_file(path: str | os.PathLike[str], shapes: Shapes | None = None) -> Network:
    """Load a network from a file; FormatError if it is missing or damaged, InputError if its suffix is unknown.

    shapes  sizes of the dynamic axes of an ONNX file's inputs
    """
    source = Path(path)
    if source.suffix.lower() not in READERS:
        raise foreign_format_error(source, list(READERS)) or _unknown_suffix(source, "read", list(READERS))
    if shapes is not None:
        if source.suffix.lower() != ".onnx":
            raise shapes_error(str(source))
        return _read_onnx(source, shapes)
    return READERS[source.suffix.lower()](source)


def save(net: Network, path: str | os.PathLike[str]) -> None:
    """Write a network to a .onnx or .safetensors file, atomically."""
    check_network(net)
    if not isinstance(path, str | os.PathLike):
        raise InputError("not a path", got=type(path).__name__, expected="str or Path", hint="model.onnx")
    target = Path(path)
    if target.suffix.lower() not in WRITERS:
        raise _unknown_suffix(target, "write", list(WRITERS))
    WRITERS[target.suffix.lower()](net, target)


def shapes_error(model: str) -> InputError:
    """The error for `shapes` with anything but an ONNX file."""
    return InputError(
        "shapes set the dynamic axes of an ONNX file", got=f"shapes for {model}", expected="a .onnx file",
        hint="leave them out",
    )  # fmt: skip


def _unknown_suffix(path: Path, verb: str, known: list[str]) -> InputError:
    got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
    expected, hint = f"one of {', '.join(known)}", str(path.with_suffix(known[0])) if path.name else known[0]
    return InputError(f"cannot {verb} {path}: unknown format", got=got, expected=expected, hint=hint)
