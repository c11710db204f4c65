import dataclasses
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from onchip.errors import InputError, OnchipError, PlanError
from onchip.ladders import LADDERS, find_ladder, ladder_devices
from onchip.ladders.frame import UNMARKED, Ladder, Rung, climb
from onchip.ladders.plot import draw_plot, save_plot
from onchip.ladders.show import describe_ladders, ladder_tables, ladders_table, make_table, of_floor, times
from onchip.measure.pace import Pace, interleave, show_ms, summarise
from onchip.measure.truth import Truth, relative_error
from onchip.network.build import mlp
from onchip.plan.floor import TOO_LOW
from onchip.plan.kernel import Cost

QUICK = Pace(rounds=2, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)


class Right(Rung):
    name, idea = "right", "correct"

    def prepare(self, net, x, threads):
        y = Truth(net, x).y.astype(np.float32)
        return lambda: y


class Few(Right):
    name, idea, max_rows, report_ms = "few", "slow, so timed on fewer rows", 2, {9: 1.5}


class Wrong(Right):
    name, idea = "wrong", "off by a little"

    def prepare(self, net, x, threads):
        run = super().prepare(net, x, threads)
        return lambda: run() + np.float32(1e-4)


class OnAnotherChip(Right):
    name, idea = "elsewhere", "needs another chip"

    def prepare(self, net, x, threads):
        raise PlanError("not on this chip", hint="another chip")


class Half(Right):
    name, idea, precision = "half", "may be off by a little", "fp16"

    def prepare(self, net, x, threads):
        run = SelfTimed(Wrong().prepare(net, x, threads))
        run.facts = {"registers": 1234, "occupancy": "25%"}
        return run

    def verify(self, truth, got):
        return dataclasses.replace(truth.verify(got), allowed=1e-2)


class Unsteady(Right):
    """Correct, but no two runs are equal."""

    name, idea = "unsteady", "atomics"

    def prepare(self, net, x, threads):
        run, ulps = super().prepare(net, x, threads), itertools.count()
        return lambda: run() + np.spacing(run()) * (next(ulps) % 2)


class Marked(Unsteady):
    name, nondeterministic = "marked", "the order of the atomics"


class SelfTimed:
    """A run with its own clock."""

    def __init__(self, run):
        self._run = run

    def __call__(self):
        return self._run()

    def sample_ms(self):
        return 42.0


class Timed(Right):
    """Takes 42 ms."""

    name = "timed"

    def prepare(self, net, x, threads):
        return SelfTimed(super().prepare(net, x, threads))


class Elsewhere(Timed):
    name, idea, why = "cluster", "sixteen GPUs", "more of them"
    report_ms, report_on = {9: 0.7, 18: 0.4}, {9: "16 GPUs over 4 nodes"}
    is_engine = True

    def cost(self, net, B):
        return Cost(row_flop=64, row_bytes=32, fixed_bytes=9 * 16)


class FewTimed(Timed):
    name, max_rows, report_ms = "few", 2, {9: 1.5}


class Short(Right):
    name, idea = "short", "forgets the last row"

    def prepare(self, net, x, threads):
        run = super().prepare(net, x, threads)
        return lambda: run()[:-1]


def fake_ladder(*rungs):
    rows = np.random.default_rng(0).standard_normal((100, 5), dtype=np.float32)
    return Ladder("fake_ladder", "a test", rungs, lambda: mlp(5, 4, 3), lambda B: rows[:B],
                  lambda net, B, precision: {"fp32": 0.5, "fp16": 0.25}[precision], rows=9, truth=Truth)  # fmt: skip


@pytest.mark.parametrize("bad", [Wrong, Short])
def test_a_wrong_rung_has_no_time(bad):
    climbed = climb(fake_ladder(Right, bad), pace=QUICK)
    right, wrong = climbed.steps
    assert right.verdict.is_right
    assert len(right.timing.samples_ms) >= 4
    assert not wrong.verdict.is_right
    assert wrong.timing is None
    assert not climbed.all_right


def test_fewer_rows_are_scaled_and_noted():
    climbed = climb(fake_ladder(Few, Right), rows=9, pace=QUICK)
    assert [step.rows for step in climbed.steps] == [2, 9]
    assert climbed.speedups(0) == (None, None)
    first, previous = climbed.speedups(1)
    assert first == previous > 0
    text = shown(make_table(climbed))
    assert "*" in text
    assert "few on 2" in text
    assert "report ms" in text
    assert "report ms" not in shown(make_table(climb(fake_ladder(Few), rows=8, pace=QUICK)))  # the report's rows are 9


