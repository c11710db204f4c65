"""Epochs on a GPU: onchip emulated on the host, torch on its CPU; on a real GPU, every engine on few rows."""

import dataclasses

import numpy as np
import pytest

from checks import random_mlp
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.bench.cases import backprop, digits, gpu_training
from onchip.bench.cases.gpu_training import SteadyFit, epoch_jobs, together_case, training_cases
from onchip.bench.cases.training import TrainingCase
from onchip.bench.frame import UnavailableError, run_cases
from onchip.bench.options import Options
from onchip.bench.peers import gpu_training as gpu_training_peers
from onchip.bench.peers.gpu import Allowance
from onchip.errors import PlanError
from onchip.measure import truth
from onchip.measure.truth import TrainingTruth
from onchip.train.options import TrainOptions
from onchip.train.training_run import Progress
from torch_stage import CpuTorchStage

ON_GPU = Options(device="cuda", peers=True)


def make_job(n=150, batch_size=32, loss="cross_entropy", device="cuda", **options):
    data = digits.random_data(n, 1)
    last = "Sigmoid" if loss == "half_sse" else None
    y = data.y_train if loss == "cross_entropy" else backprop.backprop.one_hot(data.y_train)
    train = TrainOptions(loss=loss, batch_size=batch_size, epochs=1, **options)
    x = np.ascontiguousarray(data.x_train[:, :40])
    return TrainingCase(lambda seed: random_mlp(40, 12, 10, seed=seed, output=last), x, y, train, 1, device)


FULL = {"loss": "half_sse", "batch_size": 150, "momentum": 0.5, "lr": 1e-3, "shuffle": False}
JOBS = {"batches": {}, "momentum": {"momentum": 0.9}, "full batches": FULL}


@pytest.fixture(params=JOBS.values(), ids=JOBS)
def job(request):
    return epoch_jobs("an epoch", make_job(**request.param))[0]


# -- onchip ------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("options", [{}, FULL], ids=["batches", "full batches"])
def test_onchip_is_checked_and_timed(options, monkeypatch):
    emulate_device(monkeypatch)
    monkeypatch.setattr(gpu_training, "SAMPLE_S", 0.0)
    cases = training_cases(
        "digits", epoch_jobs("an epoch", make_job(**options), ("fp32", "bf16")), Options(device="cuda")
    )
    outcome = run_cases(cases)
    assert outcome.exit_code == 0, outcome.wrong
    assert [row.precision for row in outcome.rows] == ["fp32", "bf16"]
    for row in outcome.rows:
        assert (row.unit, len(row.samples_ms)) == ("epochs/s", 3)
        assert row.floor_ms > 0
        assert row.extra["GPU MB"] > 0
        assert "4 epochs of fit, mlp_train" in row.setting
    assert outcome.rows[0].error < outcome.rows[1].error


@needs_gxx
def test_networks_trained_together_are_checked_and_timed(monkeypatch):
    emulate_device(monkeypatch)
    monkeypatch.setattr(gpu_training, "SAMPLE_S", 0.0)
    (job,) = epoch_jobs("an epoch", make_job(), ("fp32",))
    (row,) = run_cases([together_case("digits", job, 3)]).rows
    assert (row.case, row.unit, len(row.samples_ms)) == ("an epoch, 3 networks", "epochs/s", 3)
    assert row.rate == pytest.approx(3e3 / row.median_ms)
    assert "4 epochs of fit_runs, mlp_train" in row.setting


def test_the_first_epoch_is_not_timed(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 2.5, 3.0, 3.5])

    def fit(training, epochs, on_progress):
        assert epochs == 3
        for epoch in range(epochs):
            for step in (5, 10):
                on_progress(Progress(epoch + 1, epochs, step, 10, 0.0, None, 0.0))

    monkeypatch.setattr(gpu_training, "run_fit", fit)
    monkeypatch.setattr(gpu_training.time, "perf_counter", lambda: next(clock))
    assert SteadyFit(None, 3).sample_ms() == pytest.approx((3.5 - 1.0) / 2 * 1e3)


def test_epochs_reported_together_are_averaged():
    # A single epoch, then three and four at once, 10 ms each.
    done = [(1, 0.010), (2, 0.040), (3, 0.041), (4, 0.042), (5, 0.080), (6, 0.081), (7, 0.082), (8, 0.083)]
    assert gpu_training.steady_ms(done) == pytest.approx((83 - 42) / 4)
    assert gpu_training.steady_ms([(0.5, 0.0), (1, 1.0), (2, 2.0)]) == pytest.approx(1000)


def test_another_curve_is_wrong(job):
    truth = job.truth()
    losses = truth.run[: len(truth.losses)]
    for epoch_job in epoch_jobs("an epoch", job.training):
        assert epoch_job.verify(losses).is_right
        assert epoch_job.verify([*losses, 5.0, 4.0]).is_right  # later steps are not checked
        assert not epoch_job.verify(1.05 * losses).is_right
        assert not epoch_job.verify(losses[:-1]).is_right
        assert epoch_job.verify(losses).allowed == truth.losses_allowed + gpu_training.ROUNDING[epoch_job.precision]


def test_a_training_without_a_kernel_is_skipped(monkeypatch):
    def refuse(*_, **__):
        raise PlanError("no kernel takes it")

    monkeypatch.setattr(gpu_training, "fit", refuse)
    monkeypatch.setattr("onchip.bench.cases.training.plan", refuse)
    outcome = run_cases(training_cases("digits", epoch_jobs("an epoch", make_job(), ("fp32",)), Options(device="cuda")))
    assert outcome.skipped == {"onchip": "no kernel for an epoch, fp32: no kernel takes it"}


