"""Random training runs: every device follows the float64 reference on random networks and options."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib

import numpy as np
import pytest

import random_training as trainings
from emulated_cuda import needs_gxx
from onchip.errors import PlanError
from onchip.kernels.training import SharedData
from onchip.train.loop import fit
from onchip.train.training_run import plan_run
from random_training import WAYS, go_by, judge_all, judge_training, random_training

SEEDS = range(300)
CPU_SEEDS, EMULATED_SEEDS = range(40), range(40, 104)

# Digest of the training runs of SEEDS: it changes with the generator.
DIGEST = "eedfc8a180decf60"


# -- the generator ---------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_training_everywhere():
    looks = "\n".join(str(random_training(seed)) for seed in SEEDS)
    assert hashlib.sha256(looks.encode()).hexdigest()[:16] == DIGEST
    one, two = random_training(7), random_training(7)
    assert np.array_equal(one.x, two.x)
    assert all(np.array_equal(w, two.net.weights[name]) for name, w in one.net.weights.items())


@pytest.mark.parametrize(
    "holds",
    [
        *(lambda t, way=way: t.way == way for way in WAYS),
        *(lambda t, loss=loss: t.options.loss == loss for loss in ("cross_entropy", "half_sse", "mse")),
        *(lambda t, kind=kind: t.options.optimiser == kind for kind in ("sgd", "adam", "adamw")),
        lambda t: t.options.momentum > 0,
        lambda t: t.options.clip_norm > 0,
        lambda t: t.options.validation > 0,
        lambda t: t.options.class_weight == "balanced" and t.sample_weight is not None,
        lambda t: len(t.x) % t.options.batch_size != 0,
        lambda t: t.options.batch_size == 1,
        lambda t: t.options.batch_size > 256,
        lambda t: sum(name.endswith("weight") for name in t.net.weights) == 1,
        lambda t: sum(name.endswith("weight") for name in t.net.weights) == 5,
        lambda t: not any(name.endswith("bias") for name in t.net.weights),
    ],
)
def test_trainings_are_of_many_kinds(holds):
    assert sum(bool(holds(random_training(seed))) for seed in SEEDS) >= 4


@pytest.mark.parametrize("way", WAYS)
def test_every_option_occurs(way, monkeypatch):
    taken = 0
    for training in filter(lambda t: t.way == way, map(random_training, SEEDS)):
        go_by(monkeypatch, training, way, is_emulated=True)
        with contextlib.suppress(PlanError):
            plan_run(training.net, training.x, training.y, training.options, SharedData(), device="cuda", threads=None)
            taken += 1
    assert taken >= 5


# -- the check -------------------------------------------------------------------------------------------------


def verdict_on(monkeypatch, change):
    """Differences found in training 3 on the CPU, with results changed by `change(result, options)`."""
    monkeypatch.setattr(trainings, "fit", lambda *data, **how: change(fit(*data, **how), how))
    return judge_training(3)


def with_weights(result, change):
    weights = {name: change(w) for name, w in result.network.weights.items()}
    return dataclasses.replace(result, network=result.network.replace(weights=weights))


def test_correct_results_pass(monkeypatch):
    assert verdict_on(monkeypatch, lambda result, how: result) == ""


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("losses: off", lambda result, how: dataclasses.replace(result, losses=result.losses * (1 + 1e-5))),
        ("losses: shape", lambda result, how: dataclasses.replace(result, losses=result.losses[:-1])),
        ("fc1.weight: off", lambda result, how: with_weights(result, lambda w: w * np.float32(1 + 1e-4))),
        (
            "a step at a time: other bits",
            lambda result, how: (
                with_weights(result, lambda w: np.nextafter(w, np.float32(9))) if how.get("debug") else result
            ),
        ),
        (
            "with one thread: other bits",
            lambda result, how: dataclasses.replace(result, losses=result.losses + 1e-12 * ("threads" in how)),
        ),
    ],
)
def test_wrong_results_are_found_and_reproducible(monkeypatch, told, change):
    verdict = verdict_on(monkeypatch, change)
    assert told in verdict
    assert "python tests/random_training.py 3 4 --device cpu --precision fp32" in verdict


# -- the devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", CPU_SEEDS)
def test_the_cpu_is_right(seed):
    verdict = judge_training(seed)
    assert not verdict, verdict


@needs_gxx
@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", EMULATED_SEEDS)
def test_emulated_kernels_are_right(seed):
    verdict = judge_training(seed, "emulated")
    assert not verdict, verdict


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_gpu_is_right(precision):
    verdicts = judge_all(SEEDS, "cuda", precision)
    assert not verdicts, "\n\n".join(verdicts)
