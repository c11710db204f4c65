"""LSTM, GRU and RNN on both devices: every step, for any batch. CUDA kernels also run emulated on the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import layer_cases
import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.errors import ShapeError
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.recurrent.mma import RecurrentMmaKernel
from onchip.kernels.cuda.recurrent.register_resident import RecurrentRegisterResidentKernel
from onchip.kernels.cuda.recurrent.simt import RecurrentKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import GRU, LSTM, RNN, Linear, Recurrent
from onchip.network.recipe import Recipe
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.check import NAIVE_DTYPE, ULP, ULPS

CASES = [case for case in layer_cases.CASES if isinstance(case.layer, Recurrent)]


def network(layer, S, H, dtype="float32", has_states=False):
    rng = np.random.default_rng(0)
    D, G = layer.directions, layer.gates
    weights = {"recurrence": rng.standard_normal((D, G * H, H)) / np.sqrt(H)}
    if isinstance(layer, GRU) and layer.reset_after:
        weights["bias"] = rng.standard_normal((D, H))
    weights = {role: array.astype(numpy_dtype(dtype)) for role, array in weights.items()}
    states = [TensorType(("B", D, H), dtype)] * (layer.states if has_states else 0)
    return one_layer(layer, TensorType(("B", S, D * G * H), dtype), *states, weights=weights)


def with_product(net, features, has_bias=True):
    """The network after a Linear that computes its first input from `features` features."""
    rng, given, dtype = np.random.default_rng(1), net.inputs["x0"], net.inputs["x0"].dtype
    D_out = given.shape[-1]
    arrays = {"weight": rng.standard_normal((D_out, features)) / np.sqrt(features), "shift": rng.standard_normal(D_out)}
    weights = net.weights | {name: array.astype(numpy_dtype(dtype)) for name, array in arrays.items()}
    roles = {"weight": "weight", "bias": "shift"} if has_bias else {"weight": "weight"}
    (node,) = net.nodes
    nodes = (Node("gates", Linear(), ("x",), roles), dataclasses.replace(node, inputs=("gates", *node.inputs[1:])))
    states = {name: state for name, state in net.inputs.items() if name != "x0"}
    inputs = {"x": TensorType((*given.shape[:-1], features), dtype), **states}
    return Network(inputs, nodes, net.outputs, weights)


def inputs_of(net, B):
    rng = np.random.default_rng(B)
    return tuple(
        rng.standard_normal((B, *given.row_shape)).astype(numpy_dtype(given.dtype)) for given in net.inputs.values()
    )


def verify(net, xs, y, precision="fp32"):
    dtype = NAIVE_DTYPE[precision] if net.output.dtype == "float32" else net.output.dtype
    ulps = ULPS * ULP[precision] / ULP["fp32"]
    assert_error_within(y, reference.forward(net, xs), reference.forward(net, xs, dtype), ulps=ulps)


# -- the CPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cpu_keeps_the_promise_and_the_bits_of_a_row(case):
    net = layer_cases.network(case)
    engine = onchip.compile(net, device="cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["recurrent"]
    xs = layer_cases.random_inputs(case, 67)
    y = engine(*xs)
    verify(net, xs, y)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 40), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
    assert onchip.compile(net, device="cpu", threads=1)(*xs).tobytes() == y.tobytes()


@pytest.mark.parametrize("layer", [LSTM(), GRU(reset_after=False), GRU("bidirectional")], ids=str)
def test_sums_longer_than_a_chunk_on_the_cpu(layer):
    net = network(layer, 3, 143, has_states=True)
    xs = inputs_of(net, 5)
    verify(net, xs, onchip.compile(net, device="cpu")(*xs))


def test_two_states_may_be_one_value():
    net = network(LSTM(), 3, 4, has_states=True)
    (node,) = net.nodes
    shared = net.replace(nodes=[dataclasses.replace(node, inputs=("x0", "x1", "x1"))])
    x, h, _ = inputs_of(net, 3)
    unused = np.zeros_like(h)
    got = onchip.compile(shared, device="cpu")(x, h, unused)
    assert got.tobytes() == onchip.compile(net, device="cpu")(x, h, h).tobytes()


def fed(layer, S, K, H, has_states=False, has_bias=True):
    """With a preceding Linear that computes the gates' inputs."""
    net, rng = network(layer, S, H, has_states=has_states), np.random.default_rng(1)
    width = int(net.types["x0"].shape[-1])
    weights = {"W": rng.standard_normal((width, K), dtype=np.float32) / np.float32(np.sqrt(K))}
    if has_bias:
        weights["b"] = rng.standard_normal(width, dtype=np.float32)
    roles = {"weight": "W"} | ({"bias": "b"} if has_bias else {})
    (node,) = net.nodes
    nodes = Node("gates", Linear(), ("x0",), roles), dataclasses.replace(node, inputs=("gates", *node.inputs[1:]))
    return Network(net.inputs | {"x0": TensorType(("B", S, K))}, nodes, net.outputs, {**net.weights, **weights})


