"""The fused MLP on a GPU: what it claims and compiles to (anywhere), and that it is right (where there is one)."""

import dataclasses

import numpy as np
import pytest

from checks import assert_error_within, random_mlp, rows
from onchip.errors import DeviceError, KernelError, ShapeError
from onchip.kernels import reference
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.common.program import EVERY_CHIP, LaunchConfig
from onchip.kernels.cuda.mlp import fused as mlp_fused
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel, chunks, layer_floats, shared_bytes, strides
from onchip.kernels.cuda.mlp.tensor_core import MlpTensorCoreKernel
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import Linear, ReLU, Reshape, Softmax
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200, RTX_4060_LAPTOP
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from takers import stored

DECODE = (72, 64, 64, 4)
DIGITS = (784, 320, 160, 10)
NETWORKS = {
    "decode": (DECODE, {"bias": False}),
    "decode with bias": (DECODE, {}),
    "digits": (DIGITS, {"output": "LogSoftmax"}),  # its weights stay in L2
    "one output": ((16, 32, 1), {"activation": "Tanh", "output": "Sigmoid"}),
    "one number": ((1, 1), {}),
    "one number, no bias": ((1, 1), {"bias": False, "output": "Tanh"}),
    "odd widths": ((7, 13, 5, 3), {"activation": "Sigmoid", "output": "Softmax"}),
    "odd widths, no bias": ((7, 13, 5, 3), {"bias": False, "output": "LogSoftmax"}),
    "some weights in L2": ((100, 200, 200, 10), {"output": "Softmax"}),
    "some weights in L2, no bias": ((100, 200, 200, 10), {"activation": "Tanh", "bias": False}),
    "long sums": ((3000, 20, 5), {}),
    "two chunks, then one": ((5, 48, 36, 49, 65, 2), {"output": "ReLU"}),
}


def claim_of(net, device=H200, job=None):
    (claim,) = MlpFusedKernel().claims(net, 0, device, job or Job())
    assert isinstance(claim, Claim), claim
    return claim


def refusal_of(net, device=H200, job=None):
    (refusal,) = MlpFusedKernel().claims(net, 0, device, job or Job())
    assert isinstance(refusal, Refusal), refusal
    return refusal.why


# -- planning ------------------------------------------------------------------------------------------------


def test_claim_for_an_h200():
    claim = claim_of(random_mlp(*DECODE, bias=False))
    assert claim.label == "mlp_fused<72,64,64,4,ReLU>"
    assert claim.nodes == ("fc1", "relu1", "fc2", "relu2", "fc3")
    assert claim.why == "fits: 149 of 227 KiB"
    assert claim.fast_bytes == (8960 + 12 * 32 * 76) * 4 == 152_576  # the sum in the kernel's header
    assert (claim.cost.row_bytes, claim.cost.row_flop, claim.cost.fixed_bytes) == (304, 17_920 + 128, 35_840)
    assert claim.facts.program.name_expression == (
        "mlp_fused<float, float, 32, 12, 8960, 152576, NoNormaliser, Dense<72, 64, ReLU, false, true>, "
        "Dense<64, 64, ReLU, false, true>, Dense<64, 4, Identity, false, true>>"
    )
    assert claim.facts.launch_config(2**21) == LaunchConfig((132, 1, 1), (384, 1, 1), 152_576)
    assert claim.facts.launch_config(1).grid == (1, 1, 1)
    assert claim.facts.launch_config(33).grid == (2, 1, 1)


def test_claims_for_smaller_chips():
    net = random_mlp(*DECODE, bias=False)
    assert claim_of(net, A100).why == "fits: 149 of 163 KiB"
    assert claim_of(net, A100).facts.launch_config(2**21).grid == (108, 1, 1)
    small = claim_of(net, RTX_4060_LAPTOP)
    assert small.why == "fits: 92 of 99 KiB"
    assert small.facts.launch_config(2**21) == LaunchConfig((24, 1, 1), (192, 1, 1), 94_208)


