"""Random training steps: runs on the CPU follow the float64 reference, which differences of the loss confirm."""

import functools
import hashlib

import numpy as np
import pytest

import random_gradients
from onchip.network.layers import LAYERS, Descent
from onchip.plan.gradient.step import VALUES
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan
from random_gradients import random_rows, random_state, random_step, verify

SEEDS = range(150)
CPU_SEEDS = range(120)
PLANNED_SEEDS = range(100)
GPU_SEEDS, CHUNK = range(200), 10

# Digest of the networks that the steps of SEEDS train: it changes with the generator.
DIGEST = "eb9aa430a7355786"

step_of = functools.cache(random_step)


# -- the generator ---------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_step_everywhere():
    looks = [
        (step.how.loss, step.how.optimiser, step.batches, step.planned, step.lr, list(step.net.inputs))
        for step in map(step_of, SEEDS)
    ]
    assert hashlib.sha256(repr(looks).encode()).hexdigest()[:16] == DIGEST
    one, two = random_step(5), random_step(5)
    for first, second in zip(random_rows(one, 9), random_rows(two, 9), strict=True):
        assert np.array_equal(first, second)
    assert random_state(one).keys() == random_state(two).keys()
    assert all(np.array_equal(array, random_state(two)[name]) for name, array in random_state(one).items())


@pytest.mark.parametrize(
    ("share", "holds"),
    [
        *((0.1, lambda step, loss=loss: step.how.loss == loss) for loss in ("cross_entropy", "half_sse", "mse")),
        *((0.05, lambda step, loss=loss: step.how.loss == loss) for loss in ("bce_with_logits", "mae", "huber")),
        *(
            (0.1, lambda step, kind=kind: step.how.optimiser == kind)
            for kind in ("sgd", "momentum", "nesterov", "adam", "adamw")
        ),
        (0.2, lambda step: step.how.clip_norm > 0),
        (0.1, lambda step: DRAW in step.net.state),
        (0.1, lambda step: any(name.endswith(".var") for name in step.net.state)),
        (0.2, lambda step: any("float16" in kind.dtype for kind in step.net.types.values())),
        (0.3, lambda step: len(step.net.inputs) > 3),
        (0.3, lambda step: len(step.net.nodes) > 50),
        (0.02, lambda step: 1 in step.batches),
        (0.3, lambda step: step.planned not in step.batches),
    ],
)
def test_steps_are_of_many_kinds(share, holds):
    assert sum(bool(holds(step_of(seed))) for seed in SEEDS) >= share * len(SEEDS)


def test_many_layers_are_trained_through():
    kinds = {node.layer.kind for seed in SEEDS for node in step_of(seed).net.nodes}
    assert len(kinds & LAYERS.keys()) > 65


# -- the check -------------------------------------------------------------------------------------------------

WRONG = 3  # a step of momentum, with a dropout


def verdict_on(monkeypatch, change):
    """The verdict on step WRONG, whose state after a run is changed by `change(state, threads, number of the run)`."""
    run, runs = random_gradients.run_step, []

    def run_wrong(bound, rows, state):
        runs.append(rows)
        return change(run(bound, rows, state), bound.threads, len(runs))

    monkeypatch.setattr(random_gradients, "run_step", run_wrong)
    return verify(WRONG)


def each_float(state, change):
    return {name: change(array) if array.dtype.kind == "f" and name != VALUES else array
            for name, array in state.items()}  # fmt: skip


def test_right_runs_are_right(monkeypatch):
    assert verdict_on(monkeypatch, lambda state, threads, run: state) == ""


@pytest.mark.parametrize(
    ("told", "change"),
    [
        (": error", lambda state, threads, run: each_float(state, lambda array: array * np.float32(1 + 1e-5))),
        ("loss: error", lambda state, threads, run: state | {"loss": state["loss"] * np.float32(1 + 1e-5)}),
        (
            "other bits with one thread",
            lambda state, threads, run: (
                each_float(state, lambda array: np.nextafter(array, np.float32(9))) if threads == 1 else state
            ),
        ),
        (
            "other bits in memory full of NaNs",
            lambda state, threads, run: (
                each_float(state, lambda array: np.nextafter(array, np.float32(9))) if run == 3 else state
            ),
        ),
    ],
)
def test_wrong_runs_are_found_and_reproducible(monkeypatch, told, change):
    verdict = verdict_on(monkeypatch, change)
    assert told in verdict
    assert f"python tests/random_gradients.py {WRONG} {WRONG + 1} --device cpu" in verdict


def test_a_wrong_gradient_is_found(monkeypatch):
    """One that the reference computes too."""
    forward = Descent.forward
    monkeypatch.setattr(Descent, "forward", lambda self, xs, w: forward(self, (xs[0] * 1.001,), w))
    assert "slope" in verify(WRONG)


def test_memory_that_no_kernel_wrote_is_found():
    with random_gradients._filled_memory():
        assert np.isnan(np.empty((3, 4), np.float32)).all()
        assert (np.empty(5, dtype=np.int64) == -1).all()


# -- the device ------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", CPU_SEEDS)
def test_the_cpu_is_right(seed):
    verdict = verify(seed)
    assert not verdict, verdict


def test_a_gpu_has_kernels_for_every_step():
    planned = (plan(step_of(seed).net, "h200", Job("fp32", step_of(seed).planned)) for seed in PLANNED_SEEDS)
    claims = [group.claim for each in planned for group in each.groups]
    assert [claim.nodes for claim in claims if not claim.kernel and not claim.is_view] == []


@pytest.mark.gpu
@pytest.mark.parametrize("first", GPU_SEEDS[::CHUNK])
def test_the_gpu_is_right(first):
    verdicts = [verify(seed, "cuda") for seed in range(first, first + CHUNK)]
    wrong = [verdict for verdict in verdicts if verdict and not verdict.startswith(random_gradients.REFUSED)]
    assert not wrong, "\n\n".join(wrong)
