"""onchip profile: where the time of a network's calls goes."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument, Option

from onchip.cli.options import (
    WORKLOADS,
    Device,
    Io,
    Json,
    Model,
    Precision,
    Shape,
    Tables,
    Threads,
    Without,
    parse_shapes,
    parse_without,
)
from onchip.cli.output import print_json, progress, terminal_width
from onchip.cli.profiled import Trace, save_timeline
from onchip.errors import InputError


def profile(
    model: Model,
    rows: Annotated[int, Argument(metavar="ROWS", help="Rows per call.")] = 1024,
    shapes: Shape = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    io: Io = "",
    threads: Threads = None,
    without: Without = None,
    tables: Tables = "fp32",
    seconds: Annotated[float, Option(metavar="S", help="How long to run the network.")] = 2.0,
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Show where the time of a network's calls goes, kernel by kernel.

    \b
    Example:
      onchip profile decode 12800
      onchip profile faces 64 --trace faces.json

    It runs random rows, from host memory to host memory, half of the time with a recorder: a clock around each kernel,
    in so few of the calls that it takes less than 3% of their time. The table has the kernels with the most time first:
    time per call, share, the bytes and flop that the kernel must move and compute, their rates, the share of the
    hardware's floor, and the planner's estimate. An estimate that is off by more than 1.5x is reported: the planner may
    have chosen a slow kernel by it.
    """
    from onchip.files import check_outputs, check_writable
    from onchip.measure.profile_network import profile_network
    from onchip.plan.kernel import Job
    from onchip.runtime.engine import apply_io
    from onchip.workloads import load

    if rows < 1:
        raise InputError(
            "a profile needs rows", got=str(rows), expected="at least 1", hint=f"onchip profile {model} 64"
        )
    if not 0 < seconds <= 3600:
        raise InputError("bad --seconds", got=str(seconds), expected="more than 0, at most 3600", hint="--seconds 2")
    if trace is not None:
        check_outputs({"MODEL": None if model in WORKLOADS else model}, {"--trace": trace})
        check_writable(trace)
    net = apply_io(load(model, shapes=parse_shapes(shapes)), io)
    job = Job(precision, rows, parse_without(without), tables)
    with progress(f"profile {net.name}", 1) as update:
        found, calls = profile_network(net, rows, device, job, threads, seconds, update)
    if trace is not None:
        save_timeline(calls, trace)
    if as_json:
        print_json(found.to_dict())
    else:
        print(found.fitted(terminal_width(sys.stdout)))
