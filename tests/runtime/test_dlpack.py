"""DLPack capsules: read from other libraries, and exported so that others can release them."""

import ctypes
import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from onchip.errors import InputError
from onchip.runtime.arrays import dlpack

_python = ctypes.PyDLL(None)
_python.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_reads_what_numpy_makes(dtype, version):
    x = np.zeros((3, 5, 2), dtype)[:, 1:]
    found = dlpack.describe(x.__dlpack__() if version is None else x.__dlpack__(max_version=version))
    assert (found.pointer, found.shape, found.dtype) == (x.ctypes.data, (3, 4, 2), dtype)
    assert found.strides == (10, 2, 1)
    assert (found.device_type, found.device_id, found.is_read_only) == (1, 0, False)


def test_reads_what_torch_makes():
    torch = pytest.importorskip("torch")
    x = torch.zeros(6, 4, dtype=torch.bfloat16)[2:]
    found = dlpack.describe(x.__dlpack__())
    assert (found.pointer, found.shape, found.dtype) == (x.data_ptr(), (4, 4), "bfloat16")


def test_a_capsule_that_is_none_is_refused():
    capsule = np.zeros(3).__dlpack__()
    np_again = np.from_dlpack(
        type("X", (), {"__dlpack__": lambda s, **k: capsule, "__dlpack_device__": lambda s: (1, 0)})()
    )
    assert np_again.shape == (3,)
    with pytest.raises(InputError, match="not a DLPack capsule"):
        dlpack.describe(capsule)  # numpy has consumed it


class Owner:
    pass


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (5,), (2, 3, 4)])
def test_what_is_lent_reads_the_same(dtype, shape):
    found = dlpack.describe(dlpack.export(4096, shape, dtype, 2, Owner()))
    assert (found.pointer, found.shape, found.dtype) == (4096, shape, dtype)
    size = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = np.empty(shape, size)
    assert x.size == 0 or found.strides == tuple(s // x.itemsize for s in x.strides)
    assert (found.device_type, found.device_id) == (dlpack.CUDA, 2)


def test_a_capsule_that_nobody_takes_lets_its_owner_go():
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = dlpack.export(4096, (3,), "float32", 0, owner)
    del owner
    gc.collect()
    assert gone() is not None
    del capsule
    assert gone() is None


def test_who_takes_the_memory_gives_it_back():
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = dlpack.export(4096, (3,), "float32", 0, owner)
    del owner
    address = _python.PyCapsule_GetPointer(capsule, b"dltensor")
    used = b"used_dltensor"
    _python.PyCapsule_SetName(capsule, used)  # consumed as DLPack specifies
    del capsule
    assert gone() is not None
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(dlpack.Managed.from_address(address).deleter)
    deleter(address)
    assert gone() is None


ENDING = """
import atexit, ctypes

@atexit.register
def end():  # of a library that was here first: it gives back when nobody can be called any more
    deleter = Managed.from_address(address).deleter
    vars(dlpack).clear()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(address)
    print("ended")

from onchip.runtime.arrays import dlpack

capsule = dlpack.export(4096, (7, 3), "float32", 0, object())
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
address = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), b"used_dltensor")
del capsule
Managed = dlpack.Managed
"""


def test_python_ends_while_memory_is_lent():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
