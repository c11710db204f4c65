"""onchip bench: measure and write result files."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onchip.bench import CASES
from onchip.cli.debug import Debug, check_launches, check_no_results, warn_of_times
from onchip.cli.options import Commit, Shape, completes, parse_shapes
from onchip.cli.output import print_json, print_message, terminal_width
from onchip.network.text import fitted_columns, plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from onchip.bench.report.compare import Change
    from onchip.measure.profile import Profile

Argument, Option = typer.Argument, typer.Option
RESULTS = Path("benchmarks") / "results"


def bench(
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME]...",
            help=f"{', '.join(CASES)}, default all; or your own network: a .onnx or .safetensors file.",
            autocompletion=completes(CASES, ".onnx", ".safetensors"),
        ),
    ] = None,
    shapes: Shape = None,
    device: Annotated[
        str,
        Option(help="auto (a GPU if available), cpu, cuda or cuda:N."),
    ] = "auto",
    peers: Annotated[
        bool,
        Option("--peers", help="Also time torch, onnxruntime, NumPy; on a GPU torch, Triton, CuPy, JAX, interleaved."),
    ] = False,
    threads: Annotated[int | None, Option(help="CPU threads of every engine; all cores if not given.")] = None,
    accuracy: Annotated[
        bool,
        Option("--accuracy", help="Also train on MNIST: digits, 10 seeds x 30 epochs; training, LeNet-5, 5 seeds x 4."),
    ] = False,
    rows: Annotated[
        str | None,
        Option(
            metavar="N,N", help="Rows of inference, patterns of backprop, elements of scan; default: the benchmark's."
        ),
    ] = None,
    batches: Annotated[
        str | None, Option(metavar="N,N", help="digits: rows per training step; default: five sizes.")
    ] = None,
    quick: Annotated[
        bool,
        Option("--quick", help="A first look in under two minutes: fewer samples and cases; says how long all take."),
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help=f"Write DIR/<device>/<name>.json; default: {RESULTS} for complete runs with --peers.",
        ),
    ] = None,
    commit: Commit = None,
    debug: Debug = False,
    profile: Annotated[
        bool,
        Option("--profile", help="After each case was timed, profile one more call of onchip's engines; on stderr."),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        Option(metavar="OLD NEW", help="Compare two result files instead; exit code 1 if a case became slower."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure onchip and its peers; write result files.

    \b
    Example:
      onchip bench decode --rows 1000 --quick

    \b
    On a GPU, with peers, and with your own network:
      onchip bench digits sentiment --device cuda --peers
      onchip bench net.onnx --peers

    \b
    What changed beyond noise since an older result:
      onchip bench --compare old.json new.json

    \b
    decode     72-64-64-4 on many rows and on few
    digits     training of 784-320-160-10: a step on a CPU, an epoch on a GPU
    backprop   full-batch epochs of 784-56-28-10
    sentiment  sentences of 16 tokens: folded tables, convolutions
    faces      64x64 images: in GPU memory, to the host, as bytes
    imported   small networks written in torch
    mlp        dense networks of other shapes
    scan       prefix sums
    pointwise  chains of elementwise layers, and a copy
    product    single Linear layers
    training   steps of networks that are no MLPs: forward, backward, update

    Every engine is checked against float64 before it is timed: a wrong one is not timed, and the exit code is 1.
    Runs of onchip and its peers are interleaved in one process. A result file holds raw samples, machine, versions,
    commit and command. A run without --peers, or with --rows, --batches, --threads or --quick, writes to --out only.
    All benchmarks with peers take an hour or more on two cores, one takes minutes.
    """
    if compare is not None:
        compare_files(*compare, as_json)
        return

    check_no_results(debug, out=out)
    check_launches(debug)
    warn_of_times(debug)

    from onchip.bench.cases.model import is_model
    from onchip.bench.command import (
        choose_device,
        is_whole,
        run_benchmarks,
        stderr_reporter,
    )
    from onchip.bench.options import Options, parse_counts
    from onchip.bench.quick import QUICK_NAMES, QUICK_ROWS
    from onchip.bench.report.results import make_tables, show
    from onchip.formats.load import shapes_error
    from onchip.runtime.cpu.backend import check_threads

    counts = parse_counts(rows, "rows") if rows else (), parse_counts(batches, "rows in a batch") if batches else ()
    is_own, sizes = any(map(is_model, names or [])), parse_shapes(shapes)
    if sizes is not None and not is_own:
        raise shapes_error("benchmarks")
    measured, worst = [], 0
    with stderr_reporter() as reporter:
        chosen = choose_device(device, threads, reporter)
        # For a user's network, auto measures every device: users want to know which one is faster.
        for each in ["cpu", chosen] if is_own and device.lower() == "auto" and chosen != "cpu" else [chosen]:
            options = Options(each, check_threads(threads), peers, accuracy, *counts, quick, sizes)
            if quick and not names:
                names, options = list(QUICK_NAMES), replace(options, rows=options.rows or QUICK_ROWS)
            folder = out or (RESULTS if is_whole(options) and not (is_own or debug) else None)
            if folder is None and not is_own and not debug:
                reporter.log(
                    f"no file is written: only a complete run with --peers goes to {RESULTS}; use --out DIR for others"
                )
            written, exit_code = run_benchmarks(
                names or [], options, folder, commit=commit, reporter=reporter,
                on_profile=partial(log_profile, reporter.log) if profile else None,
            )  # fmt: skip
            measured += [
                (name if each == chosen else f"{name} on {each}", results) for name, results in written.items()
            ]
            worst = max(worst, exit_code)
    if as_json:
        print_json({name: results.to_dict() for name, results in measured})
    else:
        for _, results in measured:
            show(make_tables(results))
    if worst:
        raise typer.Exit(worst)


def log_profile(log: Callable[[str], None], title: str, found: Profile) -> None:
    """Print the profile of one call of a case."""
    if found.trainings or found.engines:
        log(f"{title}: profile of one call\n{found.fitted(terminal_width(sys.stderr))}")
    else:
        log(f"{title}: no profile, as it calls no engine: it may replay a captured graph")


def compare_files(old: Path, new: Path, as_json: bool) -> None:
    """Print what changed between two result files; exit code 1 if one of onchip's cases became slower, or wrong."""
    from onchip.bench.report.compare import COVERAGE, SAME, compare_results, peer_drift
    from onchip.bench.report.results import read_results

    changes = compare_results(read_results(old), read_results(new))
    drift = peer_drift(changes)
    if as_json:
        print_json({"old": old, "new": new, "peers": drift, "changes": [asdict(change) for change in changes]})
    else:
        shown = [change for change in changes if change.verdict != SAME and not change.is_peer]
        head = ["workload", "case", "engine", "precision", "old ms", "new ms", "speedup", f"{COVERAGE:.0%}", ""]
        if shown:
            print(fitted_columns(head, list(map(_cells, shown)), terminal_width(sys.stdout), right=(4, 5, 6, 7)))
        same = sum(change.verdict == SAME and not change.is_peer for change in changes)
        print_message(f"{plural(same, 'case')} within noise" + (f"; peers {drift:.3f}x" if drift is not None else ""))
    if any(change.is_regression for change in changes):
        raise typer.Exit(1)


def _cells(change: Change) -> list[str]:
    times = ["" if ms is None else f"{ms:.4g}" for ms in (change.old_ms, change.new_ms)]
    speedup = "" if change.speedup is None else f"{change.speedup:.3f}x"
    interval = "" if change.low is None else f"{change.low:.3f}-{change.high:.3f}"
    return [change.workload, change.case, change.engine, change.precision, *times, speedup, interval, change.verdict]
