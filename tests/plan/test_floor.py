"""Floors compared with times, for fixed rates: no clock."""

import pytest

from onchip.plan.floor import MEASURED_AGAIN, TOO_LOW, floor_percent, settle_floors


class Rates:
    """A machine whose rates rise with every measurement, by these factors of the first one."""

    def __init__(self, *seen):
        self.now, self.later, self.count = 1.0, list(seen), 0

    def measure(self):
        self.count += 1
        self.now = max(self.now, self.later.pop(0) if self.later else 0.0)

    def floors(self):
        return {"a": 10.0 / self.now, "b": 1.0 / self.now}


def test_nobody_measures_again_for_nothing():
    rates = Rates()
    assert settle_floors(rates.floors, {"a": 10.0, "b": 3.0}, rates.measure) == {"a": (10.0, {}), "b": (1.0, {})}
    assert settle_floors(rates.floors, {}, rates.measure)["a"].ms == 10.0  # nothing was timed
    assert rates.count == 0


def test_a_beaten_floor_is_made_of_better_rates():
    rates = Rates(0.5, 2.0)  # the first is measured under other load
    assert settle_floors(rates.floors, {"a": 6.0}, rates.measure) == {"a": (5.0, {}), "b": (0.5, {})}
    assert rates.count == 2


@pytest.mark.parametrize("is_measured", [True, False])
def test_what_no_measurement_helps_ends_at_the_fastest_run(is_measured):
    rates = Rates()
    settled = settle_floors(rates.floors, {"a": 4.0, "b": 1.0}, rates.measure if is_measured else None)
    assert settled == {"a": (4.0, TOO_LOW), "b": (1.0, {})}
    assert rates.count == (MEASURED_AGAIN if is_measured else 0)


def test_a_share_of_the_floor_is_never_above_100_percent():
    assert (floor_percent(1.0, 2.0), floor_percent(2.0, 2.0), floor_percent(48.8, 19.6)) == (50.0, 100.0, 100.0)
