"""The .safetensors container: arrays in one file, with metadata.

Eight bytes (header length, little-endian), a JSON header, the tensors back to back. Implemented here because the
library's NumPy API lacks bfloat16 and float8, and to report the byte at which a malformed header is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import MAX_HEADER_BYTES, atomic_write, check_memory, open_input
from onchip.formats.graph_json import check_keys, parse_json
from onchip.network.reading import MAX_RANK, naming_file, show
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES, numpy_dtype

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_TAGS = {name: tag for tag, name in _DTYPES.items()}
_METADATA = "__metadata__"


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write the arrays and the metadata. The file appears atomically."""
    arrays = {name: _native(array) for name, array in tensors.items()}
    if _METADATA in arrays:
        raise InputError(f"a weight cannot be called '{_METADATA}' in a .safetensors file", hint="rename it")
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    # Wide dtypes first: every tensor is then aligned to its element size when the file is mapped.
    order = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    end = 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        tag = _TAGS[arrays[name].dtype.name]
        header[name] = {"dtype": tag, "shape": arrays[name].shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        expected = f"at most {MAX_HEADER_BYTES:,} B"
        raise InputError("the graph is too large for a .safetensors file", got=f"{len(text):,} B", expected=expected)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(arrays[name].reshape(-1).view(np.uint8).data)


def _native(array: Array) -> Array:
    """The same values, row-major and in native byte order."""
    return np.asarray(array, dtype=numpy_dtype(array.dtype.name), order="C")


def read_tensors(path: str | os.PathLike[str]) -> tuple[object, dict[str, Array]]:
    """The metadata, unchecked, and every array."""
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        file_bytes = os.fstat(file.fileno()).st_size
        header, start = _read_header(file, file_bytes)
        metadata = header.pop(_METADATA, None)
        spans = sorted((_span(name, entry) for name, entry in header.items()), key=lambda span: span[3:])
        _check_layout(spans, start, file_bytes)
        check_memory(2 * (file_bytes - start), "the file")  # twice: an engine has a second copy
        return metadata, {span[0]: _read_tensor(file, span, start) for span in spans}


Span = tuple[str, str, tuple[int, ...], int, int]  # name, dtype, shape, begin, end: byte offsets after the header


def _read_header(file: IO[bytes], file_bytes: int) -> tuple[dict[str, Any], int]:
    if file_bytes < 8:
        raise FormatError("not a safetensors file", got=f"{file_bytes} B", expected="8 B of header length, a header")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            "not a safetensors file, or a malicious one", got=f"a header of {length:,} B",
            expected=f"at most {MAX_HEADER_BYTES:,} B",
        )  # fmt: skip
    if 8 + length > file_bytes:
        raise FormatError(
            "the file ends inside its header", got=f"{file_bytes:,} B", expected=f"8 B + {length:,} B of header",
            hint="copy or download the file again",
        )  # fmt: skip
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError as error:
        raise FormatError("the header is not UTF-8", got=f"a bad byte at {8 + error.start}") from None
    header = parse_json(text, "the header", start=8)
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object", got=show(header))
    return header, 8 + length


def _span(name: str, entry: object) -> Span:
    where = f"tensor {show(name)}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is not described by an object", got=show(entry))
    check_keys(entry, ("dtype", "shape", "data_offsets"), where)
    tag: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(tag, str) or tag not in _DTYPES:
        raise FormatError(f"{where} has an unknown dtype", got=show(tag), expected=", ".join(_DTYPES))
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise FormatError(f"{where} has a bad shape", got=show(shape), expected="a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"{where} has bad offsets", got=show(offsets), expected="[begin, end] in bytes")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[_DTYPES[tag]]
    if end - begin != needed:
        raise FormatError(
            f"{where}: shape and offsets do not match", got=f"{end - begin:,} B from {begin:,} to {end:,}",
            expected=f"{needed:,} B for {tag} {show(shape)}",
        )  # fmt: skip
    return name, _DTYPES[tag], tuple(shape), begin, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(spans: list[Span], start: int, file_bytes: int) -> None:
    """Check that the tensors are contiguous, without gap or overlap, up to the end of the file."""
    at = 0
    for name, _, _, begin, end in spans:
        if begin != at:
            raise FormatError(
                f"tensor {show(name)} {'overlaps the previous one' if begin < at else 'leaves a gap before it'}",
                got=f"begins at byte {start + begin:,}", expected=f"byte {start + at:,}",
            )  # fmt: skip
        at = end
    if start + at != file_bytes:
        what = "the file is truncated" if start + at > file_bytes else "the file has extra bytes after its last tensor"
        raise FormatError(
            what, got=f"{file_bytes:,} B", expected=f"{start + at:,} B", hint="copy or download the file again"
        )


def _read_tensor(file: IO[bytes], span: Span, start: int) -> Array:
    name, dtype, shape, begin, end = span
    data = np.empty(end - begin, np.uint8)
    file.seek(start + begin)
    got = file.readinto(data.data)  # type: ignore[attr-defined]
    if got != data.nbytes:
        raise FormatError(f"the file ends inside tensor {show(name)}", got=f"{got:,} B", expected=f"{data.nbytes:,} B")
    if dtype == "bool" and (data > 1).any():
        at = start + begin + int(np.argmax(data > 1))
        raise FormatError(f"tensor {show(name)} is not BOOL", got=f"a value above 1 at byte {at:,}", expected="0 or 1")
    try:
        return data.view(numpy_dtype(dtype)).reshape(shape)
    except ValueError as error:  # sizes whose product overflows next to a 0
        raise FormatError(f"tensor {show(name)} has a bad shape", got=f"{show(shape)}: {error}") from None


def digest_of(text: str, arrays: Mapping[str, Array]) -> str:
    """SHA-256 of a text and of arrays: their names, dtypes, shapes and values."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))  # lone surrogates are allowed: any text has a digest
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode(errors="surrogatepass"))
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
