"""A network that uses all kernels: correct in threads, on streams and in chunks, and with invalid ids.

On a GPU, and at small sizes on an emulated one.
"""

import threading

import numpy as np
import pytest

from all_kernels import COUNTS, PAIRS, WORDS, EmulatedArrays, TorchArrays, all_kernels, inputs
from checks import assert_error_within
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from every_network import programs_of
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import bound_plan, chunks, staging
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import compile
from random_networks import faults

NET = all_kernels()
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
THREADS = 4


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu)])
def arrays(request, monkeypatch):
    """Arrays of device "cuda"."""
    if request.param == "emulated":
        return EmulatedArrays(emulate_device(monkeypatch))
    return TorchArrays(request.getfixturevalue("torch"))


@pytest.fixture
def net(arrays):
    return all_kernels(width=40) if isinstance(arrays, EmulatedArrays) else NET


@pytest.fixture
def sizes(arrays):
    """Rows of a few batches, odd ones."""
    return (1, 7, 21) if isinstance(arrays, EmulatedArrays) else (1, 7, 1001)


def same(got, want):
    return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_kernels_are_in_it(precision):
    """Except where kernels compete: gemms and convolutions on CUDA or tensor cores, scans and recurrences by shape; and
    except training, gemms of two values, attention, several lookups, ArgMax and TopK, which have their own tests."""
    plan = make_plan(NET, H200, KERNELS, Job(precision))
    sources = [program.source for program in programs_of([plan], (7, plan.job.batch))]
    files = {f"{source.parent.name}/{source.stem}" for source in sources}
    assert {
        "conv/direct",
        "conv/depthwise",
        "embedding/gather",
        "common/permute",
        "elementwise/pointwise",
        "pool/pool",
        "reduction/reduce",
        "reduction/softmax",
        "layout/concat",
        "gemm/sm90",
    } < files
    assert {source.parent.name for source in sources} > {"mlp", "scan"}
    assert {kernel.name for kernel in KERNELS} - {group.claim.kernel for group in plan.groups} < {
        "mlp_tensor_core",
        "mlp_fused",
        "mlp_pair",
        "gemm_simt",
        "gemm_mma",
        "conv_implicit_gemm",
        "conv_gather",
        "conv_sm90",
        "gemv",
        "recipes",
        "conv_first_layer",
        "conv_last_layer",
        "conv_last_layer_sm90",
        "mlp_train",
        "mlp_train_three_launch",
        "mlp_train_resident",
        "mlp_train_layer_parallel",
        "matmul",
        "matmul_mma",
        "attention",
        "top_k",
        "lookups",
        "recurrent",
        "recurrent_register_resident",
        "recurrent_mma",
        "arg_reduce",
        "batch_norm",
        "batch_norm_grad",
        "batch_sum",
        "clip",
        "dropout",
        "embedding_grad",
        "extreme_grad",
        "loss",
        "norm_grad",
        "pool_grad",
        "recurrent_grad",
        "recurrent_grad_resident",
        "select_grad",
        "step_counters",
        "step_rows",
        "softmax_grad",
        "top_k_grad",
        "update",
        "weight_grad",
        "weight_grad_mma",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_keeps_the_promise(precision):
    assert faults(NET, compile(NET, "cuda", precision), 0, (0, 160, 4097)) == []


def test_it_is_right_wherever_its_rows_lie(arrays, net, sizes):
    engine, given = compile(net, "cuda"), inputs(max(sizes))
    whole = engine(*given)
    truth, naive = reference.forward(net, given), reference.forward(net, given, "float32")
    for got, exact, baseline in zip(whole, truth, naive, strict=True):
        assert_error_within(got, exact, baseline)
    (stream,) = arrays.streams(1)
    for B in sizes:
        want, rows = [y[:B] for y in whole], [x[:B] for x in given]
        assert same(engine(*rows), want), B
        with arrays.on(stream):
            there = [arrays.put(x, stream) for x in rows]
            for _ in range(3):  # launched, as a graph, as a graph again
                assert same(map(arrays.fetch, engine(*there)), want), B


def test_threads_and_streams(arrays, net, sizes):
    """Each thread runs its batches on several streams at a time, with host rows in between."""
    engine, failures = compile(net, "cuda"), []
    count, sizes = (2, sizes[:2]) if isinstance(arrays, EmulatedArrays) else (THREADS, sizes)  # emulation: 1 s per call
    given = {(t, s): inputs(B, seed=10 * t + s) for t in range(count) for s, B in enumerate(sizes)}
    want = {key: engine(*rows) for key, rows in given.items()}

    def work(t):
        try:
            streams, there = arrays.streams(len(sizes)), []
            for s, stream in enumerate(streams):
                with arrays.on(stream):
                    there.append([arrays.put(x, stream) for x in given[t, s]])
            for _ in range(3):
                made = []
                for s, stream in enumerate(streams):
                    with arrays.on(stream):
                        made.append(engine(*there[s]))
                if not same(engine(*given[t, 0]), want[t, 0]):
                    failures.append((t, "host"))
                for s, stream in enumerate(streams):
                    with arrays.on(stream):
                        if not same(map(arrays.fetch, made[s]), want[t, s]):
                            failures.append((t, s))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- batches larger than the memory ----------------------------------------------------------------------------


@pytest.fixture
def many(arrays, monkeypatch):
    """Rows of a batch that uses every staging slot several times."""
    if not isinstance(arrays, EmulatedArrays):
        return 60_001
    for name in ("SLOT_BYTES", "MIN_CHUNK_BYTES"):
        monkeypatch.setattr(chunks, name, 20_000)
    for name in ("MAPPED_BYTES", "SMALL_BYTES", "OFTEN_BYTES"):
        monkeypatch.setattr(staging, name, 0)
    return 83


def test_a_batch_that_does_not_fit_goes_in_chunks(arrays, net, many, sizes, monkeypatch):
    few = max(sizes)
    engine, given = compile(net, "cuda"), inputs(few)
    again = np.arange(many) % few
    want = [y[again] for y in engine(*given)]
    batch = [x[again] for x in given]
    row_bytes = [array.nbytes // many for array in (*batch, *want)]
    assert many > 2 * chunks.chunk_rows(row_bytes, many)
    (stream,) = arrays.streams(1)
    bound = CudaBackend().bind(engine.plan)
    wholes = bound.gpu.device.memory_bytes // bound.bind(many).arena_bytes  # arenas of the whole batch in all memory
    for part in (1, 3, 20):
        monkeypatch.setattr(bound_plan, "ARENA_PART", wholes * part)
        engine = compile(net, "cuda")
        assert same(engine(*batch), want), f"rows of the host, 1/{part} of the memory"
        with arrays.on(stream):
            made = engine(*[arrays.put(x, stream) for x in batch])
            assert same(map(arrays.fetch, made), want), f"rows on the GPU, 1/{part} of the memory"


# -- ids ---------------------------------------------------------------------------------------------------------

# The input, the id, and the message: tokens are looked up, and so are their prefix sums.
BAD = [
    (0, -1, f"row 17, position 2: id -1, expected 0 to {WORDS - 1}"),
    (0, WORDS, f"row 17, position 2: id {WORDS}, expected 0 to {WORDS - 1}"),
    (0, 2**40, f"row 17, position 2: id {2**40}, expected 0 to {WORDS - 1}"),
    (1, PAIRS, f"row 17, position 2: id {PAIRS}, expected 0 to {PAIRS - 1}"),
    (1, -(2**31), f"row 17, position 2: id {-(2**31)}, expected 0 to {PAIRS - 1}"),
]


def told_by(engine):
    """All errors that its kernels may find: an invalid token may also make a prefix sum invalid."""
    found = []
    while True:
        try:
            engine.wait()
        except InputError as error:
            found.append(str(error))
        else:
            return found


@pytest.mark.parametrize(("which", "value", "told"), BAD)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_ids_that_are_in_no_table(arrays, net, which, value, told, in_chunks, monkeypatch):
    if in_chunks:
        monkeypatch.setattr(bound_plan, "ARENA_PART", 1 << 62)  # chunks of 16 rows, the fewest
    engine, B = compile(net, "cuda"), 20
    good = inputs(B)
    want = engine(*good)
    bad = [x.copy() for x in good]
    bad[which][17, 2] = value
    out = tuple(np.full_like(y, 7) for y in want)
    with pytest.raises(InputError, match=told):
        engine(*bad, out=out)
    assert all((y == 7).all() for y in out), "ids of the host are looked at before any launch"
    (stream,) = arrays.streams(1)
    with arrays.on(stream):
        there, sound = ([arrays.put(x, stream) for x in rows] for rows in (bad, good))
        engine(*there)
        assert any(told in found for found in told_by(engine))
        for ask in (engine.wait, lambda: engine(*sound)):
            made = engine(*there)
            others = np.arange(B) != 17
            assert same([arrays.fetch(y)[others] for y in made], [y[others] for y in want])
            with pytest.raises(InputError, match="row 17, position 2: id"):
                ask()
            assert all("row 17, " in found for found in told_by(engine))
        assert same(map(arrays.fetch, engine(*sound)), want)


def test_totals_that_are_in_no_table(arrays, net):
    """Ids that the GPU computes: unknown before the launch, for host rows and GPU arrays."""
    engine, good = compile(net, "cuda"), inputs(20)
    want = engine(*good)
    words = good[0].copy()
    words[17] = (0, 0, WORDS - 1, 0, WORDS - 1, 0)
    told = f"row 17, position 4: id {2 * (WORDS - 1)}, expected 0 to {COUNTS - 1}"
    for _ in range(2):
        with pytest.raises(InputError, match=told):
            engine(words, *good[1:])
        assert same(engine(*good), want)
    (stream,) = arrays.streams(1)
    with arrays.on(stream):
        engine(*[arrays.put(x, stream) for x in (words, *good[1:])])
        with pytest.raises(InputError, match=told):
            engine.wait()
        engine.wait()
        assert same(map(arrays.fetch, engine(*[arrays.put(x, stream) for x in good])), want)
