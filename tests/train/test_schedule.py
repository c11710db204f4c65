"""Learning rates of steps: torch's schedules, and what a warm-up puts before them."""

import math

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.train.options import TrainOptions
from onchip.train.schedule import lrs_of


def rates(steps, **options):
    """Of all steps of a run with so many per epoch."""
    chosen = TrainOptions(**options)
    return np.concatenate([lrs_of(chosen, epoch, steps) for epoch in range(chosen.epochs)])


def of_epochs(**options):
    """The rate of each epoch, which all of its steps have."""
    found = rates(3, **options).reshape(-1, 3)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize("epochs", [1, 4, 7])
def test_constant_step_and_cosine_in_closed_form(epochs):
    common = {"lr": 0.3, "epochs": epochs}
    assert of_epochs(**common) == [0.3] * epochs
    stepped = of_epochs(schedule="step", step_every=2, step_factor=0.2, **common)
    assert stepped == [0.3 * 0.2 ** (e // 2) for e in range(epochs)]
    cosine = of_epochs(schedule="cosine", **common)
    assert cosine == [0.5 * 0.3 * (1 + math.cos(math.pi * e / epochs)) for e in range(epochs)]


def one_cycle_of_torch(lr, total):
    """OneCycleLR.get_lr with its defaults, step by step."""
    first = lr / 25
    phases = [(0.3 * total - 1, first, lr), (total - 1, lr, first / 1e4)]
    found = []
    for number in range(total):
        start = 0.0
        for end, begin_lr, end_lr in phases:
            if number <= end or end == total - 1:
                share = (number - start) / (end - start)
                found.append(end_lr + (begin_lr - end_lr) / 2.0 * (math.cos(math.pi * share) + 1))
                break
            start = end
    return found


@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (1, 2), (1, 3), (2, 2), (1, 10), (5, 4), (3, 37)])
def test_one_cycle_is_that_of_torch(epochs, steps):
    found = rates(steps, lr=0.3, schedule="one_cycle", epochs=epochs)
    assert found.tolist() == pytest.approx(one_cycle_of_torch(0.3, epochs * steps), rel=1e-12, abs=1e-17)


def test_one_cycle_begins_rises_and_ends():
    found = rates(10, lr=1.0, schedule="one_cycle", epochs=10)
    assert found[[0, 29, -1]].tolist() == pytest.approx([0.04, 1.0, 4e-6])
    assert (np.diff(found[:30]) > 0).all()
    assert (np.diff(found[29:]) < 0).all()


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine", "one_cycle"])
def test_schedules_are_those_of_torch(schedule):
    torch = pytest.importorskip("torch")
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    peers = torch.optim.lr_scheduler
    peer = {
        "constant": lambda: peers.ConstantLR(optimiser, factor=1.0),
        "step": lambda: peers.StepLR(optimiser, 3, 0.2),
        "cosine": lambda: peers.CosineAnnealingLR(optimiser, 11),
        "one_cycle": lambda: peers.OneCycleLR(optimiser, 0.3, total_steps=11, cycle_momentum=False),
    }[schedule]()
    expected = []
    for number in range(11):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        if number < 10:
            peer.step()
    found = rates(1, lr=0.3, schedule=schedule, step_every=3, step_factor=0.2, epochs=11)
    assert found.tolist() == pytest.approx(expected)


# -- warm-up ---------------------------------------------------------------------------------------------------


def test_a_warm_up_grows_linearly_to_lr():
    found = rates(4, lr=0.5, warmup=2, epochs=3)
    assert found.tolist() == pytest.approx([0.5 * k / 8 for k in range(1, 9)] + [0.5] * 4)


def test_a_warm_up_may_be_part_of_an_epoch():
    found = rates(10, lr=1.0, schedule="cosine", warmup=0.3, epochs=3)
    assert found[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    of_cosine = [0.5 * (1 + math.cos(math.pi * e / 2.7)) for e in (0, 0.7, 1.7)]
    assert found[3:].tolist() == pytest.approx([of_cosine[0]] * 7 + [of_cosine[1]] * 10 + [of_cosine[2]] * 10)


@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_the_schedule_follows_the_warm_up(schedule):
    """As the shorter run without a warm-up, like torch's SequentialLR."""
    common = {"lr": 0.1, "schedule": schedule, "step_every": 2}
    found = rates(5, warmup=3, epochs=9, **common)
    assert np.array_equal(found[15:], rates(5, epochs=6, **common))
    assert (np.diff(found[:15]) > 0).all()
    assert found[14] == 0.1


def test_a_warm_up_of_less_than_a_step_is_none():
    assert np.array_equal(rates(4, warmup=0.1, epochs=2), rates(4, epochs=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup": -1}, "warmup"),
        ({"warmup": math.nan}, "warmup"),
        ({"warmup": True}, "warmup"),
        ({"warmup": 3, "epochs": 3}, "ends before its warm-up"),
        ({"warmup": 1, "schedule": "one_cycle"}, "one_cycle warms up by itself"),
    ],
)
def test_bad_warm_ups_are_refused(given, message):
    with pytest.raises(InputError, match=message) as caught:
        TrainOptions(**given)
    assert caught.value.hint
