"""Behind `onchip bench` and `onchip ladder`: run, describe, write."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onchip.bench import CASES, machine
from onchip.bench.frame import Outcome, Voice, run_cases
from onchip.bench.options import Options
from onchip.bench.results import Results, make_folder, make_row, result_path, write_results
from onchip.files import check_writable
from onchip.ladders import find_ladder
from onchip.ladders.frame import Climb, Step, climb
from onchip.ladders.measure import Pace, show_ms
from onchip.ladders.show import need_matplotlib, save_plot
from onchip.plan.device import Device
from onchip.runtime.cpu import this_cpu

CLEAR = "\r\x1b[K"  # back to the start of the line, and nothing on it


def run_benchmarks(
    names: Sequence[str],
    options: Options,
    folder: str | os.PathLike[str],
    *,
    pace: Pace | None = None,
    voice: Voice | None = None,
) -> tuple[dict[Path, Results], int]:
    """Measure these benchmarks (all, if none is named) and write a file for each; the files and the exit code."""
    voice = voice or Voice()
    device = this_cpu(measure=True)  # rates of an hour ago, on a busier machine, would make a false floor
    slug = machine.device_slug(device)
    chosen = {name: CASES[name] for name in dict.fromkeys(names or CASES)}
    paths = {name: result_path(folder, slug, name) for name in chosen}
    for path in paths.values():
        make_folder(path)
        check_writable(path)
    written, worst = {}, 0
    for name, builder in chosen.items():
        outcome = run_cases(builder(options), pace, voice)
        written[paths[name]] = describe(device, outcome)
        write_results(written[paths[name]], paths[name])
        voice.say(f"wrote {paths[name]}")
        worst = max(worst, outcome.exit_code)
    return written, worst


def describe(device: Device, outcome: Outcome) -> Results:
    return Results(machine.describe_machine(device), machine.versions(), machine.commit(), machine.command_line(),
                   machine.today(), outcome.rows, outcome.skipped)  # fmt: skip


def climb_ladder(
    name: str,
    rows: int | None,
    rungs: list[str] | None,
    threads: int,
    plot: Path | None = None,
    folder: Path | None = None,
    voice: Voice | None = None,
    pace: Pace | None = None,
) -> tuple[Climb, Results]:
    """Climb a ladder; draw it to `plot` and write a result file under `folder` where they are given."""
    voice = voice or Voice()
    ladder = find_ladder(name)
    device = this_cpu(measure=True)
    path = None if folder is None else result_path(folder, machine.device_slug(device), f"ladder-{name}")
    if plot is not None:
        need_matplotlib()
        check_writable(plot)
    climbed = climb(ladder, rows=rows, rungs=rungs, threads=threads, pace=pace, progress=voice.progress)
    results = ladder_results(climbed, device)
    if plot is not None:
        save_plot(climbed, plot)
        voice.say(f"wrote {plot}")
    if path is not None:
        write_results(results, path)
        voice.say(f"wrote {path}")
    return climbed, results


def ladder_results(climbed: Climb, device: Device) -> Results:
    """A climb in the form of a result file: engines are "ladder:<rung>"."""
    rows = tuple(
        make_row(
            climbed.ladder, f"{climbed.B} rows", f"ladder:{step.rung}", step.timing, step.verdict, work=climbed.B,
            floor_ms=climbed.floor_ms, threads=climbed.threads,
            setting=_rung_setting(step, climbed),
        )
        for step in climbed.steps
    )  # fmt: skip
    return describe(device, Outcome(rows))


def _rung_setting(step: Step, climbed: Climb) -> str:
    scaled = "" if step.rows == climbed.B else f"timed on {step.rows:,} rows, scaled"
    report = "" if step.report_ms is None else f"in the report {show_ms(step.report_ms)} ms"
    return ", ".join(filter(None, [scaled, report]))


@contextlib.contextmanager
def stderr_voice() -> Iterator[Voice]:
    """Speak on stderr: on a terminal progress is one line that goes away, elsewhere a line each."""

    on_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        print(f"{CLEAR}{text}" if on_terminal else text, file=sys.stderr, flush=True)

    def progress(text: str) -> None:
        # No spinner: the thread that turns it would run beside what is measured.
        width = shutil.get_terminal_size().columns - 1
        print(CLEAR + text[:width], end="", file=sys.stderr, flush=True)

    try:
        yield Voice(say, progress if on_terminal else say)
    finally:
        if on_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)
