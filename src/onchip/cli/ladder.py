"""onchip ladder: time every optimisation step, from the first version to the best."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from onchip.cli.debug import Debug, check_launches, check_no_results, warn_of_times
from onchip.cli.options import Commit, completes
from onchip.cli.output import print_json, terminal_width
from onchip.cli.ranks import start_ranks
from onchip.errors import InputError
from onchip.ladders import LADDERS

Argument, Option = typer.Argument, typer.Option


def ladder(
    context: typer.Context,
    name: Annotated[
        str | None,
        Argument(
            metavar="[NAME]",
            help=f"{', '.join(LADDERS)}; without a name they are listed.",
            autocompletion=completes(LADDERS),
        ),
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda: each has its own rungs.")] = "auto",
    rows: Annotated[int | None, Option(metavar="N", help="Number of rows; --list shows the report's.")] = None,
    rung: Annotated[list[str] | None, Option(metavar="NAME", help="Only this rung; may be repeated.")] = None,
    threads: Annotated[int | None, Option(help="CPU threads; all cores if not given.")] = None,
    ranks: Annotated[
        int | None, Option(metavar="N", help="Time the rungs over N MPI ranks on this machine instead.")
    ] = None,
    listed: Annotated[
        bool, Option("--list", help="Only list the rungs: ideas, reasons, report's times, work.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None, Option(metavar="RUNG RUNG", help="Only show the difference of two rungs' sources.")
    ] = None,
    counters: Annotated[
        bool, Option("--counters", help="Also what Nsight Compute (ncu) counts: bank conflicts.")
    ] = False,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Also draw the times: .png, .svg or .pdf.")] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Also write DIR/<device>/ladder-<name>.json.")] = None,
    commit: Commit = None,
    debug: Debug = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Time a job's versions from slow to fast: one idea per rung.

    \b
    Example:
      onchip ladder decode --rows 1000
      onchip ladder decode --list
      onchip ladder decode --diff fused-shared whole-shared

    Every rung is checked against float64 before it is timed. Without a name the ladders are listed.
    """
    from onchip.bench.command import stderr_reporter
    from onchip.bench.ladder import LadderOptions, climb_ladder
    from onchip.bench.report.results import show
    from onchip.ladders.ranks import end, follow
    from onchip.ladders.show import describe_ladders, ladder_tables, ladders_table, make_table
    from onchip.network.names import known_name

    if name is None and diff is not None:
        raise InputError("--diff needs a ladder", got="no name", expected=", ".join(LADDERS),
                         hint="onchip ladder decode --diff fused-shared whole-shared")  # fmt: skip
    if name is not None:
        name = known_name(name, LADDERS, "ladder", "onchip ladder")
    if name is None or listed:
        if as_json:
            print_json(describe_ladders(LADDERS if name is None else [name]))
        else:
            show(ladders_table() if name is None else ladder_tables(name))
        return
    if diff is not None:
        if as_json:
            raise InputError("a diff has no JSON", got="--diff and --json", expected="one of them", hint="omit --json")
        from onchip.ladders.diff import find_rungs, show_diff

        width = terminal_width(sys.stdout) if sys.stdout.isatty() else 0
        show(show_diff(*find_rungs(name, device, diff), width))
        return
    check_no_results(debug, out=out, plot=plot)
    check_launches(debug)
    options = LadderOptions(device, rows, rung, threads, plot, out, counters, commit=commit)
    found = start_ranks(ranks, context.obj)
    if found.rank:
        follow(name, threads, found)
        return
    warn_of_times(debug)
    try:
        with stderr_reporter() as reporter:
            options = dataclasses.replace(options, ranks=found if found.size > 1 else None)
            climb, results = climb_ladder(name, options, reporter)
    finally:
        end(found)
    if as_json:
        print_json(results.to_dict())
    else:
        show(make_table(climb))
    if not climb.all_right:
        raise typer.Exit(1)
