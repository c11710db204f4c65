"""Folded text networks on a GPU: sums of looked-up rows and their maxima over time, all convolutions in one launch.

The kernels run on the host where there is no GPU, on a fake driver.
"""

import dataclasses

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from fake_cuda import Array
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cuda.embedding.token_max import MAX_SHARE_BITS, TokenMaxKernel
from onchip.kernels.cuda.embedding.token_slices import narrow_tables, split_tables, token_slices
from onchip.kernels.cuda.reduction.sequence_max import SequenceMaxLowering
from onchip.network.graph import Network, Node
from onchip.network.layers import GELU, Cast, Clip, Concat, GlobalMax, ReLU, SequenceMax, Sigmoid, Tanh, TokenConv
from onchip.network.recipe import Recipe, as_is, materialise, op_name, reach
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.rewrites.embedding import fold_embeddings, token_tables
from onchip.runtime.check import with_rounded_tables
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.engine import Engine
from onchip.runtime.placement import kernels_for
from onchip.workloads import sentiment
from text_networks import NETWORKS, some_lengths, weight, with_lengths

PAYS = 10**9  # rows for which a table is always worth building
MAX = GlobalMax((-1,))
RELU_MAX = (ReLU(), MAX)


def tokens(V, S, *branches, ids="int32", dtype="float32", bias=True, layers=RELU_MAX, after=(), **how):
    """Parallel TokenConvs of (taps, channels), each followed by these layers, and a Concat."""
    nodes, weights, ends = [], {}, []
    for i, (K, C) in enumerate(branches):
        weights[f"t{i}"] = weight(V, K, C, seed=i).astype(numpy_dtype(dtype))
        roles = {"weight": f"t{i}"}
        if bias:
            weights[f"b{i}"] = weight(C, seed=i).astype(numpy_dtype(dtype))
            roles["bias"] = f"b{i}"
        nodes.append(Node(f"conv{i}", TokenConv(**how), ("ids",), roles))
        for layer in layers:
            nodes.append(Node(f"{layer.kind}{i}", layer, (nodes[-1].name,)))
        ends.append(nodes[-1].name)
    if len(ends) > 1:
        nodes.append(Node("cat", Concat(1), tuple(ends)))
    for layer in after:
        nodes.append(Node(f"after.{layer.kind}", layer, (nodes[-1].name,)))
    return Network({"ids": TensorType(("B", S), ids)}, tuple(nodes), (nodes[-1].name,), weights)


def some_ids(net, B, seed=0):
    V = min(w.shape[0] for name, w in net.weights.items() if name.startswith(("t", "emb")))
    return np.random.default_rng(seed).integers(0, V, (B, *net.input.row_shape)).astype(net.input.dtype)


def exact(net, ids):
    """Sums in the order of the taps, in float32, whatever the tables are: the kernel has these bits."""
    wide = {name: np.asarray(w, np.float32) for name, w in net.weights.items()}
    return reference.forward(net.replace(weights=wide), ids, "float32").astype(numpy_dtype(net.output.dtype))


EXACT = {
    "sentiment, small": tokens(40, 16, (3, 64), (5, 64), (7, 64), (9, 64)),
    "odd widths": tokens(11, 9, (3, 7), (5, 129), (1, 33), ids="int64"),
    "one of everything": tokens(1, 1, (1, 1)),
    "as long as the sentence": tokens(9, 6, (6, 40), bias=False),
    "pads and stride": tokens(13, 7, (3, 40), (4, 24), pads=(2, 3), stride=2),
    "pads alone": tokens(5, 1, (3, 8), pads=(1, 1)),
    "far apart": tokens(6, 9, (2, 30), stride=5),
    "long": tokens(30, 300, (4, 9), (3, 12)),
    "after the maximum": tokens(7, 8, (2, 20), (3, 20), layers=(MAX, Clip(-0.5, 0.75))),
    "more than a launch takes": tokens(3, 4, *(((1 + i % 3), 1 + i) for i in range(19))),
    "float16": tokens(20, 9, (3, 72), (2, 40), dtype="float16"),
    "bfloat16": tokens(20, 9, (3, 72), (2, 41), dtype="bfloat16"),
    "to float16": tokens(20, 9, (3, 72), (2, 40), after=(Cast("float16"),)),
    "rounded on the way": tokens(20, 9, (3, 72), (2, 41), layers=(Cast("bfloat16"), ReLU(), MAX)),
    "one branch to bfloat16": tokens(20, 9, (3, 72), layers=(MAX, ReLU(), Cast("bfloat16"))),
}  # fmt: skip


