"""Arrays of CuPy, JAX and any library that exposes its memory, through an engine on their GPU. Needs a GPU."""

import subprocess
import sys

import numpy as np
import pytest

from checks import rows
from gpu_networks import BATCHES
from onchip.errors import InputError
from onchip.runtime.arrays.adapters import DeviceArray

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("B", [0, *BATCHES])
def test_cupy(engine, cupy, B):
    x = rows(B, 72)
    want, given = engine(x), cupy.asarray(x)
    out = cupy.full((B, 4), cupy.nan, cupy.float32)
    for _ in range(2):
        assert engine(given, out=out) is out
        assert np.array_equal(out.get(), want)
    made = engine(given)
    assert isinstance(made, cupy.ndarray)
    assert np.array_equal(made.get(), want)


def test_cupy_on_a_stream_of_the_callers(engine, cupy):
    x = rows(12_800, 72)
    want, stream = engine(x), cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = cupy.asarray(x)
        made = engine(given)
        assert np.array_equal(made.get(stream=stream), want)


@pytest.mark.parametrize("B", BATCHES)
def test_jax(engine, jax, B):
    x = rows(B, 72)
    want, given = engine(x), jax.numpy.asarray(x)
    for _ in range(3):
        made = engine(given * 1)  # still being computed when passed, without another reference
        assert isinstance(made, jax.Array)
        assert (made.shape, made.dtype) == ((B, 4), np.float32)
        assert np.array_equal(np.asarray(made + 0), want)
    with pytest.raises(InputError, match="out cannot be written to"):
        engine(given, out=jax.numpy.zeros((B, 4)))


def test_jax_results_are_not_written_over(engine, jax):
    xs = [rows(12_800, 72, seed=i) for i in range(8)]
    wants = [engine(x) for x in xs]
    made = [engine(jax.numpy.asarray(x) + 0) for x in xs for _ in range(4)]
    for i, y in enumerate(made):
        assert np.array_equal(np.asarray(y), wants[i // 4]), i


ENDING = """
import numpy as np
import jax.numpy as jnp
import onchip

engine = onchip.compile(onchip.mlp(5, 4, 3), "cuda")
x = jnp.asarray(np.ones((1000, 5), np.float32))
kept = [engine(x) for _ in range(4)]  # lent to JAX when Python ends
engine(x)  # under way then
"""


def test_python_ends_while_jax_has_our_arrays(jax):
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Exception" not in done.stderr


class Interface:
    """A library with only `__cuda_array_interface__`, which works on its own stream."""

    def __init__(self, tensor, stream):
        self._tensor, self._stream = tensor, stream

    @property
    def __cuda_array_interface__(self):
        return {**self._tensor.__cuda_array_interface__, "version": 3, "stream": self._stream}


def test_the_cuda_array_interface(engine, torch):
    x = rows(1000, 72)
    want, stream = engine(x), torch.cuda.Stream()
    given, out = torch.from_numpy(x).cuda(), torch.zeros(1000, 4, device="cuda")
    torch.cuda.synchronize()
    for handle in (None, 1, stream.cuda_stream):
        out.zero_()
        torch.cuda.synchronize()
        engine(Interface(given, handle), out=Interface(out, handle))
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), want)
        made = engine(Interface(given, handle))
        assert isinstance(made, DeviceArray)
        assert np.array_equal(made.numpy(), want)
        assert np.array_equal(torch.as_tensor(made, device="cuda").cpu().numpy(), want)
        assert np.array_equal(torch.from_dlpack(made).cpu().numpy(), want)


class Exchanged:
    """A library with only DLPack."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, *, stream):
        return self._tensor.__dlpack__(stream=stream)


def test_dlpack(engine, torch):
    x = rows(12_800, 72)
    want = engine(x)
    source, out = torch.from_numpy(x).cuda(), torch.zeros(12_800, 4, device="cuda")
    for _ in range(3):
        torch.cuda._sleep(5_000_000)
        given = source * 1  # not computed yet when the engine is called
        made = engine(Exchanged(given))
        del given
        torch.empty(12_800, 72, device="cuda").fill_(7)  # torch may reuse that memory
        assert np.array_equal(torch.from_dlpack(made).cpu().numpy(), want)
    engine(Exchanged(source), out=Exchanged(out))
    assert np.array_equal(out.cpu().numpy(), want)
