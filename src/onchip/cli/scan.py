"""onchip scan: prefix sums, maxima, minima or products of the values in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onchip.cli.debug import Debug, check_launches
from onchip.cli.options import Device, Json, Threads
from onchip.cli.output import print_json, print_message, progress, rate


def scan(
    file: Annotated[Path, Argument(metavar="FILE", help="A .npy of int32, int64, float32 or float64, of any size.")],
    output: Annotated[Path, Option("--output", "-o", metavar="OUT", help="The .npy to write.")],
    op: Annotated[str, Option(help="sum, max, min or product.")] = "sum",
    exclusive: Annotated[bool, Option("--exclusive", help="Exclude x[i] from y[i]: sums begin with 0.")] = False,
    axis: Annotated[int, Option(help="Axis to scan along.")] = -1,
    device: Device = "auto",
    threads: Threads = None,
    debug: Debug = False,
    as_json: Json = False,
) -> None:
    """Prefix sums, maxima, minima or products of the values in a file.

    \b
    Example:
      python -c "import numpy as np; np.save('x.npy', np.arange(1000))"
      onchip scan x.npy -o sums.npy
      onchip scan x.npy -o largest.npy --op max

    y[i] = x[0] + ... + x[i], in x's dtype: ints wrap. The output appears complete or not at all. A flat array is
    streamed in chunks and may be larger than memory.
    """
    from onchip.files import check_outputs
    from onchip.network.scan_op import ScanOp
    from onchip.runtime.io.scan_file import scan_file

    check_launches(debug)
    how = ScanOp(op, exclusive)
    check_outputs({"FILE": file}, {"--output": output})
    with progress(f"scan {file.name}", 1.0) as update:
        started = time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            update(done / total, rate(done / (time.perf_counter() - started), "elements"))

        report = scan_file(file, output, how, axis, device, threads, on_progress)
    if as_json:
        print_json({
            "input": file, "output": output, "op": op, "exclusive": exclusive, "axis": axis, "shape": report.shape,
            "dtype": report.dtype, "device": report.chosen, "seconds": report.seconds,
            "bytes_per_s": report.bytes_per_s,
        })  # fmt: skip
    else:
        size, speed = "x".join(map(str, report.shape)), f"{report.bytes_per_s / 1e9:.2f} GB/s"
        what = f"{'exclusive ' if exclusive else ''}{op} of {size} {report.dtype} on {report.chosen}"
        print_message(f"wrote {output}: {what}, {report.seconds:.3g} s, {speed} with reading and writing")
