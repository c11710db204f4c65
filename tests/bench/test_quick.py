"""onchip bench --quick: which jobs begin, and how long the whole benchmark is said to take."""

import dataclasses

import pytest

from onchip.bench import command
from onchip.bench.cases import sentiment
from onchip.bench.frame import Case, Ready, Reporter, run_cases
from onchip.bench.options import Options
from onchip.bench.quick import LIMIT_S, QUICK_PACE, Limit, text_of, whole_seconds
from onchip.measure.pace import Pace
from onchip.measure.truth import Verdict


class Clock:
    """Seconds that a test moves on."""

    now = 0.0

    def __call__(self):
        return self.now


def job(name, floor_ms=None, engine="onchip", seconds=0.0, clock=None, **changes):
    def run():
        clock.now += seconds

    ready = Ready(run if clock else lambda: None, lambda: Verdict(0.0, 1.0))
    made = Case("w", name, engine, lambda: ready, work=1, floor_ms=floor_ms)
    return dataclasses.replace(made, **changes)


def began(limit, jobs, clock):
    found = []
    for each, seconds in jobs:
        if limit.begins([each]):
            found.append(each.case)
            clock.now += seconds
    limit.end()
    return found


def test_a_job_begins_if_it_should_end_in_time():
    clock = Clock()
    limit = Limit(10.0, clock)
    jobs = [(job("a"), 4.0), (job("b"), 4.0), (job("c"), 4.0), (job("d"), 4.0)]
    assert began(limit, jobs, clock) == ["a", "b"]
    assert limit.left_out == ["w, c", "w, d"]
    assert [seconds for seconds, _ in limit.done] == [4.0, 4.0]


def test_the_first_job_always_begins():
    clock = Clock()
    assert began(Limit(1.0, clock), [(job("a"), 40.0), (job("b"), 1.0)], clock) == ["a"]


def test_a_larger_job_is_expected_to_take_longer():
    """By its floor: 3 s for the first, so up to 12 s for the second; the third is small again."""
    clock = Clock()
    jobs = [(job("a", 1.0), 3.0), (job("b", 10.0), 12.0), (job("c", lambda: 1.0), 3.0)]
    assert began(Limit(10.0, clock), jobs, clock) == ["a", "c"]


def test_the_whole_takes_what_its_pace_says():
    """Two engines at two sizes, of which one size was measured: 100 ms a run, and by the floor 400 ms."""
    pace = Pace(rounds=10, block_s=0.0, warm_up_s=0.1, pause_s=0.2, min_runs=2)
    cases = [
        job(size, floor, engine, pace=pace) for size, floor in (("s", 1.0), ("l", 4.0)) for engine in ("onchip", "b")
    ]
    rows = run_cases(cases[:2], QUICK_PACE).rows
    rows = [dataclasses.replace(row, median_ms=100.0) for row in rows]
    quick_s = 3 * (0.05 + 0.1 + 0.1)  # QUICK_PACE: pause, warm-up of one run, block of one run
    done = [(2 * (quick_s + 3.0), cases[:2])]  # and 3 s of preparation each
    small, large = 10 * (0.2 + 0.1 + 0.2), 10 * (0.2 + 0.4 + 0.8)
    assert whole_seconds(cases, rows, done) == pytest.approx(2 * (3.0 + small) + 2 * (3.0 + large))
    assert whole_seconds(cases, [], done) == 0.0


def test_texts_of_durations():
    assert [text_of(s) for s in (0.0, 42.0, 200.0, 7000.0)] == ["10 s", "40 s", "3 min", "1.9 h"]


def test_jobs_are_left_out_and_the_log_says_so(monkeypatch):
    clock, lines = Clock(), []
    cases = [job(f"case {i}", 1.0, seconds=LIMIT_S / 8, clock=clock) for i in range(9)]
    monkeypatch.setattr(command, "CASES", {"planted": lambda options: cases})
    monkeypatch.setattr(command, "Limit", lambda limit_s: Limit(limit_s, clock))
    pace = Pace(rounds=1, block_s=0, warm_up_s=0, pause_s=0, min_runs=1)
    written, code = command.run_benchmarks(
        ["planted"], Options(quick=True), None, pace=pace, reporter=Reporter(lines.append)
    )
    assert code == 0
    assert len(written["planted"].rows) == 8
    (line,) = (line for line in lines if line.startswith("planted: "))
    assert line.startswith("planted: 1 case left out for time; all 9 cases take about ")
    command.run_benchmarks(["planted"], Options(), None, pace=pace, reporter=Reporter(lines.append))
    assert sum(line.startswith("planted: ") for line in lines) == 1, "only with --quick"


def test_a_quick_run_is_not_committed():
    assert not command.is_whole(Options("cpu", command.core_count(), True, quick=True))
    assert command.is_whole(Options("cpu", command.core_count(), True))


def test_sentiment_builds_no_tables():
    small = {"vocabulary": 50, "embedding": 4, "channels": 3, "hidden": (5,)}
    cases = sentiment.cases(Options(rows=(4,)), **small)
    assert {case.engine for case in cases if case.is_quick} == {sentiment.DIRECT}


@pytest.mark.parametrize("is_quick", [True, False])
def test_what_takes_long_to_prepare_is_left_out(monkeypatch, is_quick):
    cases = [job("a", engine="onchip"), job("a", engine="onchip, with tables", is_quick=False)]
    monkeypatch.setattr(command, "CASES", {"planted": lambda options: cases})
    pace = Pace(rounds=1, block_s=0, warm_up_s=0, pause_s=0, min_runs=1)
    written, _ = command.run_benchmarks(["planted"], Options(quick=is_quick), None, pace=pace)
    assert len(written["planted"].rows) == (1 if is_quick else 2)
