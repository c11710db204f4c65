"""onchip.profile of trainings: what it counts, that it changes no bit, and the timeline that it writes."""

import itertools
import json

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import DeviceError
from onchip.kernels.training import LaunchTime
from onchip.measure.profile_training import summarise_trainings
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import runs
from onchip.runtime.cuda.timed_runs import time_launches
from onchip.runtime.placement import kernels_for
from onchip.train import recording
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.recording import ROWS, STEPS, TrainingRecorder
from row_steps import sentences
from takers import CPU

N, BATCH = 100, 16
STEPS_PER_EPOCH = 6  # of the 90 rows that are left for training


def problem():
    return mlp(8, 16, 3, seed=1), rows(N, 8, seed=2), np.arange(N) % 3


def train(**options):
    net, x, y = problem()
    chosen = {"device": "cpu", "batch_size": BATCH, "epochs": 4, "seed": 3, "validation": 0.1}
    return onchip.fit(net, x, y, **chosen | options)


def assert_same(one, other):
    np.testing.assert_array_equal(one.losses, other.losses)
    assert [epoch.validation_loss for epoch in one.history] == [epoch.validation_loss for epoch in other.history]
    for arrays, same in ((one.network.weights, other.network.weights), (one.state, other.state)):
        assert arrays.keys() == same.keys()
        for name in arrays:
            np.testing.assert_array_equal(arrays[name], same[name])


class StopError(Exception):
    pass


def stop_in_epoch_3(epoch):
    if epoch.epoch == 3:
        raise StopError


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_results_are_the_same_bits(optimiser, tmp_path):
    plain = train(optimiser=optimiser)
    with onchip.profile() as found:
        recorded = train(optimiser=optimiser)
        with pytest.raises(StopError):
            train(optimiser=optimiser, checkpoint=tmp_path, checkpoint_every=0.0, on_epoch=stop_in_epoch_3)
        resumed = train(optimiser=optimiser, checkpoint=tmp_path, resume=True)
    assert_same(recorded, plain)
    assert_same(resumed, plain)
    whole, stopped, rest = (training.epochs for training in found.recorded_trainings)
    assert (whole, stopped) == (4, 3)
    assert rest == 2  # the checkpoint is of the end of the second epoch


@needs_gxx
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_a_gpu(monkeypatch, validation, optimiser):
    emulate_device(monkeypatch)
    plain = train(device="cuda", validation=validation, optimiser=optimiser)
    with onchip.profile() as found:
        assert_same(train(device="cuda", validation=validation, optimiser=optimiser), plain)
    (one,) = found.trainings
    assert one.chosen.startswith("cuda")
    assert one.epochs == 4
    assert {"launch steps", "steps"} <= {phase.name for phase in one.phases}
    assert_phases_fit(found.recorded_trainings)
    assert len({launch.kernel for launch in one.launches}) == len(one.launches) > 1
    assert "launches per step" in one.text
    assert all(launch.kernel in one.text for launch in one.launches)
    per_step = [launch.count for launch in one.launches]
    steps = -(-int(N * (1 - validation)) // BATCH)
    assert 1 / steps in per_step  # the step counter, once per graph
    assert any(count.is_integer() for count in per_step)
    steps_us = sum(launch.estimate_us for launch in one.launches if launch.count == round(launch.count))
    assert steps_us == pytest.approx(one.estimate_us)


@needs_gxx
def test_networks_that_share_launches(monkeypatch):
    emulate_device(monkeypatch)
    net, x, y = problem()
    runs = [Run(net, TrainOptions(batch_size=BATCH, epochs=2, seed=seed)) for seed in range(2)]
    plain = fit_runs(runs, x, y, device="cuda")
    with onchip.profile() as found:
        for one, other in zip(fit_runs(runs, x, y, device="cuda"), plain, strict=True):
            assert_same(one, other)
    (one,) = found.trainings
    assert (one.networks, one.runs, one.epochs) == (2, 1, 2)
    assert one.launches
    assert_phases_fit(found.recorded_trainings)


@needs_gxx
def test_a_gpu_without_memory_for_a_copy(monkeypatch):
    gpu = emulate_device(monkeypatch)

    def time_without_memory(*args):
        with monkeypatch.context() as full:
            full.setattr(type(gpu), "reserve", refuse)
            return time_launches(*args)

    def refuse(self, nbytes, row_bytes=0):
        raise DeviceError("out of memory")

    monkeypatch.setattr(runs, "time_launches", time_without_memory)
    with onchip.profile() as found:
        train(device="cuda")
    assert found.trainings[0].launches == ()
    assert "no memory for a copy" in found.text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gxx)])