def test_weights_that_do_not_fit_stay_in_l2():
    claim = claim_of(random_mlp(*DIGITS))
    assert claim.why == "fits: 219 of 227 KiB, weights of 2 of 3 layers stay in L2"
    assert claim.facts.tiling.resident == (False, False, True)


def test_the_plan_as_text():
    plan = make_plan(random_mlp(*DECODE, bias=False), H200, [MlpFusedKernel()], Job(batch=2**21))
    assert str(plan).splitlines()[1:3] == [
        "group  layers    kernel                      on chip  bytes/row  flop/row     floor  estimate  why",
        "0      fc1..fc3  mlp_fused<72,64,64,4,ReLU>  149 KiB        304    18,048  566.5 µs  745.6 µs  "
        "fits: 149 of 227 KiB",
    ]


def test_refusals():
    net = random_mlp(6, 5, 4)
    assert refusal_of(net, dataclasses.replace(H200, arch="sm_75")).endswith("on sm_75")
    assert refusal_of(random_mlp(64, 8192)).startswith("does not fit: 8 rows of activations take ")
    wide = sequential(TensorType(("B", 4), "float64"), [("a", Linear())], {"a.weight": np.ones((2, 4))})
    assert refusal_of(wide).endswith("not float64[B, 4] on sm_90a")
    mixed = sequential(TensorType(("B", 4)), [("a", Linear())], {"a.weight": np.ones((2, 4))})
    assert refusal_of(mixed).endswith("a.weight is float64")


def test_layers_that_fit_only_by_themselves_are_cut():
    plan = make_plan(random_mlp(5000, 4, 5000), H200, [MlpFusedKernel()], Job())
    assert [group.claim.nodes for group in plan.groups] == [("fc1", "relu1"), ("fc2",)]


def test_in_other_precisions_only_what_mlp_tensor_cannot_take():
    assert list(MlpFusedKernel().claims(random_mlp(6, 5, 4), 0, H200, Job("fp16"))) == []
    claim = claim_of(random_mlp(*DIGITS), job=Job("fp16"))
    assert claim.nodes == ("fc1", "relu1")
    assert "weights take 503,040 B" in claim.why
    plan = make_plan(random_mlp(*DIGITS), H200, [MlpTensorCoreKernel(), MlpFusedKernel()], Job("fp16"))
    assert [group.claim.kernel for group in plan.groups] == ["mlp_fused", "mlp_tensor_core"]


def test_nothing_to_say_about_other_layers():
    net = sequential(TensorType(("B", 4)), [("r", ReLU())], {})
    assert list(MlpFusedKernel().claims(net, 0, H200, Job())) == []


def test_planning_computes_no_weight():
    weights = {"a.weight": stored(5, 6)}
    net = sequential(TensorType(("B", 6)), [("a", Linear())], weights)
    assert claim_of(net).weight_bytes == 6 * 8 * 4


def test_linear_over_vectors_has_more_rows_than_the_batch():
    net = vectors_net()
    claim = claim_of(net)
    assert claim.nodes == tuple(node.name for node in net.nodes)
    assert claim.facts.count(10) == 40
    assert claim.facts.launch_config(10).grid == (2, 1, 1)
    assert claim.cost.row_bytes == (20 + 8) * 4


