"""Training on a GPU: emulated on the host, and on a real one if available."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

from checks import random_mlp, rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import DeviceError, FormatError, InputError, PlanError
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.train.large_batch import launches as mlp_train
from onchip.kernels.cuda.train.large_batch.bytes import MIN_BATCH
from onchip.kernels.cuda.train.large_batch.launches import MAX_BATCH, make_lowering
from onchip.kernels.cuda.train.large_batch.rows import RowsPass
from onchip.kernels.cuda.train.large_batch.structs import MAX_LAYERS
from onchip.kernels.cuda.train.large_batch.tiling import CHUNK, STAGE_CHUNKS, STAGED_CUTS, WARPS, Tiling, choose_tiling
from onchip.kernels.pointwise import TRAINED
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import A100, H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import run_memory
from onchip.runtime.placement import kernels_for, training_kernels_for
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from training_cases import (
    CASES,
    SIGMOIDS,
    assert_bits_of_single_runs,
    assert_follows_reference,
    case,
    extras,
    reference_curve,
    take_bytes,
    take_rows,
)

WIDE = {
    "more outputs than the head has lanes": lambda: case(12, 9, 70, n=50, batch_size=16, lr=0.05),
    "wide regression outputs": lambda: case(
        12, 40, n=50, options={"output": "Tanh"}, loss="mse", batch_size=16, lr=0.5, momentum=0.5
    ),
    "more layers than a launch updates": lambda: case(
        5, *[6] * MAX_LAYERS, 4, n=20, options={"activation": "Tanh"}, batch_size=20, lr=0.05
    ),
    "slices of a batch": lambda: case(6, 5, 3, n=2100, batch_size=2090, lr=0.5, optimiser="adam"),
    "several tiles": lambda: case(75, 70, 67, 5, n=90, batch_size=80, lr=0.05),
}
SMALL = {**{name: make for name, make in CASES.items() if name != "digits"}, **WIDE}
REFUSED = {"softmax": {"output": "Softmax"}, "SiLU": {"activation": "SiLU"}}
# Rounding error of a gemm: half a unit in the last of 11 or 8 bits of its inputs, over a few layers.
ROUNDING = {"tf32": 2**-9, "fp16": 2**-9, "bf16": 2**-6}


def lowering_of(net, batch, loss="cross_entropy", **training):
    return make_lowering(find_chain(net, 0, TRAINED), TrainingStep(loss, **training), "fp32", batch, H200)


def same_results(one, other):
    assert np.array_equal(one.losses, other.losses)
    for name, w in one.network.weights.items():
        assert np.array_equal(other.network.weights[name], w), name
    for name, array in one.state.items():
        assert np.array_equal(other.state[name], array), name


def assert_losses_follow(result, net, x, y, seed, training, epochs):
    """The loss curve deviates from float64's at most twice as much as a naive float32 run's."""
    truth, naive = (reference_curve(net, x, y, seed, dtype, training, epochs)[0] for dtype in ("float64", "float32"))
    allowed = 2 * np.abs(naive - truth).max() + 8 * np.finfo(np.float32).eps * np.abs(truth).max()
    assert np.abs(result.losses - truth).max() <= allowed


# -- on the host -------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("name", SMALL)
def test_emulated_training_follows_the_reference(name, monkeypatch):
    emulate_device(monkeypatch)
    assert_follows_reference(*SMALL[name](), device="cuda")


@needs_gxx
def test_a_killed_run_resumes_with_the_same_bits(monkeypatch, tmp_path):
    emulate_device(monkeypatch)
    net, x, y, training = SMALL["weights, smoothing, clipped"]()
    training |= {"epochs": 3, "device": "cuda", "seed": 3, "optimiser": "adamw", "weight_decay": 0.1, "lr": 0.01}
    whole = fit(net, x, y, **training)

    def stop(progress):
        if progress.epoch == 2 and progress.step >= 2:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        fit(net, x, y, on_progress=stop, debug=True, **kept, **training)
    same_results(whole, fit(net, x, y, resume=True, **kept, **training))


@needs_gxx
def test_concurrent_runs_have_the_bits_of_a_single_run(monkeypatch):
    emulate_device(monkeypatch)
    net, x, y, training = SMALL["decay and momentum"]()
    runs = [Run(net, TrainOptions(**training, epochs=2, seed=seed)) for seed in (1, 2)]
    sent, write = [], run_memory.write_rows
    monkeypatch.setattr(
        run_memory, "write_rows", lambda gpu, to, rows: (sent.append(rows.shape[0]), write(gpu, to, rows))
    )
    results = fit_runs(runs, x, y, device="cuda")
    for seed, result in zip((1, 2), results, strict=True):
        same_results(fit(net, x, y, device="cuda", epochs=2, seed=seed, **training), result)
    assert sent.count(len(x)) == 1 + len(runs)  # once for both together, and once per separate run
    more = np.concatenate([np.arange(len(x)), np.arange(5)])  # an order longer than the rows
    (result,) = fit_runs([Run(net, TrainOptions(**training, epochs=1, shuffle=False), more)], x, y, device="cuda")
    same_results(fit(net, x[more], y[more], device="cuda", epochs=1, shuffle=False, **training), result)


@needs_gxx
def test_one_launch_for_similar_runs(monkeypatch):
    gpu = emulate_device(monkeypatch)
    net, x, y, training = SMALL["one layer"]()
    counts = []
    for seeds in ((1,), (1, 2, 3)):
        before = len(gpu.driver.replays)
        fit_runs([Run(net, TrainOptions(**training, epochs=1, seed=seed)) for seed in seeds], x, y, device="cuda")
        counts.append(len(gpu.driver.replays) - before)
    assert counts[0] == counts[1]


def runs_alike(net, n, training):
    """Runs with different weights, lr, epochs and rows, each with a full batch."""
    parts = None, np.arange(n - 1, 0, -1)
    return [
        Run(
            net.replace(weights={name: w * np.float32(i + 1) for name, w in net.weights.items()}),
            TrainOptions(**training | {"epochs": 3 - i, "seed": i, "lr": training["lr"] / (i + 1)}), part,
        )
        for i, part in enumerate(parts)
    ]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("kind", ["plain", "staged", "bytes", "narrow"])
def test_emulated_networks_in_one_launch_have_the_bits_of_single_runs(kind, monkeypatch):
    emulate_device(monkeypatch)
    net, x, y, training = STAGED["a batch of 7"]()
    training |= {"class_weight": "balanced", "clip_norm": 0.3} if kind == "plain" else {}  # row weights per run
    if kind == "staged":
        stage_everything(monkeypatch, *STAGED_CUTS[0], 3)
    elif kind == "bytes":
        take_bytes(monkeypatch)
        net, x, y, training = case_of_bytes("classes")
    elif kind == "narrow":
        take_rows(monkeypatch)
        net, x, y, training = case_of_bytes("four layers, mean of squares", cases=NARROW)
    assert_bits_of_single_runs(runs_alike(net, len(x), training), x, y)


@needs_gxx
def test_rows_that_are_sent_in_slices_are_the_same(monkeypatch):
    emulate_device(monkeypatch)
    net, x, y, training = SMALL["one layer"]()
    whole = fit(net, x, y, device="cuda", epochs=1, **training)
    monkeypatch.setattr(run_memory, "SLICE_BYTES", 7 * 8 * 4)
    same_results(whole, fit(net, x, y, device="cuda", epochs=1, **training))


@needs_gxx
def test_state_is_continued_and_another_runs_is_refused(monkeypatch):
    emulate_device(monkeypatch)
    net, x, y, training = SMALL["adam"]()
    training |= {"device": "cuda", "shuffle": False, "schedule": "constant"}
    whole, first = (fit(net, x, y, epochs=epochs, **training) for epochs in (2, 1))
    second = fit(first.network, x, y, epochs=1, state=first.state, **training)
    assert np.array_equal(np.concatenate([first.losses, second.losses]), whole.losses)
    with pytest.raises(FormatError, match=r"mean:fc1\.weight"):
        fit(net, x, y, epochs=1, state={"steps": first.state["steps"]}, **training)


STAGED = {
    "a batch of 1": lambda: case(40, 33, 4, n=5, batch_size=1, lr=0.05),
    "a batch of 7": lambda: case(70, 9, 40, n=20, batch_size=7, lr=0.05),
    "several stages": lambda: case(150, 131, 67, 5, n=330, batch_size=256, lr=0.05, momentum=0.5),
    "an odd batch": lambda: case(35, 20, 3, n=4100, batch_size=4097, lr=0.1),
}


def stage_everything(monkeypatch, warps_m, warps_n, slices):
    """Every gemm through shared memory, whatever its cost."""

    def choose(sizes, terms, precision, device, can_slice=False):
        return Tiling(4, warps_m, warps_n, WARPS // (warps_m * warps_n), slices if can_slice else 1, is_staged=True)

    monkeypatch.setattr(mlp_train, "choose_tiling", choose)


@needs_gxx
@pytest.mark.sample(12)
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(("warps_m", "warps_n"), STAGED_CUTS)
@pytest.mark.parametrize("name", STAGED)
def test_emulated_staged_gemms(name, warps_m, warps_n, slices, monkeypatch):
    emulate_device(monkeypatch)
    stage_everything(monkeypatch, warps_m, warps_n, slices)
    assert_follows_reference(*STAGED[name](), device="cuda")


BYTES = {
    "classes": lambda: case(40, 33, 4, n=150, batch_size=64, lr=0.05),
    "a batch of 1": lambda: case(7, 5, 4, n=5, batch_size=1, lr=0.05),
    "several tiles": lambda: case(150, 131, 67, 5, n=330, batch_size=256, lr=0.05, momentum=0.5),
    "no bias": lambda: case(35, 20, 3, n=90, options={"bias": False}, loss="half_sse", batch_size=40, lr=1e-3),
    "an odd batch, a share held back": lambda: case(35, 70, 3, n=4100, batch_size=4097, lr=0.1, validation=1e-3),
    "adam": lambda: case(129, 65, 6, n=100, batch_size=97, lr=0.01, optimiser="adam"),
}


def case_of_bytes(name, levels=255, cases=BYTES):
    net, x, y, training = cases[name]()
    return net, np.random.default_rng(1).integers(0, 256, x.shape).astype(np.float32) / np.float32(levels), y, training


@needs_gxx
@pytest.mark.parametrize("name", BYTES)
def test_emulated_uint8_rows(name, monkeypatch):
    emulate_device(monkeypatch)
    take_bytes(monkeypatch)
    assert_follows_reference(*case_of_bytes(name), device="cuda")


@needs_gxx
def test_uint8_rows_take_a_quarter_of_the_memory(monkeypatch):
    emulate_device(monkeypatch)
    net = random_mlp(600, 9, 3)
    pixels = np.random.default_rng(1).integers(0, 256, (600, 600)).astype(np.float32)
    training = {"batch_size": 600, "epochs": 1, "device": "cuda", "lr": 1e-9}
    as_bytes = fit(net, pixels, np.zeros(len(pixels), np.int64), **training)
    assert "uint8 rows" in as_bytes.plan.groups[0].claim.why
    as_floats = fit(net, pixels + np.float32(0.5), np.zeros(len(pixels), np.int64), **training)
    assert as_bytes.gpu_bytes < as_floats.gpu_bytes - pixels.size


@needs_gxx
def test_emulated_rows_of_integers(monkeypatch):
    emulate_device(monkeypatch)
    take_bytes(monkeypatch)
    net, x, y, training = case_of_bytes("classes", levels=1)
    assert_follows_reference(net, x, y, training | {"lr": 1e-6}, device="cuda")


NARROW = {
    "classes and all extras": lambda: case(40, 33, 4, n=300, lr=0.05, **extras(300) | {"batch_size": 130}),
    "sigmoids": lambda: case(
        20, 56, 28, 10, n=200, options=SIGMOIDS, loss="half_sse", batch_size=200, lr=1e-3, momentum=0.5
    ),
    "four layers, mean of squares": lambda: case(
        9, 13, 7, 5, 3, n=50, options={"activation": "Tanh"}, loss="mse", batch_size=33, lr=0.1
    ),
    "no bias, leaky": lambda: case(
        12, 30, 20, 6, n=140, options={"bias": False, "activation": "LeakyReLU"}, batch_size=129, lr=0.02
    ),
    "a batch of 1": lambda: case(7, 5, 4, n=5, batch_size=1, lr=0.05),
}


@needs_gxx
@pytest.mark.parametrize("name", NARROW)
def test_emulated_narrow_layers_in_one_launch(name, monkeypatch):
    emulate_device(monkeypatch)
    take_rows(monkeypatch)
    assert_follows_reference(*case_of_bytes(name, cases=NARROW), device="cuda")


@needs_gxx
def test_emulated_narrow_layers_with_many_tiles_per_block(monkeypatch):
    emulate_device(monkeypatch)
    take_rows(monkeypatch)
    monkeypatch.setattr(RowsPass, "blocks", lambda *_: 2)
    many = {"many": lambda: case(20, 19, 7, 3, n=700, loss="mse", batch_size=600, lr=0.1, momentum=0.5)}
    assert_follows_reference(*case_of_bytes("many", cases=many), device="cuda")


def assert_rounding(precision):
    """Losses follow float64's within the rounding of the inputs, and differ from those of fp32."""
    net, x, y, training = SMALL["several tiles"]()
    exact, rounded = (fit(net, x, y, device="cuda", epochs=2, precision=each, **training)
                      for each in ("fp32", precision))  # fmt: skip
    truth, _, _ = reference_curve(net, x, y, 0, "float64", training, epochs=2)
    off = np.abs(rounded.losses - truth).max() / np.abs(truth).max()
    assert np.abs(exact.losses - truth).max() / np.abs(truth).max() < off / 8 < ROUNDING[precision] / 8
    assert rounded.network.weights["fc1.weight"].dtype == np.float32