@pytest.mark.parametrize(
    ("layer", "S", "K", "H", "has_states"),
    [
        (LSTM(), 49, 10, 32, False), (LSTM("bidirectional"), 5, 150, 17, True),
        (LSTM("reverse", "cell"), 7, 3, 5, False),
        (GRU("bidirectional"), 6, 9, 33, True), (GRU("reverse", reset_after=False), 40, 20, 16, False),
        (RNN(output="last"), 3, 1, 7, False),
    ],
)  # fmt: skip
def test_a_preceding_linear_is_fused(layer, S, K, H, has_states):
    for has_bias in (True, False):
        net = fed(layer, S, K, H, has_states, has_bias)
        engine, xs = onchip.compile(net, device="cpu"), inputs_of(net, 67)
        assert [group.claim.facts.K for group in engine.plan.groups] == [K], str(engine.plan)
        y = engine(*xs)
        verify(net, xs, y)
        for rows in (slice(0, 1), slice(66, 67), slice(3, 8), slice(3, 40), slice(0, 0)):
            assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
        assert onchip.compile(net, device="cpu", threads=1)(*xs).tobytes() == y.tobytes()


def test_a_linear_with_other_readers_is_not_fused():
    net = fed(LSTM(), 4, 3, 5)
    engine, xs = onchip.compile(net.replace(outputs=("gates", *net.outputs)), device="cpu"), inputs_of(net, 3)
    assert [group.claim.kernel for group in engine.plan.groups] == ["mlp_fused", "recurrent"]
    assert engine(*xs)[1].tobytes() == onchip.compile(net, device="cpu")(*xs).tobytes()


