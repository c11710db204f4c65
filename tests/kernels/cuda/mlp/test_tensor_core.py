"""The MLP on tensor cores: what it claims and how it packs (anywhere), and that it is right (on a GPU)."""

import dataclasses

import numpy as np
import pytest

import onchip
from checks import random_mlp, rows
from onchip.kernels import reference
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import LaunchConfig
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.kernels.cuda.mlp.tensor_core import MlpTensorCoreKernel
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import ELU, GELU, Cast, Clip, LeakyReLU, Linear, ReLU, Reshape, Softmax
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200, RTX_4060_LAPTOP
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.cuda.nvrtc import compile_program

DECODE = (72, 64, 64, 4)
IO = ("float32", "float16", "bfloat16")


def claim_of(net, device=H200, precision="fp16", B=Job.batch):
    (claim,) = MlpTensorCoreKernel().claims(net, 0, device, Job(precision, B))
    assert isinstance(claim, Claim), claim
    return claim


def refusal_of(net, device=H200, job=None):
    (refusal,) = MlpTensorCoreKernel().claims(net, 0, device, job or Job("fp16"))
    assert isinstance(refusal, Refusal), refusal
    return refusal.why


# -- planning ------------------------------------------------------------------------------------------------


def test_claim_for_an_h200():
    claim = claim_of(with_io(random_mlp(*DECODE, bias=False), "float16"))
    assert claim.label == "mlp_tensor_core<72,64,64,4,ReLU>"
    assert claim.nodes == ("x.float32", "fc1", "relu1", "fc2", "relu2", "fc3.float32", "fc3")  # with both Casts
    assert claim.why == "fits: 91 of 227 KiB, rows in fp16"
    assert claim.weight_bytes == (80 * 64 + 64 * 64 + 64 * 8) * 2 == 19_456
    assert claim.fast_bytes == 19_456 + 16 * 2 * 16 * 144  # two tiles of 16 rows in flight for each of 16 warps
    assert (claim.cost.row_bytes, claim.cost.row_flop) == (152, 17_920 + 128)
    assert claim.facts.program.name_expression == (
        "mlp_tensor_core<Fp16, ByWgmma, f16, f16, 1, 16, 2, 19456, NoNormaliser, Dense<72, 64, ReLU, false>, "
        "Dense<64, 64, ReLU, false>, Dense<64, 4, Identity, false>>"
    )
    assert claim.facts.launch_config(2**21) == LaunchConfig((132, 1, 1), (512, 1, 1), 93_184, overlaps=True)


def test_a_small_batch_takes_fewer_warps():
    launch = claim_of(random_mlp(*DECODE)).facts
    for B, blocks, threads in ((1, 1, 128), (64, 1, 128), (65, 2, 128), (132 * 64, 132, 128), (12_800, 132, 256)):
        config = launch.launch_config(B)
        assert (config.grid[0], config.block[0]) == (blocks, threads), B
        assert blocks * threads // 128 * 64 >= B or blocks == 132


def test_a_small_network_over_many_rows_takes_two_blocks_at_a_time():
    net = with_io(random_mlp(16, 32, 1), "float16")
    enough = 132 * 5 * 128  # a tile of two blocks for each of five teams
    for B, blocks in ((1, 1), (enough - 1, 1), (enough, 2), (1 << 24, 2)):
        assert claim_of(net, B=B).facts.tiling.blocks == blocks, B
    assert claim_of(random_mlp(*DECODE), B=enough).facts.tiling.blocks == 1  # it has no registers for two


def test_claims_for_other_chips():
    net = with_io(random_mlp(*DECODE, bias=False), "float16")
    for device in (A100, RTX_4060_LAPTOP):
        launch = claim_of(net, device).facts
        assert (launch.tiling.by, launch.tiling.blocks, launch.tiling.warps) == ("ByMma", 2, 12)
        assert not launch.launch_config(100).overlaps