@pytest.mark.parametrize("tile_rows", mlp_fused.ROWS)
def test_chunks_cover_every_width(tile_rows):
    for D_out in range(1, 300):
        widths = chunks(D_out, tile_rows)
        assert sum(widths[:-1]) < D_out <= sum(widths)
        assert sorted(widths, reverse=True) == list(widths)
        assert sum(widths) - D_out < max(16, 128 // tile_rows, D_out // 2 + 4)


def test_rows_next_to_each_other_start_in_other_banks():
    for widths in [(1, 1), DECODE, DIGITS, (7, 13, 5, 3), (8, 8), (64, 128, 64)]:
        chain = find_chain(random_mlp(*widths), 0)
        for tile_rows in mlp_fused.ROWS:
            assert all(stride % 8 == 4 for stride in strides(chain, tile_rows) if stride)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("device", [H200, A100, RTX_4060_LAPTOP], ids=lambda d: d.arch)
def test_every_choice_fits(name, device):
    widths, options = NETWORKS[name]
    claim = claim_of(random_mlp(*widths, **options), device)
    tiling, chain = claim.facts.tiling, claim.facts.chain
    assert claim.fast_bytes == shared_bytes(chain, tiling) <= device.fast_bytes
    assert 1 <= tiling.warps <= mlp_fused.MAX_WARPS
    assert claim.facts.budget.registers * 32 * tiling.warps <= 65536


@pytest.mark.parametrize("name", NETWORKS)
def test_packed_weights_are_what_was_promised(name):
    widths, options = NETWORKS[name]
    net = random_mlp(*widths, **options)
    claim = claim_of(net)
    (recipe,) = claim.recipes.values()
    packed = materialise(recipe, net.weights)
    assert (packed.shape, packed.dtype) == (recipe.shape, np.float32)
    at, tile = 0, claim.facts.tiling.rows
    for layer in claim.facts.chain.layers:
        block = packed[at : at + layer_floats(layer, tile)].reshape(-1, sum(chunks(layer.D_out, tile)))
        assert np.array_equal(block[: layer.D_in, : layer.D_out], net.weights[layer.weight].T)
        assert not block[:, layer.D_out :].any()
        if layer.bias is not None:
            assert np.array_equal(block[layer.D_in, : layer.D_out], net.weights[layer.bias])
        at += block.size
    assert at == packed.size


# -- compiling, with no GPU ----------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled(net, device) -> the compiler's report, without a cache."""
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    return lambda net, device: compile_program(claim_of(net, device).facts.program, device.arch)


@pytest.mark.parametrize("device", [A100, H200], ids=lambda d: d.arch)
@pytest.mark.parametrize("name", ["decode", "digits"])
def test_registers_stay_within_the_budget(name, device, compiled):
    widths, options = NETWORKS[name]
    net = random_mlp(*widths, **options)
    budget, made = claim_of(net, device).facts.budget, compiled(net, device)
    assert made.registers <= budget.registers
    assert made.spill_bytes <= budget.spill_bytes == 0


@pytest.mark.parametrize("arch", EVERY_CHIP)
def test_compiles_for_every_architecture(arch, compiled):
    made = compiled(random_mlp(3, 5, 2, output="Softmax"), dataclasses.replace(RTX_4060_LAPTOP, arch=arch))
    assert made.spill_bytes == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("decode", "digits")])
def test_odd_widths_compile(name, compiled):
    widths, options = NETWORKS[name]
    assert compiled(random_mlp(*widths, **options), H200).spill_bytes == 0


@pytest.mark.parametrize(
    ("ours", "wrong", "said"),
    [("152576", "152560", "shared memory per block"), ("8960", "8956", "weight layout")],
)
def test_the_kernel_does_not_compile_with_other_sums_than_its_own(ours, wrong, said, compiled):
    program = claim_of(random_mlp(*DECODE, bias=False)).facts.program
    assert ours in program.name_expression
    lie = dataclasses.replace(program, name_expression=program.name_expression.replace(ours, wrong))
    with pytest.raises(KernelError, match=said):
        compile_program(lie, "sm_90a")


# -- running, on a GPU ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend():
    return CudaBackend(0)


def vectors_net():
    layers = [("split", Reshape((4, 5))), ("a", Linear()), ("r", ReLU()), ("b", Linear()), ("s", Softmax())]
    weights = {"a.weight": rows(6, 5, seed=3), "b.weight": rows(2, 6, seed=4)}
    return sequential(TensorType(("B", 20)), [*layers, ("out", Reshape((8,)))], weights)