@pytest.mark.parametrize(
    ("layer", "x", "recurrence", "message"),
    [
        (LSTM(), (5, 12), (1, 12, 4), "bad recurrence shape"), (GRU(), (5, 12), (1, 9, 3), "(B, ..., S, 9)"),
        (RNN("bidirectional"), (0, 6), (2, 3, 3), "S at least 1"), (RNN(), (6,), (1, 6, 6), "bad input shape"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(layer, x, recurrence, message):
    with pytest.raises(ShapeError) as caught:
        layer.infer((TensorType(("B", *x)),), {"recurrence": TensorType(recurrence)})
    assert message in str(caught.value)


def test_invalid_attributes():
    for make in (lambda: LSTM("up"), lambda: GRU(output="cell"), lambda: RNN(activation="gelu")):
        with pytest.raises(ShapeError, match=r"bad (direction|output|activation)"):
            make()


# -- a GPU ---------------------------------------------------------------------------------------------------------

# Units: below a warp, past a chunk of the sum, past the threads of a block.
EMULATED = {
    "lstm": (LSTM("bidirectional"), 3, 70, "float32", True),
    "cell": (LSTM("reverse", "cell"), 2, 5, "float32", False),
    "lstm, float64": (LSTM(output="last"), 2, 9, "float64", True),
    "gru": (GRU("bidirectional"), 3, 33, "bfloat16", True),
    "gru, reset first": (GRU("bidirectional", reset_after=False), 3, 41, "float32", True),
    "rnn": (RNN(), 2, 300, "float32", False),
    "relu": (RNN("reverse", "last", "relu"), 3, 31, "float16", False),
}


@needs_gxx
@pytest.mark.parametrize("case", EMULATED)
def test_an_emulated_gpu_keeps_the_promise(monkeypatch, case):
    *given, has_states = EMULATED[case]
    net = network(*given, has_states=has_states)
    gpu = emulated_gpu(monkeypatch)
    (claim,) = claims_of(net, "recurrent")
    for B in (1, 9):
        xs = inputs_of(net, B)
        verify(net, xs, run_claim(gpu, net, claim, *xs))


@needs_gxx
def test_a_sequence_has_the_same_bits_however_many_a_thread_has(monkeypatch):
    net = network(LSTM("bidirectional"), 3, 70, has_states=True)
    gpu, xs = emulated_gpu(monkeypatch), inputs_of(net, 21)
    (claim,) = claims_of(net, "recurrent")
    few = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=1))
    assert [facts.rows_for(21) for facts in (claim.facts, few.facts)] == [1, 8]
    assert run_claim(gpu, net, claim, *xs).tobytes() == run_claim(gpu, net, few, *xs).tobytes()


# -- a GPU, few sequences: the recurrence stays in registers --------------------------------------------------------

FEW_SEQUENCES = {
    "lstm, a cluster": (LSTM("bidirectional"), 3, 70, "float32", True),
    "cell": (LSTM("reverse", "cell"), 2, 5, "float32", False),
    "gru": (GRU("bidirectional"), 3, 33, "bfloat16", True),
    "gru, last": (GRU(output="last"), 2, 64, "float32", False),
    "relu": (RNN("reverse", "last", "relu"), 3, 31, "float16", False),
    "rnn": (RNN(), 2, 130, "float32", True),
}


@needs_gxx
@pytest.mark.parametrize("case", FEW_SEQUENCES)
def test_few_sequences_on_an_emulated_gpu(monkeypatch, case):
    *given, has_states = FEW_SEQUENCES[case]
    net = network(*given, has_states=has_states)
    gpu, xs = emulated_gpu(monkeypatch), inputs_of(net, 5)
    (claim,) = claims_of(net, "recurrent_register_resident")
    y = run_claim(gpu, net, claim, *xs)
    verify(net, xs, y)
    together = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=2))
    assert together.facts.clusters.sequences_for(5) > claim.facts.clusters.sequences_for(5) == 1
    assert run_claim(gpu, net, together, *xs).tobytes() == y.tobytes()
    assert claim.facts.at(0).launches == ()


