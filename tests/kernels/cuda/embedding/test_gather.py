"""Look-ups on a GPU: rows of tables, sums along windows of ids, and ids that are in no table.

The kernels run on the host where there is no GPU, on a fake driver.
"""

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from fake_cuda import Array
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cuda.embedding.gather import WORDS, GatherKernel
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import CumSum, Embedding, GlobalMean, GlobalSum, TokenConv
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import bound_plan, chunks, staging
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine
from onchip.runtime.placement import kernels_for

LARGE = 2**63 - 1


def embedding(V, E, shape=(5,), ids="int32", dtype="float32"):
    table = (100 * rows(V, E)).astype(numpy_dtype(dtype))
    return sequential(TensorType(("B", *shape), ids), [("e", Embedding())], {"e.weight": table})


def token_conv(V, K, C, S, ids="int32", dtype="float32", has_bias=True, **attributes):
    weights = {"c.weight": rows(V * K, C).reshape(V, K, C).astype(numpy_dtype(dtype))}
    if has_bias:
        weights["c.bias"] = rows(1, C, seed=5)[0].astype(numpy_dtype(dtype))
    return sequential(TensorType(("B", S), ids), [("c", TokenConv(**attributes))], weights)


def some_ids(net, B, seed=0):
    V = min(weight.shape[0] for name, weight in net.weights.items() if name.endswith("weight"))
    return np.random.default_rng(seed).integers(0, V, (B, *net.input.row_shape)).astype(net.input.dtype)


def naive(net, ids):
    """One operation at a time, in the network's dtype."""
    return reference.forward(net, ids, dtype=net.output.dtype).astype(numpy_dtype(net.output.dtype))


EMBEDDINGS = [
    embedding(7, 1), embedding(7, 3, ids="int64"), embedding(40, 4), embedding(40, 10, (3, 2)),
    embedding(5, 1030, (2,), dtype="float16"), embedding(5, 1028, (), "int64"), embedding(9, 3, dtype="float16"),
    embedding(9, 8, dtype="bfloat16"), embedding(9, 5, dtype="float64"), embedding(1, 32, (1,)),
]  # fmt: skip
TOKEN_CONVS = [
    token_conv(11, 1, 5, 4), token_conv(11, 3, 40, 7, ids="int64"), token_conv(11, 3, 300, 7, pads=(1, 2)),
    token_conv(6, 4, 5, 9, stride=2, pads=(3, 0), has_bias=False), token_conv(6, 2, 3, 5, stride=7),
    token_conv(11, 3, 40, 7, dtype="float64", pads=(1, 1)),
]  # fmt: skip


def test_a_row_is_copied_in_the_widest_words_that_it_allows():
    for E, dtype, word_bytes, lane_bits in [
        (4, "float32", 16, 0), (6, "float32", 8, 2), (3, "float32", 4, 2), (3, "float16", 2, 2),
        (1024, "float32", 16, 8), (64, "float32", 16, 4), (20, "float32", 16, 3),
    ]:  # fmt: skip
        (claim,) = GatherKernel().claims(embedding(9, E, dtype=dtype), 0, H200, Job())
        assert (claim.facts.word_bytes, claim.facts.lane_bits) == (word_bytes, lane_bits)
        assert WORDS[word_bytes] in claim.facts.program.name_expression


def test_what_it_costs_and_what_it_does_not_take():
    (claim,) = GatherKernel().claims(embedding(9, 6), 0, H200, Job())
    assert claim.cost.row_bytes == 5 * (4 + 2 * 6 * 4)
    assert claim.facts.at(3).launches[0].config.grid == (1, 1, 1)
    (claim,) = GatherKernel().claims(token_conv(11, 3, 40, 7), 0, H200, Job())
    assert (claim.cost.row_flop, claim.cost.row_bytes) == (3 * 5 * 40, 7 * 4 + 4 * 5 * 40 * 4)
    (claim,) = GatherKernel().claims(token_conv(11, 3, 40, 7), 0, H200, Job(tables="fp16"))
    assert claim.cost.row_bytes == 7 * 4 + (4 + 3 * 2) * 5 * 40
    (claim,) = GatherKernel().claims(token_conv(11, 3, 40, 7, dtype="float64"), 0, H200, Job(tables="fp16"))
    assert claim.recipes["table"].dtype == "float64"


# -- on the host ---------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


def engine_of(net):
    return Engine(make_plan(net, H200, kernels_for(H200)), CudaBackend(), "cuda:0")


