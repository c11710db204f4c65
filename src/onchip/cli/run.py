"""onchip run: a network over the rows of a file, or over random ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from onchip.cli.options import (
    Device,
    Io,
    Json,
    Model,
    NoEarly,
    NoFold,
    NoMerge,
    NoPhases,
    NoWindows,
    Precision,
    Seed,
    Tables,
    Threads,
    Verbose,
    left_out,
)
from onchip.cli.talk import print_json, progress, rate, say, say_device
from onchip.errors import InputError, printable

if TYPE_CHECKING:
    from onchip.plan.plan import Plan
    from onchip.runtime.row_sources import FittedRows
    from onchip.spec.network import Network

_LONG_S = 2.0  # building that takes longer is announced


def run(
    model: Model,
    rows: Annotated[
        Path | None,
        Argument(
            metavar="[INPUT]",
            show_default=False,
            help="Rows: .npy, idx or .bin (bare numbers), of any size; .csv, .npz, idx.gz; .txt (N, then N rows of "
            "numbers); - for standard input (.csv, .npy or .npz).",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        Option("--input", metavar="NAME=FILE", help="Rows of an input by its name: of a model that has several."),
    ] = None,
    padding: Annotated[
        int | None, Option(metavar="ID", help="Sentences end with this id: what stands before it is their length.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", help="What to write: .npy, .bin, .csv; .txt, .bmp, .png for images. Else rows are shown."
        ),
    ] = None,
    top: Annotated[
        int | None,
        Option(metavar="N", help="The N likeliest classes of a row, where the network knows their names."),
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
    batch: Annotated[int | None, Option(metavar="ROWS", help="Rows at a time; the results do not change.")] = None,
    scale: Annotated[float | None, Option(help="Convert rows to the network's float type, divide by this.")] = None,
    no_fold: NoFold = False,
    no_merge: NoMerge = False,
    no_windows: NoWindows = False,
    no_phases: NoPhases = False,
    no_early: NoEarly = False,
    tables: Tables = "fp32",
    debug: Annotated[
        bool, Option("--debug", help="On a GPU: wait after every launch, and name the kernel that failed.")
    ] = False,
    plan: Annotated[bool, Option("--plan", help="Show the plan, as -v does.")] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Run a network over the rows of a file, or over random ones.

    \b
    Example:
      python -c "import numpy as np; np.save('x.npy', np.ones((9, 72), 'f4'))"
      onchip run decode x.npy -o out.npy
      onchip run faces --count 4 --seed 1 -o grid.png

    \b
    With files of your own:
      onchip run sentiment --weights params.bin inputs.bin -o answers.bin
      onchip run faces --weights network.bin input.txt -o output.txt

    \b
    What onchip train wrote knows its columns and classes, and how to scale bytes:
      onchip run net.onnx table.csv -o answers.csv
      cat table.csv | onchip run net.onnx - --top 3

    \b
    Sentences of several lengths, told by a file or by the id that fills them up:
      onchip run sentiment --weights params.bin inputs.bin --input lengths=lengths.npy -o answers.bin
      onchip run sentiment --weights params.bin inputs.bin --padding 0 -o answers.bin

    INPUT is the first input's rows. An embedding whose row of the padding is zero needs neither.

    The output appears whole or not at all. Rows pass through in pieces: memory stays bounded.
    """
    from onchip.files import check_outputs
    from onchip.formats.csv_writer import check_top, likeliest
    from onchip.plan.kernel import Job
    from onchip.runtime.engine import Engine, apply_io, place
    from onchip.runtime.stream import (
        PICTURES,
        check_output_suffix,
        check_piece,
        open_output,
        piece_rows,
        run_rows,
    )
    from onchip.workloads import WORKLOADS, model_name
    from onchip.workloads.job import job_network, weights_note

    model, named = model_name(model), _named_files(inputs or [])
    if rows == Path("-"):
        rows = _read_stdin()
    _check_request([*([rows] if rows else []), *named.values()], count, seed, padding)
    file = None if model in WORKLOADS else model
    read = {f"--input {name}": path for name, path in named.items()}
    check_outputs({"MODEL": file, "INPUT": rows, "--weights": weights, **read}, {"--output": output})
    check_output_suffix(output)
    if batch is not None:
        check_piece(batch)
    has_lengths = padding is not None or "lengths" in named
    draws = output is not None and output.suffix.lower() in PICTURES
    net = apply_io(job_network(model, weights, pixels=draws, lengths=has_lengths), io)
    classes = net.meaning.classes
    if top is not None:
        check_top(top, classes)
    without = left_out(no_fold, no_merge, no_windows, no_phases, no_early)
    with _open_sources(net, rows, named, count, seed, scale, padding) as sources:
        notes = [*weights_note(model, weights, net), *(f"input: {note}" for source in sources for note in source.notes)]
        for note in notes:
            say(note)
        total = len(sources[0])
        with open_output(output, net, total, top) as sink:
            started = time.perf_counter()
            # All rows of the job, not of a piece: work done once pays off over all of them.
            hint = max(1, total)
            placed = place(net, device, Job(precision, hint, without=without, tables=tables), threads, batch)
            _announce_building(placed[0])
            engine = Engine(*placed, debug=debug)
            engine.warm_up()
            say_device(engine.chosen, engine.plan, max(verbose, plan), time.perf_counter() - started)
            piece = piece_rows(engine.plan) if batch is None else batch
            with progress(f"run {net.name}", total) as update:
                report = run_rows(engine, sources, sink, piece, lambda n, per_s: update(n, rate(per_s)))
    if report.bad_rows:
        first = f"the first is row {report.first_bad_row}"
        say(f"input: {report.bad_rows:,} rows hold NaN or Inf, {first}; they passed through")
    shape = [report.rows, *net.output.row_shape]
    answers = likeliest(report.first_rows, classes, top or 1) if classes else []
    speed = f"{rate(report.rows_per_s)} with reading and writing, {rate(report.engine_rows_per_s)} in the engine"
    if as_json:
        print_json({
            "model": model, "weights": None if weights is None else str(weights),
            "input": None if rows is None else str(rows), "count": count, "seed": seed, "padding": padding,
            "inputs": {name: str(path) for name, path in named.items()},
            "output": None if output is None else str(output),
            "notes": notes, "shape": shape, "dtype": net.output.dtype, "device": engine.chosen,
            "precision": precision, "io": io or None, "tables": tables, "without": without,
            "seconds": report.seconds, "engine_seconds": report.engine_seconds,
            "rows_per_s": report.rows_per_s, "engine_rows_per_s": report.engine_rows_per_s,
            "bad_rows": report.bad_rows, "first_bad_row": report.first_bad_row,
            "first_rows": report.first_rows.tolist(), "first_answers": answers, "plan": engine.plan.to_dict(),
        })  # fmt: skip
    elif output is None:
        print(f"{net.output.dtype} {shape}: {speed}")
        for i, row in enumerate(report.first_rows):
            told = [f"{printable(label)} {share:.1%}" for label, share in answers[i]] if answers else [_short(row)]
            print(f"row {i}: {', '.join(told)}")
    else:
        say(f"wrote {output}: {net.output.dtype} {shape}, {speed}")


