import dataclasses
import math
import weakref

import numpy as np
import pytest

import onchip
from onchip.bench.frame import Case, Ready, Reporter, UnavailableError, run_cases
from onchip.measure.pace import Pace
from onchip.measure.truth import Verdict
from onchip.network.build import mlp
from onchip.plan.floor import MEASURED_AGAIN, TOO_LOW

QUICK = Pace(rounds=3, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=2, max_runs=2)


def case(engine, error=0.0, run=lambda: None, name="10 rows", **options):
    ready = Ready(run, lambda: Verdict(error, 1e-6), setting=f"{engine}'s way")
    return Case("planted", name, engine, lambda: ready, work=10, floor_ms=0.001, threads=2, **options)


@pytest.mark.parametrize("error", [1e-3, math.inf, math.nan])
def test_a_wrong_engine_has_no_time(error):
    ran = []
    outcome = run_cases([case("onchip"), case("bad", error, lambda: ran.append(1))], QUICK)
    good, bad = outcome.rows
    assert good.checked
    assert good.median_ms > 0
    assert len(good.samples_ms) == 6
    assert not bad.checked
    assert (bad.median_ms, bad.p20_ms, bad.p80_ms, bad.rate, bad.samples_ms) == (None, None, None, None, ())
    assert ran == []
    assert outcome.exit_code == 1
    assert "bad: wrong result" in outcome.wrong[0]


def test_all_right_is_exit_code_0():
    outcome = run_cases([case("onchip"), case("peer")], QUICK)
    assert outcome.exit_code == 0
    assert [row.setting for row in outcome.rows] == ["onchip's way", "peer's way"]
    assert [row.threads for row in outcome.rows] == [2, 2]


def test_every_engine_is_checked_before_the_clock_starts():
    events = []

    def watched(engine):
        ready = Ready(lambda: events.append(f"run {engine}"), lambda: events.append(f"check {engine}") or Verdict(0, 0))
        return Case("planted", "10 rows", engine, lambda: ready, work=1)

    run_cases([watched("a"), watched("b")], QUICK)
    assert events == ["check a", "check b"] + (["run a"] * 3 + ["run b"] * 3) * 3


def test_a_missing_peer_is_skipped_with_the_reason():
    def missing():
        raise UnavailableError("frob is not installed")

    lines = []
    peer = dataclasses.replace(case("frob"), prepare=missing)
    cases = [case("onchip"), peer, case("onchip", name="20 rows"), dataclasses.replace(peer, case="20 rows")]
    outcome = run_cases(cases, QUICK, Reporter(log=lines.append))
    assert [row.engine for row in outcome.rows] == ["onchip", "onchip"]
    assert outcome.skipped == {"frob": "frob is not installed"}
    assert lines[0] == "skipped frob: frob is not installed"
    assert [line.partition(" ms")[0].rstrip("0123456789.") for line in lines[1:]] == [
        "planted, 10 rows: onchip ", "planted, 20 rows: onchip ",
    ]  # fmt: skip
    assert outcome.exit_code == 0


def test_a_failing_peer_does_not_stop_the_others():
    def fail(*_):
        raise RuntimeError("\nout of memory\nlong trace")

    runs = iter(range(100))

    def fails_late():
        if next(runs) > 3:
            fail()

    late = case("late", run=fails_late)
    peers = [
        dataclasses.replace(case("unready"), prepare=fail),
        dataclasses.replace(case("unchecked"), prepare=lambda: Ready(fail, fail)),
        late,
        case("steady"),
    ]
    saved = []
    outcome = run_cases([case("onchip"), *peers, case("onchip", name="20 rows")], QUICK, save=saved.append)
    assert [row.engine for row in outcome.rows] == ["onchip", "steady", "onchip"]
    assert all(row.median_ms > 0 and len(row.samples_ms) == 6 for row in outcome.rows)
    reason = "it failed at planted, 10 rows: out of memory"
    assert outcome.skipped == dict.fromkeys(["unready", "unchecked", "late"], reason)
    assert outcome.exit_code == 0
    assert [len(outcome.rows) for outcome in saved] == [2, 3]
    for broken in (dataclasses.replace(case("onchip"), prepare=fail), case("onchip", run=fail)):
        with pytest.raises(RuntimeError, match="out of memory"):
            run_cases([broken, case("peer")], QUICK)