@needs_gxx
@pytest.mark.parametrize("precision", ROUNDING)
def test_emulated_gemms_in_other_precisions(precision, monkeypatch):
    emulate_device(monkeypatch)
    assert_rounding(precision)


# -- as data -----------------------------------------------------------------------------------------------------


def test_digits_take_five_launches_per_step():
    steps = lowering_of(mlp(784, 320, 160, 10), 64).steps(3)
    names = [launch.program.name_expression.partition("<")[0].partition("_")[2] for launch in steps.launches]
    assert names == [*3 * ["forward", "forward", "head", "backward", "gradients"], "advance"]
    assert all(launch.config.overlaps for launch in steps.launches)


@pytest.mark.parametrize("terms", [1, 16, 785, 4096, 60_000])
@pytest.mark.parametrize("sizes", [[(1, 1)], [(64, 320)], [(320, 785), (160, 321), (10, 161)], [(4096, 4096)]])
def test_tiles_cover_gemms_of_any_size(sizes, terms):
    for precision, can_slice in itertools.product(("fp32", "bf16"), (False, True)):
        tiling = choose_tiling(sizes, terms, precision, H200, can_slice)
        assert tiling.warps_m * tiling.warps_n * tiling.split_k == WARPS
        assert tiling.slices * tiling.slice_chunks(terms) * CHUNK >= terms
        assert not tiling.is_staged or tiling.slice_chunks(terms) % STAGE_CHUNKS == 0
        assert can_slice or tiling.slices == 1
        for rows_, columns in sizes:
            assert (
                tiling.blocks(rows_, columns) * (8 * tiling.R) ** 2 * tiling.warps_m * tiling.warps_n >= rows_ * columns
            )


