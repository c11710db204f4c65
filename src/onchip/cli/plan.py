"""onchip plan: which kernels would run, and why."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from onchip.cli.options import (
    WORKLOADS,
    Io,
    Json,
    Model,
    PlanDevice,
    Precision,
    Shape,
    Tables,
    Without,
    parse_shapes,
    parse_without,
)
from onchip.cli.output import print_json, print_message, terminal_width
from onchip.errors import InputError
from onchip.network.training import LOSSES

if TYPE_CHECKING:
    from onchip.plan.plan import Plan


def plan(
    model: Model,
    shapes: Shape = None,
    device: PlanDevice = "auto",
    batch: Annotated[int, Option(metavar="ROWS", help="Rows per call, for which the plan is chosen.")] = 1024,
    precision: Precision = "fp32",
    io: Io = "",
    train: Annotated[str, Option(metavar="LOSS", show_default=False, help=f"Plan training: {', '.join(LOSSES)}.")] = "",
    optimiser: Annotated[str, Option(help="With --train: sgd, momentum, nesterov, adam or adamw.")] = "sgd",
    without: Without = None,
    tables: Tables = "fp32",
    nodes: Annotated[int | None, Option(metavar="N", help="Predict the job's time on N machines.")] = None,
    gpus_per_node: Annotated[int | None, Option(metavar="N", help="GPUs per machine.")] = None,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Also write the plan as a picture with details: a page.")
    ] = None,
    svg: Annotated[Path | None, Option("--svg", metavar="FILE", help="Also write the plan as a picture.")] = None,
    as_json: Json = False,
) -> None:
    """Show which kernel would run which layers, what it costs, and why.

    \b
    Example:
      onchip plan decode --device h200 --batch 2097152
      onchip plan sentiment --device h200 --batch 16384
      onchip plan faces --device h200 --html faces.html
      onchip plan faces --device h200 --batch 1000000 --nodes 64 --gpus-per-node 8

    Nothing runs, no weight is computed, and the device need not be present. auto chooses the device that is estimated
    faster for a call with --batch rows in host memory, and prints the reason.
    """
    from onchip.files import check_outputs, check_writable
    from onchip.network.training import TrainingStep
    from onchip.plan.kernel import Job
    from onchip.plan.scale_out import predict, table
    from onchip.runtime.engine import apply_io
    from onchip.runtime.placement import plan_and_reason
    from onchip.train.step import step_of
    from onchip.workloads import load

    if optimiser != "sgd" and not train:
        got, hint = "--optimiser without --train", "--train cross_entropy"
        raise InputError("nothing to train", got=got, expected="--train too", hint=hint)
    check_outputs({"MODEL": None if model in WORKLOADS else model}, {"--html": html, "--svg": svg})
    for path in filter(None, (html, svg)):
        check_writable(path)
    net = apply_io(load(model, shapes=parse_shapes(shapes)), io)
    net = step_of(net, TrainingStep(train, optimiser)) if train else net
    planned, chosen = plan_and_reason(net, device, Job(precision, batch, parse_without(without), tables))
    predicted = []
    if nodes is not None or gpus_per_node is not None:
        most, each = 1 if nodes is None else nodes, 1 if gpus_per_node is None else gpus_per_node
        smaller = [(1, 1), (1, each), *((2**i, each) for i in range(1, most.bit_length())), (most, each)]
        sizes = [size for size in dict.fromkeys(smaller) if size[0] <= most]
        predicted = [predict(planned, batch, *size) for size in sizes]
    save_picture(planned, html, svg)
    if as_json:
        print_json({**planned.to_dict(), "chosen": chosen, "predicted": [
            {**asdict(each), "seconds": each.seconds, "bottleneck": each.bottleneck} for each in predicted
        ]})  # fmt: skip
    else:
        if device == "auto":
            print_message(f"device: {chosen}")
        print(planned.text(terminal_width(sys.stdout)))
        if predicted:
            print(table(predicted))


def save_picture(planned: Plan, html: Path | None, svg: Path | None) -> None:
    """Write the plan as a page and as a picture, as far as requested."""
    from onchip.bench.report.plan_page import plan_page
    from onchip.files import atomic_write
    from onchip.plan.picture import plan_picture
    from onchip.svg import standalone

    for path, draw in ((html, plan_page), (svg, lambda planned: standalone(plan_picture(planned)))):
        if path is not None:
            with atomic_write(path) as file:
                file.write(draw(planned).encode())
            print_message(f"wrote {path}")