def test_every_reason_is_recorded():
    reasons = iter(["too few rows", "too slow", "too few rows"])

    def missing():
        raise UnavailableError(next(reasons))

    cases = [dataclasses.replace(case("frob", name=f"{n} rows"), prepare=missing) for n in range(3)]
    assert run_cases(cases, QUICK).skipped == {"frob": "too few rows; too slow"}


def test_precisions_of_a_case_do_not_compete():
    order = []
    cases = [
        case(f"{precision} {engine}", run=lambda name=engine + precision: order.append(name), precision=precision)
        for precision in ("fp16", "fp32")
        for engine in ("a", "b")
    ]
    rows = run_cases(cases, QUICK).rows
    assert [row.precision for row in rows] == ["fp16", "fp16", "fp32", "fp32"]
    assert max(i for i, name in enumerate(order) if "16" in name) < min(
        i for i, name in enumerate(order) if "32" in name
    )


def test_a_run_of_many_steps_reports_the_time_of_one():
    (row,) = run_cases([case("onchip", unit="steps/s", parts=1000)], QUICK).rows
    (whole,) = run_cases([case("onchip", unit="steps/s")], QUICK).rows
    assert row.median_ms < whole.median_ms
    assert row.rate == pytest.approx(10 / (row.median_ms / 1e3))


def test_an_engine_that_ran_some_rows_reports_the_time_of_all():
    sample, whole = run_cases([case("part", parts=1 / 1000), case("whole")], QUICK).rows
    assert sample.median_ms > whole.median_ms
    assert sample.rate == pytest.approx(10 / (sample.median_ms / 1e3))


def test_a_remark_gets_all_rows_of_its_case():
    seen, lines = [], []

    def remark(rows):
        seen.append([row.engine for row in rows])
        return "twice as fast"

    others = [case("onchip", name="20 rows"), case("peer", name="20 rows", remark=lambda rows: "")]
    cases = [case("onchip", remark=remark), case("peer"), *others]
    rows = run_cases(cases, QUICK, Reporter(log=lines.append)).rows
    assert seen == [["onchip", "peer"]]
    settings = [row.setting for row in rows]
    assert settings == ["onchip's way, twice as fast", "peer's way", "onchip's way", "peer's way"]
    assert lines[0] == "planted, 10 rows, onchip: twice as fast"
    assert [("x peer " in line, line[:24]) for line in lines[1:]] == [
        (True, "planted, 10 rows: onchip"), (True, "planted, 20 rows: onchip"),
    ]  # fmt: skip


def test_scores_replace_the_rate():
    ready = Ready(lambda: None, lambda: Verdict(0, 0), scores=lambda: [97.0, 98.0, 99.0])
    (row,) = run_cases([dataclasses.replace(case("onchip"), prepare=lambda: ready)], QUICK).rows
    assert (row.rate, row.score_std, row.scores) == (98.0, 1.0, (97.0, 98.0, 99.0))
    one = dataclasses.replace(ready, scores=lambda: [97.5])
    (row,) = run_cases([dataclasses.replace(case("onchip"), prepare=lambda: one)], QUICK).rows
    assert (row.rate, row.score_std) == (97.5, None)
    wrong = dataclasses.replace(ready, check=lambda: Verdict(1, 0), scores=pytest.fail)
    (row,) = run_cases([dataclasses.replace(case("onchip"), prepare=lambda: wrong)], QUICK).rows
    assert (row.rate, row.score_std, row.scores) == (None, None, ())


