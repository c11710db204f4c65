"""The results of `onchip run`, printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onchip.cli.output import print_json, print_message, rate
from onchip.errors import printable

if TYPE_CHECKING:
    from onchip.cli.run_request import RunRequest
    from onchip.network.graph import Network
    from onchip.network.recipe import Array
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
    def shapes(self) -> dict[str, list[int]]:
        """Of the results, by output."""
        types = ((name, self.network.types[name]) for name in self.network.outputs)
        return {name: [self.report.rows, *row_type.row_shape] for name, row_type in types}

    @property
    def text(self) -> str:
        """Dtype and shape of every output."""
        has_one = len(self.network.outputs) == 1
        parts = [(name, f"{self.network.types[name].dtype} {shape}") for name, shape in self.shapes.items()]
        return ", ".join(text if has_one else f"{printable(name)} {text}" for name, text in parts)

    def first_rows(self, name: str) -> Array:
        from onchip.runtime.io.packed import unpack

        return unpack(self.report.first_rows, self.network, name)

    @property
    def speed(self) -> str:
        if not self.report.rows:
            return "the input has no rows: nothing was run"
        whole, engine = rate(self.report.rows_per_s), rate(self.report.engine_rows_per_s)
        return f"{whole} with reading and writing, {engine} in the engine"


def print_result(request: RunRequest, result: RunResult, as_json: bool) -> None:
    """Print the first rows if there is no output file. With `as_json`, everything that is known."""
    from onchip.formats.tables.csv_writer import top_classes

    report, net = result.report, result.network
    classes = net.meaning.classes if len(net.outputs) == 1 else ()
    if report.bad_rows:
        first = f"the first is row {report.first_bad_row}"
        print_message(f"input: {report.bad_rows:,} rows contain NaN or Inf, {first}; they were run unchanged")
    answers = top_classes(report.first_rows, classes, request.top or 1) if classes else []
    if as_json:
        print_json(_document(request, result, answers))
    elif not request.output:
        print(f"{result.text}: {result.speed}")
        firsts = {name: result.first_rows(name) for name in net.outputs}
        for i in range(len(report.first_rows)):
            values = [f"{printable(label)} {share:.1%}" for label, share in answers[i]] if answers else []
            values = values or [_short(rows[i]) for rows in firsts.values()]
            print(f"row {i}: {', '.join(values)}")
    else:
        files = ", ".join(str(target.path) for target in request.targets)
        print_message(f"wrote {files}: {result.text}, {result.speed}")


def _document(request: RunRequest, result: RunResult, answers: Any) -> dict[str, Any]:
    report, net = result.report, result.network
    firsts = {name: result.first_rows(name).tolist() for name in net.outputs}
    (shape, *others), targets = result.shapes.values(), [str(target) for target in request.targets]
    dtypes = {name: net.types[name].dtype for name in net.outputs}
    has_one = not others
    return {
        "model": request.model, "weights": request.weights, "input": request.rows,
        "column": request.column, "count": request.count, "seed": request.seed, "padding": request.padding,
        "inputs": request.named, "output": targets if len(targets) > 1 else "".join(targets) or None,
        "notes": result.notes, "shape": shape if has_one else result.shapes,
        "dtype": dtypes[net.outputs[0]] if has_one else dtypes, "device": result.device,
        "ranks": result.ranks, "resumed_rows": report.resumed_rows,
        "precision": request.precision, "io": request.io or None, "tables": request.tables, "without": request.without,
        "seconds": report.seconds, "engine_seconds": report.engine_seconds,
        "rows_per_s": report.rows_per_s, "engine_rows_per_s": report.engine_rows_per_s,
        "bad_rows": report.bad_rows, "first_bad_row": report.first_bad_row,
        "first_rows": firsts[net.outputs[0]] if has_one else firsts, "first_answers": answers,
        "plan": result.plan.to_dict(),
    }  # fmt: skip


def _short(row: Any) -> str:
    values = [f"{value:.6g}" for value in row.reshape(-1)[:8].tolist()]
    return "  ".join(values) + ("  ..." if row.size > len(values) else "")
