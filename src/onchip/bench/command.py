"""The implementation of `onchip bench`: run, describe, write."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onchip.bench import CASES
from onchip.bench.cases.model import is_model, model_cases
from onchip.bench.frame import Case, Outcome, Reporter, run_cases
from onchip.bench.options import Options
from onchip.bench.quick import LIMIT_S, QUICK_PACE, Limit, text_of, whole_seconds
from onchip.bench.report import machine
from onchip.bench.report.results import Results, job_title, make_folder, result_path, write_results
from onchip.files import check_writable
from onchip.measure.pace import Pace
from onchip.measure.profile import Profile
from onchip.network.names import known_name
from onchip.network.text import plural
from onchip.plan.device import Device
from onchip.runtime.cpu.backend import core_count, this_cpu
from onchip.runtime.placement import device_name, find_device

QUIET_S = 30.0  # seconds between progress lines if stderr is not a terminal
CLEAR = "\r\x1b[K"  # carriage return, erase the line


def run_benchmarks(
    names: Sequence[str],
    options: Options,
    folder: str | os.PathLike[str] | None,
    *,
    commit: str | None = None,
    pace: Pace | None = None,
    reporter: Reporter | None = None,
    on_profile: Callable[[str, Profile], object] | None = None,
) -> tuple[dict[str, Results], int]:
    """Measure these benchmarks and write one file each; return the results by name and the exit code.

    names   benchmarks, or files of networks; none: all benchmarks
    folder  None: write nothing
    commit  the commit of a source tree without .git
    on_profile  as for run_cases
    """
    reporter, commit = reporter or Reporter(), machine.commit(commit)
    pace = pace or (QUICK_PACE if options.quick else None)
    chosen = dict(map(_find_cases, names or CASES))
    device, ceilings = _measured_device(options.device)
    paths = {}
    if folder is not None:
        paths = {name: result_path(folder, machine.device_slug(device), name) for name in chosen}
    for path in paths.values():
        make_folder(path)
        check_writable(path)
    measured, exit_code = {}, 0
    for name, builder in chosen.items():
        empty, target = describe(device, Outcome(()), commit, ceilings), paths.get(name)
        partial = None if target is None else target.with_name(f"{name}.json.partial")  # kept if interrupted
        unfinished = replace(empty, commit=commit + machine.PARTIAL)  # marked as partial even if renamed
        save = None if partial is None else functools.partial(_write, unfinished, partial)
        measure_again = functools.partial(this_cpu, measure=True) if options.device == "cpu" else None
        limit = Limit(LIMIT_S / len(chosen) if options.quick else math.inf)
        cases = builder(options)
        timed = [case for case in cases if case.is_quick or not options.quick]
        outcome = run_cases(timed, pace, reporter, save, measure_again, on_profile, limit.begins)
        if options.quick:
            is_all = not (options.rows or options.batches)
            whole = cases if is_all else builder(replace(options, rows=(), batches=()))
            reporter.log(_about_the_whole(name, whole, outcome, limit))
        facts = machine.describe_machine(find_device(options.device)[0], ceilings)  # with the rates of the floors
        measured[name] = _write(replace(empty, machine=facts), target, outcome)
        if partial is not None:
            partial.unlink(missing_ok=True)
            reporter.log(f"wrote {target}")
        exit_code = max(exit_code, outcome.exit_code)
    return measured, exit_code


def _about_the_whole(name: str, cases: Sequence[Case], outcome: Outcome, limit: Limit) -> str:
    """What --quick left out, and how long the benchmark takes without it."""
    limit.end()
    jobs = len(dict.fromkeys(map(job_title, cases)))
    left_out = f"{plural(len(limit.left_out), 'case')} left out for time; " if limit.left_out else ""
    seconds = whole_seconds(cases, outcome.rows, limit.done)
    return f"{name}: {left_out}all {plural(jobs, 'case')} take about {text_of(seconds)} without --quick"


def is_whole(options: Options) -> bool:
    """Whether a run measures everything that a committed file has: every case, every peer, every core."""
    return options.peers and not (options.quick or options.rows or options.batches) and options.threads == core_count()


def _find_cases(name: str) -> tuple[str, Callable[[Options], list[Case]]]:
    """The name of a benchmark or of a network file, and the function that builds its cases."""
    if is_model(name):
        return Path(name).stem, functools.partial(model_cases, name)
    known = known_name(name, CASES, "benchmark", "onchip bench decode, or the .onnx file of a network")
    return known, CASES[known]


def _write(described: Results, path: Path | None, outcome: Outcome) -> Results:
    results = replace(described, rows=outcome.rows, skipped=outcome.skipped)
    if path is not None:
        write_results(results, path)
    return results


def choose_device(name: str, threads: int | None, reporter: Reporter) -> str:
    """The device to measure on. "auto" is the GPU, if there is one."""
    if name != "auto":
        found = find_device(name, threads)[0]
        return "cpu" if found.kind == "cpu" else device_name(name)
    _, _, chosen = find_device(name, threads)
    reporter.log(f"device: {chosen}")
    return chosen.partition(" ")[0]


def _measured_device(name: str) -> tuple[Device, dict[str, float] | None]:
    """The device; for a GPU, whose floors use peak rates, also the rates measured now."""
    if name == "cpu":
        return this_cpu(measure=True), None  # old rates, measured on a busier machine, would give a wrong floor
    from onchip.bench.stage import measure_ceilings

    return find_device(name)[0], measure_ceilings(int(name.partition(":")[2] or 0))


def describe(device: Device, outcome: Outcome, commit: str, ceilings: Mapping[str, float] | None = None) -> Results:
    facts = machine.describe_machine(device, ceilings)
    return Results(facts, machine.versions(device), commit, machine.command_line(), machine.today(),
                   outcome.rows, outcome.skipped)  # fmt: skip


@contextlib.contextmanager
def stderr_reporter() -> Iterator[Reporter]:
    """Report on stderr: on a terminal progress is one overwritten line, elsewhere a line now and then."""
    is_terminal, printed_at = sys.stderr.isatty(), time.monotonic()

    def log(text: str) -> None:
        print(f"{CLEAR}{text}" if is_terminal else text, file=sys.stderr, flush=True)

    def progress(text: str) -> None:
        # No spinner: its thread would disturb the measurement.
        width = shutil.get_terminal_size().columns - 1
        print(CLEAR + text[:width], end="", file=sys.stderr, flush=True)

    def progress_line(text: str) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= QUIET_S:
            printed_at = time.monotonic()
            log(text)

    try:
        yield Reporter(log, progress if is_terminal else progress_line)
    finally:
        if is_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)