def test_a_large_batch_uses_split_k_slices():
    lowering = lowering_of(mlp(784, 56, 28, 10), 60_000, loss="half_sse", optimiser="momentum")
    assert lowering.tiling.slices > 1
    assert "train_apply<0, 8>" in [launch.program.name_expression for launch in lowering.steps(1).launches]


@pytest.mark.parametrize(
    ("batch", "job", "has_shares"),
    [(60_000, {}, True), (60_000, {"byte_scale": 1.0}, True), (60_000, {"clip_norm": 1.0}, False), (64, {}, False)],
)
def test_the_reduction_order_names_the_shares(batch, job, has_shares):
    lowering = lowering_of(mlp(784, 56, 28, 10), batch, loss="half_sse", **job)
    applied = [each.program.name_expression for each in lowering.steps(1).launches if "apply" in str(each.program)]
    assert any(name.endswith(", 8>") for name in applied) == has_shares == ("in 8 shares" in lowering.order)


@pytest.mark.parametrize("batch", [1, 512, 1024, 4097, 60_000])
@pytest.mark.parametrize("device", [H200, A100, dataclasses.replace(H200, arch="sm_86", fast_bytes=99 << 10)])
def test_every_launch_on_uint8_rows_fits_in_shared_memory(batch, device):
    for widths, precision in itertools.product(((784, 56, 28, 10), (784, 320, 160, 10)), ("fp32", "tf32", "bf16")):
        chain = find_chain(mlp(*widths), 0, TRAINED)
        lowering = make_lowering(chain, TrainingStep("cross_entropy", byte_scale=1 / 255), precision, batch, device)
        assert bool(lowering.byte_rows) == (batch >= MIN_BATCH)
        has_room = precision != "fp32" or device.fast_bytes > 100 << 10
        assert bool(lowering.rows_pass) == (batch > 32 * device.units and widths[1] == 56 and has_room)
        assert all(each.config.shared_bytes <= device.fast_bytes for each in lowering.steps(1).launches)
        if rows := lowering.byte_rows:
            assert rows.slices(batch) * rows.slice_stages(batch) * 32 >= batch


