"""Structs that kernels take by value: their layout in C, and arguments that are packed by field name."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

from onchip.kernels.cuda.common.arguments import Int64, Struct


class CStruct(ctypes.Structure):
    """The layout of a C struct. A subclass repeats the struct's fields in `_fields_`, pointers as c_void_p.

    A test compares the size and every offset with those of the compiler.
    """

    source: ClassVar[Path]  # the .cu or .cuh file with the struct
    c_name: ClassVar[str]  # its name there, with template arguments

    @classmethod
    def of(cls, **values: Any) -> Struct:
        """The kernel argument: a value per field.

        A pointer field takes a Memory (an Int64 is an address; 0 is null), a nested struct what its `of` returns,
        an array a sequence; elements past the end of the sequence are zero.
        """
        kinds: dict[str, Any] = {name: kind for name, kind, *_ in cls._fields_}
        if values.keys() != kinds.keys():
            raise TypeError(f"{cls.c_name} has the fields {', '.join(kinds)}, not {', '.join(values)}")
        packed = _Packed(ctypes.sizeof(cls))
        for name, value in values.items():
            packed.put(kinds[name], getattr(cls, name).offset, value, f"{cls.c_name}::{name}")
        return Struct(bytes(packed.data), tuple(packed.pointers))


class _Packed:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.pointers: list[tuple[int, Any]] = []

    def put(self, kind: Any, offset: int, value: Any, name: str) -> None:
        if issubclass(kind, ctypes.Array):
            if len(value) > kind._length_:
                raise OverflowError(f"{len(value)} values do not fit {name}[{kind._length_}]")
            for i, each in enumerate(value):
                self.put(kind._type_, offset + i * ctypes.sizeof(kind._type_), each, name)
        elif isinstance(value, Struct):
            if len(value.data) != ctypes.sizeof(kind):
                raise TypeError(f"{name} has {ctypes.sizeof(kind)} bytes, not {len(value.data)}")
            self._write(offset, value.data)
            self.pointers += [(offset + at, memory) for at, memory in value.pointers]
        elif kind is ctypes.c_void_p and not isinstance(value, Int64):
            self.pointers.append((offset, value))
        elif kind is ctypes.c_void_p:
            self._write(offset, value.value.to_bytes(8, "little", signed=value.value < 0))
        else:
            number = kind(value)
            if kind is not ctypes.c_float and number.value != value:  # ctypes truncates
                raise OverflowError(f"{value:,} does not fit {name}")
            self._write(offset, bytes(number))

    def _write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data