def claim_of(net, **job):
    (claim,) = TokenMaxKernel().claims(net, 0, H200, Job(**job))
    return claim


def engine_of(net, **job):
    return Engine(make_plan(net, H200, kernels_for(H200), Job(batch=PAYS, **job)), CudaBackend(), "cuda:0")


# -- plans ---------------------------------------------------------------------------------------------------


def test_sentiment_is_one_launch_and_its_tables_are_slices():
    claim = claim_of(EXACT["sentiment, small"])
    assert [node for node in claim.nodes if "conv" in node] == ["conv0", "conv1", "conv2", "conv3"]
    assert claim.nodes[-1] == "cat"
    assert [claim.recipes[f"table{n}"].shape for n in range(4)] == [(2, K, 41, 32) for K in (3, 5, 7, 9)]
    (launch,) = claim.facts.at(16_384).launches
    assert launch.config.grid == (8 * 1024, 1, 1)
    half = claim_of(EXACT["sentiment, small"], tables="fp16")
    assert [half.recipes[f"table{n}"].shape for n in range(4)] == [(1, K, 41, 64) for K in (3, 5, 7, 9)]
    assert claim_of(EXACT["sentiment, small"], precision="bf16").recipes["table0"].dtype == "bfloat16"


def test_few_sentences_are_shared_by_more_threads_and_long_ones_leave_room():
    lowering = claim_of(EXACT["sentiment, small"]).facts
    assert [lowering.share_bits(B) for B in (1, 7, 100_000)] == [MAX_SHARE_BITS, MAX_SHARE_BITS, 0]
    assert claim_of(tokens(5, 1000, (3, 4))).facts.share_bits(10**6) == 1
    assert len(claim_of(EXACT["more than a launch takes"]).facts.at(5).launches) == 2
    assert claim_of(EXACT["one of everything"]).facts.at(0).launches == ()


def test_what_it_does_not_take_has_a_reason():
    def why(net, **job):
        (refusal,) = TokenMaxKernel().claims(net, 0, H200, Job(**job))
        return refusal.why

    assert "only monotonic activations before the max" in why(tokens(5, 6, (2, 3), layers=(GELU(), MAX)))
    assert "not float64" in why(tokens(5, 6, (2, 3), dtype="float64"))
    assert "for the ids of a sentence" in why(tokens(5, 60_000, (2, 3)))
    apart = tokens(5, 6, (2, 3), (3, 3))
    apart = apart.replace(weights={**apart.weights, "t1": weight(6, 3, 3)})
    assert "same number of rows" in why(apart)


def test_a_floor_that_a_cache_allows_and_an_estimate_of_what_was_measured():
    cost = claim_of(tokens(21_635, 16, (3, 64), (5, 64), (7, 64), (9, 64), dtype="float16")).cost
    assert cost.row_looked_up_bytes == 244 * 128
    floor, estimate = cost.floor_us(H200, "fp16", 16_384), cost.estimate_us(H200, "fp16", 16_384)
    assert 16_384 * 244 * 128 / 33.5e6 < floor < estimate < 16_384 * 244 * 128 / 4.2e6