@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_no_kernel_trains_are_refused_first(name):
    net = mlp(8, 7, 3, **REFUSED[name])
    with pytest.raises(PlanError):
        make_plan(training_step(net, TrainingStep("cross_entropy")), H200, training_kernels_for(H200), Job("fp32", 8))


def test_more_rows_than_a_kernel_counts_are_refused():
    step = training_step(mlp(8, 3), TrainingStep("cross_entropy"))
    with pytest.raises(PlanError) as refused:
        make_plan(step, H200, training_kernels_for(H200), Job("fp32", MAX_BATCH + 1))
    assert f"{MAX_BATCH:,}" in str(refused.value)


@pytest.mark.parametrize("extra", [{"label_smoothing": 0.1}, {"clip_norm": 1.0}, {"is_weighted": True}])
def test_mlp_train_claims_what_resident_kernels_refuse(extra):
    hows = (TrainingStep("cross_entropy", "adamw", byte_scale=1 / 255, **options) for options in ({}, extra))
    steps = (training_step(mlp(784, 320, 160, 10), how) for how in hows)
    resident, plan = (make_plan(step, H200, kernels_for(H200), Job("fp32", 64)) for step in steps)
    assert resident.groups[0].claim.kernel in ("mlp_train_resident", "mlp_train_layer_parallel")
    assert plan.groups[0].claim.kernel == "mlp_train"
    assert {refusal.kernel for refusal in plan.refusals} >= {"mlp_train_resident", "mlp_train_layer_parallel"}


