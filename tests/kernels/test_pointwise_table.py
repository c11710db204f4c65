"""Every pointwise operation: the same results on both devices and in NumPy, on ordinary and special values."""

import subprocess
import sys

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.chain import find_chain
from onchip.kernels.cpu.elementwise.rowwise import RowwiseKernel
from onchip.kernels.cpu.train.mlp import MlpTrainKernel
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.activation import cpp_name
from onchip.kernels.pointwise import ACTIVATIONS, BINARY, CODES, OPERATIONS, TRAINED, UNARY, operation_of
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    GELU,
    LAYERS,
    Broadcast,
    Cast,
    Clip,
    Div,
    Elementwise,
    HardSigmoid,
    Layer,
    LeakyReLU,
    Mask,
    Mish,
    Mod,
    Ordered,
    Pow,
    PReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Sub,
    Tanh,
    ToInts,
    ToPixels,
)
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine, compile
from onchip.train import options

ULPS = 5  # if every hardware approximation has its maximum error
ODD = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e20, -1e20, 65504, 65520, -1e5, 88, -88, 1e-20, -1e-30, 1e-40,
     -1e-45],
    np.float32,
)  # fmt: skip
EXAMPLES = {
    LeakyReLU: (LeakyReLU(0.2), LeakyReLU(0.0), LeakyReLU(-0.5)),
    Clip: (Clip(-0.5, 0.7), Clip(high=0.25), Clip(low=-0.75), Clip(0.5, -0.5)),
    ELU: (ELU(), ELU(0.3)),
    HardSigmoid: (HardSigmoid(), HardSigmoid(1 / 6)),
}


def examples(row):
    kinds = {GELU: "approximate", Cast: "dtype", ToInts: "dtype"}
    if row.layer is Mod:
        return (Mod(row.variant == "truncated"),)
    return EXAMPLES.get(row.layer) or (row.layer(**{kinds[row.layer]: row.variant} if row.variant else {}),)


ONE = [(row, layer) for row in UNARY for layer in examples(row)]


def values(seed=0):
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(4000) * 10.0 ** rng.integers(-3, 3, 4000)
    return np.concatenate([ODD, wide.astype(np.float32)])


def values_of_every_magnitude(seed=0):
    """Every exponent and sign, each with the first, the last and some mantissas; and many where activations bend."""
    rng = np.random.default_rng(seed)
    digits = np.concatenate([[0, 1, 2**23 - 1], rng.integers(0, 2**23, 125)]).astype(np.uint32)
    heads = np.arange(512, dtype=np.uint32) << np.uint32(23)
    bent = np.concatenate([rng.uniform(-most, most, 1 << 16) for most in (1, 2, 16)]).astype(np.float32)
    return np.concatenate([(heads[:, None] | digits).ravel().view(np.float32), bent])


