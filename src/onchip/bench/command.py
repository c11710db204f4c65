"""Behind `onchip bench`: run, describe, write."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onchip.bench import CASES, machine
from onchip.bench.frame import Outcome, Reporter, run_cases
from onchip.bench.options import Options
from onchip.bench.results import Results, make_folder, result_path, write_results
from onchip.files import check_writable
from onchip.measure.pace import Pace
from onchip.plan.device import Device
from onchip.runtime.cpu import this_cpu
from onchip.runtime.engine import device_name, find_device

CLEAR = "\r\x1b[K"  # back to the start of the line, and nothing on it


def run_benchmarks(
    names: Sequence[str],
    options: Options,
    folder: str | os.PathLike[str],
    *,
    pace: Pace | None = None,
    reporter: Reporter | None = None,
) -> tuple[dict[Path, Results], int]:
    """Measure these benchmarks and write a file for each; the files and the exit code.

    names  none: all that there are
    """
    reporter = reporter or Reporter()
    chosen = {name: CASES[name] for name in dict.fromkeys(names or CASES)}
    device, ceilings = _measured_device(options.device)
    slug = machine.device_slug(device)
    paths = {name: result_path(folder, slug, name) for name in chosen}
    for path in paths.values():
        make_folder(path)
        check_writable(path)
    written, worst = {}, 0
    for name, builder in chosen.items():
        described = describe(device, Outcome(()), ceilings)
        partial = paths[name].with_name(f"{name}.json.partial")  # what is left of a run that is cut short
        outcome = run_cases(builder(options), pace, reporter, functools.partial(_write, described, partial))
        written[paths[name]] = _write(described, paths[name], outcome)
        partial.unlink(missing_ok=True)
        reporter.say(f"wrote {paths[name]}")
        worst = max(worst, outcome.exit_code)
    return written, worst


def _write(described: Results, path: Path, outcome: Outcome) -> Results:
    results = replace(described, rows=outcome.rows, skipped=outcome.skipped)
    write_results(results, path)
    return results


def choose_device(name: str, threads: int | None, reporter: Reporter) -> str:
    """The device to measure on. "auto" is the GPU where there is one."""
    if name != "auto":
        found = find_device(name, threads)[0]
        return "cpu" if found.kind == "cpu" else device_name(name)
    _, _, chosen = find_device(name, threads)
    reporter.say(f"device: {chosen}")
    return chosen.partition(" ")[0]


def _measured_device(name: str) -> tuple[Device, dict[str, float] | None]:
    """The device, and what it reached just now where its rates are not measured anew."""
    if name == "cpu":
        return this_cpu(measure=True), None  # rates of an hour ago, on a busier machine, would make a false floor
    from onchip.bench.stage import measure_ceilings

    return find_device(name)[0], measure_ceilings(int(name.partition(":")[2] or 0))


def describe(device: Device, outcome: Outcome, ceilings: Mapping[str, float] | None = None) -> Results:
    facts = machine.describe_machine(device, ceilings)
    return Results(facts, machine.versions(device), machine.commit(), machine.command_line(), machine.today(),
                   outcome.rows, outcome.skipped)  # fmt: skip


@contextlib.contextmanager
def stderr_reporter() -> Iterator[Reporter]:
    """Speak on stderr: on a terminal progress is one line that goes away, elsewhere a line each."""

    on_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        print(f"{CLEAR}{text}" if on_terminal else text, file=sys.stderr, flush=True)

    def progress(text: str) -> None:
        # No spinner: the thread that turns it would run beside what is measured.
        width = shutil.get_terminal_size().columns - 1
        print(CLEAR + text[:width], end="", file=sys.stderr, flush=True)

    try:
        yield Reporter(say, progress if on_terminal else say)
    finally:
        if on_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)