def test_fp32_is_three_products_of_tf32():
    claim = claim_of(random_mlp(*DECODE, bias=False), precision="fp32")
    assert claim.cost.row_flop == 3 * (17_920 + 128)
    assert claim.weight_bytes == 2 * 4 * (72 * 64 + 64 * 64 + 64 * 8)
    many = claim_of(random_mlp(*DECODE, bias=False), precision="fp32", B=2**21)
    assert many.cost.estimate_us(H200, "fp32", 2**21) == pytest.approx(3 * 18_048 * 2**21 / 352e12 * 1e6 + 2)
    assert claim.cost.floor_us(H200, "fp32", 2**21) == pytest.approx(3 * 18_048 * 2**21 / 494.5e12 * 1e6 + 0.7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("widths", "activation"),
    [(DECODE, "ReLU"), ((16, 32, 1), "ReLU"), ((3, 24, 24, 24, 1), "Tanh"), ((5, *(17,) * 9, 2), "Sigmoid")],
)
def test_fp32_is_as_exact_as_rounded_sums(widths, activation):
    """Over many networks: the rows of a deep one with sigmoids are nearly the same, so each is one draw."""
    ours = naive = 0.0
    for seed in range(20):
        net, x = random_mlp(*widths, seed=seed, activation=activation), rows(1000, widths[0], seed=seed)
        truth = reference.forward(net, x)
        engine = onchip.compile(net, device="cuda")
        assert [group.claim.kernel for group in engine.plan.groups] == ["mlp_tensor_core"]
        ours += float(((engine(x) - truth) ** 2).mean())
        naive += float(((reference.forward(net, x, "float32") - truth) ** 2).mean())
    assert np.sqrt(ours / naive) < 1.5


def test_the_plan_as_text():
    plan = make_plan(
        with_io(random_mlp(*DECODE, bias=False), "float16"), H200, [MlpTensorCoreKernel()], Job("fp16", 2**21)
    )
    line = "0      x.float32..fc3  mlp_tensor_core<72,64,64,4,ReLU>   91 KiB        152    18,048  67.1 µs   77.2 µs"
    assert str(plan).splitlines()[2].startswith(line)


def test_readers_of_one_input_take_their_casts_with_them():
    nodes = (Node("a", Linear(), ("x",), {"weight": "w"}), Node("b", Linear(), ("x",), {"weight": "w"}))
    net = Network({"x": TensorType(("B", 7))}, nodes, ("a", "b"), {"w": rows(5, 7)})
    plan = make_plan(with_io(net, "float16"), H200, [MlpTensorCoreKernel()], Job("fp16"))
    assert [len(group.claim.nodes) for group in plan.groups] == [3, 3]
    assert all(group.claim.facts.dtypes == ("float16", "float16") for group in plan.groups)


def test_several_casts_at_an_end_are_one_and_one_in_the_middle_ends_the_chain():
    ends = [
        ("h", Cast("float16")),
        ("i", Cast("float32")),
        ("a", Linear()),
        ("o", Cast("float16")),
        ("p", Cast("bfloat16")),
    ]
    net = sequential(TensorType(("B", 4), "bfloat16"), ends, {"a.weight": rows(3, 4)})
    claim = claim_of(net)
    assert claim.nodes == ("h", "i", "a", "o", "p")
    assert claim.facts.dtypes == ("bfloat16", "bfloat16")
    middle = [("a", Linear()), ("h", Cast("float16")), ("i", Cast("float32")), ("b", Linear())]
    net = sequential(TensorType(("B", 4)), middle, {"a.weight": rows(3, 4), "b.weight": rows(2, 3)})
    assert claim_of(net).nodes[0] == "a"
    assert "b" not in claim_of(net).nodes  # its input was rounded before it


def test_a_chain_that_does_not_fit_is_cut():
    net = random_mlp(128, *(128,) * 20, 5)
    plan = make_plan(net, H200, [MlpTensorCoreKernel()], Job("fp16"))
    assert 2 < len(plan.groups) < 10
    assert all(group.claim.fast_bytes <= H200.fast_bytes for group in plan.groups)
    assert [name for group in plan.groups for name in group.claim.nodes] == [node.name for node in plan.network.nodes]


def test_layers_too_wide_for_the_registers_together_are_cut():
    net = random_mlp(1, 900, 2)
    plan = make_plan(net, H200, [MlpTensorCoreKernel()], Job("fp16"))
    assert [group.claim.nodes for group in plan.groups] == [("x.float16", "fc1", "relu1"), ("fc2.float16", "fc2")]


