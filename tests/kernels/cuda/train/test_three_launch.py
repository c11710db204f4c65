"""Training in three launches per step: emulated, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.train.large_batch import three_launch as mlp_train_three_launch
from onchip.kernels.cuda.train.large_batch.three_launch import ThreeLaunchLowering, make_lowering
from onchip.kernels.pointwise import TRAINED
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.train.loop import fit
from onchip.train.many import Run
from onchip.train.options import TrainOptions
from training_cases import (
    PIXEL_CASES,
    assert_bits_of_single_runs,
    assert_follows_reference,
    assert_same_bits,
    case_of_pixels,
    pixels,
    reference_curve,
    shared_bytes_of,
    take_any_batch,
)


def lowering_of(*widths, precision="fp32", batch=256, byte_scale=1 / 255, **training):
    step = TrainingStep("cross_entropy", byte_scale=byte_scale, **training)
    return make_lowering(find_chain(mlp(*widths), 0, TRAINED), step, precision, batch, H200)


def assert_bf16_rounding(name):
    net, x, y, training = case_of_pixels(name)
    result = fit(net, x, y, epochs=2, seed=7, device="cuda", precision="bf16", **training)
    assert isinstance(result.plan.groups[0].claim.facts, ThreeLaunchLowering)
    truth, _, _ = reference_curve(net, x, y, 7, "float64", training, epochs=2)
    assert np.abs(result.losses - truth).max() <= 2**-5 * np.abs(truth).max()


# -- on the host -------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    emulate_device(monkeypatch)
    take_any_batch(monkeypatch)


@needs_gxx
@pytest.mark.parametrize("name", PIXEL_CASES)
def test_emulated_launches_follow_the_reference(name, gpu):
    result = assert_follows_reference(*case_of_pixels(name), device="cuda")
    assert result.plan.groups[0].claim.kernel == "mlp_train_three_launch"


@needs_gxx
@pytest.mark.parametrize("name", ["digits", "four layers, adam"])
def test_emulated_launches_in_bf16(name, gpu):
    assert_bf16_rounding(name)


@needs_gxx
def test_emulated_bits_do_not_depend_on_where_graphs_end(gpu):
    net, x, y, training = case_of_pixels("digits")
    whole = fit(net, x, y, epochs=2, device="cuda", **training)
    assert_same_bits(whole, fit(net, x, y, epochs=2, device="cuda", debug=True, **training))  # no graphs


@needs_gxx
def test_emulated_networks_in_one_launch_have_the_bits_of_single_runs(gpu):
    x, y = pixels(70, 37), np.arange(70) % 4
    options = [TrainOptions(batch_size=32, epochs=1 + i % 2, seed=i, lr=0.1 / (1 + i)) for i in range(3)]
    assert_bits_of_single_runs([Run(mlp(37, 20, 9, 4, seed=i), each) for i, each in enumerate(options)], x, y)


@needs_gxx
@pytest.mark.parametrize("widths", [(5, 3, 2), (20, 53, 29, 17, 5), (20, 53, 32), (784, 320, 160, 10)])
def test_host_and_kernel_agree_on_shared_memory(widths, tmp_path):
    specs = ", ".join(f"LayerSpec<{width}, 1>" for width in widths[1:])
    nbytes = shared_bytes_of(mlp_train_three_launch.CLUSTER_SOURCE, f"SharedLayout<3, {specs}>", tmp_path)
    assert nbytes == lowering_of(*widths).cluster_bytes


def test_two_blocks_of_digits_share_an_sm():
    assert 2 * (lowering_of(784, 320, 160, 10).cluster_bytes + 1024) <= 228 << 10


@pytest.mark.parametrize(
    ("batch", "chosen"),
    [
        (64, "mlp_train_layer_parallel"),
        (65, "mlp_train_three_launch"),
        (512, "mlp_train_three_launch"),
        (513, "mlp_train"),
    ],
)
def test_the_planner_chooses_it_where_it_is_faster(batch, chosen):
    step = training_step(mlp(784, 320, 160, 10), TrainingStep("cross_entropy", byte_scale=1 / 255))
    (group,) = make_plan(step, H200, KERNELS, Job("fp32", batch)).groups
    assert group.claim.kernel == chosen


@pytest.mark.parametrize(
    ("widths", "job", "why"),
    [
        ((784, 320, 10), {"byte_scale": 0.0}, "uint8 rows"),
        ((784, 320, 10), {"clip_norm": 1.0}, "clipping"),
        ((784, 320, 33), {}, "32 outputs"),
        ((784, 9, 9, 9, 9, 10), {}, "2 to 4 layers"),
        ((9000, 32, 10), {}, "bytes, got 9,001"),
        ((784, 1600, 800, 10), {}, "does not fit"),
    ],
)
def test_refusals_have_a_reason(widths, job, why):
    assert why in lowering_of(*widths, **job)


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", PIXEL_CASES)
def test_launches_follow_the_reference(name, monkeypatch):
    take_any_batch(monkeypatch)
    assert_follows_reference(*case_of_pixels(name), device="cuda")


@pytest.mark.gpu
def test_bits_do_not_depend_on_where_graphs_end(monkeypatch):
    take_any_batch(monkeypatch)
    net, x, y, training = case_of_pixels("digits")
    whole = fit(net, x, y, epochs=2, device="cuda", **training)
    assert_same_bits(whole, fit(net, x, y, epochs=2, device="cuda", debug=True, **training))