def test_a_run_may_be_checked_on_fewer_rows_and_its_time_divided():
    sizes = []

    class Watched(Right):
        def prepare(self, net, x, threads):
            sizes.append(len(x))
            return super().prepare(net, x, threads)

    pace = dataclasses.replace(QUICK, block_s=0)
    whole = climb(dataclasses.replace(fake_ladder(Watched), checked=4), pace=pace)
    assert whole.all_right
    assert sizes == [9, 4]
    halves = climb(dataclasses.replace(fake_ladder(Wrong, Right), checked=4, parts=10**6), pace=pace)
    assert [step.verdict.is_right for step in halves.steps] == [False, True]
    assert halves.steps[1].timing.median_ms < whole.steps[0].timing.median_ms / 100


def test_a_rung_that_cannot_run_is_skipped_with_the_reason():
    climbed = climb(fake_ladder(Right, OnAnotherChip), pace=QUICK)
    assert [step.rung for step in climbed.steps] == ["right"]
    assert climbed.all_right
    assert climbed.skipped == {"elsewhere": "not on this chip"}
    assert "skipped elsewhere: not on this chip" in shown(make_table(climbed))


def test_a_rung_may_have_a_precision_a_clock_and_facts():
    climbed = climb(fake_ladder(Timed, Half), pace=QUICK)
    right, half = climbed.steps
    assert half.verdict.is_right
    assert half.timing.median_ms == 42
    assert (right.precision, right.floor_ms, half.precision, half.floor_ms) == ("fp32", 0.5, "fp16", 0.25)
    assert climbed.floors == {"fp32": 0.5, "fp16": 0.25}
    text = shown(make_table(climbed))
    assert "0.5000 ms (fp32), 0.2500 ms (fp16)" in text
    assert "1,234" in text
    assert "25%" in text
    assert "registers" not in shown(make_table(climb(fake_ladder(Right), pace=QUICK)))


def test_rates_are_remeasured_if_a_rung_beats_its_floor():
    floors = [100.0, 90.0, 21.0]
    ladder = dataclasses.replace(fake_ladder(Timed, Half), floor_ms=lambda net, B, precision: floors[0])
    climbed = climb(ladder, pace=QUICK, measure_again=lambda: floors.pop(0))
    assert [step.floor_ms for step in climbed.steps] == [21.0, 21.0]
    assert shown(make_table(climbed)).count("50%") == 2
    floors[0] = 75.6  # 180 % of floor, whatever is measured
    climbed = climb(ladder, pace=QUICK, measure_again=lambda: None)
    assert [step.floor_ms for step in climbed.steps] == [42.0, 42.0]
    assert all(step.facts["floor"] == TOO_LOW["floor"] for step in climbed.steps)
    assert shown(make_table(climbed)).count("100%") == 2


def test_two_runs_of_a_rung_have_the_same_bits_unless_it_is_marked():
    climbed = climb(fake_ladder(Right, Unsteady, Marked), pace=QUICK)
    right, unsteady, marked = climbed.steps
    assert (right.verdict.is_right, unsteady.verdict.is_right, marked.verdict.is_right) == (True, False, True)
    assert unsteady.timing is None
    assert (right.nondeterministic, unsteady.nondeterministic) == ("", UNMARKED)
    text = shown(make_table(climbed))
    assert "marked~ " in text
    assert "~ two runs may differ: " in text
    assert "marked: the order of the atomics" in text
    assert "~" not in shown(make_table(climb(fake_ladder(Right), pace=QUICK)))


class AlsoMarked(Marked):
    name = "also"


def test_rungs_that_differ_for_the_same_reason_are_listed_together():
    text = shown(make_table(climb(fake_ladder(Marked, AlsoMarked), pace=QUICK)))
    assert "~ two runs may differ: marked, also: the order of the atomics\n" in text


def test_a_time_of_another_machine_is_marked():
    climbed = climb(fake_ladder(Few, Elsewhere), rows=9, pace=QUICK)
    few, elsewhere = climbed.steps
    assert (few.report_on, elsewhere.report_on) == ("", "16 GPUs over 4 nodes")
    text = shown(make_table(climbed))
    assert "0.7000† " in text
    assert "1.500 " in text
    assert "† in the report: cluster on 16 GPUs over 4 nodes" in text
    assert "†" not in shown(make_table(climb(fake_ladder(Elsewhere), rows=18, pace=QUICK)))


def test_work_per_row_and_reasons_are_shown():
    (step,) = climb(fake_ladder(Elsewhere), pace=QUICK).steps
    assert (step.facts["bytes per row"], step.facts["flop per row"]) == (32 + 16, 64)
    text = shown(make_table(climb(fake_ladder(Right, Elsewhere), pace=QUICK)))
    assert "more of them" in text
    assert "bytes per row" in text


