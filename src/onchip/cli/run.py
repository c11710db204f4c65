"""onchip run: run a network on the rows of a file, or on random rows."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Exit, Option

from onchip.cli.options import (
    Device,
    Io,
    Json,
    Model,
    Precision,
    Seed,
    Shape,
    Tables,
    Threads,
    Verbose,
    Without,
    parse_shapes,
    parse_without,
)
from onchip.cli.output import print_device, print_json, print_message, progress, ranks_progress, rate
from onchip.errors import InputError, OnchipError, printable

if TYPE_CHECKING:
    from onchip.network.graph import Network
    from onchip.plan.plan import Plan
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.runtime.io.output import PartialOutput
    from onchip.runtime.io.row_sources import FittedRows

_LONG_S = 2.0  # longer building is logged


def run(
    context: Context,
    model: Model,
    rows: Annotated[
        Path | None,
        Argument(
            metavar="[INPUT]",
            show_default=False,
            help="Rows: .npy, idx or .bin (raw values), of any size; .csv, .npz, idx.gz; .txt (N, then N rows); "
            "- for standard input (.csv, .npy or .npz).",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        Option("--input", metavar="NAME=FILE", help="Rows of a named input, for a model with several inputs."),
    ] = None,
    shapes: Shape = None,
    padding: Annotated[
        int | None, Option(metavar="ID", help="Id that pads sentences at the end; lengths are computed from it.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Output file: .npy, .bin, .csv; for images .txt, .bmp, .png. Without it, some rows are printed.",
        ),
    ] = None,
    top: Annotated[
        int | None,
        Option(metavar="N", help="The N most likely classes per row, if the network stores their names."),
    ] = None,
    weights: Annotated[
        Path | None, Option(metavar="FILE", help="Weights of sentiment (params.bin) or faces (network.bin).")
    ] = None,
    count: Annotated[int | None, Option(metavar="N", help="Random rows to run instead of INPUT.")] = None,
    seed: Seed = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    io: Io = "",
    threads: Threads = None,
    batch: Annotated[int | None, Option(metavar="ROWS", help="Rows per launch; the results do not change.")] = None,
    scale: Annotated[
        float | None, Option(help="Convert rows to the network's float type and divide them by this.")
    ] = None,
    without: Without = None,
    tables: Tables = "fp32",
    debug: Annotated[
        bool, Option("--debug", help="On a GPU: synchronise after every launch and name the kernel that failed.")
    ] = False,
    ranks: Annotated[
        str | None,
        Option(metavar="N", help="Run as N MPI ranks on this machine, each with a GPU or some cores; or auto."),
    ] = None,
    gpus: Annotated[
        str | None, Option(metavar="N or I,J", help="Drive N GPUs, or the GPUs I,J, from one process.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue an interrupted run: compute the missing chunks of -o.")
    ] = False,
    deadline: Annotated[
        float, Option(metavar="SECONDS", help="End the job if a rank needs longer for one chunk.")
    ] = 120.0,
    plan: Annotated[bool, Option("--plan", help="Show the plan, as -v does.")] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Run a network on the rows of a file, or on random rows.

    \b
    Example:
      python -c "import numpy as np; np.save('x.npy', np.ones((9, 72), 'f4'))"
      onchip run decode x.npy -o out.npy
      onchip run faces --count 4 --seed 1 -o grid.png

    \b
    With your own files:
      onchip run sentiment --weights params.bin inputs.bin -o answers.bin
      onchip run faces --weights network.bin input.txt -o output.txt

    \b
    Networks from onchip train store their columns, classes and byte scale:
      onchip run net.onnx table.csv -o answers.csv
      cat table.csv | onchip run net.onnx - --top 3

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
    from onchip.runtime.distributed.launchers import is_one_of_many
    from onchip.runtime.distributed.supervise import Reporter, check_started_once, is_supervised, run_ranks

    if ranks not in (None, "1", "auto") and not (is_one_of_many() or is_supervised()):  # before the slow imports
        _check_request([*([rows] if rows else []), *_named_files(inputs or []).values()], count, seed, padding)
        _check_scale_out(ranks, rows, resume, output, deadline)
        with ranks_progress() as show:
            raise Exit(run_ranks(_parse_ranks(ranks), context.obj, show))

    from onchip.files import check_outputs
    from onchip.formats.tables.csv_writer import check_top, top_classes
    from onchip.plan.kernel import Job
    from onchip.runtime.distributed.follower import follow
    from onchip.runtime.distributed.leader import RankGroup
    from onchip.runtime.distributed.ranks import find_ranks
    from onchip.runtime.engine import apply_io
    from onchip.runtime.io.output import KEEP_S, PICTURES, check_output_suffix, open_output
    from onchip.runtime.io.stream import check_chunk
    from onchip.runtime.run_job import RunOptions, parse_gpus, ranks_for, start_job
    from onchip.workloads import WORKLOADS, model_name
    from onchip.workloads.job import job_network, run_record, weights_note

    found = find_ranks()
    reporter = Reporter(found)
    if found.rank:
        raise Exit(follow(found, reporter.chunk))
    with RankGroup(found, deadline, print_message if verbose else lambda text: None) as group:
        model, named = model_name(model), _named_files(inputs or [])
        _check_request([*([rows] if rows else []), *named.values()], count, seed, padding)
        file = None if model in WORKLOADS else model
        read = {f"--input {name}": path for name, path in named.items()}
        check_outputs({"MODEL": file, "INPUT": rows, "--weights": weights, **read}, {"--output": output})
        check_output_suffix(output)
        if batch is not None:
            check_chunk(batch)
        check_started_once(ranks, found)
        _check_scale_out(ranks, rows, resume, output, deadline)
        if is_piped := rows == Path("-"):
            rows = _read_stdin()
        how = RunOptions(device, threads, () if gpus is None else parse_gpus(gpus), batch, debug, deadline)
        has_lengths = padding is not None or "lengths" in named
        draws = output is not None and output.suffix.lower() in PICTURES
        net = job_network(model, weights, pixels=draws, lengths=has_lengths, shapes=parse_shapes(shapes))
        net = apply_io(net, io)
        classes = net.meaning.classes
        if top is not None:
            check_top(top, classes)
        disabled = parse_without(without)
        opened = _open_sources(net, rows, named, count, seed, scale, padding)
        with _naming_stdin(rows if is_piped else None), opened as sources:
            notes = [*weights_note(model, weights, net)]
            notes += [f"input: {note}" for source in sources for note in source.notes]
            for note in notes:
                print_message(note)
            total = len(sources[0])
            # All rows of the job, not of a chunk or a rank: work done once is amortised over all of them, and the plan,
            # and so the bits, do not depend on the number of ranks.
            job = Job(precision, max(1, total), without=disabled, tables=tables)
            if ranks == "auto" and found.size == 1:
                chosen_ranks, why = ranks_for(net, device, job)
                print_message(f"ranks: {chosen_ranks} (auto: {why})")
                if chosen_ranks > 1:
                    with ranks_progress() as show:
                        raise Exit(run_ranks(chosen_ranks, context.obj, show))
            files = {**({"INPUT": rows} if rows else {}), **named}
            options = {"count": count, "seed": seed, "scale": scale, "padding": padding, "io": io, "top": top}
            record = {} if output is None else run_record(model, net, files, job, options)
            # With several ranks, keep every chunk: if one rank dies, the launcher stops the others.
            keep_s = KEEP_S if found.size == 1 else 0.0
            with _log_partial(open_output(output, net, total, record, resume, keep_s, top)) as sink:
                if sink is not None and sink.found:
                    print_message(_earlier_run(sink, resume))
                started = time.perf_counter()
                log_building = functools.partial(_log_building, found)
                engines, chunks = start_job(net, sources, sink, job, how, found, group, log_building)
                engine = engines[0]
                chosen = _device_names([engine.chosen for engine in engines], found)
                print_device(chosen, engine.plan, max(verbose, plan), time.perf_counter() - started)
                what = f"run {net.name}"
                with progress(what, total) as update:

                    def on_progress(done: int, per_s: float) -> None:
                        update(done, rate(per_s))
                        reporter.progress(what, total, done, rate(per_s))

                    report = group.run(engines, sources, sink, chunks, on_progress, reporter.chunk)
    if report.bad_rows:
        first = f"the first is row {report.first_bad_row}"
        print_message(f"input: {report.bad_rows:,} rows contain NaN or Inf, {first}; they were run unchanged")
    shape = [report.rows, *net.output.row_shape]
    answers = top_classes(report.first_rows, classes, top or 1) if classes else []
    speed = f"{rate(report.rows_per_s)} with reading and writing, {rate(report.engine_rows_per_s)} in the engine"
    if not report.rows:
        speed = "the input has no rows: nothing was run"
    if as_json:
        print_json({
            "model": model, "weights": None if weights is None else str(weights),
            "input": "-" if is_piped else None if rows is None else str(rows),
            "count": count, "seed": seed, "padding": padding,
            "inputs": {name: str(path) for name, path in named.items()},
            "output": None if output is None else str(output),
            "notes": notes, "shape": shape, "dtype": net.output.dtype, "device": chosen,
            "ranks": found.size, "resumed_rows": report.resumed_rows,
            "precision": precision, "io": io or None, "tables": tables, "without": disabled,
            "seconds": report.seconds, "engine_seconds": report.engine_seconds,
            "rows_per_s": report.rows_per_s, "engine_rows_per_s": report.engine_rows_per_s,
            "bad_rows": report.bad_rows, "first_bad_row": report.first_bad_row,
            "first_rows": report.first_rows.tolist(), "first_answers": answers, "plan": engine.plan.to_dict(),
        })  # fmt: skip
    elif output is None:
        print(f"{net.output.dtype} {shape}: {speed}")
        for i, row in enumerate(report.first_rows):
            values = [f"{printable(label)} {share:.1%}" for label, share in answers[i]] if answers else [_short(row)]
            print(f"row {i}: {', '.join(values)}")
    else:
        print_message(f"wrote {output}: {net.output.dtype} {shape}, {speed}")


def _read_stdin() -> Path:
    """Copy stdin to a file that is removed at exit; its first bytes determine the format."""
    import atexit
    import shutil
    import sys
    import tempfile

    begin = sys.stdin.buffer.read(6)
    if not begin:
        expected, hint = "rows as .csv, .npy or .npz", "cat table.csv | onchip run MODEL -"
        raise InputError("standard input is empty", got="no bytes", expected=expected, hint=hint)
    suffix = ".npy" if begin == b"\x93NUMPY" else ".npz" if begin.startswith(b"PK") else ".csv"
    with tempfile.NamedTemporaryFile(suffix=suffix, prefix="onchip-stdin-", delete=False) as file:
        path = Path(file.name)
        atexit.register(path.unlink, missing_ok=True)
        file.write(begin)
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


@contextlib.contextmanager
def _naming_stdin(path: Path | None) -> Iterator[None]:
    """In errors about this file, print "standard input" instead of its temporary path."""
    try:
        yield
    except OnchipError as error:
        if path is None or str(path) not in error.what:
            raise
        what = error.what.replace(str(path), "standard input")
        raise type(error)(what, got=error.got, expected=error.expected, hint=error.hint) from None


def _parse_ranks(text: str) -> int:
    from onchip.network.reading import is_count

    if not is_count(text):
        raise InputError("bad number of ranks", got=text, expected="a number, or auto", hint="--ranks 2")
    return int(text)


def _check_scale_out(ranks: str | None, rows: Path | None, resume: bool, output: Path | None, deadline: float) -> None:
    if ranks is not None and rows == Path("-"):
        got, hint = f"--ranks {ranks} and standard input", "save it to a file first"
        raise InputError("ranks read rows from a file", got=got, expected="INPUT", hint=hint)
    if resume and output is None:
        raise InputError("nothing to resume", got="no --output", expected="the -o of the interrupted run")
    if not deadline > 0:
        raise InputError("bad deadline", got=f"{deadline:g}", expected="seconds, more than 0", hint="--deadline 120")


def _earlier_run(sink: PartialOutput, resume: bool) -> str:
    """The message about an earlier, incomplete run with the same output."""
    if not resume:
        return f"an earlier run did not complete {sink.path}: starting over (--resume would continue it)"
    if not sink.cuts:
        return f"nothing to resume: no chunk of {sink.path} is done"
    return f"resumed: {len(sink.records):,} of {len(sink.cuts):,} chunks are done"


@contextlib.contextmanager
def _log_partial(opened: contextlib.AbstractContextManager[PartialOutput | None]) -> Iterator[PartialOutput | None]:
    """As `opened`; log what remains of an output that is not completed."""
    sink = None
    try:
        with opened as sink:
            yield sink
    except BaseException:
        if sink is not None and sink.resume_hint:
            print_message(sink.resume_hint)
        raise


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


def _named_files(inputs: list[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for text in inputs:
        name, equals, file = text.partition("=")
        if not (name and equals and file) or name in named:
            expected = "NAME=FILE, each name once"
            raise InputError("bad --input", got=text, expected=expected, hint="--input lengths=lengths.npy")
        named[name] = Path(file)
    return named


def _check_request(files: Sequence[Path], count: int | None, seed: int | None, padding: int | None) -> None:
    if bool(files) == (count is not None):
        got = "neither" if count is None else f"{files[0]} and --count {count}"
        hint = "a file of rows, or --count 64 for random ones"
        raise InputError("choose the rows to run on", got=got, expected="INPUT or --count, one of them", hint=hint)
    if seed is not None and count is None:
        expected, hint = "--seed with --count", "leave it out: rows of a file are not random"
        raise InputError(
            "--seed is for random rows", got=f"--seed {seed} with {files[0]}", expected=expected, hint=hint
        )
    if padding is not None and count is not None:
        got, hint = f"--padding {padding} with --count {count}", "leave it out: random rows have none"
        raise InputError("--padding is for rows of a file", got=got, expected="INPUT", hint=hint)


@contextlib.contextmanager
def _open_sources(
    net: Network,
    rows: Path | None,
    named: Mapping[str, Path],
    count: int | None,
    seed: int | None,
    scale: float | None,
    padding: int | None,
) -> Iterator[Sequence[FittedRows]]:
    from onchip.runtime.io.row_sources import FittedRows, input_files, open_inputs, padded_inputs, random_inputs

    if count is not None:
        drawn = zip(random_inputs(net, count, seed or 0), net.inputs.values(), strict=True)
        yield [FittedRows(source, input_type, scale) for source, input_type in drawn]
        return
    counted = [padded_inputs(net)[1]] if padding is not None else []
    with open_inputs(net, input_files(net, rows, named, counted), scale, padding) as sources:
        yield sources


def _short(row: Any) -> str:
    values = [f"{value:.6g}" for value in row.reshape(-1)[:8].tolist()]
    return "  ".join(values) + ("  ..." if row.size > len(values) else "")
