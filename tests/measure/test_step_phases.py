"""The phases of a training step in a profile: what a kernel that runs whole steps does, per thread or block."""

import json

import numpy as np
import pytest

import onchip
from checks import rows
from onchip.kernels.cpu.train import phases
from onchip.kernels.training import StepPhase
from onchip.network.build import mlp
from onchip.runtime.cpu.backend import core_count

ROWS = {"rows: forward", "rows: loss", "rows: backward"}
WEIGHTS = {"weights: gradients", "weights: update"}
# Each path through kernels/cpu/train/step.py: widths, rows, batch, options, threads, and the phases.
PATHS = {
    "one thread": ((8, 16, 3), 200, 8, {}, 1, ROWS | WEIGHTS),
    "one thread, clipped": (
        (8, 16, 3), 200, 8, {"clip_norm": 0.1}, 1,
        ROWS | {"rows: gradients", "weights: add blocks", "weights: norm", "weights: update"},
    ),
    "threads share a block": ((200, 100, 50, 10), 1000, 64, {}, 2, ROWS | WEIGHTS),
    "threads share a block, clipped": (
        (200, 100, 50, 10), 1000, 64, {"clip_norm": 0.1}, 2,
        ROWS | WEIGHTS | {"weights: add blocks", "weights: norm"},
    ),
    "a block per thread": (
        (20, 100, 10), 20_000, 8192, {"epochs": 5}, 2,
        ROWS | {"rows: gradients", "weights: add blocks", "weights: update"},
    ),
}  # fmt: skip


def problem(widths, n):
    return mlp(*widths, seed=1), rows(n, widths[0], seed=2), np.arange(n) % widths[-1]


@pytest.mark.parametrize("path", PATHS)
def test_the_phases_of_a_cpu_step(path):
    widths, n, batch, options, threads, expected = PATHS[path]
    if core_count() < threads:
        pytest.skip("needs two cores")
    chosen = {"device": "cpu", "threads": threads, "batch_size": batch, "epochs": 2, "seed": 3} | options
    plain = onchip.fit(*problem(widths, n), **chosen)
    with onchip.profile() as found:
        recorded = onchip.fit(*problem(widths, n), **chosen)
    np.testing.assert_array_equal(recorded.losses, plain.losses)
    for name, w in plain.network.weights.items():
        np.testing.assert_array_equal(recorded.network.weights[name], w)
    (one,) = found.trainings
    (launch,) = one.launches
    named = {phase.name: phase for phase in launch.phases}
    assert expected <= named.keys() <= expected | {"rows: wait", "weights: wait", "between loops"}
    assert all(0 < phase.us <= phase.most_us for phase in launch.phases)
    assert sum(phase.us for phase in launch.phases) == pytest.approx(launch.us)
    assert len(launch.threads) == threads
    assert 0 < max(launch.threads) <= 1
    assert f"phase in {one.kernel}" in found.text
    assert all(name in found.text for name in named)
    assert "time in tasks per thread" in found.text
    assert "launches per step" not in found.text
    written = json.loads(json.dumps(found.to_dict()))["trainings"][0]["launches"][0]["phases"]
    assert [StepPhase(**each) for each in written] == list(launch.phases)


def test_too_few_steps():
    with onchip.profile() as found:
        onchip.fit(*problem((8, 16, 3), 40), device="cpu", batch_size=40, epochs=1)
    assert found.trainings[0].launches == ()
    assert "phase in" not in found.text


@pytest.mark.parametrize(("steps", "recorded"), [(2, 1), (12, 1), (13, 2), (24, 3)])
def test_the_sums_of_two_threads(steps, recorded):
    times = phases.new_times(2)
    times[0, [phases.FORWARD, phases.GRADIENTS]] = 2000, 1000
    times[1, [phases.FORWARD, phases.GRADIENTS]] = 1000, 500
    times[0, [phases.ROWS_LOOP, phases.WEIGHTS_LOOP, phases.STEP]] = 2500, 1000, 4000
    times[0, phases._STEPS] = steps
    us, found, threads = phases.step_phases(times)
    assert us == pytest.approx(4 / recorded)
    assert [(phase.name, phase.us * recorded, phase.most_us * recorded) for phase in found] == [
        ("rows: forward", pytest.approx(1.5), pytest.approx(2)),
        ("rows: wait", pytest.approx(1), pytest.approx(1.5)),
        ("weights: gradients", pytest.approx(0.75), pytest.approx(1)),
        ("weights: wait", pytest.approx(0.25), pytest.approx(0.5)),
        ("between loops", pytest.approx(0.5), pytest.approx(0.5)),
    ]
    assert threads == (3 / 4, 1.5 / 4)
