"""onchip run: run a network on the rows of a file, or on random rows."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from typer import Context, Exit

from onchip.cli import run_options as opt
from onchip.cli.debug import Debug, check_launches
from onchip.cli.options import Device, Io, Json, Model, Precision, Seed, Shape, Tables, Threads, Verbose, Without
from onchip.cli.output import print_device, print_message, progress, ranks_progress, rate
from onchip.cli.profiled import ShowProfile, Trace, profiled
from onchip.cli.run_report import RunResult, print_result
from onchip.cli.run_request import RunRequest
from onchip.errors import InputError

if TYPE_CHECKING:
    from onchip.network.graph import Network
    from onchip.plan.kernel import Job
    from onchip.plan.plan import Plan
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.runtime.distributed.supervise import Reporter
    from onchip.runtime.io.row_sources import FittedRows

_LONG_S = 2.0  # longer building is logged
_NOT_REQUESTED = ("context", "debug", "plan", "profile", "as_json", "verbose")  # not about what is run


def run(
    context: Context,
    model: Model,
    rows: opt.Rows = None,
    text: opt.Text = None,
    column: opt.Column = None,
    inputs: opt.Inputs = None,
    shapes: Shape = None,
    padding: opt.Padding = None,
    keep: opt.Keep = None,
    output: opt.Output = None,
    top: opt.Top = None,
    weights: opt.Weights = None,
    count: opt.Count = None,
    seed: Seed = None,
    grid: opt.Grid = None,
    walk: opt.Walk = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    io: Io = "",
    threads: Threads = None,
    batch: opt.Batch = None,
    scale: opt.Scale = None,
    without: Without = None,
    tables: Tables = "fp32",
    debug: Debug = False,
    ranks: opt.Ranks = None,
    gpus: opt.Gpus = None,
    resume: opt.Resume = False,
    deadline: opt.Deadline = 120.0,
    plan: opt.ShowPlan = False,
    profile: ShowProfile = False,
    trace: Trace = None,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Run a network on the rows of a file, or on random rows.

    \b
    Example:
      python -c "import numpy as np; np.save('x.npy', np.ones((9, 72), 'f4'))"
      onchip run decode x.npy -o out.npy
      onchip run faces --count 4 --seed 1 -o grid.png
      onchip run sentiment --text "a waste of time"

    \b
    Texts, with the shipped model or one from onchip train sentiment:
      onchip run sentiment reviews.csv --column text -o scores.csv
      onchip run sentiment.onnx - < sentences.txt -o scores.csv

    The name sentiment means the shipped model if there are texts (--text, or a .txt, .csv or .tsv), and with --weights,
    --count or a file of ids the network of the report.

    \b
    Here, faces is a small generator of portraits that comes with onchip:
    synthetic pictures, of no person. With --weights, and in other commands,
    it is the larger network of the workload.
      onchip run faces --grid 8x4 --seed 2 -o faces.png
      onchip run faces --count 5 --walk 12 -o walk.gif

    \b
    With your own files:
      onchip run sentiment --weights params.bin inputs.bin -o answers.bin
      onchip run faces --weights network.bin input.txt -o out.txt -o out.bmp
      onchip run clf.onnx x.npy -o label=y.npy -o probabilities=p.csv
      onchip run clf.onnx x.npy -o outputs.npz

    \b
    Networks from onchip train store their columns, classes and byte scale:
      onchip run net.onnx table.csv -o answers.csv
      cat table.csv | onchip run net.onnx - --top 3
      onchip run net.onnx data/*.parquet --keep id -o answers.parquet

    \b
    Variable-length sentences, from a file or by the padding id:
      onchip run sentiment --weights w.bin x.bin --input lengths=n.npy -o y.bin
      onchip run sentiment --weights w.bin x.bin --padding 0 -o y.bin

    INPUT is the first input's rows. If the embedding of the padding id is zero, neither is needed.

    \b
    On several GPUs, as MPI ranks, on a cluster; bit-identical to one process:
      onchip run faces --count 100000 -o faces.npy --gpus 4
      onchip run faces --count 100000 -o faces.npy --ranks 4
      mpiexec -n 16 onchip run faces --count 100000 -o faces.npy

    The output appears complete or not at all. Rows are processed in chunks: memory stays bounded. If a run is killed,
    OUTPUT.partial keeps the finished chunks and OUTPUT.manifest lists them: --resume computes the others.
    """
    # The parameters above, by name. Not context.params: with Typer 0.28 and earlier, its paths are still text.
    given = {name: value for name, value in locals().items() if name not in _NOT_REQUESTED}
    request = RunRequest(**{**given, "rows": opt.one_name(rows)}).with_count()
    check_launches(debug)
    if text:
        from onchip.cli.run_texts import run_texts

        with profiled(profile, None):
            run_texts(request, text, as_json, max(verbose, plan))
        return

    from onchip.runtime.distributed.launchers import is_one_of_many
    from onchip.runtime.distributed.supervise import Reporter, is_supervised

    if ranks not in (None, "1", "auto") and not (is_one_of_many() or is_supervised()):  # before the slow imports
        request.check_rows()
        request.check_scale_out()
        _start_ranks(_parse_ranks(ranks), context.obj)

    from onchip.runtime.distributed.follower import follow
    from onchip.runtime.distributed.leader import RankGroup
    from onchip.runtime.distributed.ranks import find_ranks, name_of
    from onchip.runtime.run_job import start_job

    all_ranks = find_ranks()
    reporter = Reporter(all_ranks)
    if all_ranks.rank:
        raise Exit(follow(all_ranks, reporter.chunk))
    with RankGroup(all_ranks, deadline, print_message if verbose else lambda text: None) as group:
        request = request.checked(all_ranks)
        options, net = request.run_options(), request.network()
        with request.open_sources(net) as sources:
            notes = _print_notes(request, net, sources)
            total = len(sources[0])
            job = request.job(total)
            if ranks == "auto" and all_ranks.size == 1:
                _start_best_ranks(net, device, job, context.obj)
            # The timeline is written when the output is complete.
            with profiled(profile, trace) as recorded, request.open_output(net, job, sources, all_ranks) as sink:
                options = replace(options, records=recorded is not None)
                started = time.perf_counter()
                log_building = functools.partial(_log_building, all_ranks)
                engines, chunks = start_job(net, sources, sink, job, options, all_ranks, group, log_building)
                used_plan = engines[0].plan
                devices = _device_names([engine.chosen for engine in engines], all_ranks)
                print_device(devices, used_plan, max(verbose, plan), time.perf_counter() - started)
                with _run_progress(f"run {net.name}", total, reporter) as on_progress:
                    report = group.run(engines, sources, sink, chunks, on_progress, reporter.chunk)
                if recorded is not None and all_ranks.size > 1:
                    recorded.add_ranks(name_of(0, all_ranks), group.recorded(used_plan))
    print_result(request, RunResult(net, used_plan, devices, all_ranks.size, notes, report), as_json)