def test_other_precisions_are_a_gpu_s():
    net, x, y, training = SMALL["one layer"]()
    with pytest.raises(DeviceError, match="does not compute in tf32"):
        fit(net, x, y, device="cpu", precision="tf32", **training)
    with pytest.raises(InputError, match="unknown precision"):
        fit(net, x, y, precision="fp64", **training)


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", {**CASES, **WIDE})
def test_training_follows_the_reference(name):
    assert_follows_reference(*{**CASES, **WIDE}[name](), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(("warps_m", "warps_n"), STAGED_CUTS)
@pytest.mark.parametrize("name", STAGED)
def test_staged_gemms(name, warps_m, warps_n, slices, monkeypatch):
    stage_everything(monkeypatch, warps_m, warps_n, slices)
    assert_follows_reference(*STAGED[name](), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1024, 5000])
def test_large_batches_follow_the_reference_with_the_same_bits(batch):
    net, x, y, training = case(784, 320, 160, 10, n=5000, batch_size=batch, lr=0.1)
    one, other = (fit(net, x, y, device="cuda", epochs=3, seed=5, **training) for _ in range(2))
    same_results(one, other)
    assert_losses_follow(one, net, x, y, 5, training, epochs=3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ROUNDING)
def test_products_in_other_precisions(precision):
    assert_rounding(precision)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["digits", "adam", "decay and momentum", "slices of a batch"])