def test_a_network_of_16_bits_has_tables_of_products_of_16_bits():
    """And the plan knows what its folded tables have become."""
    net = sentiment.network(vocabulary=500, embedding=256, channels=128, hidden=(64,))
    plan = make_plan(net, H200, kernels_for(H200), Job("fp16", PAYS))
    assert ops_of(plan.groups[0].claim, plan.network) & TABLES == {op_name(narrow_tables), op_name(token_slices)}
    kept = sum(2 * 128 * K * 501 for K in (3, 5, 7, 9))
    assert plan.fold.startswith(f"folded: tables of {kept / (1 << 20):.1f} MiB")
    wide = make_plan(net, H200, kernels_for(H200), Job("fp32", PAYS, tables="bf16"))
    assert "not used" not in str(wide)
    assert ops_of(wide.groups[0].claim, wide.network) & TABLES == {op_name(split_tables), op_name(token_slices)}
    older = make_plan(net, A100, kernels_for(A100), Job("fp16", PAYS))
    assert ops_of(older.groups[0].claim, older.network) & TABLES == {op_name(token_tables), op_name(token_slices)}


def test_tables_that_a_rewrite_rounds_are_products_of_16_bits_all_the_same():
    net, _ = fold_embeddings(sentiment.network(vocabulary=500, embedding=256, channels=128, hidden=(64,)))
    nodes, weights = list(net.nodes), dict(net.weights)
    for i, node in enumerate(nodes):
        if isinstance(node.layer, TokenConv):
            name = node.weights["weight"]
            weights[f"{name}.half"] = Recipe.of(as_is, (name,), net.weights[name].shape, "float16")
            nodes[i] = dataclasses.replace(node, weights={**node.weights, "weight": f"{name}.half"})
    net = Network(net.inputs, tuple(nodes[:-3]), ("concat",), weights)
    (claim,) = TokenMaxKernel().claims(net, 0, H200, Job("fp16"))
    made = reach(claim.recipes.values(), net.weights)
    assert {getattr(found, "op", "") for found in made.values()} & TABLES == {
        op_name(narrow_tables),
        op_name(token_slices),
    }
    assert claim.facts.dtypes == ("int32", "float16", "float16")


TABLES = {op_name(op) for op in (token_tables, narrow_tables, split_tables, token_slices)}


def ops_of(claim, net):
    """The operations of its recipes."""
    return {getattr(found, "op", "") for found in reach(claim.recipes.values(), net.weights).values()}


# -- on the host ---------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


@needs_gxx
@pytest.mark.parametrize("B", [1, 7, 70])
@pytest.mark.parametrize("name", EXACT)
def test_sums_are_those_of_the_reference(gpu, name, B):
    net = EXACT[name]
    engine, ids = engine_of(net), some_ids(net, B)
    assert [group.claim.kernel for group in engine.plan.groups] == ["token_max"]
    want = exact(net, ids)
    assert engine(ids).tobytes() == want.tobytes()
    assert engine(Array(gpu, ids)).numpy().tobytes() == want.tobytes()


@needs_gxx
@pytest.mark.parametrize("bits", range(MAX_SHARE_BITS + 1))
def test_however_many_threads_share_a_sentence(gpu, monkeypatch, bits):
    net = tokens(30, 45, (3, 40), (8, 9), ids="int64", pads=(1, 0))
    monkeypatch.setattr("onchip.kernels.cuda.embedding.token_max.TokenMaxLowering.share_bits", lambda self, B: bits)
    engine, ids = engine_of(net, tables="fp16"), some_ids(net, 37)
    tables = {name: net.weights[name].astype(np.float16).astype(np.float32) for name in ("t0", "t1")}
    rounded = net.replace(weights={**net.weights, **tables})
    assert engine(ids).tobytes() == exact(rounded, ids).tobytes()


@needs_gxx
@pytest.mark.parametrize("name", NETWORKS)
def test_folded_networks_are_right(gpu, name):
    net = NETWORKS[name]
    net = net.replace(nodes=net.nodes[:-1], outputs=("cat",))  # its last gemm is not emulated
    x = some_ids(net, 21)
    engine = engine_of(net)
    assert "token_max" in [group.claim.kernel for group in engine.plan.groups], str(engine.plan)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@needs_gxx