def test_refusals():
    net = random_mlp(6, 5, 4)
    assert refusal_of(net, dataclasses.replace(H200, arch="sm_75")).endswith("on sm_75")
    assert refusal_of(random_mlp(784, 320, 160, 10)).startswith("does not fit: weights take 6")
    wide = sequential(TensorType(("B", 4), "float64"), [("a", Linear())], {"a.weight": np.ones((2, 4))})
    assert refusal_of(wide).endswith("not float64[B, 4] on sm_90a")
    mixed = sequential(TensorType(("B", 4)), [("a", Linear())], {"a.weight": np.ones((2, 4))})
    assert refusal_of(mixed).endswith("a.weight is float64")
    assert (
        list(MlpTensorCoreKernel().claims(sequential(TensorType(("B", 4)), [("r", ReLU())], {}), 0, H200, Job("fp16")))
        == []
    )


# -- compiling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [19_472, 9_728])
def test_other_weights_than_the_host_packed_do_not_compile(wrong):
    program = claim_of(with_io(random_mlp(*DECODE, bias=False), "float16")).facts.program
    lie = dataclasses.replace(program, name_expression=program.name_expression.replace("19456", str(wrong)))
    with pytest.raises(onchip.OnchipError, match="weight layout"):
        compile_program(lie, "sm_90a")


# -- running, on a GPU ---------------------------------------------------------------------------------------

NETWORKS = {
    "decode": random_mlp(*DECODE, bias=False),
    "decode with bias": random_mlp(*DECODE),
    "one number": random_mlp(1, 1, output="Tanh"),
    "one layer": random_mlp(5, 9, bias=False),
    "odd widths": random_mlp(7, 13, 5, 3, activation="Sigmoid", output="Softmax"),
    "71 columns": random_mlp(71, 33, 17, output="LogSoftmax"),
    "one output": random_mlp(16, 32, 1, activation="Tanh", output="Sigmoid"),
    "128 wide": random_mlp(48, 128, 128, 128, 3),
    "200 wide": random_mlp(100, 200, 200, 10, output="Softmax"),
    "256 wide": random_mlp(20, 256, 256, 6, bias=False),
    "ten layers": random_mlp(24, *(64,) * 9, 5),
    "long rows": random_mlp(784, 60, 10),
    "very long rows": random_mlp(1500, 24, 2),
    "many outputs": random_mlp(12, 40, 333),
    "two launches": random_mlp(96, *(128,) * 14, 7),
}


def verify(engine, net, x, precision):
    truth = reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    allowed = FACTOR * naive + ULPS * max(ULP[precision], DTYPE_ULP.get(net.output.dtype, 0.0))
    got = engine(x)
    error = scaled_error(got, truth)
    print(f"{precision} {net.name} {[g.claim.label for g in engine.plan.groups]} error {error:.2g} naive {naive:.2g}")
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, naive {naive:.3g}"
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_is_right_and_has_the_same_bits_whatever_the_batch(name, precision):
    net = NETWORKS[name]
    engine = onchip.compile(net, "cuda", precision)
    x = rows(12_800 + 5, *net.input.row_shape)
    whole = verify(engine, net, x, precision)
    for B in (1, 2, 7, 63, 64, 65, 1000):
        assert np.array_equal(engine(x[:B]), whole[:B]), f"B = {B}"
    assert np.array_equal(engine(x[313:320]), whole[313:320])  # nor on the position in the batch
    assert np.array_equal(engine(x), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["decode", "one output", "long rows"])
def test_many_tiles_for_every_warp(name, precision, io):
    """A tile after the other goes through the same slots: each must hold what the rows alone would give."""
    torch = pytest.importorskip("torch")
    net = with_io(NETWORKS[name], io)
    engine = onchip.compile(net, "cuda", precision)
    D, B = net.input.row_shape[0], 132 * 16 * 64 + 33
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(B, D, device="cuda", generator=generator).to(getattr(torch, io))
    whole = engine(x).cpu()
    for start in (0, 50_001, B - 3000):
        part = engine(x[start : start + 3000].clone()).cpu()
        assert torch.equal(part, whole[start : start + 3000]), start
    truth = reference.forward(net, x[-500:].float().cpu().numpy())
    assert np.abs(whole[-500:].float().numpy() - truth).max() < 0.05 * np.abs(truth).max()