def test_a_case_may_have_its_own_pace():
    ran = []
    own = Pace(rounds=3, warm_up_s=0, pause_s=0, min_runs=1, max_runs=1)
    timed = case("onchip", run=lambda: ran.append(1), pace=own)
    run_cases([timed])
    assert len(ran) == 3
    run_cases([timed], QUICK)
    assert len(ran) == 3 + 9


def test_extra_properties_of_an_engine_are_in_its_row():
    ready = Ready(lambda: None, lambda: Verdict(0.0, 1.0), extra={"GPU MB": 12.5})
    (row,) = run_cases([Case("a", "b", "onchip", lambda: ready, work=1)], QUICK).rows
    assert row.extra == {"GPU MB": 12.5}


def test_the_memory_of_a_job_is_freed_before_the_next():
    class Memory:
        pass

    memories = []

    def prepare():
        assert [memory() for memory in memories] == [None] * len(memories)
        memory = Memory()
        memories.append(weakref.ref(memory))
        return Ready(lambda: memory, lambda: Verdict(0, 0))

    cases = [dataclasses.replace(case("onchip", name=name), prepare=prepare) for name in ("10 rows", "20 rows")]
    assert len(run_cases(cases, QUICK).rows) == len(memories) == 2


# -- floors ------------------------------------------------------------------------------------------------


class Clocked:
    """A run that took `ms` milliseconds."""

    def __init__(self, ms):
        self._ms = ms

    def __call__(self):
        return None

    def sample_ms(self):
        return self._ms


def test_rates_are_remeasured_if_a_run_beats_its_floor():
    rates = [1.0, 2.0]

    def floor_ms():
        return 10.0 / rates[0]

    def row_of(engine, ms, name="10 rows", floor=floor_ms):
        return dataclasses.replace(case(engine, run=Clocked(ms), name=name), floor_ms=floor)

    cases = [row_of("onchip", 12.0, "5 rows"), row_of("onchip", 6.0), row_of("peer", 30.0)]
    outcome = run_cases(cases, QUICK, measure_again=lambda: rates.pop(0))
    assert [row.floor_ms for row in outcome.rows] == [5.0, 5.0, 5.0]  # all floors of a file from the same rates
    assert [row.extra for row in outcome.rows] == [{}, {}, {}]
    assert rates == [2.0]


def test_a_floor_still_beaten_becomes_the_time_with_a_note():
    cases = [
        dataclasses.replace(case(engine, run=Clocked(ms)), floor_ms=10.0)
        for engine, ms in (("onchip", 6.0), ("b", 20.0))
    ]
    measured = []
    outcome = run_cases(cases, QUICK, measure_again=lambda: measured.append(1))
    assert [row.floor_ms for row in outcome.rows] == [6.0, 6.0]
    assert all(row.extra == TOO_LOW for row in outcome.rows)
    assert len(measured) == MEASURED_AGAIN
    assert [row.floor_ms for row in run_cases(cases, QUICK).rows] == [6.0, 6.0]  # a GPU's rates are not measured


def test_one_call_more_is_profiled_after_the_job_was_timed():
    engine, x = onchip.compile(mlp(8, 4), "cpu"), np.ones((3, 8), np.float32)
    calls, profiles = [], []

    def run():
        engine(x)
        calls.append(engine._recorder is not None)

    def show(title, found):
        profiles.append((title, found.engines[0].calls))

    timed = [case("peer", run=run), case("onchip", run=run), case("onchip wrong", error=1.0, run=run)]
    outcome = run_cases(timed, QUICK, on_profile=show)
    assert profiles == [("planted, 10 rows, onchip", 1)]
    assert calls == [False] * 18 + [True]
    assert [len(row.samples_ms) for row in outcome.rows] == [6, 6, 0]
    run_cases([case("onchip", run=run)], QUICK)
    assert calls[19:] == [False] * 9
