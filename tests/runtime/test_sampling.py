"""Which calls are recorded: simulated calls, on a clock of their own."""

import numpy as np
import pytest

from onchip.runtime.sampling import AGAIN, FIRST, LIMIT, PAIRS, Sampling, Turn

MS = 1_000_000
START = FIRST + 2 * PAIRS  # calls before the choice


class Engine:
    """Calls of one number of rows, which take these times."""

    def __init__(self, plain_ns, recorded_ns, rows=7, of=None):
        self.sampling, self.rows = of or Sampling(), rows
        self.plain_ns, self.recorded_ns = plain_ns, recorded_ns
        self.ns, self.turns, self.counts = 0, [], []

    def call(self):
        turn, begin = self.sampling.turn(self.rows), self.ns
        self.ns += self.recorded_ns() if turn is Turn.RECORD else self.plain_ns()
        if turn is Turn.SKIP:
            self.sampling.skipped(self.rows)
        else:
            self.sampling.took(self.rows, turn, begin, self.ns)
        if turn is Turn.RECORD:
            self.counts.append(self.sampling.stands_for(self.rows))
        self.turns.append(turn)

    def calls(self, count):
        for _ in range(count):
            self.call()
        return self

    @property
    def recorded(self):
        return self.turns.count(Turn.RECORD)


def constant(plain_ns, recorded_ns):
    return Engine(lambda: plain_ns, lambda: recorded_ns)


def test_the_first_calls_are_recorded_then_plain_ones_alternate_with_them():
    engine = constant(MS, 2 * MS).calls(START)
    assert engine.turns == [Turn.RECORD] * FIRST + [Turn.RECORD, Turn.TIME] * PAIRS


@pytest.mark.parametrize("longer", [0.05, 0.32, 0.69, 3.0, 40.0])
def test_recording_takes_less_than_its_limit(longer):
    """Of the time of all calls; one of every so many is recorded, each of which stands for as many."""
    engine = constant(MS, round(MS * (1 + longer))).calls(START)
    begin, before = engine.ns, engine.recorded
    engine.calls(100_000)
    assert 1 < (engine.ns - begin) / (100_000 * MS) < 1 + LIMIT
    every = 100_000 / (engine.recorded - before)
    assert longer / LIMIT < every < 3 * longer / LIMIT + 2
    steady = engine.counts[-20:]
    assert max(steady) - min(steady) <= 1  # some have a plain call that was timed before them
    assert sum(engine.counts) + sum(engine.sampling.take_unrecorded().values()) == 100_000 + START


def test_nearly_all_calls_are_recorded_where_that_is_cheap():
    engine = constant(10 * MS, 10 * MS + 10_000).calls(1000)
    assert engine.recorded > 1000 * AGAIN / (AGAIN + 1) - PAIRS
    assert set(engine.turns) == {Turn.RECORD, Turn.TIME}


def test_times_that_vary():
    """By a fifth of a call, and now and then much more."""
    rng = np.random.default_rng(0)

    def vary(ns):
        return lambda: int(ns * rng.uniform(0.9, 1.1)) + (50 * MS if rng.random() < 0.01 else 0)

    plain, engine = vary(MS), Engine(vary(MS), vary(1.5 * MS)).calls(START)
    begin = engine.ns
    engine.calls(50_000)
    assert (engine.ns - begin) / sum(plain() for _ in range(50_000)) < 1 + LIMIT
    assert engine.recorded > 500


def test_calls_that_become_faster_are_recorded_less_often():
    times = [10 * MS, 11 * MS]
    engine = Engine(lambda: times[0], lambda: times[1]).calls(5000)
    times[:] = MS, 2 * MS
    engine.calls(1000)
    begin = engine.ns
    engine.calls(50_000)
    assert (engine.ns - begin) / (50_000 * MS) < 1 + LIMIT


def test_calls_in_a_loop_that_are_faster_than_timed_ones():
    """Skipped calls with GPU arrays overlap: nothing waits for them. They take 1 ms each, and one alone 3 ms."""
    engine = Engine(lambda: 3 * MS if engine.sampling.turn(7) is Turn.TIME else MS, lambda: 5 * MS)
    engine.calls(2000)
    begin = engine.ns
    engine.calls(50_000)
    assert (engine.ns - begin) / (50_000 * MS) < 1 + LIMIT


def test_the_callers_own_time_does_not_count():
    """It would look as if calls took longer, and more of them could be recorded."""
    engine = constant(MS, 2 * MS)
    for _ in range(2000):
        engine.call()
        engine.ns += 100 * MS
    before = engine.recorded
    for _ in range(2000):
        engine.call()
        engine.ns += 100 * MS
    assert engine.recorded - before < 2000 * LIMIT


def test_each_number_of_rows_has_its_own_choice():
    few = constant(MS, 2 * MS).calls(1000)
    many = Engine(lambda: 100 * MS, lambda: 101 * MS, rows=1000, of=few.sampling)
    assert many.calls(FIRST).turns == [Turn.RECORD] * FIRST
    many.calls(100)
    assert many.recorded > 80
    assert few.sampling.take_unrecorded().keys() <= {7, 1000}


def test_another_plan_records_first_and_remembers():
    engine = constant(MS, 2 * MS).calls(1000)
    engine.sampling.begin()
    assert engine.sampling.left(7) == 0
    before = engine.recorded
    engine.recorded_ns = lambda: 500 * MS  # the first calls of another plan compile: they are not compared
    engine.calls(FIRST)
    assert engine.recorded == before + FIRST
    engine.recorded_ns = lambda: 2 * MS
    begin = engine.ns
    engine.calls(1000)
    assert (engine.ns - begin) / (1000 * MS) < 1 + LIMIT


def test_a_call_that_fails_changes_nothing():
    engine = constant(MS, 2 * MS).calls(START - 1)
    assert [engine.sampling.turn(7) for _ in range(3)] == [Turn.TIME] * 3
    engine.calls(2)
    assert [engine.sampling.turn(7) for _ in range(3)] == [Turn.SKIP] * 3