@pytest.mark.gpu
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])  # in fp32 few rows may be another kernel's
@pytest.mark.parametrize("widths", [(16, 32, 1), (1, 1, 1), (7, 13, 5, 3)], ids=str)  # gemv claims a single gemm
def test_the_rows_that_are_expected_change_no_bits(widths, precision, io):
    net = with_io(random_mlp(*widths), io)
    few, many = (onchip.compile(net, "cuda", precision, batch_hint=B) for B in (1, 1 << 20))
    x = rows(132 * 5 * 128 + 77, widths[0]).astype(numpy_dtype(io))
    whole = verify(many, net, x, precision)
    for B in (1, 7, 31, 33, 127, 129, 12_800, len(x)):
        assert np.array_equal(many(x[:B]), whole[:B]), B
        assert np.array_equal(few(x[:B]), whole[:B]), B


@pytest.mark.gpu
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["decode", "odd widths", "71 columns", "long rows", "many outputs"])
def test_rows_in_any_dtype(name, precision, io):
    net = with_io(NETWORKS[name], io)
    engine = onchip.compile(net, "cuda", precision)
    x = rows(777, *net.input.row_shape).astype(numpy_dtype(io))
    got = verify(engine, net, x, precision)
    assert got.dtype == numpy_dtype(io)
    if engine.plan.groups[0].claim.kernel == "mlp_tensor_core":
        assert len(engine.plan.groups) == 1  # the Casts cost no launch
        assert engine.plan.groups[0].claim.cost.row_bytes == sum(
            TensorType(t.shape, io).row_bytes for t in (net.input, net.output)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "layer", [kind() for kind in ACTIVATIONS] + [LeakyReLU(0.2), Clip(0, 6), Clip(None, 0.5), GELU("tanh"), ELU(0.5)]
)
def test_every_activation(layer, precision):
    weights = {
        "a.weight": rows(24, 10, seed=3) / np.float32(3), "a.bias": rows(24, seed=5),
        "b.weight": rows(9, 24, seed=4) / np.float32(5),
    }  # fmt: skip
    net = sequential(TensorType(("B", 10)), [("a", Linear()), ("f", layer), ("b", Linear()), ("g", layer)], weights)
    verify(onchip.compile(net, "cuda", precision), net, 3 * rows(500, 10), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_beside_the_batch_axis(precision):
    layers = [("split", Reshape((4, 5))), ("a", Linear()), ("r", ReLU()), ("b", Linear()), ("s", Softmax())]
    weights = {"a.weight": rows(6, 5, seed=3), "b.weight": rows(2, 6, seed=4)}
    net = sequential(TensorType(("B", 20)), [*layers, ("out", Reshape((8,)))], weights)
    verify(onchip.compile(net, "cuda", precision), net, rows(333, 20), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_stays_in_its_row(precision):
    net, x = random_mlp(6, 50, 4), rows(200, 6)
    x[3, 2], x[111, 0] = np.nan, np.inf
    got = onchip.compile(net, "cuda", precision)(x)
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[111]).any()
    assert np.isfinite(np.delete(got, [3, 111], axis=0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["decode", "odd widths", "71 columns", "128 wide", "many outputs", "long rows"])
def test_the_product_of_other_chips(name, precision, monkeypatch):
    """mma.sync runs on Hopper too."""
    monkeypatch.setattr(mlp_tensor_core, "instruction", lambda arch: "ByMma")
    net = NETWORKS[name]
    engine = onchip.compile(net, "cuda", precision)
    if engine.plan.groups[0].claim.kernel != "mlp_tensor_core":
        pytest.skip(engine.plan.groups[0].claim.why)
    assert engine.plan.groups[0].claim.facts.tiling.by == "ByMma"
    x = rows(1005, *net.input.row_shape)
    whole = verify(engine, net, x, precision)
    assert np.array_equal(engine(x[:7]), whole[:7])