@pytest.mark.parametrize(("tables", "activation"), [("fp32", Sigmoid()), ("bf16", Tanh())])
def test_nan_in_a_table_shows_wherever_it_is_met(gpu, tables, activation):
    net = tokens(5, 4, (2, 20), ids="int64", layers=(activation, MAX))
    table = net.weights["t0"].copy()
    table[3, 1, 7] = np.nan
    net = net.replace(weights={**net.weights, "t0": table})
    x = np.array([[0, 3, 1, 2], [3, 0, 1, 2], [1, 2, 1, 3], [0, 1, 2, 4]])
    got = engine_of(net, tables=tables)(x)
    assert np.isnan(got[:, 7]).tolist() == [True, False, True, False]
    assert np.isfinite(np.delete(got, 7, axis=1)).all()


@needs_gxx
def test_the_first_bad_id_is_told_by_the_next_call(gpu):
    net = EXACT["odd widths"]
    engine, good = engine_of(net), some_ids(net, 70)
    bad = good.copy()
    bad[[69, 33, 33], [0, 4, 2]] = [11, -(2**40), 2**40]
    y = engine(Array(gpu, bad)).numpy()
    assert np.array_equal(y[:33], exact(net, good)[:33])
    with pytest.raises(InputError, match=f"row 33, position 2: id {2**40}, expected 0 to 10"):
        engine(Array(gpu, good))
    assert np.array_equal(engine(Array(gpu, good)).numpy(), exact(net, good))
    assert engine(good[:0]).shape == (0, 169)


@needs_gxx
@pytest.mark.parametrize("bits", [0, 2, MAX_SHARE_BITS])
@pytest.mark.parametrize("name", EXACT)
def test_sentences_of_different_lengths(gpu, monkeypatch, name, bits):
    net = with_lengths(EXACT[name], "int64" if bits else "int32")
    monkeypatch.setattr("onchip.kernels.cuda.embedding.token_max.TokenMaxLowering.share_bits", lambda self, B: bits)
    engine, given = engine_of(net), (some_ids(EXACT[name], 37), some_lengths(net, 37))
    assert [group.claim.kernel for group in engine.plan.groups] == ["token_max"]
    want = exact(net, given)
    assert engine(*given).tobytes() == want.tobytes()
    assert engine(*(Array(gpu, x) for x in given)).numpy().tobytes() == want.tobytes()


@needs_gxx
@pytest.mark.parametrize(("layers", "kernels"), [
    ((Tanh(), MAX), ["token_max"]), ((MAX, Sigmoid()), ["token_max"]),
    # Where no window is in bounds, a Sigmoid before the max would turn 0 into 1/2.
    ((Sigmoid(), MAX), ["gather", "pointwise", "sequence_max"]), ((MAX,), ["token_max"]),
])  # fmt: skip
def test_what_no_window_lies_within_is_0(gpu, layers, kernels):
    plain = tokens(7, 8, (3, 20), layers=layers)
    net = with_lengths(plain)
    engine, given = engine_of(net), (some_ids(plain, 9), np.array([0, 1, 2, 3, 4, 8, 9, -5, 2**31 - 1], np.int32))
    assert [group.claim.kernel for group in engine.plan.groups] == kernels
    truth, naive = (reference.forward(net, given, dtype) for dtype in ("float64", "float32"))
    assert_error_within(engine(*given), truth, baseline=naive)
    assert (truth[[0, 1, 2, 7]] == (0.5 if layers[-1] == Sigmoid() else 0)).all()


@needs_gxx
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dtype", "lengths"), [("float32", "int64"), ("float16", "int32"), ("float64", "int32")])
def test_a_maximum_up_to_lengths_by_itself(gpu, dtype, lengths, channels_last):
    given = {"x": TensorType(("B", 37, 9), dtype), "lengths": TensorType(("B",), lengths)}
    net = Network(given, (Node("y", SequenceMax(3, 2), ("x", "lengths")),), ("y",), {})
    x = weight(50, 37, 9).astype(dtype)
    x[7, 5, 2], x[8, 5, 8] = np.nan, np.inf
    at = some_lengths(net, 50)
    want = SequenceMax(3, 2).forward((x, at), {})
    made = np.empty_like(want)
    lies = np.ascontiguousarray(x.transpose(0, 2, 1)) if channels_last else x
    steps = BoundSteps(gpu, SequenceMaxLowering((dtype, lengths), 37, 9, 3, 2, channels_last, 2).at(50))
    steps.enqueue([lies.ctypes.data, at.ctypes.data], [made.ctypes.data], 0, gpu.stream)
    assert made.tobytes() == want.tobytes()