def test_the_rows_of_the_report():
    assert fake_ladder(Right).row_counts == (9,)
    assert fake_ladder(Few, Elsewhere).row_counts == (9, 18)


def test_a_gpus_climb_has_no_threads():
    climbed = climb(dataclasses.replace(fake_ladder(Right), device="cuda"), threads=3, pace=QUICK)
    assert climbed.threads is None
    assert "threads" not in shown(make_table(climbed))
    assert "3 threads" in shown(make_table(climb(fake_ladder(Right), threads=3, pace=QUICK)))


def test_speedups_skip_a_wrong_rung():
    climbed = climb(fake_ladder(Right, Wrong, Few), pace=QUICK)
    assert climbed.speedups(1) == (None, None)
    assert climbed.speedups(2)[1] == climbed.steps[0].timing.median_ms / climbed.steps[2].timing.median_ms
    assert "wrong: no time" in shown(make_table(climbed))


def test_rungs_are_picked_in_the_ladders_order():
    assert [r.name for r in fake_ladder(Right, Few, Wrong).pick(["wrong", "right"])] == ["right", "wrong"]
    with pytest.raises(InputError, match="unknown rung"):
        fake_ladder(Right).pick(["none"])
    with pytest.raises(InputError, match="needs rows"):
        climb(fake_ladder(Right), rows=0)
    with pytest.raises(InputError, match="does not fit into memory"):
        climb(fake_ladder(Right), rows=10**18)


def test_ladders_are_listed():
    described = describe_ladders()
    assert tuple(described) == LADDERS
    assert json.dumps(described)
    assert [ladder["device"] for ladder in described["decode"]] == ["cpu", "cuda"]
    assert described["decode"][1]["row_counts"] == (12_800, 2_097_152)
    separate = described["decode"][1]["rungs"][0]
    assert (separate["report_ms"], separate["report_on"]) == ({"12800": 0.392, "2097152": 57.948}, {})
    assert (separate["bytes per row"], separate["flop per row"]) == (2352, 17_920)
    rungs = {rung["name"]: rung for rung in described["scan"][1]["rungs"]}
    assert [name for name, rung in rungs.items() if rung["nondeterministic"]] == ["single-pass"]
    assert [name for name, rung in rungs.items() if rung["is_engine"]] == ["onchip"]
    with pytest.raises(InputError, match="unknown ladder"):
        find_ladder("none")
    with pytest.raises(InputError, match="no rungs for this device"):
        find_ladder("digits", "cpu")


NOT_COUNTED = {  # lists of objects; a library's passes; the engine, where they depend on the plan; messages
    ("decode", "cpu", "python"), ("backprop", "cpu", "numpy"), ("digits", "cuda", "onchip"),
    ("backprop", "cuda", "onchip"), ("faces", "cuda", "onchip"), ("sentiment", "cuda", "onchip-direct"),
    ("sentiment", "cuda", "onchip-folded"),
    *((name, device, rung.name) for name in LADDERS for device in ladder_devices(name)
      for rung in find_ladder(name, device).over_ranks),
}  # fmt: skip


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_says_why_and_counts_its_work(name):
    for device in ladder_devices(name):
        ladder = find_ladder(name, device)
        net = ladder.network()
        for rungs in (ladder.rungs, ladder.over_ranks):
            assert [bool(rung.why) for rung in rungs] == [i > 0 for i in range(len(rungs))]
            for rung in rungs:
                assert "\n" not in rung.idea + rung.why
                assert rung.is_engine == (rung.name.startswith("onchip") or rungs is ladder.over_ranks
                                          or rung.name == "sums-in-registers")  # fmt: skip
                for B in ladder.row_counts:
                    cost = rung().cost(net, B)
                    assert (cost is None) == ((name, device, rung.name) in NOT_COUNTED)
                    assert cost is None or (cost.row_flop > 0 and cost.row_bytes > 0 and cost.launches <= 1)


def test_the_lists_as_tables(monkeypatch):
    text = shown(ladders_table())
    for name in LADDERS:
        assert f" {name} " in text
    assert "12,800 or 2,097,152 rows (default 2,097,152)" in text
    monkeypatch.setattr("onchip.ladders.show.ladder_devices", lambda name: ("cpu",))
    monkeypatch.setattr("onchip.ladders.show.find_ladder", lambda name, device: fake_ladder(Few, Elsewhere, Marked))
    lines = shown(ladder_tables("fake")).splitlines()
    assert "report ms, 9 rows" in lines[2]
    few, elsewhere, marked = (next(line for line in lines if line.startswith(f" {name}"))
                              for name in ("few", "cluster", "marked~"))  # fmt: skip
    assert few.split() == ["few", "fp32", "1.500", "-"]  # its work is not counted
    assert elsewhere.split() == ["cluster", "fp32", "0.7000†", "0.4000", "48", "64"]
    assert marked.split() == ["marked~", "fp32", "-", "-"]
    assert "† in the report on 16 GPUs over 4 nodes: cluster (9 rows)" in lines
    assert "~ two runs may differ: marked: the order of the atomics" in lines