def assert_computes(row, layer, x, got):
    """Equal to the float64 reference, within a few ulp of x or of the result. Far below 0 the
    reference itself loses digits: of 1 + tanh(x) those below 2^-52 are gone."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        if row.layer is Cast:  # the truth is x itself: the Cast rounds
            rounded = layer.forward((x,), {})
            np.testing.assert_array_equal(got.astype(np.float32), rounded)
            return
        truth = layer.forward((wide,), {})
        if row.layer is ToInts:
            near = np.abs(np.nan_to_num(x, nan=1e9)) < 100  # for others, machines differ
            is_bool = layer.dtype == "bool"
            np.testing.assert_array_equal(got if is_bool else got[near], truth if is_bool else truth[near])
            return
        if row.layer is ToPixels:
            assert np.abs(got.astype(int) - truth.astype(int)).max() <= 1
            assert (got == truth).mean() > 0.99
            assert (got[:8] == truth[:8]).all()
            return
        assert layer.is_differentiable
        (slope,), _ = layer.backward((wide,), {}, truth, np.ones_like(truth))
        allowed = ULPS * 2.0**-23 * (np.abs(truth) + np.abs(wide * slope)) + 2.0**-52 * np.abs(wide)
        allowed += 2.0**-149  # between subnormal values
        allowed[~np.isfinite(allowed)] = 0
        expected = truth.astype(np.float32)
        same = (got == expected) | (np.isnan(got) & np.isnan(truth))
        wrong = ~same & ~(np.abs(got - truth) <= allowed)
    worst = np.flatnonzero(wrong)[:5]
    assert not wrong.any(), [(x[i], got[i], truth[i]) for i in worst]


def test_there_is_a_row_for_every_pointwise_layer():
    kinds = {kind for kind in LAYERS.values() if issubclass(kind, Elementwise | Broadcast)}
    assert {row.layer for row in OPERATIONS} == {*kinds, Cast, ToInts, ToPixels}
    for row in OPERATIONS:
        assert all(operation_of(layer) is row for layer in examples(row))
    assert len({row.struct for row in OPERATIONS}) == len(OPERATIONS)
    for row in OPERATIONS:
        assert bool(row.cuda) == bool(row.cpu) == (row.layer in kinds)
    assert operation_of(Cast("float64")) is None


def test_what_has_no_slope_is_no_activation():
    assert [row.layer for row in OPERATIONS if row.layer.backward is Layer.backward] == [
        Mod,
        Mod,
        ToPixels,
        *[ToInts] * 6,
    ]


@pytest.mark.parametrize(
    ("row", "layer"),
    [(row, layer) for row, layer in ONE if row in CODES],
    ids=lambda given: getattr(given, "struct", str(given)),
)
def test_the_cpu_computes_the_same(row, layer):
    x = values()
    net = sequential(TensorType(("B", 1)), [("y", layer)], {})
    (claim,) = RowwiseKernel().claims(net, 0, this_cpu(), Job())
    y = np.empty_like(x)
    RowwiseKernel().bind(claim, {})([x[:, None]], [y[:, None]], 1)
    assert_computes(row, layer, x, y)


def on_emulated_gpu(monkeypatch, net, *x):
    gpu = emulated_gpu(monkeypatch)
    plan = make_plan(net, gpu.device, KERNELS, Job())
    return Engine(plan, CudaBackend(), "cuda:0")(*x)


@needs_gxx
@pytest.mark.parametrize(("row", "layer"), ONE, ids=lambda given: getattr(given, "struct", str(given)))
def test_cuda_computes_the_same(monkeypatch, row, layer):
    x = values()
    net = sequential(TensorType(("B", 1)), [("y", layer)], {})
    assert_computes(row, layer, x, on_emulated_gpu(monkeypatch, net, x[:, None])[:, 0])


@needs_gxx
@pytest.mark.parametrize("layer", [Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"), ELU(), Softplus(), Mish()], ids=str)
def test_cuda_is_exact_for_every_magnitude(monkeypatch, layer):
    x = values_of_every_magnitude()
    net = sequential(TensorType(("B", 1)), [("y", layer)], {})
    assert_computes(operation_of(layer), layer, x, on_emulated_gpu(monkeypatch, net, x[:, None])[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [layer for row, layer in ONE if issubclass(row.layer, Elementwise)], ids=str)
def test_a_gpu_is_exact_for_every_magnitude(layer):
    x = np.concatenate([values(), *map(values_of_every_magnitude, range(8))])
    net = sequential(TensorType(("B", 1)), [("y", layer)], {})
    assert_computes(operation_of(layer), layer, x, compile(net, "cuda")(x[:, None])[:, 0])


@needs_gxx
@pytest.mark.parametrize("layer", [row.layer() for row in BINARY if row.layer not in (Mask, Mod)], ids=str)
def test_cuda_combines_the_same(monkeypatch, layer):
    x, z = (np.resize(values(seed), len(ODD) ** 2 + 4000) for seed in (0, 1))
    x[: len(ODD) ** 2], z[: len(ODD) ** 2] = np.repeat(ODD, len(ODD)), np.tile(ODD, len(ODD))
    given = TensorType(("B", 1))
    net = Network({"x": given, "z": given}, (Node("y", layer, ("x", "z")),), ("y",), {})
    with np.errstate(all="ignore"):
        expected = layer.forward((x, z), {})
    got = on_emulated_gpu(monkeypatch, net, x[:, None], z[:, None])[:, 0]
    if isinstance(layer, Pow):  # libraries differ in the last digit
        np.testing.assert_allclose(got, expected, rtol=ULPS * 2.0**-23, atol=2.0**-149)
    else:
        np.testing.assert_array_equal(got, expected)


@needs_gxx
@pytest.mark.parametrize("layer", [Sub(), Div(), PReLU()], ids=str)
def test_cuda_knows_which_operand_is_the_first(monkeypatch, layer):
    """A constant as first and as second operand, and the accumulator as second operand."""
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal((5, 7), np.float32), rng.standard_normal(7, np.float32)
    given = TensorType(("B", 7))
    nodes = (
        Node("a", layer, ("x",), {"first": "c"}),
        Node("b", layer, ("x", "a")),
        Node("y", layer, ("b",), {"constant": "c"}),
    )
    net = Network({"x": given}, nodes, ("a", "y"), {"c": c})
    assert isinstance(layer, Ordered)
    for got, expected in zip(on_emulated_gpu(monkeypatch, net, x), reference.forward(net, x, "float32"), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_parameters_of_compiled_kernels_are_the_bits_of_floats():
    assert cpp_name(None) == "Identity"
    assert cpp_name(GELU("tanh")) == "TanhGELU"
    assert cpp_name(LeakyReLU(0.5)) == "Fixed<LeakyReLU, 0x3f000000u>"
    assert cpp_name(Clip(high=1.0)) == "Fixed<Clip, 0xff800000u, 0x3f800000u>"


def test_what_can_be_trained_is_what_the_kernel_trains():
    for kind in ACTIVATIONS:
        step = training_step(mlp(5, 4, 3, activation=kind.__name__), TrainingStep("mse"))
        (answer,) = MlpTrainKernel().claims(step, 0, this_cpu(), Job())
        assert hasattr(answer, "cost") == (kind in TRAINED)
    assert set(TRAINED) < set(ACTIVATIONS)


def test_chains_know_every_activation():
    for kind in ACTIVATIONS:
        chain = find_chain(mlp(5, 4, 3, activation=kind.__name__), 0)
        assert isinstance(chain.layers[0].activation, kind)


def test_neither_the_reference_nor_planning_needs_numba():
    code = (
        "import sys; import onchip.kernels.reference, onchip.kernels.pointwise, onchip.plan.planner, "
        "onchip.kernels.cuda, onchip.kernels.chain; print('numba' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "False"


def test_a_bound_that_is_not_there_is_an_infinity():
    row = operation_of(Clip(0.1, 6))
    assert row.float32_parameters(Clip(0.1, 6)) == (np.float32(0.1), np.float32(6))
    assert row.float32_parameters(Clip()) == (-np.inf, np.inf)


def test_training_names_those_that_it_goes_through():
    assert tuple(layer.__name__ for layer in TRAINED) == options.ACTIVATIONS