def test_few_sequences_keep_the_recurrence_in_registers():
    net = network(LSTM(), 49, 128)
    kernels = [make_plan(net, H200, KERNELS, Job(batch=B)).groups[0].claim.kernel for B in (1, 64, 1 << 15)]
    assert kernels == ["recurrent_register_resident", "recurrent_register_resident", "recurrent_mma"]
    (claim,) = claims_of(net, "recurrent_register_resident")
    assert [(claim.facts.clusters.blocks_for(N), claim.facts.clusters.sequences_for(N)) for N in (1, 33, 64, 256)] == [
        (4, 1), (4, 1), (2, 1), (2, 4),
    ]  # fmt: skip
    for wide in (RNN(), LSTM()):
        assert (
            claims_of(network(wide, 2, 300), "recurrent_register_resident") == []
        )  # more than registers of a cluster hold
    (answer,) = RecurrentRegisterResidentKernel().claims(net, 0, A100, Job())
    assert isinstance(answer, Refusal)
    assert "cluster on sm_80" in answer.why


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW_SEQUENCES, "keyword", "wide"])
def test_few_sequences_on_a_gpu(case):
    others = {"keyword": (LSTM(), 49, 128, "float32", False), "wide": (LSTM("bidirectional"), 7, 256, "float32", True)}
    *given, has_states = (FEW_SEQUENCES | others)[case]
    net = network(*given, has_states=has_states)
    engine, xs = onchip.compile(net, "cuda", batch_hint=1), inputs_of(net, 2049)
    assert [group.claim.kernel for group in engine.plan.groups] == ["recurrent_register_resident"]
    y = engine(*xs)
    verify(net, xs, y)
    for rows in (slice(0, 1), slice(2048, 2049), slice(7, 300), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()


# -- a GPU, many sequences: tensor cores ----------------------------------------------------------------------------

# Units: odd ones, which async copies cannot load; more than the warps of a block, so that a cluster splits them.
MMA = {
    "lstm": (LSTM("bidirectional"), 3, 70, "float16", "fp16", True),
    "lstm, many steps": (LSTM(), 49, 24, "float16", "fp16", False),
    "lstm, a cluster": (LSTM("bidirectional", "last"), 3, 130, "bfloat16", "bf16", True),
    "lstm in fp32, a cluster": (LSTM(), 3, 70, "float32", "fp32", True),
    "lstm in tf32": (LSTM("reverse"), 3, 33, "float32", "tf32", True),
    "cell, of float32 in fp16": (LSTM("reverse", "cell"), 2, 5, "float32", "fp16", False),
    "gru": (GRU("bidirectional"), 3, 33, "bfloat16", "bf16", True),
    "gru in fp32": (GRU(output="last"), 4, 64, "float32", "fp32", False),
    "gru, reset first": (GRU("bidirectional", reset_after=False), 3, 41, "float32", "fp32", True),
    "gru, reset first, a cluster": (GRU("reverse", reset_after=False), 3, 136, "float16", "fp16", True),
    "rnn in tf32, a cluster": (RNN(), 2, 300, "float32", "tf32", True),
    "relu": (RNN("reverse", "last", "relu"), 3, 31, "float16", "fp16", False),
}


# With the preceding gemm: features below, at and past a step of K, and odd ones.
WITH_PRODUCT = {
    "lstm": (10, True), "lstm, a cluster": (33, True), "lstm in fp32, a cluster": (12, False),
    "lstm in tf32": (5, True), "gru": (16, True), "gru in fp32": (1, True), "gru, reset first": (40, True),
    "relu": (7, False),
}  # fmt: skip


def many(case, product):
    *given, precision, has_states = MMA[case]
    net = network(*given, has_states=has_states)
    return with_product(net, *product) if product else net, precision


@needs_gxx
@pytest.mark.parametrize(("case", "product"), [*((case, None) for case in MMA), *WITH_PRODUCT.items()])
def test_many_sequences_on_an_emulated_gpu(monkeypatch, case, product):
    net, precision = many(case, product)
    gpu, xs = emulated_gpu(monkeypatch), inputs_of(net, 37)
    (claim,) = claims_of(net, "recurrent_mma", precision)
    assert len(claim.nodes) == len(net.nodes)
    assert ("cluster" in case) == (claim.facts.blocks > 1)
    y = run_claim(gpu, net, claim, *xs)
    verify(net, xs, y, precision)
    for units, rows in ((1, slice(37)), (132, slice(3, 20))):  # several tiles per block; another position in a tile
        other = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=units))
        got = run_claim(gpu, net, other, *(np.ascontiguousarray(x[rows]) for x in xs))
        assert got.tobytes() == y[rows].tobytes()
    assert claim.facts.at(0).launches == ()


@needs_gxx
def test_an_infinite_state_does_not_affect_others(monkeypatch):
    """inf times the zero padding of units is NaN; padded units must not enter a sum."""
    net = network(LSTM(), 3, 5, "float16", has_states=True)
    x, h, c = inputs_of(net, 3)
    h[1, 0, 2] = np.inf
    (claim,) = claims_of(net, "recurrent_mma", "fp16")
    y = run_claim(emulated_gpu(monkeypatch), net, claim, x, h, c)
    assert np.isfinite(reference.forward(net, (x, h, c))).all()
    verify(net, (x, h, c), y, "fp16")


