"""Training by the persistent kernel with blocks per layer: emulated, and on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from emulated_cuda import copy_headers, kernel_of, needs_gxx
from emulated_engine import emulate_device
from onchip.errors import KernelError
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.common.program import Program
from onchip.kernels.cuda.train.layer_parallel import layer_parallel as mlp_train_layer_parallel
from onchip.kernels.cuda.train.layer_parallel.layer_parallel import LayerParallelLowering, make_lowering
from onchip.kernels.cuda.train.resident import args as mlp_train_args
from onchip.kernels.pointwise import TRAINED
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import devices
from onchip.runtime.placement import kernels_for
from onchip.train.loop import fit
from onchip.train.many import Run
from onchip.train.options import TrainOptions
from training_cases import (
    assert_bits_of_single_runs,
    assert_follows_reference,
    assert_same_bits,
    case,
    delay_at_random,
    leave_out_a_block,
    pixels,
    reference_curve,
    train_only_by,
)

CASES = {
    "digits": lambda: case(37, 20, 9, 4, n=150, batch_size=64, lr=0.1),
    "four layers, adam": lambda: case(20, 21, 17, 9, 5, n=70, batch_size=30, lr=0.01, optimiser="adam"),
    "two layers, 32 outputs": lambda: case(12, 19, 32, n=50, batch_size=16, lr=0.05),
    "no bias, decay": lambda: case(
        16, 24, 3, n=40, options={"bias": False, "activation": "Sigmoid"}, loss="half_sse", batch_size=16, lr=1e-2,
        weight_decay=0.1,
    ),
    "double-buffered pixels": lambda: case(1000, 9, 5, n=40, batch_size=16, lr=0.05),
    "momentum, batch 1": lambda: case(
        6, 5, 4, n=9, options={"activation": "Tanh"}, loss="mse", batch_size=1, momentum=0.5
    ),
}  # fmt: skip


def case_of(name):
    net, x, y, training = CASES[name]()
    return net, pixels(len(x), x.shape[1]), y, training


def lowering_of(*widths, precision="fp32", batch=64, device=H200, byte_scale=1 / 255, **training):
    step = TrainingStep("cross_entropy", byte_scale=byte_scale, **training)
    return make_lowering(find_chain(mlp(*widths), 0, TRAINED), step, precision, batch, device)


ROUNDING = {"tf32": 2**-8, "bf16": 2**-5}  # of a loss


def assert_rounding(precision, name):
    net, x, y, training = case_of(name)
    result = fit(net, x, y, epochs=2, seed=7, device="cuda", precision=precision, **training)
    assert isinstance(result.plan.groups[0].claim.facts, LayerParallelLowering)
    truth, _, _ = reference_curve(net, x, y, 7, "float64", training, epochs=2)
    assert np.abs(result.losses - truth).max() <= ROUNDING[precision] * np.abs(truth).max()


# -- on the host -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[100, 7], ids=["one tile per block", "several tiles"])
def gpu(monkeypatch, request):
    """An emulated GPU with this many SMs."""
    emulate_device(monkeypatch)
    monkeypatch.setattr(devices, "probe", lambda: ([dataclasses.replace(H200, units=request.param)], ""))
    train_only_by(monkeypatch, "mlp_train_layer_parallel")


@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_emulated_blocks_follow_the_reference(name, gpu):
    result = assert_follows_reference(*case_of(name), device="cuda")
    assert result.plan.groups[0].claim.kernel == "mlp_train_layer_parallel"


@needs_gxx
@pytest.mark.parametrize("name", ["digits", "four layers, adam", "double-buffered pixels"])
@pytest.mark.parametrize("precision", ROUNDING)
def test_emulated_blocks_in_lower_precision(precision, name, gpu):
    assert_rounding(precision, name)


@needs_gxx
def test_bits_do_not_depend_on_the_number_of_blocks(monkeypatch):
    emulate_device(monkeypatch)
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    net, x, y, training = case_of("digits")
    results = []
    for units in (100, 4):
        device = dataclasses.replace(H200, units=units)
        monkeypatch.setattr(devices, "probe", lambda device=device: ([device], ""))
        results.append(fit(net, x, y, epochs=1, seed=7, device="cuda", **training))
    many, few = results
    assert many.plan.groups[0].claim.facts.blocks > few.plan.groups[0].claim.facts.blocks
    assert np.array_equal(many.losses, few.losses)
    for name, w in many.network.weights.items():
        assert np.array_equal(few.network.weights[name], w), name


@needs_gxx
def test_emulated_bits_depend_neither_on_where_launches_end_nor_on_delays(gpu, monkeypatch):
    net, x, y, training = case_of("digits")
    whole = fit(net, x, y, epochs=2, device="cuda", **training)
    assert_same_bits(whole, fit(net, x, y, epochs=2, device="cuda", debug=True, **training))  # one launch per step
    delay_at_random(monkeypatch, LayerParallelLowering)
    assert_same_bits(whole, fit(net, x, y, epochs=2, device="cuda", **training))


@needs_gxx
@pytest.mark.parametrize("gpu", [13], indirect=True, ids=["two at a time"])
def test_emulated_networks_in_one_launch_have_the_bits_of_single_runs(gpu):
    x, y = pixels(70, 37), np.arange(70) % 4
    options = [TrainOptions(batch_size=32, epochs=1 + i % 2, seed=i, lr=0.1 / (1 + i)) for i in range(3)]
    runs = [Run(mlp(37, 20, 9, 4, seed=i), each) for i, each in enumerate(options)]
    together = lowering_of(37, 20, 9, 4, batch=32, device=dataclasses.replace(H200, units=13)).for_networks(3)
    assert together.networks == 2
    assert_bits_of_single_runs(runs, x, y)


@needs_gxx
@pytest.mark.parametrize(
    ("owned", "widths"),
    [(1, (5, 3, 2)), (2, (20, 53, 29, 17, 5)), (3, (20, 53, 32)), (1, (784, 320, 160, 10)), (4, (784, 320, 160, 10))],
)
def test_host_and_kernel_agree_on_shared_memory(owned, widths, tmp_path):
    copy_headers(tmp_path)
    source = tmp_path / "size.cu"
    source.write_text(
        f"{mlp_train_layer_parallel.SOURCE.read_text()}\ntemplate <int SPLITS, int OWNED, int BATCH, int... W>\n"
        "__global__ void size_of(int* to) { *to = max_bytes<Sizes<Widths<W...>, SPLITS, OWNED, BATCH>>(); }\n"
    )
    for precision, splits, batch in (("fp32", 3, 64), ("bf16", 1, 16)):
        size = np.zeros(1, np.int32)
        name = f"size_of<{splits}, {owned}, {batch}, {', '.join(map(str, widths))}>"
        kernel_of(Program(source, name)).run(1, 1, (size.ctypes.data,))
        lowering = dataclasses.replace(lowering_of(*widths, precision=precision, batch=batch), owned=owned)
        assert lowering.shared_bytes == size[0], precision


# -- as data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_small_batches_of_pixels_use_it(batch, precision):
    step = training_step(mlp(784, 320, 160, 10), TrainingStep("cross_entropy", byte_scale=1 / 255))
    claim = make_plan(step, H200, kernels_for(H200), Job(precision, batch)).groups[0].claim
    assert claim.kernel == "mlp_train_layer_parallel"
    assert "61 blocks" in claim.why


@pytest.mark.parametrize(
    ("precision", "count", "blocks", "at_once"),
    [
        ("bf16", 2, 61, 2),
        ("bf16", 4, 31, 4),
        ("bf16", 8, 16, 8),
        ("bf16", 10, 22, 5),
        ("tf32", 8, 31, 4),
        ("tf32", 16, 31, 4),
        ("fp32", 8, 31, 4),
    ],
)
def test_many_networks_have_fewer_blocks_each(precision, count, blocks, at_once):
    together = lowering_of(784, 320, 160, 10, precision=precision).for_networks(count)
    assert (together.blocks, together.networks) == (blocks, at_once)
    assert together.blocks * together.networks <= H200.units


def test_step_values_of_each_layer_count_as_shared_memory():
    one = lowering_of(752, 256, 128, 64, 10, precision="bf16")
    full = dataclasses.replace(one, device=dataclasses.replace(H200, fast_bytes=one.shared_bytes + 4 * 32))
    assert full.fits
    assert not dataclasses.replace(one, device=dataclasses.replace(H200, fast_bytes=one.shared_bytes + 4 * 32 - 1)).fits
    tight = dataclasses.replace(H200, fast_bytes=one.shared_bytes)
    assert "does not fit" in lowering_of(752, 256, 128, 64, 10, precision="bf16", device=tight)


@pytest.mark.parametrize(
    ("widths", "job", "why"),
    [((20, 9, 5), {"byte_scale": 0.0}, "uint8 rows"), ((20, 9, 5), {"batch": 65}, "at most 64 rows"),
     ((20, 10), {}, "2 to 15 layers"), ((20, 9, 33), {}, "32 outputs"), ((2000, 20, 10), {}, "does not fit"),
     ((20, *[1024] * 9, 10), {"precision": "bf16"}, "more blocks"), ((20, 9000, 10), {}, "at most 512 units in fp32")],
)  # fmt: skip
def test_refusals_have_a_reason(widths, job, why):
    assert why in lowering_of(*widths, **job)


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_blocks_follow_the_reference(name, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    result = assert_follows_reference(*case_of(name), device="cuda")
    assert result.plan.groups[0].claim.kernel == "mlp_train_layer_parallel"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ROUNDING)
def test_blocks_in_lower_precision(precision, name, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    assert_rounding(precision, name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("batch", [16, 33, 64])
def test_many_steps_follow_the_reference_with_the_same_bits(batch, precision, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    net, _, y, training = case(784, 320, 160, 10, n=batch * 60 + 13, batch_size=batch, lr=0.03)
    x = pixels(len(y), 784)
    one, other = (fit(net, x, y, device="cuda", epochs=2, seed=5, precision=precision, **training) for _ in range(2))
    assert np.array_equal(one.losses, other.losses)
    for name, w in one.network.weights.items():
        assert np.array_equal(other.network.weights[name], w), name
    truth, naive = (reference_curve(net, x, y, 5, dtype, training, epochs=2)[0] for dtype in ("float64", "float32"))
    # Before rounding differences grow: a ReLU that is on in one run and off in the other.
    got, truth, naive = one.losses[:20], truth[:20], naive[:20]
    allowed = 2 * np.abs(naive - truth).max() + 8 * np.finfo(np.float32).eps * np.abs(truth).max()
    allowed += ROUNDING.get(precision, 0.0) * np.abs(truth).max()
    assert np.abs(got - truth).max() <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_many_networks_have_the_bits_of_single_runs(precision, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    x, y = pixels(1293, 784), np.arange(1293) % 10
    options = [TrainOptions(batch_size=64, epochs=2 + i % 2, seed=i, lr=0.01, precision=precision) for i in range(8)]
    assert_bits_of_single_runs([Run(mlp(784, 320, 160, 10, seed=i), each) for i, each in enumerate(options)], x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [16, 64])
def test_random_delays_change_no_bit(batch, precision, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    net, _, y, training = case(784, 320, 160, 10, n=batch * 30 + 13, batch_size=batch, lr=0.03)
    x = pixels(len(y), 784)
    expected = fit(net, x, y, device="cuda", epochs=2, precision=precision, **training)
    delay_at_random(monkeypatch, LayerParallelLowering)
    assert_same_bits(expected, fit(net, x, y, device="cuda", epochs=2, precision=precision, **training))


@pytest.mark.gpu
def test_a_missing_block_is_an_error(monkeypatch):
    train_only_by(monkeypatch, "mlp_train_layer_parallel")
    monkeypatch.setattr(mlp_train_args, "DEADLINE_MS", 50)
    leave_out_a_block(monkeypatch, LayerParallelLowering)
    net, x, y, training = case_of("digits")
    with pytest.raises(KernelError, match="grid barrier timed out"):
        fit(net, x, y, device="cuda", epochs=1, **training)
