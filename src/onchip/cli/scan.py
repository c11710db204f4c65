"""onchip scan: prefix sums, maxima, minima or products of the values in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onchip.cli.options import Device, Json, Threads
from onchip.cli.talk import print_json, progress, rate, say


def scan(
    file: Annotated[
        Path, Argument(metavar="FILE", help="Numbers: .npy of int32, int64, float32 or float64, of any size.")
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="OUT", help="What to write: .npy.")],
    op: Annotated[str, Option(help="sum, max, min or product.")] = "sum",
    exclusive: Annotated[bool, Option("--exclusive", help="y[i] without x[i]: sums begin with 0.")] = False,
    axis: Annotated[int, Option(help="Along which axis.")] = -1,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Running sums, maxima, minima or products of the numbers in a file.

    \b
    Example:
      python -c "import numpy as np; np.save('x.npy', np.arange(1000))"
      onchip scan x.npy -o sums.npy
      onchip scan x.npy -o largest.npy --op max

    y[i] = x[0] + ... + x[i], of x's dtype: ints wrap. The output appears whole or not at all. A flat array passes
    through in parts, and may be larger than memory.
    """
    from onchip.files import check_outputs
    from onchip.network.scan_op import ScanOp
    from onchip.runtime.io.scan_file import scan_file

    how = ScanOp(op, exclusive)
    check_outputs({"FILE": file}, {"--output": output})
    with progress(f"scan {file.name}", 1.0) as update:
        started = time.perf_counter()

        def tell(done: int, total: int) -> None:
            update(done / total, rate(done / (time.perf_counter() - started), "numbers"))

        report = scan_file(file, output, how, axis, device, threads, tell)
    if as_json:
        print_json({
            "input": file, "output": output, "op": op, "exclusive": exclusive, "axis": axis, "shape": report.shape,
            "dtype": report.dtype, "device": report.chosen, "seconds": report.seconds,
            "bytes_per_s": report.bytes_per_s,
        })  # fmt: skip
    else:
        size, speed = "x".join(map(str, report.shape)), f"{report.bytes_per_s / 1e9:.2f} GB/s"
        what = f"{'exclusive ' if exclusive else ''}{op} of {size} {report.dtype} on {report.chosen}"
        say(f"wrote {output}: {what}, {report.seconds:.3g} s, {speed} with reading and writing")
