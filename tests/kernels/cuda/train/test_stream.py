"""Training whose blocks run rows through all layers after the first: emulated, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.train.large_batch import stream as mlp_train_stream
from onchip.kernels.cuda.train.large_batch.launches import make_lowering
from onchip.kernels.cuda.train.large_batch.stream import StreamPass
from onchip.kernels.pointwise import TRAINED
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import H200
from onchip.train.loop import fit
from onchip.train.many import Run
from onchip.train.options import TrainOptions
from training_cases import (
    PIXEL_CASES,
    assert_bits_of_single_runs,
    assert_follows_reference,
    assert_same_bits,
    case,
    case_of_pixels,
    pixels,
    shared_bytes_of,
    stream_everything,
    train_only_by,
)


def take_two_tiles(monkeypatch):
    monkeypatch.setattr(StreamPass, "tiles", property(lambda self: 2))


def lowering_of(*widths, precision="fp32", batch=1024, byte_scale=1 / 255, **training):
    step = TrainingStep("cross_entropy", byte_scale=byte_scale, **training)
    return make_lowering(find_chain(mlp(*widths), 0, TRAINED), step, precision, batch, H200)


def kernels_of(lowering):
    return [each.program.name_expression.partition("<")[0] for each in lowering.steps(2).launches]


# -- on the host -------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    emulate_device(monkeypatch)
    stream_everything(monkeypatch)


@needs_gxx
@pytest.mark.parametrize("name", PIXEL_CASES)
def test_emulated_rows_follow_the_reference(name, gpu):
    result = assert_follows_reference(*case_of_pixels(name), device="cuda")
    assert result.plan.groups[0].claim.facts.stream_pass


@needs_gxx
@pytest.mark.parametrize("name", ["digits", "four layers, adam", "many rows"])
def test_emulated_tiles_of_32_rows_have_the_same_bits(name, gpu, monkeypatch):
    net, x, y, training = case_of_pixels(name)
    one = fit(net, x, y, epochs=2, device="cuda", **training)
    take_two_tiles(monkeypatch)
    assert_same_bits(one, fit(net, x, y, epochs=2, device="cuda", **training))


@needs_gxx
def test_emulated_blocks_loop_over_tiles(gpu, monkeypatch):
    net, x, y, training = case_of_pixels("many rows")
    one = fit(net, x, y, epochs=2, device="cuda", **training)
    monkeypatch.setattr(StreamPass, "blocks", property(lambda self: 3))
    assert_same_bits(one, fit(net, x, y, epochs=2, device="cuda", **training))


@needs_gxx
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_emulated_gemms_in_other_precisions(precision, gpu):
    net, x, y, training = case_of_pixels("digits")
    exact, rounded = (
        fit(net, x, y, epochs=2, device="cuda", precision=each, **training).losses for each in ("fp32", precision)
    )
    off = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 0 < off < 2**-5


@needs_gxx
def test_emulated_networks_in_one_launch_have_the_bits_of_single_runs(gpu):
    x, y = pixels(70, 37), np.arange(70) % 4
    options = [TrainOptions(batch_size=32, epochs=1 + i % 2, seed=i, lr=0.1 / (1 + i)) for i in range(3)]
    assert_bits_of_single_runs([Run(mlp(37, 20, 9, 4, seed=i), each) for i, each in enumerate(options)], x, y)


@needs_gxx
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("widths", [(5, 3, 2), (20, 53, 29, 17, 5), (20, 53, 32), (784, 320, 160, 10)])
def test_host_and_kernel_agree_on_shared_memory(widths, tiles, tmp_path):
    specs = ", ".join(f"LayerSpec<{width}, 1>" for width in widths[1:])
    nbytes = shared_bytes_of(mlp_train_stream.SOURCE, f"SharedLayout<3, {tiles}, 0, {specs}>", tmp_path)
    batch = 16 * tiles * H200.units
    assert nbytes == StreamPass(widths[1:], "fp32", batch, H200.units, H200.fast_bytes).shared_bytes


# -- as data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1024, 4096])
def test_digits_take_five_launches_per_step(batch):
    step = ["bytes_forward", "train_stream", "bytes_gradient", "large_gradients", "train_apply"]
    assert kernels_of(lowering_of(784, 320, 160, 10, batch=batch)) == ["bytes_split", *2 * step, "train_advance"]


@pytest.mark.parametrize(
    ("widths", "job"),
    [
        ((784, 2048, 2048, 10), {}),  # 34 MB of weights per block
        ((784, 320, 160, 10), {"batch": 60_000}),  # 15 waves
        ((784, 320, 160, 33), {}),
        ((784, 40, 40, 40, 40, 10), {}),
        ((784, 4000, 10), {}),
    ],
)
def test_one_launch_per_gemm_if_faster_or_if_rows_do_not_fit(widths, job):
    assert "train_stream" not in kernels_of(lowering_of(*widths, **job))


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", PIXEL_CASES)
def test_rows_follow_the_reference(name, monkeypatch):
    stream_everything(monkeypatch)
    assert_follows_reference(*case_of_pixels(name), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1000, 4096])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_depend_neither_on_the_run_nor_on_where_graphs_end(batch, precision, monkeypatch):
    train_only_by(monkeypatch, "mlp_train")
    net, _, y, training = case(784, 320, 160, 10, n=10_000, batch_size=batch, lr=0.03)
    x = pixels(10_000, 784)
    one, other = (fit(net, x, y, device="cuda", epochs=3, precision=precision, **training) for _ in range(2))
    assert_same_bits(one, other)
    debugged = fit(
        net, x, y, device="cuda", epochs=3, precision=precision, debug=True, **training
    )  # one graph per step
    assert_same_bits(one, debugged)