def test_same_seed_same_bits(name):
    net, x, y, training = {**CASES, **WIDE}[name]()
    one, other = (fit(net, x, y, device="cuda", epochs=3, seed=5, **training) for _ in range(2))
    same_results(one, other)


@pytest.mark.gpu
def test_an_epoch_of_many_steps_follows_the_reference():
    """More steps than a graph has: 784-320-160-10, 200 of them, a short batch last."""
    net, x, y, training = case(784, 320, 160, 10, n=64 * 199 + 13, batch_size=64, lr=0.03)
    result = fit(net, x, y, epochs=1, seed=2, device="cuda", **training)
    assert_losses_follow(result, net, x, y, 2, training, epochs=1)
    on_cpu = fit(net, x, y, epochs=1, seed=2, device="cpu", **training)
    assert result.losses == pytest.approx(on_cpu.losses, rel=2e-3)  # two runs of float32 drift apart
    assert result.history[0].accuracy == pytest.approx(on_cpu.history[0].accuracy, abs=1e-3)


@pytest.mark.gpu
def test_a_killed_run_on_a_gpu_resumes_with_the_same_bits(tmp_path):
    net, x, y, training = CASES["digits"]()
    training |= {"epochs": 4, "device": "cuda", "momentum": 0.9}
    whole = fit(net, x, y, **training)

    def stop(progress):
        if progress.epoch == 3:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        fit(net, x, y, on_progress=stop, **kept, **training)
    same_results(whole, fit(net, x, y, resume=True, **kept, **training))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_command_trains_on_a_gpu(cli, precision):
    ran = cli("train", "digits", "--data", "sklearn", "--epochs", 5, "--lr", 0.1, "--device", "cuda", "--precision",
              precision, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["device"] == "cuda:0"
    assert document["gpu_bytes"] > 2**20
    assert 0 < document["gpu_busy"] <= 1
    assert document["accuracy"] > 0.9


@pytest.mark.gpu
def test_runs_on_a_gpu_side_by_side():
    net, x, y = random_mlp(30, 20, 4), rows(400, 30), np.arange(400) % 4
    runs = [Run(net, TrainOptions(epochs=3, seed=seed)) for seed in range(4)]
    for seed, result in enumerate(fit_runs(runs, x, y, device="cuda")):
        same_results(fit(net, x, y, device="cuda", epochs=3, seed=seed), result)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [256, 1024])
def test_networks_in_one_launch_have_the_bits_of_single_runs(batch):
    net, x, y, training = case(784, 320, 160, 10, n=3000, batch_size=batch, lr=0.03)
    assert_bits_of_single_runs(runs_alike(net, len(x), training), x, y)
    x = np.random.default_rng(1).integers(0, 256, x.shape).astype(np.float32) / np.float32(255)
    assert_bits_of_single_runs(runs_alike(net, len(x), training), x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BYTES)
def test_uint8_rows(name, monkeypatch):
    take_bytes(monkeypatch)
    assert_follows_reference(*case_of_bytes(name), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NARROW)
def test_narrow_layers_in_one_launch(name, monkeypatch):
    take_rows(monkeypatch)
    assert_follows_reference(*case_of_bytes(name, cases=NARROW), device="cuda")


@pytest.mark.gpu
def test_narrow_layers_of_many_bytes_follow_the_reference_with_the_same_bits():
    net, x, y, training = case(
        784, 56, 28, 10, n=6000, options=SIGMOIDS, loss="half_sse", batch_size=6000, lr=2e-4, momentum=2e-3
    )
    x = np.random.default_rng(1).integers(0, 256, x.shape).astype(np.float32) / np.float32(255)
    one, other = (fit(net, x, y, device="cuda", epochs=3, seed=5, **training) for _ in range(2))
    same_results(one, other)
    assert_losses_follow(one, net, x, y, 5, training, epochs=3)
