"""The implementation of `onchip ladder`: choose the device, climb, describe, plot, write."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from onchip.bench.command import describe
from onchip.bench.frame import Outcome, Reporter
from onchip.bench.report import machine
from onchip.bench.report.results import Results, make_folder, make_row, result_path, write_results
from onchip.errors import DeviceError, InputError
from onchip.files import check_outputs, check_writable
from onchip.ladders import find_ladder
from onchip.ladders.counters import bank_conflicts
from onchip.ladders.frame import Climb, Ladder, Step, climb
from onchip.ladders.plot import need_matplotlib, save_plot
from onchip.ladders.ranks import begin
from onchip.measure.pace import Pace, show_ms
from onchip.network.names import known_name
from onchip.plan.device import Device
from onchip.runtime.cpu.backend import check_threads, this_cpu
from onchip.runtime.cuda.devices import cuda_devices
from onchip.runtime.distributed.ranks import Ranks
from onchip.runtime.placement import device_name, find_device


@dataclasses.dataclass(frozen=True)
class LadderOptions:
    """The options of a climb."""

    device: str = "auto"  # "cpu" or "cuda"
    rows: int | None = None  # default: the ladder's
    rungs: list[str] | None = None  # default: all
    threads: int | None = None  # default: all cores
    plot: Path | None = None  # file to write
    folder: Path | None = None  # for result files
    counters: bool = False  # count bank conflicts with ncu
    ranks: Ranks | None = None  # climb the rungs of several ranks, as rank 0
    commit: str | None = None  # the commit of a source tree without .git


def climb_ladder(
    name: str, options: LadderOptions, reporter: Reporter | None = None, pace: Pace | None = None
) -> tuple[Climb, Results]:
    """Climb a ladder; write a plot and a result file if the options name them."""
    reporter, commit = reporter or Reporter(), machine.commit(options.commit)
    device = find_ladder_device(options, reporter)
    ladder = (
        find_ladder(name, device.kind)
        if options.ranks is None
        else _over_ranks(name, device.kind, options.rows, options.ranks)
    )
    if options.counters and device.kind != "cuda":
        raise InputError(
            "--counters needs a GPU", got=device.name, expected="--device cuda", hint="run without --counters"
        )
    path = None
    if options.folder is not None:
        stem = f"ladder-{name}" + ("" if options.rows in (None, ladder.rows) else f"-{options.rows}")
        stem += "" if options.ranks is None else f"-ranks-{options.ranks.size}"
        path = result_path(options.folder, machine.device_slug(device), stem)
    check_outputs({}, {"--plot": options.plot, "--out": path})
    if options.plot is not None:
        need_matplotlib()
        check_writable(options.plot)
    if path is not None:
        make_folder(path)
        check_writable(path)
    measure_again = functools.partial(this_cpu, measure=True) if device.kind == "cpu" else None
    climbed = climb(ladder, rows=options.rows, rungs=options.rungs, threads=check_threads(options.threads), pace=pace,
                    progress=reporter.progress, measure_again=measure_again)  # fmt: skip
    device = this_cpu() if device.kind == "cpu" else device  # climb may have measured its rates again
    for rung, reason in climbed.skipped.items():
        reporter.log(f"skipped {rung}: {reason}")
    if options.counters:
        climbed = with_bank_conflicts(climbed, reporter)
    results = ladder_results(climbed, device, commit)
    if options.plot is not None:
        save_plot(climbed, options.plot)
        reporter.log(f"wrote {options.plot}")
    if path is not None:
        write_results(results, path)
        reporter.log(f"wrote {path}")
    return climbed, results


def _over_ranks(name: str, device: str, rows: int | None, ranks: Ranks) -> Ladder[Any]:
    """The ladder with its rungs for several ranks, which begin to prepare, and the floor of all their GPUs."""
    ladder = find_ladder(name, device)
    if not ladder.over_ranks:
        raise InputError(f"ladder {name} has no rungs for ranks", got=f"--ranks {ranks.size}", expected="one process",
                         hint="omit --ranks")  # fmt: skip
    devices = min(ranks.size, len(cuda_devices())) * ranks.machines if device == "cuda" else ranks.machines
    begin(ranks, device, rows or ladder.rows)
    return dataclasses.replace(
        ladder, rungs=ladder.over_ranks,
        floor_ms=lambda net, B, precision: ladder.floor_ms(net, B, precision) / devices,
    )  # fmt: skip


def find_ladder_device(options: LadderOptions, reporter: Reporter) -> Device:
    """The device to climb on. "auto": the GPU, if there is one."""
    requested = known_name(device_name(options.device), ("auto", "cpu", "cuda"), "device for a ladder", "--device auto")
    found, _, chosen = find_device(requested, options.threads)
    if requested == "auto":
        reporter.log(f"device: {chosen}")
    # Cached rates may be too low, if other programs ran meanwhile: rungs would beat their floors.
    return this_cpu(measure=True) if found.kind == "cpu" else found


def with_bank_conflicts(climbed: Climb, reporter: Reporter) -> Climb:
    """The same climb with each rung's bank conflicts, if ncu can count them."""
    reporter.progress("counting bank conflicts")
    try:
        rungs = [step.rung for step in climbed.steps if "launches" in step.facts]  # not those that run an engine
        counts = bank_conflicts(climbed.ladder, climbed.B, rungs)
    except DeviceError as error:
        reporter.log(f"bank conflicts not counted: {error.what}" + (f": {error.got}" if error.got else ""))
        return climbed
    steps = (
        dataclasses.replace(step, facts={**step.facts, "bank conflicts": counts[step.rung]})
        if step.rung in counts else step
        for step in climbed.steps
    )  # fmt: skip
    return dataclasses.replace(climbed, steps=tuple(steps))


def ladder_results(climbed: Climb, device: Device, commit: str) -> Results:
    """A climb as results: one engine "ladder:<rung>" per rung."""
    rows = tuple(
        make_row(
            climbed.ladder, f"{climbed.B} rows", f"ladder:{step.rung}", step.timing, step.verdict, work=climbed.B,
            precision=step.precision, floor_ms=step.floor_ms, threads=climbed.threads,
            setting=_rung_setting(step, climbed), extra=step.facts, kernels=step.kernels,
        )
        for step in climbed.steps
    )  # fmt: skip
    skipped = {f"ladder:{rung}": reason for rung, reason in climbed.skipped.items()}
    return describe(device, Outcome(rows, skipped), commit)


def _rung_setting(step: Step, climbed: Climb) -> str:
    scaled = "" if step.rows == climbed.B else f"timed on {step.rows:,} rows, scaled"
    machine = f" on {step.report_on}" if step.report_on else ""
    report = "" if step.report_ms is None else f"in the report {show_ms(step.report_ms)} ms{machine}"
    differs = f"two runs may differ: {step.nondeterministic}" if step.nondeterministic else ""
    return ", ".join(filter(None, [scaled, report, differs]))
