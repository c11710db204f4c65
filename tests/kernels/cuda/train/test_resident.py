"""Training by the persistent kernel with resident weights: emulated, and on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import emulated_cuda
from checks import rows
from emulated_cuda import FIND_RACES, copy_headers, kernel_of, needs_gxx
from emulated_engine import emulate_device
from onchip.errors import KernelError
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.common.program import Program
from onchip.kernels.cuda.train.resident import args as mlp_train_args
from onchip.kernels.cuda.train.resident.resident import UNITS, ResidentLowering, make_lowering
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
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from training_cases import (
    CASES,
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

# Batches that fit, at least two layers.
SMALL = ("odd widths", "batch 1", "no bias", "mean of squares", "leaky", "decay", "decay and momentum", "adam",
         "steps down", "cosine", "a share held back")  # fmt: skip
MORE = {
    "four layers": lambda: case(20, 21, 17, 9, 5, n=70, batch_size=30, lr=0.05, momentum=0.5),
    "32 outputs": lambda: case(12, 19, 32, n=50, batch_size=16, lr=0.05),
    "64 rows": lambda: case(30, 26, 11, 4, n=130, batch_size=64, lr=0.05),
}
NAMES = (*SMALL, *MORE)


def made(name):
    return {**CASES, **MORE}[name]()


def lowering_of(*widths, batch=16, **training):
    step = TrainingStep("cross_entropy", **training)
    return make_lowering(find_chain(mlp(*widths), 0, TRAINED), step, "fp32", batch, H200)


def plan_of(*widths, batch, device=H200):
    step = training_step(mlp(*widths), TrainingStep("cross_entropy"))
    return make_plan(step, device, kernels_for(device), Job("fp32", batch))


@pytest.fixture(params=[1, 6], ids=["one block", "several blocks"])
def blocks(monkeypatch, request):
    """An emulated GPU with this many SMs: a single block that never waits, or several that share units."""
    emulate_device(monkeypatch)
    monkeypatch.setattr(devices, "probe", lambda: ([dataclasses.replace(H200, units=request.param)], ""))
    train_only_by(monkeypatch, "mlp_train_resident")


# -- on the host -------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("name", NAMES)
def test_emulated_blocks_follow_the_reference(name, blocks):
    net, x, y, training = made(name)
    result = assert_follows_reference(net, x, y, training, device="cuda")
    assert result.plan.groups[0].claim.kernel == "mlp_train_resident"


@needs_gxx
def test_emulated_blocks_train_on_uint8_rows(blocks):
    net, _, y, training = case(37, 20, 9, 4, n=60, batch_size=16, lr=0.1)
    result = assert_follows_reference(net, pixels(60, 37), y, training, device="cuda")
    assert "uint8 rows" in result.plan.groups[0].claim.why


@needs_gxx
@pytest.mark.parametrize("is_bytes", [False, True])
@pytest.mark.parametrize(
    ("rows", "blocks", "widths"),
    [(16, 1, (5, 3, 2)), (16, 3, (20, 13, 7, 3)), (32, 5, (20, 53, 29, 17, 5)), (64, 40, (784, 320, 160, 10))],
)
def test_host_and_kernel_agree_on_shared_memory(rows, blocks, widths, is_bytes, tmp_path):
    copy_headers(tmp_path)
    source = tmp_path / "size.cu"
    source.write_text(
        '#include "train/resident/resident.cuh"\ntemplate <class X, int ROWS, int BLOCKS, int... W>\n'
        "__global__ void size_of(int* to) { *to = SharedLayout<X, Widths<W...>, ROWS, BLOCKS>::FLOATS; }\n"
    )
    size = np.zeros(1, np.int32)
    X = "unsigned char" if is_bytes else "float"
    name = f"size_of<{X}, {rows}, {blocks}, {', '.join(map(str, widths))}>"
    kernel_of(Program(source, name)).run(1, 1, (size.ctypes.data,))
    base = lowering_of(*widths, byte_scale=1 / 255 if is_bytes else 0.0)
    lowering = dataclasses.replace(base, rows=rows, blocks=blocks)
    assert lowering.shared_bytes == 4 * size[0]


# Three networks on six SMs: a single one has three blocks in each of two groups; together, one block each.
TOGETHER = (20, 24, 16, 3)


def runs_together(n=70):
    """Runs that differ in every allowed option: weights, seeds, lr, rows, epochs, early stopping."""
    x, y = rows(n, TOGETHER[0]), np.random.default_rng(5).integers(0, TOGETHER[-1], n)
    settings = [
        {"lr": 0.1, "epochs": 2, "seed": 1},
        {"lr": 0.02, "epochs": 1, "seed": 2, "weight_decay": 0.1, "schedule": "cosine"},
        {"lr": 0.1, "epochs": 3, "seed": 3, "validation": 0.2, "patience": 1},
    ]
    parts = [None, np.arange(0, n, 2), np.arange(n)]
    runs = [
        Run(mlp(*TOGETHER, seed=i), TrainOptions(batch_size=32, **setting), part)
        for i, (setting, part) in enumerate(zip(settings, parts, strict=True))
    ]
    return runs, x, y


@needs_gxx
@pytest.mark.parametrize("blocks", [6], indirect=True)
def test_emulated_networks_in_one_launch_have_the_bits_of_single_runs(blocks, monkeypatch):
    runs, x, y = runs_together()
    launched, launch = [], ResidentLowering.steps
    monkeypatch.setattr(ResidentLowering, "steps", lambda self, count: (launched.append(self), launch(self, count))[1])
    assert_bits_of_single_runs(runs, x, y)
    together, *single = launched
    assert (together.networks, together.groups, together.blocks) == (3, 2, 1)
    assert {(each.networks, each.groups, each.blocks) for each in single} == {(1, 2, 3)}


@needs_gxx
@pytest.mark.parametrize("blocks", [6], indirect=True)
def test_a_network_that_diverges_leaves_the_others(blocks):
    (good, *_), x, y = runs_together()
    bad = dataclasses.replace(good, options=dataclasses.replace(good.options, lr=1e30))
    result, error, other = fit_runs([good, bad, good], x, y, device="cuda")
    assert isinstance(error, KernelError)
    assert "diverged" in error.what
    assert np.array_equal(result.losses, other.losses)


@needs_gxx
@pytest.mark.parametrize("blocks", [6], indirect=True)
def test_emulated_bits_depend_neither_on_where_launches_end_nor_on_delays(blocks, monkeypatch):
    (run, *_), x, y = runs_together()
    options = {"device": "cuda", **dataclasses.asdict(run.options)}
    whole = fit(run.net, x, y, **options)
    assert_same_bits(whole, fit(run.net, x, y, debug=True, **options))  # one launch per step
    delay_at_random(monkeypatch, ResidentLowering)
    assert_same_bits(whole, fit(run.net, x, y, **options))


@needs_gxx
@pytest.mark.parametrize("blocks", [6], indirect=True)
@pytest.mark.parametrize("optimiser", [{"momentum": 0.9, "lr": 0.05}, {"optimiser": "adam", "lr": 0.003}])
def test_each_moment_belongs_to_one_thread(optimiser, blocks, monkeypatch):
    """A row of 50 or 33 weights ends within a float4; the next element is its bias, which another thread owns."""
    monkeypatch.setattr(emulated_cuda, "SANITIZED", FIND_RACES)
    kernel_of.cache_clear()
    net, x, y, training = case(50, 33, 17, 3, n=17, batch_size=7, **optimiser)
    fit(net, x, y, epochs=1, device="cuda", **training)
    kernel_of.cache_clear()


# -- as data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_small_batches_are_trained_in_one_launch(batch):
    claim = plan_of(784, 320, 160, 10, batch=batch).groups[0].claim
    assert claim.kernel == "mlp_train_resident"
    assert "one launch" in claim.why


@pytest.mark.parametrize(
    ("widths", "batch", "why"),
    [((784, 320, 160, 10), 256, "at most 128 rows"), ((20, 10), 16, "2 to 15 layers"), ((20, 9, 33), 16, "32 outputs"),
     ((4000, 1000, 1000, 10), 64, "does not fit")],
)  # fmt: skip
def test_refusals_have_a_reason(widths, batch, why):
    plan = plan_of(*widths, batch=batch)
    assert plan.groups[0].claim.kernel == "mlp_train"
    assert any(why in refusal.why for refusal in plan.refusals if refusal.kernel == "mlp_train_resident")


def test_other_gpus_use_mlp_train():
    plan = plan_of(784, 320, 160, 10, batch=16, device=dataclasses.replace(H200, arch="sm_89", fast_bytes=99 << 10))
    assert plan.groups[0].claim.kernel == "mlp_train"


@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize(
    "widths", [(20, 53, 29, 17, 5), (20, 8, 500, 3), (64, 1030, 10), (7, 1, 1, 1), (9, 300, 290, 8)]
)
def test_every_block_owns_a_tile(widths, batch):
    lowering = lowering_of(*widths, batch=batch)
    if isinstance(lowering, str):
        assert "does not fit" in lowering
        return
    assert lowering.groups * lowering.blocks <= H200.units
    last = [
        -(-width // lowering.owned_units(i)) for i, width in enumerate(widths[1:-1], 1)
    ]  # blocks that own units of a layer
    assert max(last) == lowering.blocks
    assert all(units % UNITS == 0 for units in map(lowering.owned_units, range(1, len(widths) - 1)))


def test_step_values_count_as_shared_memory():
    one = lowering_of(784, 320, 160, 10, batch=64)
    for bytes_left, fits in ((32, True), (31, False)):
        device = dataclasses.replace(H200, fast_bytes=one.shared_bytes + bytes_left)
        assert dataclasses.replace(one, device=device).fits is fits


@pytest.mark.parametrize("job", [{"batch": 16}, {"batch": 64}, {"batch": 64, "optimiser": "momentum"}])
def test_networks_share_a_gpu(job):
    single = lowering_of(784, 320, 160, 10, byte_scale=1 / 255, **job)
    for count in range(1, 34):
        lowering = single.for_networks(count)
        assert 1 <= lowering.networks <= count
        assert lowering.networks * lowering.groups * lowering.blocks <= H200.units
        assert (lowering.groups, lowering.rows, lowering.order) == (single.groups, single.rows, single.order)
        assert lowering.order_blocks == single.blocks
        assert lowering.fits
        assert single.for_networks(lowering.networks).networks == lowering.networks  # not split again
    assert single.for_networks(1) == single
    assert single.for_networks(8).networks >= 3
    assert single.for_networks(5).networks * 2 >= 5


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "digits"])
def test_blocks_follow_the_reference(name, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_resident")
    net, x, y, training = made(name)
    result = assert_follows_reference(net, x, y, training, device="cuda")
    assert result.plan.groups[0].claim.kernel == "mlp_train_resident"


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 33, 64, 128])
def test_many_steps_on_uint8_rows_follow_the_reference_with_the_same_bits(batch, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_resident")
    net, _, y, training = case(784, 320, 160, 10, n=batch * 60 + 13, batch_size=batch, lr=0.03)
    x = pixels(len(y), 784)
    one, other = (fit(net, x, y, device="cuda", epochs=2, seed=5, **training) for _ in range(2))
    assert np.array_equal(one.losses, other.losses)
    for name, w in one.network.weights.items():
        assert np.array_equal(other.network.weights[name], w), name
    assert one.plan.groups[0].claim.kernel == "mlp_train_resident"
    truth, naive = (reference_curve(net, x, y, 5, dtype, training, epochs=2)[0] for dtype in ("float64", "float32"))
    allowed = 2 * np.abs(naive - truth).max() + 8 * np.finfo(np.float32).eps * np.abs(truth).max()
    assert np.abs(one.losses - truth).max() <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 64])
def test_many_networks_on_uint8_rows_have_the_bits_of_single_runs(batch, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_resident")
    x, y = pixels(batch * 20 + 13, 784), np.arange(batch * 20 + 13) % 10
    settings = [{"lr": 0.01 * (1 + i % 3), "epochs": 2 + i % 2, "seed": i} for i in range(8)]
    runs = [
        Run(
            mlp(784, 320, 160, 10, seed=i),
            TrainOptions(batch_size=batch, **each),
            None if i % 2 else np.arange(9, len(x)),
        )
        for i, each in enumerate(settings)
    ]
    assert_bits_of_single_runs(runs, x, y)


@pytest.mark.gpu
def test_runs_that_differ_in_every_option_have_the_bits_of_single_runs():
    assert_bits_of_single_runs(*runs_together(n=500))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 64])
def test_random_delays_change_no_bit(batch, monkeypatch):
    train_only_by(monkeypatch, "mlp_train_resident")
    net, _, y, training = case(784, 320, 160, 10, n=batch * 30 + 13, batch_size=batch, lr=0.03)
    x = pixels(len(y), 784)
    expected = fit(net, x, y, device="cuda", epochs=2, **training)
    delay_at_random(monkeypatch, ResidentLowering)
    assert_same_bits(expected, fit(net, x, y, device="cuda", epochs=2, **training))


@pytest.mark.gpu
def test_a_missing_block_is_an_error(monkeypatch):
    monkeypatch.setattr(mlp_train_args, "DEADLINE_MS", 50)
    leave_out_a_block(monkeypatch, ResidentLowering)
    net, x, y, training = case(20, 40, 30, 3, n=40, batch_size=16)
    with pytest.raises(KernelError, match="grid barrier timed out"):
        fit(net, x, y, device="cuda", epochs=1, **training)
