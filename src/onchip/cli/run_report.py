"""The results of `onchip run`, printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onchip.cli.output import print_json, print_message, rate
from onchip.errors import printable

if TYPE_CHECKING:
    from onchip.cli.run_request import RunRequest
    from onchip.network.graph import Network
    from onchip.plan.plan import Plan
    from onchip.runtime.distributed.schedule import StreamReport


@dataclass(frozen=True, eq=False)
class RunResult:
    network: Network
    plan: Plan
    device: str
    ranks: int
    notes: list[str]
    report: StreamReport

    @property
    def shape(self) -> list[int]:
        return [self.report.rows, *self.network.output.row_shape]

    @property
    def speed(self) -> str:
        if not self.report.rows:
            return "the input has no rows: nothing was run"
        whole, engine = rate(self.report.rows_per_s), rate(self.report.engine_rows_per_s)
        return f"{whole} with reading and writing, {engine} in the engine"


def print_result(request: RunRequest, result: RunResult, as_json: bool) -> None:
    """Print the first rows if there is no output file. With `as_json`, everything that is known."""
    from onchip.formats.tables.csv_writer import top_classes

    report, output, classes = result.report, result.network.output, result.network.meaning.classes
    if report.bad_rows:
        first = f"the first is row {report.first_bad_row}"
        print_message(f"input: {report.bad_rows:,} rows contain NaN or Inf, {first}; they were run unchanged")
    answers = top_classes(report.first_rows, classes, request.top or 1) if classes else []
    if as_json:
        print_json(_document(request, result, answers))
    elif request.output is None:
        print(f"{output.dtype} {result.shape}: {result.speed}")
        for i, row in enumerate(report.first_rows):
            values = [f"{printable(label)} {share:.1%}" for label, share in answers[i]] if answers else [_short(row)]
            print(f"row {i}: {', '.join(values)}")
    else:
        print_message(f"wrote {request.output}: {output.dtype} {result.shape}, {result.speed}")


def _document(request: RunRequest, result: RunResult, answers: Any) -> dict[str, Any]:
    report = result.report
    return {
        "model": request.model, "weights": request.weights, "input": request.rows,
        "column": request.column, "count": request.count, "seed": request.seed, "padding": request.padding,
        "inputs": request.named, "output": request.output,
        "notes": result.notes, "shape": result.shape, "dtype": result.network.output.dtype, "device": result.device,
        "ranks": result.ranks, "resumed_rows": report.resumed_rows,
        "precision": request.precision, "io": request.io or None, "tables": request.tables, "without": request.without,
        "seconds": report.seconds, "engine_seconds": report.engine_seconds,
        "rows_per_s": report.rows_per_s, "engine_rows_per_s": report.engine_rows_per_s,
        "bad_rows": report.bad_rows, "first_bad_row": report.first_bad_row,
        "first_rows": report.first_rows.tolist(), "first_answers": answers, "plan": result.plan.to_dict(),
    }  # fmt: skip


def _short(row: Any) -> str:
    values = [f"{value:.6g}" for value in row.reshape(-1)[:8].tolist()]
    return "  ".join(values) + ("  ..." if row.size > len(values) else "")