def test_epochs_per_sample():
    assert [gpu_training.epochs_of(seconds) for seconds in (1.0, 0.05, 1e-9)] == [1, 6, gpu_training.MAX_EPOCHS]


# -- peers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["not compiled", "compiled"])
def test_torch_graph_runs_the_same_steps(job, seconds, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    run = gpu_training_peers.torch_graph(Allowance(seconds), job, CpuTorchStage())
    run.run()  # first_losses restarts it
    assert job.verify(run.first_losses(), 3.0).is_right, job.verify(run.first_losses()).error
    assert run.epochs == (gpu_training_peers.FULL_BATCHES if job.training.options.loss == "half_sse" else 1)
    assert run.setting.startswith("compiled" if seconds else "not compiled")


def test_torch_eager_runs_the_same_steps():
    pytest.importorskip("torch")
    (job,) = epoch_jobs("an epoch", make_job(), ("fp32",))
    run = gpu_training_peers.torch_eager(job, CpuTorchStage())
    assert job.verify(run.first_losses(), 3.0).is_right
    run.run()


def test_a_peer_is_checked_and_timed(job, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_training, "make_stage", CpuTorchStage)
    monkeypatch.setattr(gpu_training, "SAMPLE_S", 0.01)
    monkeypatch.setattr("torch.compile", lambda call, **_: call)
    peers = gpu_training_peers.make_training_peers()
    cases = training_cases("digits", [job], ON_GPU, {"torch graph": peers["torch graph"]})
    outcome = run_cases([case for case in cases if case.engine != "onchip"])
    assert outcome.exit_code == 0, outcome.wrong
    (row,) = outcome.rows
    assert "epochs in a row, compiled" in row.setting


def test_a_peer_without_torch_is_skipped(job, monkeypatch):
    monkeypatch.setattr(gpu_training, "make_stage", lambda index: None)
    with pytest.raises(UnavailableError, match="torch for CUDA"):
        gpu_training.peer(job, "torch graph", None, 0)


def test_the_cases_of_digits():
    cases = digits.cases(ON_GPU, digits.random_data(130, 1))
    engines = {}
    for case in cases:
        engines.setdefault((case.case, case.precision), []).append(case.engine)
    expected = {}
    for size in digits.BATCHES:
        for precision in ("fp32", "tf32", "bf16"):
            peers = [] if precision == "bf16" else ["jax", "torch graph"] if size == 64 else ["jax"]
            eager = ["torch eager"] if (size, precision) == (64, "fp32") else []
            expected[f"epoch, batch {size}, uint8 pixels", precision] = ["onchip", *peers, *eager]
            if size == 64:
                expected["epoch, batch 64, uint8 pixels, 8 networks", precision] = ["onchip"]
            if size in (64, 1024):
                expected[f"epoch, batch {size}, float rows", precision] = ["onchip", *peers]
    assert engines == expected


def test_the_cases_of_backprop():
    cases = backprop.cases(dataclasses.replace(ON_GPU, rows=(70,)))
    assert {(case.case, case.precision) for case in cases} == {
        (f"epoch of 70 patterns, {rows}", precision)
        for rows in ("uint8 pixels", "float rows")
        for precision in ("fp32", "tf32", "bf16")
    }
    assert {case.engine for case in cases} == {"onchip", "torch graph", "jax"}


def test_random_pixels_are_bytes():
    x = digits.random_data(20, 3).x_train
    assert np.array_equal(x, np.round(x * 255).astype(np.uint8).astype(np.float32) / np.float32(255))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["onchip", "torch graph", "jax", "torch eager"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["batches", "full batches"])
def test_every_engine_on_a_gpu(name, options):
    if name == "torch eager" and options:
        pytest.skip("only for small batches")
    if name != "onchip":
        pytest.importorskip(name.partition(" ")[0])
    peers = {**gpu_training_peers.make_training_peers(), "torch eager": gpu_training_peers.torch_eager}
    cases = training_cases("digits", epoch_jobs("an epoch", make_job(**options), ("fp32", "tf32")), ON_GPU, peers)
    outcome = run_cases([case for case in cases if case.engine == name])
    assert not outcome.skipped
    assert outcome.exit_code == 0, outcome.wrong
    assert len(outcome.rows) == 2


def test_the_allowed_error_is_that_of_the_worst_of_several_naive_runs(monkeypatch):
    net, x, y = random_mlp(4, 3, 2), np.ones((6, 4), np.float32), np.array([0, 1, 0, 1, 0, 1])
    batches, seen = [np.arange(3), np.arange(3, 6)], []
    errors = iter([0.0, 1e-6, 1e-3, 1e-5])

    def run(net, x, y, batches, options, dtype):
        seen.append(batches)
        return np.array([0.5, 0.25, 0.125]) + next(errors)

    monkeypatch.setattr(truth, "reference_run", run)
    verify = TrainingTruth(net, x, y, batches, TrainOptions(), naive_runs=3)
    assert verify.verify_losses(np.array([0.5, 0.251])).is_right
    assert not verify.verify_losses(np.array([0.5, 0.253])).is_right
    assert [sorted(map(tuple, map(sorted, orders))) for orders in seen] == [[(0, 1, 2), (3, 4, 5)]] * 4
    assert seen[0] is seen[1] is batches
    assert any(not np.array_equal(a, b) for orders in seen[2:] for a, b in zip(orders, batches, strict=True))