def test_a_network_that_trains_by_layers(device, monkeypatch):
    if device == "cuda":
        emulate_device(monkeypatch)
    net, x, y = sentences(), np.arange(5 * N).reshape(N, 5) % 11, np.arange(N) % 3
    plain = onchip.fit(net, x, y, device=device, batch_size=BATCH, epochs=2)
    with onchip.profile() as found:
        assert_same(onchip.fit(net, x, y, device=device, batch_size=BATCH, epochs=2), plain)
    (one,) = found.trainings
    assert (one.network, one.kernel) == ("network", f"{len(plain.plan.groups)} groups of layers")
    assert f"batch {BATCH}, {one.kernel}\n" in one.text
    assert (one.is_by_layers, one.steps) == (True, 2 * -(-N // BATCH))
    kernels = {launch.kernel: launch for launch in one.launches}
    assert {"step_rows", "loss", "update", "step_counters"} <= kernels.keys()
    assert kernels["update"].count >= 1
    assert all(launch.estimate_us > 0 for launch in one.launches if launch.kernel != "view")
    assert sum(launch.us for launch in one.launches) > 0
    assert "launches per step" in one.text
    assert_phases_fit(found.recorded_trainings)


def assert_phases_fit(recorded):
    """Phases do not overlap and add up to at most the time of their run."""
    for training in recorded:
        for earlier, later in itertools.pairwise(training.phases):
            assert earlier.begin_ns <= earlier.end_ns <= later.begin_ns
        assert sum(span.end_ns - span.begin_ns for span in training.phases) == sum(training.phase_ns.values())
        assert sum(training.phase_ns.values()) <= training.run_ns
        for earlier, later in itertools.pairwise(training.spans):
            assert earlier.begin_ns <= earlier.end_ns <= later.begin_ns


def test_the_phases_and_steps_of_a_fit(tmp_path):
    with onchip.profile() as found:
        train(checkpoint=tmp_path, on_epoch=lambda epoch: None)
    (one,) = found.trainings
    assert (one.networks, one.runs, one.epochs, one.steps) == (1, 1, 4, 4 * STEPS_PER_EPOCH)
    names = {"plan and build", "prepare rows", "steps", "evaluate", "checkpoints", "callbacks", "read weights"}
    assert {phase.name for phase in one.phases} == names
    assert [phase.share for phase in one.phases] == sorted((phase.share for phase in one.phases), reverse=True)
    assert_phases_fit(found.recorded_trainings)
    steps = {}
    for span in found.recorded_trainings[0].spans:
        steps[span.epoch] = steps.get(span.epoch, 0) + span.steps
    assert steps == dict.fromkeys(range(1, 5), STEPS_PER_EPOCH)
    assert not found.engines
    assert "training mlp on cpu: 1 network, 4 epochs, 24 steps, batch 16, mlp_train" in found.text
    assert json.dumps(found.to_dict())
    assert str(found) == found.text


def test_many_runs_are_one_table():
    net, x, y = problem()
    runs = [Run(net, TrainOptions(batch_size=BATCH, epochs=2, seed=seed)) for seed in range(3)]
    plain = fit_runs(runs, x, y, device="cpu")
    with onchip.profile() as found:
        for one, other in zip(fit_runs(runs, x, y, device="cpu"), plain, strict=True):
            assert_same(one, other)
    (one,) = found.trainings
    assert (one.networks, one.runs, one.epochs) == (3, 3, 6)
    assert not one.is_comparable  # the runs shared the cores
    for training in found.recorded_trainings:
        assert training.phases[0].name == "plan and build"
    assert_phases_fit(found.recorded_trainings)


def test_nothing_is_recorded_outside():
    with onchip.profile() as found:
        pass
    train()
    assert not found.recorded_trainings
    assert recording.new_recorder() is None


def test_a_training_that_never_began_has_no_table(tmp_path):
    with onchip.profile() as found, pytest.raises(onchip.OnchipError):
        train(validation=2.0)
    assert str(found) == "no calls were recorded"
    found.save_trace(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


# -- sums ----------------------------------------------------------------------------------------------------


def recorder_of(monkeypatch, step_us):
    """A recorded run by a clock of our own: 50 us of rows, then steps of `step_us` each, in epochs of two steps."""
    now = 0

    def spend(us):
        nonlocal now
        now += us * 1000

    monkeypatch.setattr(recording, "perf_counter_ns", lambda: now)
    recorder = TrainingRecorder()
    step = training_step(mlp(256, 256, 10), TrainingStep("cross_entropy", "sgd"))
    plan = make_plan(step, CPU, kernels_for(CPU), Job(batch=64))
    recorder.start("mlp", plan, "cpu", 1, 2, True)
    with recorder.phase(ROWS):
        spend(50)
    spend(10)
    first = 0
    for epoch, steps in ((0, [2, 2]), (2, [1])):
        recorder.begin_chunk(epoch, steps)
        with recorder.phase(STEPS):
            for us in step_us[first : first + sum(steps)]:
                spend(us)
        recorder.end_chunk(sum(step_us[first : first + sum(steps)]) / 1e6, False)
        first += sum(steps)
    return recorder


def test_the_times_of_a_run(monkeypatch):
    recorder = recorder_of(monkeypatch, [10, 10, 10, 10, 100])
    (one,) = summarise_trainings([recorder])
    assert one.run_us == 200
    assert {phase.name: phase.total_us for phase in one.phases} == {"prepare rows": 50, "steps": 140}
    assert {phase.name: phase.share for phase in one.phases} == {"prepare rows": 0.25, "steps": 0.7}
    assert (one.epochs, one.steps) == (3, 5)
    assert one.step_us == pytest.approx(28)
    assert one.step_p95_us == pytest.approx(np.percentile([10, 10, 100], 95))
    assert one.epoch_us == pytest.approx(20)  # the third epoch is not whole
    assert one.busy == pytest.approx(0.7)
    assert "other" in one.text
    assert [span.epoch for span in recorder.spans] == [1, 2, 3]


def test_an_estimate_that_is_off(monkeypatch):
    estimate = summarise_trainings([recorder_of(monkeypatch, [1] * 5)])[0].estimate_us
    assert estimate > 2
    for times, is_off in ((0.6, True), (0.7, False), (1.4, False), (1.6, True)):
        (one,) = summarise_trainings([recorder_of(monkeypatch, [times * estimate] * 5)])
        assert ("its estimate" in one.text) == is_off
    shared = recorder_of(monkeypatch, [3 * estimate] * 5)
    shared.is_alone = False
    assert "its estimate" not in summarise_trainings([shared])[0].text


def test_the_estimates_of_launches(monkeypatch):
    recorder = recorder_of(monkeypatch, [1] * 5)
    slow, fits, short = LaunchTime("slow", 1, 50, 20), LaunchTime("fits", 2, 50, 40), LaunchTime("short", 1, 0.9, 5)
    recorder.chosen = "cuda"
    recorder.launches = (slow, fits, short)
    text = summarise_trainings([recorder])[0].text
    assert "estimate: slow takes 2.5x its estimate" in text
    assert "estimate: fits" not in text
    assert "estimate: short" not in text
    assert "40.0 µs" in text
    recorder.launches = (slow,)  # a kernel that is the whole step has the step's line
    assert "estimate: slow" not in summarise_trainings([recorder])[0].text
    recorder.networks = 2
    text = summarise_trainings([recorder])[0].text
    assert "its estimate" not in text
    assert "20.0 µs" not in text


def test_the_totals_count_what_the_timeline_drops(monkeypatch):
    monkeypatch.setattr(recording, "MAX_SPANS", 1)
    recorder = recorder_of(monkeypatch, [10] * 5)
    assert (len(recorder.phases), len(recorder.spans)) == (1, 1)
    assert (recorder.steps, recorder.epochs, recorder.phase_ns[STEPS]) == (5, 3, 50_000)


def test_the_timeline(monkeypatch, tmp_path):
    recorder = recorder_of(monkeypatch, [10, 10, 10, 10, 100])
    found = onchip.measure.profile.Profile(recorded_trainings=[recorder])
    found.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        ("prepare rows", 0, 0, 50), ("steps", 0, 60, 40), ("steps", 0, 100, 100),
        ("epoch 1", 1, 60, 20), ("epoch 2", 1, 80, 20), ("epoch 3", 1, 100, 100),
    ]  # fmt: skip
    assert [e["args"]["steps"] for e in complete[3:]] == [2, 2, 1]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "phases", (0, 1): "epochs"}
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in events)
