"""Ids in GPU arrays: invalid ones are reported asynchronously. Needs a GPU."""

import threading

import numpy as np
import pytest

from checks import rows
from onchip.errors import InputError
from onchip.network.build import sequential
from onchip.network.layers import CumSum, Embedding, TokenConv
from onchip.network.types import TensorType
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import compile
from onchip.workloads import sentiment

pytestmark = pytest.mark.gpu


def network(kind, ids="int32"):
    given = TensorType(("B", 5), ids)
    if kind == "embedding":
        return sequential(given, [("e", Embedding())], {"e.weight": rows(40, 12)})
    if kind == "sums":
        return sequential(given, [("c", TokenConv())], {"c.weight": rows(120, 9).reshape(40, 3, 9)})
    return sequential(given, [("e", Embedding()), ("s", CumSum(1))], {"e.weight": rows(40, 12)})  # two groups


def some_ids(B, dtype="int32", seed=0):
    return np.random.default_rng(seed).integers(0, 40, (B, 5)).astype(dtype)


@pytest.mark.parametrize("kind", ["embedding", "sums", "two groups"])
@pytest.mark.parametrize(
    ("dtype", "value"), [("int32", -1), ("int32", 2**31 - 1), ("int64", 40), ("int64", -(2**63)), ("int64", 2**63 - 1)]
)
def test_the_first_bad_id_of_torch_tensors(torch, kind, dtype, value):
    engine, good = compile(network(kind, dtype), "cuda"), some_ids(50_000, dtype)
    want, bad = engine(good), good.copy()
    bad[[49_999, 40_000, 33_333, 33_333], [0, 1, 4, 2]] = value
    x, y, out = torch.from_numpy(bad).cuda(), torch.from_numpy(good).cuda(), torch.empty(want.shape, device="cuda")
    told = f"row 33333, position 2: id {value}, expected 0 to 39"
    for ask in (engine.wait, lambda: engine(y), lambda: engine(y, out=out)):
        for _ in range(3):  # launched, captured, replayed
            engine(x, out=out)
            torch.cuda.synchronize()  # a call reports earlier errors
            with pytest.raises(InputError, match=told):
                ask()
        for _ in range(2):
            assert np.array_equal(engine(y, out=out).cpu().numpy(), want)
    engine(torch.full_like(x, -5))
    with pytest.raises(InputError, match="row 0, position 0: id -5"):
        engine.wait()
    engine.wait()


@pytest.mark.parametrize("kind", ["embedding", "sums", "two groups"])
@pytest.mark.parametrize("B", [7, 50_000])
def test_bad_ids_of_the_host_are_told_by_the_same_call(kind, B):
    engine, good = compile(network(kind), "cuda"), some_ids(B)
    want, bad = engine(good), good.copy()
    bad[[B - 1, B - 3, B - 3], [0, 4, 1]] = 40, -2, 77
    for _ in range(2):
        with pytest.raises(InputError, match=f"row {B - 3}, position 1: id 77, expected 0 to 39"):
            engine(bad)
        assert np.array_equal(engine(good), want)


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_megabyte_of_the_hosts_ids_has_the_bits_of_ids_there(torch, is_locked):
    """One chunk, copied to the GPU in slices; pinned arrays are copied directly."""
    net = sentiment.network(vocabulary=900, embedding=64, channels=40, hidden=(32,))
    engine = compile(net, "cuda", "fp16", batch_hint=1 << 30)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 900, (16_384, 16)).astype(np.int32))
    there = engine(ids.cuda()).cpu().numpy()
    given, out = (ids.pin_memory(), torch.empty(16_384, 2).pin_memory()) if is_locked else (ids, torch.empty(16_384, 2))
    for _ in range(3):  # launches, then a graph
        out.fill_(float("nan"))
        assert engine(given.numpy(), out=out.numpy()).tobytes() == there.tobytes()


def test_a_ticket_waits_and_tells(torch):
    engine = compile(network("embedding"), "cuda")
    ids = torch.from_numpy(some_ids(100)).cuda()
    y = torch.empty(100, 5, 12, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    pointers = {"x": ids.data_ptr(), "e": y.data_ptr()}
    bound = CudaBackend().bind(engine.plan)
    bound.enqueue(pointers, 100, stream.cuda_stream).wait()
    assert np.array_equal(y.cpu().numpy(), engine(ids.cpu().numpy()))
    ids[7, 3] = 77
    torch.cuda.synchronize()
    ticket = bound.enqueue(pointers, 100, stream.cuda_stream)
    with pytest.raises(InputError, match="row 7, position 3: id 77"):
        ticket.wait()
    ticket.wait()


def test_a_graph_of_the_callers_tells_too(torch):
    engine, good = compile(network("two groups"), "cuda"), some_ids(500)
    x, out = torch.from_numpy(good).cuda(), torch.empty(500, 5, 12, device="cuda")
    engine(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine(x, out=out)
    graph.replay()
    engine.wait()
    x[3, 1] = -7
    graph.replay()
    with pytest.raises(InputError, match="row 3, position 1: id -7"):
        engine.wait()


def test_threads_with_good_ids_on_streams_of_their_own(torch):
    engine, failures = compile(network("two groups"), "cuda"), []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for B in (1000, 777):
                    ids = some_ids(B, seed=seed)
                    x, want = torch.from_numpy(ids).cuda(), engine(ids)
                    outs = [torch.empty(B, 5, 12, device="cuda") for _ in range(5)]
                    for i in range(50):
                        engine(x, out=outs[i % 5])
                    failures.extend((seed, B) for y in outs if not np.array_equal(y.cpu().numpy(), want))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def check_library(engine, given, read):
    """given(ids) -> an array of the library; read(array) -> NumPy"""
    ids = some_ids(1000)
    for _ in range(3):
        assert np.array_equal(read(engine(given(ids))), engine(ids))
    ids[7, 3] = 40
    engine(given(ids))
    with pytest.raises(InputError, match="row 7, position 3: id 40"):
        engine.wait()


@pytest.mark.parametrize("kind", ["embedding", "two groups"])
def test_cupy(cupy, kind):
    check_library(compile(network(kind), "cuda"), cupy.asarray, lambda y: y.get())


@pytest.mark.parametrize("kind", ["embedding", "two groups"])
def test_jax(jax, kind):
    check_library(compile(network(kind), "cuda"), jax.numpy.asarray, np.asarray)