def test_a_list_needs_no_gpu_and_no_compiler():
    code = (
        "import sys; from onchip.cli.main import main; code = main(['ladder', '--list', '--json']);"
        "print(code, *sorted({m.split('.')[0] for m in sys.modules} & {'numba', 'cuda'}), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(json.loads(ran.stdout)) == LADDERS
    assert ran.stderr.strip() == "0"


@pytest.mark.parametrize("name", ["climb.png", "climb.svg"])
def test_plot(name, tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(climb(fake_ladder(Right, Few, Wrong, Half), pace=QUICK), tmp_path / name)
    head = (tmp_path / name).read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in head
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_nothing_in_the_plot_covers_a_value():
    """Values, floor lines, marks and legend do not overlap."""
    pytest.importorskip("matplotlib")
    climbed = climb(fake_ladder(Timed, FewTimed, Half, Elsewhere), rows=9, pace=QUICK)
    figure = draw_plot(climbed)
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    (values,) = axes.child_axes
    labels = [text.get_window_extent() for text in values.get_yticklabels()]
    assert [text.get_text() for text in values.get_yticklabels()] == [
        f"{show_ms(step.timing.median_ms)} ms" for step in climbed.steps
    ]
    inside, below = axes.get_window_extent(), legend.get_window_extent()
    for label in labels:
        assert label.x0 >= inside.x1  # lines and marks are inside the axes
        assert not label.overlaps(below)
    assert not below.overlaps(inside)
    assert len({bar.get_facecolor() for bar in axes.patches}) == 2  # the engine has another colour
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["rung", "engine", "floor 0.5000 ms (fp32)", "floor 0.2500 ms (fp16)", "report",
                     "report, 16 GPUs over 4 nodes †"]  # fmt: skip


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(OnchipError, match=r"onchip\[plot\]"):
        save_plot(climb(fake_ladder(Right), pace=QUICK), tmp_path / "climb.png")
    assert not list(tmp_path.iterdir())


# -- the clock ---------------------------------------------------------------------------------------------


def test_competitors_alternate_and_warm_up():
    calls = []
    pace = Pace(rounds=3, block_s=0, warm_up_s=1e-9, pause_s=0, min_runs=2, max_runs=2)
    samples = interleave([lambda: calls.append("a"), lambda: calls.append("b")], pace)
    assert "".join(calls) == "aaabbb" * 3  # one warm-up and two runs per block
    assert [len(s) for s in samples] == [6, 6]


def test_a_run_may_be_timed_by_its_own_clock():
    assert interleave([SelfTimed(lambda: 1 / 0)], Pace(rounds=2, block_s=0, pause_s=0, min_runs=2)) == [[42.0] * 4]


def test_no_warm_up_on_request():
    calls = []
    interleave([lambda: calls.append(1)], Pace(rounds=3, block_s=9, warm_up_s=0, pause_s=0, min_runs=1, max_runs=1))
    assert len(calls) == 3


def test_summary():
    timing = summarise([4.0, 1.0, 2.0, 3.0, 5.0], scale=2)
    assert timing.median_ms == 6
    assert timing.p20_ms < 6 < timing.p80_ms
    assert timing.samples_ms == (8, 2, 4, 6, 10)


def test_values_are_shown_with_four_digits():
    assert [show_ms(v) for v in (None, 0.0123456, 1.23456, 123.456)] == ["-", "0.01235", "1.235", "123.5"]
    assert show_ms(12345.6) == "12,346"
    assert [of_floor(0.5, ms) for ms in (1.0, 0.75, 12345.6)] == ["50%", "67%", "0.0041%"]
    assert [times(v) for v in (None, 0.0436, 1.934, 123456.0)] == ["-", "0.0436x", "1.93x", "123,000x"]


# -- the error ---------------------------------------------------------------------------------------------


def test_relative_error_is_the_reports():
    assert relative_error(np.array([0.5, 10.0]), np.array([0.25, 8.0])) == pytest.approx(0.25)
    assert relative_error(np.array([100.0]), np.array([90.0])) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("got", "truth", "error"),
    [
        ([math.nan], [1.0], math.inf),
        ([1.0], [math.nan], math.inf),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([1.0, 2.0], [1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error_of_odd_values(got, truth, error):
    assert relative_error(np.array(got), np.array(truth)) == error


def shown(table) -> str:
    from rich.console import Console

    console = Console(width=250, record=True, file=__import__("io").StringIO())
    console.print(table)
    return console.export_text()