def _read_stdin() -> Path:
    """Standard input in a file, which is removed when the program ends; what it begins with says what it is."""
    import atexit
    import shutil
    import sys
    import tempfile

    begin = sys.stdin.buffer.read(6)
    suffix = ".npy" if begin == b"\x93NUMPY" else ".npz" if begin.startswith(b"PK") else ".csv"
    with tempfile.NamedTemporaryFile(suffix=suffix, prefix="onchip-stdin-", delete=False) as file:
        path = Path(file.name)
        atexit.register(path.unlink, missing_ok=True)
        file.write(begin)
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def _announce_building(plan: Plan) -> None:
    """Say that the weights which the rewrites derive take a while, if they do."""
    seconds = plan.build_us * 1e-6
    if seconds > _LONG_S:
        size = plan.weight_bytes / 2**30
        say(f"building {size:.1f} GiB of weights: {plan.rewrite_flop:,} flop, about {seconds:.0f} s")


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
        raise InputError("what to run over?", got=got, expected="INPUT or --count, one of them", hint=hint)
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
    from onchip.runtime.row_sources import FittedRows, input_files, open_inputs, padded_inputs, random_inputs

    if count is not None:
        drawn = zip(random_inputs(net, count, seed or 0), net.inputs.values(), strict=True)
        yield [FittedRows(source, given, scale) for source, given in drawn]
        return
    counted = [padded_inputs(net)[1]] if padding is not None else []
    with open_inputs(net, input_files(net, rows, named, counted), scale, padding) as sources:
        yield sources


def _short(row: Any) -> str:
    values = [f"{value:.6g}" for value in row.reshape(-1)[:8].tolist()]
    return "  ".join(values) + ("  ..." if row.size > len(values) else "")
