"""A GPU trains the next chunk while the host processes the results of the last one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.runtime.cuda.gpu import Event
from onchip.runtime.cuda.runs import CudaRun, CudaRuns, JointLaunches
from onchip.train import loop, training_run
from onchip.train.checkpoint import Checkpoints
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.training_run import TrainingRun
from training_cases import assert_same_bits, case

pytestmark = needs_gxx
TRAINING = {"batch_size": 16, "lr": 0.1, "momentum": 0.5, "seed": 3}


@pytest.fixture
def emulated(monkeypatch):
    """The device, with a list of the begin and end calls."""
    emulate_device(monkeypatch)
    log = []

    def logged(name, call):
        return lambda team, *args: log.append(name) or call(team, *args)

    for name in ("begin", "end"):
        monkeypatch.setattr(CudaRuns, name, logged(name, getattr(CudaRuns, name)))
    return log


def test_the_next_chunk_begins_before_the_last_is_processed(emulated):
    net, x, y, _ = case(8, 3, n=40)
    fit(net, x, y, device="cuda", epochs=6, on_epoch=lambda e: emulated.append(e.epoch), **TRAINING)
    assert [each for each in emulated if isinstance(each, int)] == [1, 2, 3, 4, 5, 6]
    pieces = emulated.count("begin")
    assert pieces == emulated.count("end") > 1
    assert emulated[:4] == ["begin", "end", "begin", 1]
    ahead = 0
    for each in emulated:
        ahead += {"begin": 1, "end": -1}.get(each, 0)
        assert 0 <= ahead <= 1
    assert ahead == 0


@pytest.mark.parametrize("more", [{"validation": 0.25}, {"stop": lambda epoch: False}, {"debug": True}])
def test_weights_read_after_an_epoch_are_up_to_date(emulated, more):
    net, x, y, _ = case(8, 3, n=40)
    fit(net, x, y, device="cuda", epochs=3, on_epoch=lambda e: emulated.append(e.epoch), **TRAINING, **more)
    for at, each in enumerate(emulated):
        if isinstance(each, int):
            assert emulated[:at].count("begin") == emulated[:at].count("end")


def test_a_slow_callback_does_not_shorten_chunks(emulated, monkeypatch):
    sizes, keep = [], TrainingRun.keep

    def keep_and_count(run, trained, took):
        sizes.append(sum(len(losses) for losses, _ in trained))
        keep(run, trained, took)

    monkeypatch.setattr(TrainingRun, "keep", keep_and_count)
    monkeypatch.setattr(Event, "ms_since", lambda *_: 1.0)
    net, x, y, _ = case(8, 3, n=40)
    fit(net, x, y, device="cuda", epochs=9, on_progress=lambda _: time.sleep(0.15), **TRAINING)
    assert sizes == [3, 12, 12]


def test_a_run_is_idle_for_a_checkpoint(emulated, monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, at: kept.append(at))
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(training_run, "REPORT_SECONDS", 0.0)
    net, x, y, _ = case(8, 3, n=40)
    told = {"on_progress": lambda p: time.sleep(0.01), "checkpoint": tmp_path, "checkpoint_every": 0.04}
    fit(net, x, y, device="cuda", epochs=8, **told, **TRAINING)
    assert len(kept) > 2
    assert emulated[:3] == ["begin", "end", "begin"]  # ahead in between
    whole = [at for at in kept if at.step == 0]
    for at in whole:
        alone = fit(net, x, y, device="cuda", epochs=at.epoch, **TRAINING)
        assert np.array_equal(at.losses, alone.losses)
        for name, w in at.weights.items():
            assert np.array_equal(w, alone.network.weights[name]), (at.epoch, name)
    assert whole[-1].epoch == 8


def test_an_error_of_a_listener_leaves_the_gpu_as_it_was(emulated):
    net, x, y, _ = case(8, 3, n=40)

    def fail(epoch):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        fit(net, x, y, device="cuda", epochs=4, on_epoch=fail, **TRAINING)
    assert emulated.count("begin") == emulated.count("end") + 1  # one in flight
    one, other = (fit(net, x, y, device="cuda", epochs=4, **TRAINING) for _ in range(2))
    assert_same_bits(one, other)


def test_runs_of_other_lengths_go_ahead_together(emulated):
    net, x, y, _ = case(8, 3, n=40)
    options = TrainOptions(epochs=5, **TRAINING)
    runs = [Run(net, options), Run(net, options, np.arange(17)), Run(net, TrainOptions(epochs=2, **TRAINING))]
    together = fit_runs(runs, x, y, device="cuda")
    assert emulated[:3] == ["begin", "end", "begin"]
    for run, result in zip(runs, together, strict=True):
        (alone,) = fit_runs([run], x, y, device="cuda")
        assert_same_bits(result, alone)


@pytest.mark.parametrize(("rows", "batch"), [(40, 16), (48, 16), (400, 4)])
def test_no_graph_is_built_while_steps_are_timed(monkeypatch, rows, batch):
    """A short epoch, epochs that are joined, and an epoch in several pieces."""
    emulate_device(monkeypatch)
    log, build, begin = [], JointLaunches.build, CudaRun.begin
    monkeypatch.setattr(JointLaunches, "build", lambda *args: log.append("build") or build(*args))
    monkeypatch.setattr(CudaRun, "begin", lambda *args: log.append("timed") or begin(*args))
    monkeypatch.setattr(CudaRun, "end", lambda run, end=CudaRun.end: log.append("end") or end(run))
    net, x, y, _ = case(8, 3, n=rows)
    fit(net, x, y, device="cuda", epochs=12, **TRAINING | {"batch_size": batch})
    timed = [at for at, each in enumerate(log) if each == "timed"]
    assert "build" in log
    assert all("build" not in log[at : log.index("end", at)] for at in timed)