def test_tiles_fill_the_chip():
    (claim,) = claims_of(network(LSTM(), 49, 128, "float16"), "recurrent_mma", "fp16")
    assert claim.facts.tile_bytes == 50_176  # as recurrent/mma.cu says
    made = [claim.facts.at(N).launches[0].config for N in (1, 4096, 1 << 14, 1 << 20)]
    assert [(config.grid[0], config.shared_bytes // 50_176) for config in made] == [
        (1, 1), (128, 2), (256, 4), (16384, 4),
    ]  # fmt: skip
    (both,) = claims_of(network(LSTM("bidirectional"), 49, 32, "float16"), "recurrent_mma", "fp16")
    assert both.facts.blocks_per_sm == 4
    assert both.facts.at(4096).launches[0].config.grid == (512, 1, 1)


def test_many_sequences_in_16_bits_run_on_tensor_cores():
    net = network(LSTM(), 49, 128, "float16")
    kernels = [make_plan(net, H200, KERNELS, Job("fp16", B)).groups[0].claim.kernel for B in (1, 4096)]
    assert kernels == ["recurrent_register_resident", "recurrent_mma"]
    (answer,) = RecurrentMmaKernel().claims(network(LSTM(), 2, 264), 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "264 units in fp32" in answer.why
    (answer,) = RecurrentMmaKernel().claims(network(LSTM(), 2, 136, "float16"), 0, A100, Job("fp16"))
    assert isinstance(answer, Refusal)
    assert claims_of(network(LSTM(), 2, 8, "float64"), "recurrent_mma") == []


def test_a_linear_is_fused_where_that_is_faster():
    net = with_product(network(LSTM(), 49, 128, "float16"), 10)
    plan = make_plan(net, H200, KERNELS, Job("fp16", 4096))
    assert [group.claim.label for group in plan.groups] == ["recurrent_mma<10,LSTM,128>"]
    shared = net.replace(outputs=("gates", "y"))  # the gates' inputs are an output
    assert claims_of(shared, "recurrent_mma", "fp16") == []
    assert claims_of(net, "recurrent_mma", "bf16") == []  # it would round
    assert len(claims_of(net, "recurrent_mma", "fp16", start=1)) == 1
    much = with_product(network(LSTM(), 49, 128, "float16"), 2000)  # weights that do not fit
    assert claims_of(much, "recurrent_mma", "fp16") == []


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "product"), [*((case, None) for case in MMA), *WITH_PRODUCT.items()])
def test_many_sequences_on_a_gpu(case, product):
    net, precision = many(case, product)
    engine, xs = onchip.compile(net, "cuda", precision, batch_hint=1 << 15), inputs_of(net, 4097)
    assert engine.plan.groups[-1].claim.kernel == "recurrent_mma"
    y = engine(*xs)
    verify(net, xs, y, precision)
    for rows in (slice(0, 1), slice(4096, 4097), slice(7, 300), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()


def test_states_that_do_not_fit_are_refused():
    big = network(RNN(), 1, 2).replace()  # as if it were as wide as the recipe says
    wide = 40_000
    given = {"x0": TensorType(("B", 1, wide))}
    recurrence = Recipe("network.recipe:as_is", (), (1, wide, wide), "float32")
    net = type(big)(given, big.nodes, big.outputs, {"recurrence": recurrence})
    (answer,) = RecurrentKernel().claims(net, 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "320,000 of 232,448 B of shared memory" in answer.why


@pytest.mark.gpu
@pytest.mark.parametrize("case", EMULATED)
def test_a_gpu_keeps_the_promise_and_the_bits_of_a_row(case):
    *given, has_states = EMULATED[case]
    net = network(*given, has_states=has_states)
    engine, xs = onchip.compile(net, "cuda"), inputs_of(net, 4097)
    y = engine(*xs)
    verify(net, xs, y)
    for rows in (slice(0, 1), slice(4096, 4097), slice(7, 300), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