# -- tables of 8 bits ----------------------------------------------------------------------------------------

FP8 = [name for name in EXACT if name not in ("float16", "rounded on the way")]


def in_8_bits(net, given):
    """As the kernel: channels divided by their peaks, rounded, summed in float16, maximum, scaled."""
    short = {}
    for node in net.nodes:
        if isinstance(node.layer, TokenConv):
            table = np.asarray(net.weights[node.weights["weight"]], np.float32)
            peaks = np.float32(448) * np.exp2(np.ceil(np.log2(np.abs(table).max(axis=(0, 1)) / 448))).astype(np.float32)
            scaled = (table * (np.float32(448) / peaks)).astype(numpy_dtype("float8_e4m3fn")).astype(np.float32)
            short[node.name] = scaled, peaks * np.float32(1 / 448)
    values = dict(zip(net.inputs, given, strict=True))
    for node in net.nodes:
        read = tuple(values[name] for name in node.inputs)
        if isinstance(node.layer, TokenConv):
            table, factors = short[node.name]
            added = 0
            for k in range(table.shape[1]):
                one = np.where(np.arange(table.shape[1])[:, None] == k, table, 0)
                term = node.layer.forward(read, {"weight": one})
                added = (added + term).astype(np.float16).astype(np.float32)
            bias = np.asarray(net.weights[node.weights["bias"]], np.float32) if "bias" in node.weights else 0
            values[node.name] = added * factors[:, None] + np.broadcast_to(bias, factors.shape)[:, None]
        else:
            values[node.name] = node.layer.forward(read, {})
    return values[net.outputs[0]]


@needs_gxx
@pytest.mark.parametrize("bits", [0, MAX_SHARE_BITS])
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("name", FP8)
def test_tables_of_8_bits(gpu, monkeypatch, name, has_lengths, bits):
    net, given = EXACT[name], (some_ids(EXACT[name], 37),)
    if has_lengths:
        net = with_lengths(net)
        given = (*given, some_lengths(net, 37))
    monkeypatch.setattr("onchip.kernels.cuda.embedding.token_max.TokenMaxLowering.share_bits", lambda self, B: bits)
    engine = engine_of(net, tables="fp8")
    assert "fp8 tables" not in str(engine.plan)
    got = engine(*given).astype(np.float32)
    close = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[net.output.dtype]
    np.testing.assert_allclose(got, in_8_bits(net, given), rtol=close, atol=close)
    assert np.abs(got - exact(net, given).astype(np.float32)).max() < 0.1 * max(2, np.abs(got).max())


@needs_gxx
def test_what_is_not_finite_is_nan_in_8_bits_and_a_channel_of_zeros_stays_so(gpu):
    net = tokens(5, 4, (2, 20), ids="int64", layers=(MAX,), bias=False)
    table = net.weights["t0"].copy()
    table[3, 1, 7], table[2, 0, 8], table[..., 9] = np.nan, -np.inf, 0
    table[..., 10] *= np.float32(1e-38)
    net = net.replace(weights={**net.weights, "t0": table})
    x = np.array([[0, 3, 1, 2], [3, 0, 1, 2], [1, 2, 1, 3], [0, 1, 0, 4]])
    got = engine_of(net, tables="fp8")(x)
    assert np.isnan(got[:, 7]).tolist() == [True, False, True, False]
    assert np.isnan(got[:, 8]).tolist() == [False, False, True, False]
    assert (got[:, 9:11] == 0).all()
    assert np.isfinite(np.delete(got, (7, 8), axis=1)).all()


