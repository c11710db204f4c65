"""onchip run: a network over the rows of a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onchip.cli.options import Device, Json, Model, Precision, Threads, Verbose
from onchip.cli.talk import print_json, progress, rate, say, say_device


def run(
    model: Model,
    rows: Annotated[Path, Argument(metavar="INPUT", help="Rows: .npy, idx or idx.gz; may be larger than memory.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="The .npy to write; without it the first rows are shown.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    batch: Annotated[int | None, Option(metavar="ROWS", help="Rows at a time; the results do not change.")] = None,
    scale: Annotated[float | None, Option(help="Convert rows to the network's float type, divide by this.")] = None,
    plan: Annotated[bool, Option("--plan", help="Show the plan, as -v does.")] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Run a network over the rows of a file.

    \b
    Example:
      python -c "import numpy as np; np.save('rows.npy', np.ones((1000, 72), 'float32'))"
      onchip run decode rows.npy -o out.npy

    The output appears whole or not at all. Rows pass through in pieces: memory stays bounded.
    """
    from onchip.runtime.engine import compile
    from onchip.runtime.stream import FittedRows, open_output, piece_rows, run_rows, warm_up
    from onchip.spec.arrays import open_rows
    from onchip.workloads import load

    net = load(model)
    piece = piece_rows(net) if batch is None else batch
    with open_rows(rows) as source:
        fitted = FittedRows(source, net.input, scale)
        for note in fitted.notes:
            say(f"input: {note}")
        with open_output(output, net, len(fitted)) as sink:
            started = time.perf_counter()
            engine = compile(net, device, precision, threads, batch_hint=piece)
            warm_up(engine)
            say_device(engine.chosen, engine.plan, max(verbose, plan), time.perf_counter() - started)
            with progress(f"run {net.name}", len(fitted)) as update:
                report = run_rows(engine, fitted, sink, piece, lambda n, per_s: update(n, rate(per_s)))
    if report.bad_rows:
        first = f"the first is row {report.first_bad_row}"
        say(f"input: {report.bad_rows:,} rows hold NaN or Inf, {first}; they passed through")
    shape = [report.rows, *net.output.row_shape]
    speed = f"{rate(report.rows_per_s)} with reading and writing, {rate(report.engine_rows_per_s)} in the engine"
    if as_json:
        print_json({
            "model": model, "input": str(rows), "output": None if output is None else str(output),
            "notes": fitted.notes, "shape": shape, "dtype": net.output.dtype, "device": engine.chosen,
            "precision": precision, "seconds": report.seconds, "engine_seconds": report.engine_seconds,
            "rows_per_s": report.rows_per_s, "engine_rows_per_s": report.engine_rows_per_s,
            "bad_rows": report.bad_rows, "first_bad_row": report.first_bad_row,
            "first_rows": report.first_rows.tolist(), "plan": engine.plan.to_dict(),
        })  # fmt: skip
    elif output is None:
        print(f"{net.output.dtype} {shape}: {speed}")
        for i, row in enumerate(report.first_rows):
            print(f"row {i}: {_short(row)}")
    else:
        say(f"wrote {output}: {net.output.dtype} {shape}, {speed}")


def _short(row: Any) -> str:
    values = [f"{value:.6g}" for value in row.reshape(-1)[:8].tolist()]
    return "  ".join(values) + ("  ..." if row.size > len(values) else "")