def _start_ranks(count: int, args: Sequence[str]) -> NoReturn:
    """Run this command line as `count` ranks; exit with their exit code."""
    from onchip.runtime.distributed.supervise import run_ranks

    with ranks_progress() as show:
        raise Exit(run_ranks(count, args, show))


def _start_best_ranks(net: Network, device: str, job: Job, args: Sequence[str]) -> None:
    """Choose the number of ranks; if it is not 1, start them and exit."""
    from onchip.runtime.run_job import ranks_for

    count, why = ranks_for(net, device, job)
    print_message(f"ranks: {count} (auto: {why})")
    if count > 1:
        _start_ranks(count, args)


def _parse_ranks(text: str) -> int:
    from onchip.network.reading import is_count

    if not is_count(text):
        raise InputError("bad number of ranks", got=text, expected="a number, or auto", hint="--ranks 2")
    return int(text)


def _print_notes(request: RunRequest, net: Network, sources: Sequence[FittedRows]) -> list[str]:
    """Print the notes on the weights and the inputs; returns them."""
    from onchip.workloads.job import weights_note

    notes = [*weights_note(request.model, request.weights, net)]
    notes += [f"input: {note}" for source in sources for note in source.notes]
    for note in notes:
        print_message(note)
    return notes


def _device_names(devices: list[str], ranks: Ranks) -> str:
    """The devices of all workers, on one line."""
    if ranks.size > 1:
        hosts = len(set(ranks.hosts))
        return f"{devices[0]}; {ranks.size} ranks on {hosts} {'machine' if hosts == 1 else 'machines'}"
    return ", ".join(devices)


def _log_building(ranks: Ranks, plan: Plan) -> None:
    """Log if computing the derived weights takes long, and which rank computes them."""
    from onchip.runtime.cpu.weights import computing_rank

    seconds = plan.build_us * 1e-6
    if seconds > _LONG_S:
        size, who = plan.weight_bytes / 2**30, f", {computing_rank(plan, ranks)}" if ranks.size > 1 else ""
        print_message(f"building {size:.1f} GiB of weights: {plan.rewrite_flop:,} flop, about {seconds:.0f} s{who}")


@contextlib.contextmanager
def _run_progress(what: str, total: int, reporter: Reporter) -> Iterator[Callable[[int, float], None]]:
    """Yields on_progress(rows done, rows/s): for the bar of this process, or of the one that started the ranks."""
    with progress(what, total) as update:

        def on_progress(done: int, per_s: float) -> None:
            update(done, rate(per_s))
            reporter.progress(what, total, done, rate(per_s))

        yield on_progress