def test_tables_of_8_bits_need_a_chip_that_converts_them_and_few_taps():
    def why(net, device=H200):
        (refusal,) = TokenMaxKernel().claims(net, 0, device, Job(tables="fp8"))
        return refusal.why

    assert "runs on sm_89, sm_90a" in why(tokens(5, 6, (2, 3)), A100)
    assert "at most 128 taps" in why(tokens(5, 130, (129, 3)))


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_gpu_has_the_bits_of_the_reference(name, has_lengths):
    net, given = EXACT[name], (some_ids(EXACT[name], 4_097),)
    if has_lengths:
        net = with_lengths(net)
        given = (*given, some_lengths(net, 4_097))
    engine, want = onchip.compile(net, "cuda"), exact(net, given)
    for B in (0, 1, 7, 100, 4_097):
        assert engine(*(x[:B] for x in given)).tobytes() == want[:B].tobytes()
    assert engine(*(x[55:58] for x in given)).tobytes() == want[55:58].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_gpu_folds_a_text_network(precision):
    """Large enough that its tables are computed on the GPU, by every kind of gemm."""
    net = sentiment.network(vocabulary=3_000, embedding=256, channels=72, hidden=(128,), classes=5)
    net = net.replace(weights={name: materialise(name, net.weights) for name in net.weights})
    ids = np.random.default_rng(0).integers(0, 3_000, (300, 16), dtype=np.int32)
    engine = onchip.compile(net, "cuda", precision, batch_hint=1 << 24)
    assert engine.plan.groups[0].claim.kernel == "token_max", str(engine.plan)
    truth = reference.forward(net, ids[:24])
    baseline = {"fp32": "float32", "bf16": "bfloat16"}.get(precision, "float16")  # which has as many digits as tf32
    naive = reference.forward(net, ids[:24], baseline)
    assert_error_within(engine(ids)[:24], truth, baseline=naive)
    assert engine(ids[:7]).tobytes() == engine(ids)[:7].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("without", [(), ("fold",)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_takes_sentences_of_different_lengths(precision, without):
    net = sentiment.network(vocabulary=900, embedding=256, channels=72, hidden=(128,), classes=5, lengths=True)
    net = net.replace(weights={name: materialise(name, net.weights) for name in net.weights})
    ids = np.random.default_rng(0).integers(0, 900, (300, 16), dtype=np.int32)
    lengths = (np.arange(300) % 18).astype(np.int32)
    engine = onchip.compile(net, "cuda", precision, batch_hint=1 << 24, without=without)
    assert ("token_max" in str(engine.plan)) == (not without), str(engine.plan)
    truth = reference.forward(net, (ids[:36], lengths[:36]))
    naive = reference.forward(
        net, (ids[:36], lengths[:36]), {"fp32": "float32", "bf16": "bfloat16"}.get(precision, "float16")
    )
    got = engine(ids, lengths)
    assert_error_within(got[:36], truth, baseline=naive)
    assert engine(ids[:7], lengths[:7]).tobytes() == got[:7].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FP8)
def test_a_gpu_looks_up_tables_of_8_bits(name):
    net = with_lengths(EXACT[name])
    given = some_ids(EXACT[name], 4_097), some_lengths(net, 4_097)
    engine, want = onchip.compile(net, "cuda", tables="fp8"), in_8_bits(net, given)
    close = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[net.output.dtype]
    got = engine(*given)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=close, atol=close)
    for B in (0, 1, 7, 100):
        assert engine(*(x[:B] for x in given)).tobytes() == got[:B].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_folds_a_text_network_into_8_bits(precision):
    net = sentiment.network(vocabulary=3_000, embedding=256, channels=72, hidden=(128,), classes=5)
    net = net.replace(weights={name: materialise(name, net.weights) for name in net.weights})
    ids = np.random.default_rng(0).integers(0, 3_000, (300, 16), dtype=np.int32)
    engine = onchip.compile(net, "cuda", precision, batch_hint=1 << 24, tables="fp8")
    assert "float8_e4m3fn" in engine.plan.groups[0].claim.label, str(engine.plan)
    truth = reference.forward(net, ids[:24])
    naive = reference.forward(
        with_rounded_tables(net, "fp8"), ids[:24], {"fp32": "float32", "fp16": "float16"}[precision]
    )
    assert_error_within(engine(ids)[:24], truth, baseline=naive)
    assert engine(ids[:7]).tobytes() == engine(ids)[:7].tobytes()
