"""LSTM, GRU and RNN on both devices: the steps' arithmetic, whatever the batch. CUDA's kernel runs on the host."""

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
from onchip.kernels.cuda.recurrent import RecurrentAlone
from onchip.kernels.cuda.recurrent_held import RecurrentHeld
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan
from onchip.spec.layers import GRU, LSTM, RNN, Linear, Recurrent
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Recipe
from onchip.spec.types import TensorType, numpy_dtype

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


def inputs_of(net, B):
    rng = np.random.default_rng(B)
    return tuple(
        rng.standard_normal((B, *given.row_shape)).astype(numpy_dtype(given.dtype)) for given in net.inputs.values()
    )


def judge(net, xs, y):
    dtype = net.output.dtype
    assert_error_within(y, reference.forward(net, xs), reference.forward(net, xs, dtype))


# -- the CPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cpu_keeps_the_promise_and_the_bits_of_a_row(case):
    net = layer_cases.network(case)
    engine = onchip.compile(net, device="cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["recurrent"]
    xs = layer_cases.random_inputs(case, 67)
    y = engine(*xs)
    judge(net, xs, y)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 40), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
    assert onchip.compile(net, device="cpu", threads=1)(*xs).tobytes() == y.tobytes()


@pytest.mark.parametrize("layer", [LSTM(), GRU(reset_after=False), GRU("bidirectional")], ids=str)
def test_sums_longer_than_a_chunk_on_the_cpu(layer):
    net = network(layer, 3, 143, has_states=True)
    xs = inputs_of(net, 5)
    judge(net, xs, onchip.compile(net, device="cpu")(*xs))


def test_two_states_may_be_one_value():
    net = network(LSTM(), 3, 4, has_states=True)
    (node,) = net.nodes
    shared = net.replace(nodes=[dataclasses.replace(node, inputs=("x0", "x1", "x1"))])
    x, h, _ = inputs_of(net, 3)
    unused = np.zeros_like(h)
    got = onchip.compile(shared, device="cpu")(x, h, unused)
    assert got.tobytes() == onchip.compile(net, device="cpu")(x, h, h).tobytes()


def fed(layer, S, K, H, has_states=False, has_bias=True):
    """A Linear in front, which makes what the gates are given."""
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
def test_a_product_in_front_is_done_on_the_way(layer, S, K, H, has_states):
    for has_bias in (True, False):
        net = fed(layer, S, K, H, has_states, has_bias)
        engine, xs = onchip.compile(net, device="cpu"), inputs_of(net, 67)
        assert [group.claim.facts.K for group in engine.plan.groups] == [K], str(engine.plan)
        y = engine(*xs)
        judge(net, xs, y)
        for rows in (slice(0, 1), slice(66, 67), slice(3, 8), slice(3, 40), slice(0, 0)):
            assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
        assert onchip.compile(net, device="cpu", threads=1)(*xs).tobytes() == y.tobytes()


def test_a_product_that_others_read_stays_alone():
    net = fed(LSTM(), 4, 3, 5)
    engine, xs = onchip.compile(net.replace(outputs=("gates", *net.outputs)), device="cpu"), inputs_of(net, 3)
    assert [group.claim.kernel for group in engine.plan.groups] == ["mlp_fused", "recurrent"]
    assert engine(*xs)[1].tobytes() == onchip.compile(net, device="cpu")(*xs).tobytes()


