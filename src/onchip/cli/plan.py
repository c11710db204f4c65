"""onchip plan: what would run, and why."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from onchip.cli.options import (
    Io,
    Json,
    Model,
    NoEarly,
    NoFold,
    NoMerge,
    NoPhases,
    NoWindows,
    PlanDevice,
    Precision,
    Tables,
    left_out,
)
from onchip.cli.talk import columns_of, print_json, say


def plan(
    model: Model,
    device: PlanDevice = "auto",
    batch: Annotated[int, Option(metavar="ROWS", help="Rows the plan is priced for.")] = 1024,
    precision: Precision = "fp32",
    io: Io = "",
    train: Annotated[
        str, Option(metavar="LOSS", show_default=False, help="Plan training: cross_entropy, half_sse or mse.")
    ] = "",
    optimiser: Annotated[str, Option(help="With --train: sgd, momentum or adam.")] = "sgd",
    no_fold: NoFold = False,
    no_merge: NoMerge = False,
    no_windows: NoWindows = False,
    no_phases: NoPhases = False,
    no_early: NoEarly = False,
    tables: Tables = "fp32",
    as_json: Json = False,
) -> None:
    """Show which kernel would run which layers, what it costs, and why.

    \b
    Example:
      onchip plan decode --device h200 --batch 2097152
      onchip plan sentiment --device h200 --batch 16384

    Nothing runs, no weight is computed, and the device need not be here. auto takes the device that should do a call
    with so many rows of the host sooner, and says why.
    """
    from onchip.plan.kernel import Job
    from onchip.runtime.engine import apply_io, plan_and_reason
    from onchip.workloads import load

    job = Job(precision, batch, train, optimiser, left_out(no_fold, no_merge, no_windows, no_phases, no_early), tables)
    made, chosen = plan_and_reason(apply_io(load(model), io), device, job)
    if as_json:
        print_json({**made.to_dict(), "chosen": chosen})
    else:
        if device == "auto":
            say(f"device: {chosen}")
        print(made.text(columns_of(sys.stdout)))
