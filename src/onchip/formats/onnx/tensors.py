"""Tensors in an ONNX file: element types, TensorProto to NumPy and back, external data files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError
from onchip.files import free_memory, open_input
from onchip.network.reading import is_count, show
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES, numpy_dtype

MAX_TENSOR_BYTES = 16 << 30  # of all weights: many tensors may point into one file

ELEMENT_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
ELEMENT_TYPES = {dtype: number for number, dtype in ELEMENT_DTYPES.items()}

TEXT = 8  # strings: used only for labels
_EXTERNAL = 1  # TensorProto.data_location


def text(value: str | bytes) -> str:
    """Check a protobuf string: invalid UTF-8 arrives as bytes."""
    if isinstance(value, bytes):
        raise FormatError("a name is not UTF-8", got=show(value))
    return value


def dtype_of(element: int, where: str) -> str:
    if element not in ELEMENT_DTYPES:
        raise FormatError(
            f"{where} has an unsupported element type", got=f"ONNX type {element}", expected=", ".join(ELEMENT_TYPES)
        )
    return ELEMENT_DTYPES[element]


def make_tensor(name: str, array: Array) -> Any:
    import onnx

    array = np.asarray(array, dtype=numpy_dtype(array.dtype.name), order="C")
    return onnx.TensorProto(
        name=name, data_type=ELEMENT_TYPES[array.dtype.name], dims=array.shape, raw_data=array.tobytes()
    )


class TensorReader:
    """Converts TensorProtos of one model to arrays."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder  # external data must be in the model's folder; None: the model is in memory
        self._bytes = 0
        self._most = min(MAX_TENSOR_BYTES, free_memory() // 2)  # half: an engine has a second copy

    def charge(self, nbytes: int) -> None:
        """Account for bytes about to be read or created; FormatError if the file exceeds its limit."""
        self._bytes += nbytes
        if self._bytes > self._most:
            raise FormatError("too many weights", got=f"{self._bytes:,} B", expected=f"at most {self._most:,} B")

    def read(self, tensor: Any, name: str) -> Array:
        where = f"tensor {show(name)}"
        dtype, shape = dtype_of(tensor.data_type, where), tuple(tensor.dims)
        if any(d < 0 for d in shape):
            raise FormatError(f"{where} has a negative size", got=show(shape))
        count = math.prod(shape)
        nbytes = count * DTYPE_BYTES[dtype]
        self.charge(nbytes)
        if tensor.data_location == _EXTERNAL:
            array = np.frombuffer(self._external(tensor, where, nbytes), numpy_dtype(dtype))
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != nbytes:
                raise FormatError(f"{where} is damaged", got=f"{len(tensor.raw_data):,} B", expected=f"{nbytes:,} B")
            array = np.frombuffer(bytes(tensor.raw_data), numpy_dtype(dtype))
        else:
            array = _typed_data(tensor, dtype)
            if array.size != count:
                raise FormatError(f"{where} is damaged", got=f"{array.size:,} elements", expected=f"{count:,}")
        if dtype == "bool" and (array.view(np.uint8) > 1).any():
            raise FormatError(f"{where} is not bool", got="a value above 1", expected="0 or 1")
        try:
            return array.reshape(shape)
        except ValueError as error:  # too many axes, or sizes whose product overflows next to a 0
            raise FormatError(f"{where} has a bad shape", got=f"{show(shape)}: {error}") from None

    def _external(self, tensor: Any, where: str, nbytes: int) -> bytes:
        entries = {text(entry.key): text(entry.value) for entry in tensor.external_data}
        location = entries.get("location", "")
        offset = _byte_count(entries.get("offset", "0"), where)
        length = _byte_count(entries.get("length", str(nbytes)), where)
        if length != nbytes:
            raise FormatError(f"{where}: bad length of external data", got=f"{length:,} B", expected=f"{nbytes:,} B")
        with open_input(self._confined(location, where)) as file:
            file.seek(0, 2)
            size = file.tell()
            if offset + nbytes > size:
                expected = f"at least {offset + nbytes:,} B"
                raise FormatError(f"{where}: {show(location)} is truncated", got=f"{size:,} B", expected=expected)
            file.seek(offset)
            return file.read(nbytes)

    def _confined(self, location: str, where: str) -> Path:
        """The file at `location`, which must be in the model's folder after resolving symbolic links."""
        path, inside, is_file = Path(location), False, False
        if self.folder is None:
            raise FormatError(f"{where} has external data", got=show(location), expected="a model with all its data")
        if location and not path.is_absolute() and ".." not in path.parts and not set(location) & set("\\:\0"):
            try:
                path = (self.folder / path).resolve()
                inside = path.is_relative_to(self.folder.resolve())
                is_file = path.is_file()
            except (OSError, RuntimeError):  # a symlink loop, or a name too long
                pass
        if not inside:
            raise FormatError(
                f"{where} has external data outside the model's folder", got=show(location),
                expected="a relative path without '..' or links out of the folder",
                hint="put the data file next to the model",
            )  # fmt: skip
        if not is_file:
            hint = "put the data file next to the model"
            raise FormatError(f"{where}: its external data is missing", got=f"no file {show(location)}", hint=hint)
        return path


def _byte_count(value: str, where: str) -> int:
    if not is_count(value):
        raise FormatError(f"{where}: bad offset or length of external data", got=show(value), expected="bytes")
    return int(value)


def _typed_data(tensor: Any, dtype: str) -> Array:
    """The values of a tensor stored in a typed repeated field instead of raw bytes."""
    if dtype == "float32":
        return np.array(tensor.float_data, np.float32)
    if dtype == "float64":
        return np.array(tensor.double_data, np.float64)
    if dtype == "int64":
        return np.array(tensor.int64_data, np.int64)
    values = np.array(tensor.int32_data, np.int32)
    if dtype in ("float16", "bfloat16"):  # one 16-bit pattern per int32
        return values.astype(np.uint16).view(numpy_dtype(dtype))
    return values.astype(numpy_dtype(dtype))