@pytest.mark.parametrize(
    ("layer", "x", "recurrence", "told"),
    [
        (LSTM(), (5, 12), (1, 12, 4), "recurrence has another shape"), (GRU(), (5, 12), (1, 9, 3), "(B, ..., S, 9)"),
        (RNN("bidirectional"), (0, 6), (2, 3, 3), "S at least 1"), (RNN(), (6,), (1, 6, 6), "input has another shape"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(layer, x, recurrence, told):
    with pytest.raises(ShapeError) as caught:
        layer.infer((TensorType(("B", *x)),), {"recurrence": TensorType(recurrence)})
    assert told in str(caught.value)


def test_attributes_that_are_none():
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
        judge(net, xs, run_claim(gpu, net, claim, *xs))


@needs_gxx
def test_a_sequence_has_the_same_bits_however_many_a_thread_has(monkeypatch):
    net = network(LSTM("bidirectional"), 3, 70, has_states=True)
    gpu, xs = emulated_gpu(monkeypatch), inputs_of(net, 21)
    (claim,) = claims_of(net, "recurrent")
    few = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=1))
    assert [facts.rows_for(21) for facts in (claim.facts, few.facts)] == [1, 8]
    assert run_claim(gpu, net, claim, *xs).tobytes() == run_claim(gpu, net, few, *xs).tobytes()


# -- a GPU, few sequences: the recurrence stays in registers --------------------------------------------------------

HELD = {
    "lstm, a cluster": (LSTM("bidirectional"), 3, 70, "float32", True),
    "cell": (LSTM("reverse", "cell"), 2, 5, "float32", False),
    "gru": (GRU("bidirectional"), 3, 33, "bfloat16", True),
    "gru, last": (GRU(output="last"), 2, 64, "float32", False),
    "relu": (RNN("reverse", "last", "relu"), 3, 31, "float16", False),
    "rnn": (RNN(), 2, 130, "float32", True),
}


@needs_gxx
@pytest.mark.parametrize("case", HELD)
def test_few_sequences_on_an_emulated_gpu(monkeypatch, case):
    *given, has_states = HELD[case]
    net = network(*given, has_states=has_states)
    gpu, xs = emulated_gpu(monkeypatch), inputs_of(net, 5)
    (claim,) = claims_of(net, "recurrent_held")
    y = run_claim(gpu, net, claim, *xs)
    judge(net, xs, y)
    together = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=2))
    assert together.facts.sequences_for(5) > claim.facts.sequences_for(5) == 1
    assert run_claim(gpu, net, together, *xs).tobytes() == y.tobytes()
    assert claim.facts.at(0).launches == ()


def test_few_sequences_are_held_and_many_are_not():
    net = network(LSTM(), 49, 128)
    kernels = [make_plan(net, H200, KERNELS, Job(batch=B)).groups[0].claim.kernel for B in (1, 64, 1 << 15)]
    assert kernels == ["recurrent_held", "recurrent_held", "recurrent"]
    (claim,) = claims_of(net, "recurrent_held")
    assert [(claim.facts.blocks_for(N), claim.facts.sequences_for(N)) for N in (1, 33, 64, 256)] == [
        (4, 1), (4, 1), (2, 1), (2, 4),
    ]  # fmt: skip
    for wide in (RNN(), LSTM()):
        assert claims_of(network(wide, 2, 300), "recurrent_held") == []  # more than registers of a cluster hold
    (answer,) = RecurrentHeld().claims(net, 0, A100, Job())
    assert isinstance(answer, Refusal)
    assert "no cluster of sm_80" in answer.why


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*HELD, "keyword", "wide"])
def test_few_sequences_on_a_gpu(case):
    others = {"keyword": (LSTM(), 49, 128, "float32", False), "wide": (LSTM("bidirectional"), 7, 256, "float32", True)}
    *given, has_states = (HELD | others)[case]
    net = network(*given, has_states=has_states)
    engine, xs = onchip.compile(net, "cuda", batch_hint=1), inputs_of(net, 2049)
    assert [group.claim.kernel for group in engine.plan.groups] == ["recurrent_held"]
    y = engine(*xs)
    judge(net, xs, y)
    for rows in (slice(0, 1), slice(2048, 2049), slice(7, 300), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()


def test_states_that_do_not_fit_are_refused():
    big = network(RNN(), 1, 2).replace()  # as if it were as wide as the recipe says
    wide = 40_000
    given = {"x0": TensorType(("B", 1, wide))}
    recurrence = Recipe("spec.recipe:as_is", (), (1, wide, wide), "float32")
    net = type(big)(given, big.nodes, big.outputs, {"recurrence": recurrence})
    (answer,) = RecurrentAlone().claims(net, 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "320,000 of 232,448 B of shared memory" in answer.why


@pytest.mark.gpu
@pytest.mark.parametrize("case", EMULATED)
def test_a_gpu_keeps_the_promise_and_the_bits_of_a_row(case):
    *given, has_states = EMULATED[case]
    net = network(*given, has_states=has_states)
    engine, xs = onchip.compile(net, "cuda"), inputs_of(net, 4097)
    y = engine(*xs)
    judge(net, xs, y)
    for rows in (slice(0, 1), slice(4096, 4097), slice(7, 300), slice(0, 0)):
        assert engine(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