@needs_gxx
@pytest.mark.parametrize("B", [1, 6, 130])
@pytest.mark.parametrize("net", [*EMBEDDINGS, *TOKEN_CONVS], ids=lambda net: f"{net.input} {net.output}")
def test_rows_and_sums_are_those_of_the_reference(gpu, net, B):
    ids = some_ids(net, B)
    engine, want = engine_of(net), naive(net, ids)
    assert engine(ids).tobytes() == want.tobytes()  # one row, or one sum in the order of the taps
    assert engine(Array(gpu, ids)).numpy().tobytes() == want.tobytes()


@needs_gxx
@pytest.mark.parametrize(("tables", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_tables_in_16_bits_are_rounded_once_and_summed_in_float32(gpu, tables, dtype):
    net = TOKEN_CONVS[2]
    engine = Engine(make_plan(net, H200, kernels_for(H200), Job(tables=tables)), CudaBackend(), "cuda:0")
    rounded = net.weights["c.weight"].astype(numpy_dtype(dtype)).astype(np.float32)
    ids = some_ids(net, 6)
    assert engine(ids).tobytes() == naive(net.replace(weights={**net.weights, "c.weight": rounded}), ids).tobytes()


BAD = [
    (net, value)
    for net, values in ((EMBEDDINGS[2], (-1, 40, -(2**31), 2**31 - 1)), (EMBEDDINGS[1], (-1, 7, -LARGE - 1, LARGE)),
                        (TOKEN_CONVS[1], (11, -(2**40), 2**40)))
    for value in values
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize(("net", "value"), BAD, ids=lambda given: str(getattr(given, "input", given)))
def test_the_first_bad_id_is_told_by_the_next_call(gpu, net, value):
    engine, good = engine_of(net), some_ids(net, 70)
    bad = good.copy()
    bad[[69, 33, 33], [0, 4, 2]] = value
    y = engine(Array(gpu, bad))  # another row is looked up: nothing is raised, nothing fails
    want = reference.forward(net, good, dtype="float32")
    assert np.array_equal(y.numpy()[:33], want[:33])
    limit = net.weights[net.nodes[0].weights["weight"]].shape[0]
    with pytest.raises(InputError, match=f"row 33, position 2: id {value}, expected 0 to {limit - 1}"):
        engine(Array(gpu, good))
    assert np.array_equal(engine(Array(gpu, good)).numpy(), want)  # the status was reset
    with pytest.raises(InputError, match="row 33, position 2"):
        engine(bad)  # ids of the host are checked before the launch
    assert np.array_equal(engine(good), want)


@needs_gxx
def test_who_waits_is_told_and_a_ticket_tells_its_own(gpu):
    net = EMBEDDINGS[2]
    engine, bad = engine_of(net), some_ids(net, 9)
    bad[4, 1] = 99
    engine(Array(gpu, bad))
    with pytest.raises(InputError, match="row 4, position 1: id 99"):
        engine.wait()
    engine.wait()
    x, y, z = Array(gpu, bad), Array(gpu, rows(9, 20)), Array(gpu, some_ids(net, 9))
    on = CudaBackend().bind(engine.plan)
    first = on.enqueue({"x": x.buffer.pointer, "e": y.buffer.pointer}, 9, 5)
    with pytest.raises(InputError, match="row 4, position 1: id 99"):
        first.wait()
    first.wait()
    second = on.enqueue({"x": z.buffer.pointer, "e": y.buffer.pointer}, 9, 6)
    second.wait()


@needs_gxx
def test_nobody_else_is_told_what_another_stream_is_asked_for(gpu):
    net = EMBEDDINGS[2]
    on, good, bad = CudaBackend().bind(engine_of(net).plan), some_ids(net, 9), some_ids(net, 9)
    bad[4, 1] = 99
    y = Array(gpu, rows(9, 20))
    places = [{"x": Array(gpu, ids).buffer, "e": y.buffer} for ids in (bad, good)]
    pointers = [{name: buffer.pointer for name, buffer in place.items()} for place in places]
    failed = on.enqueue(pointers[0], 9, 5)
    on.run({"x": good}, {"e": np.empty((9, 5, 4), np.float32)}, 9)  # host rows have their own status words
    with pytest.raises(InputError, match="row 4"):
        failed.wait()
    on.enqueue(pointers[1], 9, 6).wait()


def chain(*layers, weights, given):
    return sequential(given, [(f"l{i}", layer) for i, layer in enumerate(layers)], weights)


@needs_gxx
def test_rows_in_chunks_are_counted_from_the_first(gpu, monkeypatch):
    """One group writes what the next one reads, and memory holds 16 rows of it."""
    net = chain(Embedding(), CumSum(1), weights={"l0.weight": rows(10, 4)}, given=TensorType(("B", 3), "int64"))
    monkeypatch.setattr(bound_plan, "ARENA_PART", 1 << 62)
    engine, ids = engine_of(net), some_ids(net, 60)
    want = reference.forward(net, ids, dtype="float32")
    for _ in range(3):
        assert np.allclose(engine(Array(gpu, ids)).numpy(), want, atol=1e-5)
    ids[[37, 59], [2, 0]] = 10
    engine(Array(gpu, ids))
    with pytest.raises(InputError, match="row 37, position 2: id 10, expected 0 to 9"):
        engine.wait()
    with pytest.raises(InputError, match="row 59, position 0"):
        engine.wait()  # in its own chunk
    engine.wait()


@needs_gxx
@pytest.mark.parametrize("small", [False, True])
def test_ids_that_the_gpu_computes_are_told_when_the_hosts_rows_are_done(gpu, monkeypatch, small):
    if not small:
        for name in ("SLOT_BYTES", "MIN_CHUNK_BYTES"):
            monkeypatch.setattr(chunks, name, 2048)
        for name in ("MAPPED_BYTES", "SMALL_BYTES"):
            monkeypatch.setattr(staging, name, 0)
    net = chain(CumSum(1), Embedding(), weights={"l1.weight": rows(10, 4)}, given=TensorType(("B", 3), "int64"))
    engine, x = engine_of(net), np.random.default_rng(0).integers(0, 4, (200, 3))
    want = reference.forward(net, x, dtype="float32")
    assert np.array_equal(engine(x), want)
    bad = x.copy()
    bad[150:] = 5
    for _ in range(2):
        with pytest.raises(InputError, match=r"row 150, position 1: id 10[\s\S]*'l0'"):
            engine(bad)
        assert np.array_equal(engine(x), want)


# -- on a GPU ------------------------------------------------------------------------------------------------


def summed(V, E, S, layer, ids="int64", dtype="float32"):
    table = rows(V, E).astype(numpy_dtype(dtype))
    return sequential(TensorType(("B", S), ids), [("e", Embedding()), ("m", layer)], {"e.weight": table})


SUMMED = [
    (9, 8, 37, GlobalMean((1,))), (9, 8, 300, GlobalMean((1,))),
    (9, 3, 5, GlobalSum((-2,), keep=True), "int32", "float16"), (4, 5, 16, GlobalMean((1,)), "int64", "float64"),
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("given", SUMMED)
def test_rows_that_are_summed_up(monkeypatch, given):
    """A bag of words: one launch, and no looked-up row is written."""
    net = summed(*given)
    emulated_gpu(monkeypatch)
    plan = make_plan(net, H200, kernels_for(H200), Job())
    assert [len(group.claim.nodes) for group in plan.groups] == [2]
    engine, ids = Engine(plan, CudaBackend(), "cuda:0"), some_ids(net, 9)
    got = engine(ids)
    assert_error_within(got, reference.forward(net, ids), naive(net, ids))
    assert np.array_equal(engine(ids[3:4]), got[3:4])
    ids[5, 2] = 9
    with pytest.raises(InputError):
        engine(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("given", SUMMED)
def test_rows_that_are_summed_up_on_a_gpu(given):
    net = summed(*given)
    engine, ids = onchip.compile(net, "cuda"), some_ids(net, 4097)
    got = engine(ids)
    assert_error_within(got, reference.forward(net, ids), naive(net, ids))
    for B in (0, 1, 7):
        assert np.array_equal(engine(ids[:B]), got[:B])


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 7, 1000, 40_001])
@pytest.mark.parametrize("net", [*EMBEDDINGS, *TOKEN_CONVS], ids=lambda net: f"{net.input} {net.output}")
def test_a_gpu_looks_up_what_the_reference_does(net, B):
    ids = some_ids(net, B)
    assert onchip.compile(net, "cuda")(ids).tobytes() == naive(net, ids).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_sums_narrow_tables_in_float32(dtype):
    net = token_conv(50, 5, 33, 20, dtype=dtype, pads=(2, 2))
    ids = some_ids(net, 300)
    wide = Network(net.inputs, net.nodes, net.outputs, {n: w.astype(np.float32) for n, w in net.weights.items()})
    want = reference.forward(wide, ids, dtype="float32").astype(numpy_dtype(dtype))
    assert onchip.compile(net, "cuda")(ids).tobytes() == want.tobytes()
