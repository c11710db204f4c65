"""onchip check: the error of every device and precision."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from onchip.cli.debug import Debug, check_launches
from onchip.cli.options import Json, Model, Shape, Tables, parse_shapes
from onchip.cli.output import print_json, print_message, progress, terminal_width
from onchip.network.text import fitted_columns

if TYPE_CHECKING:
    from onchip.runtime.check import CheckRow


def check(
    model: Model,
    shapes: Shape = None,
    rows: Annotated[int | None, Option(help="Number of random rows; default 1000, fewer for large networks.")] = None,
    seed: Annotated[int, Option(help="Seed of the random rows.")] = 0,
    tables: Tables = "fp32",
    debug: Debug = False,
    as_json: Json = False,
) -> None:
    """Compare every device and precision with a float64 reference.

    \b
    Example:
      onchip check decode --rows 200

    The baseline is a naive run in the same precision: NumPy, one operation at a time. An engine passes if its error
    is at most twice the baseline's plus 4 ulp, and if a row has the same bits in batches of 1, 2, 7 and all rows.
    Exit code 1 if an engine fails.

    With --tables, embeddings are folded and the baseline uses tables that are rounded once, so the error is the cost
    of the smaller tables.
    """
    from onchip.runtime.check import MEASURE, check_network
    from onchip.workloads import load

    check_launches(debug)
    net = load(model, shapes=parse_shapes(shapes))
    with progress(f"check {net.name}", 1) as update:
        report = check_network(net, rows, seed, update, tables)
    if as_json:
        print_json({
            "network": report.network, "rows": report.rows, "seed": seed, "tables": tables, "measure": MEASURE,
            "passed": report.passed, "no_cuda": report.no_cuda,
            "checks": [
                {**asdict(row), "allowed": row.allowed, "ratio": row.ratio, "verdict": row.verdict}
                for row in report.checks
            ],
        })  # fmt: skip
    else:
        head = [
            "device", "precision", "kernels", "max error", "naive error", "naive in", "ratio", "same bits", "verdict",
        ]  # fmt: skip
        cells = [_cells(row) for row in report.checks]
        print(fitted_columns(head, cells, terminal_width(sys.stdout), right=(3, 4, 6)))
        print_message(f"error: {MEASURE} over {report.rows:,} random rows (seed {seed}), against float64")
        print_message(
            "naive: NumPy, one operation at a time, rounded after each; float32 in place of tf32, which NumPy lacks"
        )
        if report.no_cuda is not None:
            print_message(f"cuda: not available: {report.no_cuda}")
    if not report.passed:
        raise Exit(1)


def _cells(row: CheckRow) -> list[str]:
    naive = [_error_text(row.naive_error), row.naive_dtype]
    if row.error is None:
        return [row.device, row.precision, "", "", *naive, "", "", f"not available: {row.reason}"]
    same = "yes" if row.unequal_batch is None else f"NO, batch {row.unequal_batch}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [row.device, row.precision, ", ".join(row.kernels), _error_text(row.error), *naive, ratio, same, row.verdict]


def _error_text(error: float) -> str:
    return "overflow" if error == float("inf") else f"{error:.1e}"
