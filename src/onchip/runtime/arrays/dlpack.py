"""DLPack: exchange arrays between libraries without a copy. Only the subset that GPU arrays need."""

from __future__ import annotations

import atexit
import ctypes
from dataclasses import dataclass
from typing import Any

from onchip.errors import InputError

HOST, CUDA, CUDA_MANAGED = 1, 2, 13  # device types

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # type codes; code and bits name a dtype
_NAMES = {"bfloat16": "bfloat16", "bool8": "bool"}


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_python = ctypes.PyDLL(None)  # a separate handle, so that argument types set here affect no other module
_is_valid, _get_pointer, _new = _python.PyCapsule_IsValid, _python.PyCapsule_GetPointer, _python.PyCapsule_New
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
# The same two for a capsule that is being destroyed: by address, since a new reference is not allowed.
_is_valid_at, _get_pointer_at = _python["PyCapsule_IsValid"], _python["PyCapsule_GetPointer"]
_is_valid_at.argtypes, _is_valid_at.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_int
_get_pointer_at.argtypes, _get_pointer_at.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
_new.argtypes, _new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object

_nothing = ctypes.CDLL(None).getpid  # a C function that ignores its arguments

# Exported and not yet released: address of the managed tensor -> the tensor, its sizes, the owner of the memory.
_lent: dict[int, tuple[Managed, Any, Any]] = {}


@dataclass(frozen=True)
class Described:
    """The contents of a capsule; the memory is valid as long as the capsule is."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: row-major
    dtype: str
    device_type: int
    device_id: int
    is_read_only: bool


def describe(capsule: Any) -> Described:
    """Read a capsule of `__dlpack__` without consuming it: keep it while the memory is used."""
    read_only = False
    if _is_valid(capsule, b"dltensor"):
        tensor = Managed.from_address(_get_pointer(capsule, b"dltensor")).tensor
    elif _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise InputError("unknown DLPack", got=f"version {managed.major}.{managed.minor}", expected="version 1")
        tensor, read_only = managed.tensor, bool(managed.flags & 1)
    else:
        raise InputError("not a DLPack capsule", got=repr(capsule), expected="one that is not consumed yet")
    name = f"{_CODES.get(tensor.code, f'code {tensor.code}, bits ')}{tensor.bits}" + "x" * (tensor.lanes != 1)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    dtype = _NAMES.get(name, name)
    return Described(pointer, shape, strides, dtype, tensor.device_type, tensor.device_id, read_only)


def export(pointer: int, shape: tuple[int, ...], dtype: str, device_id: int, owner: object) -> Any:
    """A capsule for row-major memory on a GPU; the owner is kept alive until the consumer releases it."""
    code, bits = next(
        (code, int(dtype.removeprefix(kind))) for code, kind in _CODES.items() if dtype.removeprefix(kind).isdigit()
    )
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    sizes = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
    sizes_at = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    strides_at = ctypes.cast(ctypes.addressof(sizes) + 8 * len(shape), ctypes.POINTER(ctypes.c_int64))
    tensor = _Tensor(pointer, CUDA, device_id, len(shape), code, bits, 1, sizes_at, strides_at, 0)
    managed = Managed(tensor, None, ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _lent[address] = (managed, sizes, owner)
    return _new(address, b"dltensor", ctypes.cast(_destructor, ctypes.c_void_p))


def _release(address: int) -> None:
    _lent.pop(address, None)


def _release_unused(capsule: int) -> None:
    """Release a capsule that was never consumed: it still has its original name."""
    if _is_valid_at(capsule, b"dltensor"):
        _lent.pop(_get_pointer_at(capsule, b"dltensor"), None)


@atexit.register
def _disable_callbacks() -> None:
    """After Python ends, no callback can run: what is exported by then is leaked and freed with the process."""
    for managed, sizes, owner in _lent.values():
        managed.deleter = ctypes.cast(_nothing, ctypes.c_void_p)
        for leaked in (managed, sizes, owner):
            _python.Py_IncRef(ctypes.py_object(leaked))


# C callbacks: the deleter is called by the consumer, from any thread; the destructor by Python.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_release_unused)