def runner(backend, net):
    """x -> y on the GPU."""
    plan = make_plan(net, backend.device, [MlpFusedKernel()])
    assert len(plan.groups) == 1
    bound = backend.bind(plan)

    def run(x):
        y = np.full((len(x), *net.output.row_shape), np.nan, np.float32)
        bound.run({"x": np.ascontiguousarray(x)}, {net.outputs[0]: y}, len(x))
        return y

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_is_right_and_has_the_same_bits_whatever_the_batch(name, backend):
    widths, options = NETWORKS[name]
    net, x = random_mlp(*widths, **options), rows(12800, widths[0])
    run = runner(backend, net)
    whole = run(x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    for B in (1, 2, 7, 127, 128, 129, 1000):
        assert np.array_equal(run(x[:B]), whole[:B]), f"B = {B}"
    assert np.array_equal(run(x[313:320]), whole[313:320])  # nor on the position in the batch
    assert np.array_equal(run(x), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
def test_rows_in_half_precision(io, backend):
    net = random_mlp(30, 21, 8)
    cast = with_io(net, io)
    x = rows(300, 30).astype(numpy_dtype(io))
    plan = make_plan(cast, backend.device, [MlpFusedKernel()])
    assert len(plan.groups) == 1
    y = np.empty((300, 8), numpy_dtype(io))
    backend.bind(plan).run({"x": x}, {cast.outputs[0]: y}, 300)
    whole = runner(backend, net)(x.astype(np.float32))
    assert y.tobytes() == whole.astype(numpy_dtype(io)).tobytes()


@pytest.mark.gpu
def test_rows_beside_the_batch_axis(backend):
    net, x = vectors_net(), rows(333, 20)
    got = runner(backend, net)(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.gpu
def test_nan_and_inf_pass_through(backend):
    net, x = random_mlp(6, 5, 4), rows(20, 6)
    x[3, 2], x[11, 0] = np.nan, np.inf
    got, truth = runner(backend, net)(x), reference.forward(net, x, "float32")
    assert np.isnan(got[3]).all()
    assert np.array_equal(np.isnan(got), np.isnan(truth))
    assert np.isfinite(np.delete(got, [3, 11], axis=0)).all()


@pytest.mark.gpu
def test_no_rows(backend):
    assert runner(backend, random_mlp(6, 5, 4))(rows(0, 6)).shape == (0, 4)


@pytest.mark.gpu
def test_two_groups_hand_a_value_over(backend):
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3), "v": rows(4, 9, seed=4)}
    net, x = Network({"x": TensorType(("B", 6))}, nodes, ("a", "b"), weights), rows(100, 6)
    plan = make_plan(net, backend.device, [MlpFusedKernel()])
    assert len(plan.groups) == 2
    got = {"a": np.empty((100, 9), np.float32), "b": np.empty((100, 4), np.float32)}
    backend.bind(plan).run({"x": x}, got, 100)
    truth, naive = reference.forward_all(net, x), reference.forward_all(net, x, "float32")
    for name in got:
        assert_error_within(got[name], truth[name], baseline=naive[name])


@pytest.mark.gpu
def test_an_array_that_does_not_fit_is_refused(backend):
    net = random_mlp(6, 5, 4)
    bound, y = backend.bind(make_plan(net, backend.device, [MlpFusedKernel()])), np.empty((9, 4), np.float32)
    for x in (rows(9, 5), rows(8, 6), rows(9, 6).astype(np.float64), np.asfortranarray(rows(9, 6))):
        with pytest.raises(ShapeError, match="'x' has the wrong shape"):
            bound.run({"x": x}, {net.outputs[0]: y}, 9)


@pytest.mark.gpu
def test_two_plans_share_a_backend(backend):
    first, second = random_mlp(*DECODE, seed=1), random_mlp(*DECODE, seed=2)
    x = rows(50, 72)
    run_first, run_second = runner(backend, first), runner(backend, second)
    alone = run_first(x)
    assert not np.array_equal(run_second(x), alone)
    del run_second
    assert np.array_equal(run_first(x), alone)
