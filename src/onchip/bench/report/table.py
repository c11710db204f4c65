"""The tables of results in README and ladder pages, generated from committed result files:

    python -m onchip.bench.report.table README.md benchmarks/results --front
    python -m onchip.bench.report.table docs/results.md benchmarks/results
    python -m onchip.bench.report.table docs/ladders/decode.md benchmarks/results/*/ladder-decode.json

Replaces the text between the two marker comments; --check only reports whether it is up to date. Files with only
rungs give a table of rungs; --front selects a few rows, one per kind of work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onchip.bench.report.results import (
    ACCURACY,
    Results,
    Row,
    best_peer,
    case_title,
    machine_title,
    read_results,
    short_commit,
    show_floor,
    show_rate,
    show_speedup,
)
from onchip.errors import FormatError, OnchipError
from onchip.files import atomic_write, open_input
from onchip.ladders.show import of_floor, times
from onchip.measure.pace import show_ms

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEAD = ("case", "onchip", "best peer", "speedup", "of floor")
# Device, workload and case of each row in the README.
FRONT = (
    ("h200", "decode", "2097152 rows, fp16"), ("h200", "sentiment", "16384 sentences, random ids, fp16"),
    ("h200", "faces", "5248 images, fp16"), ("h200", "scan", "2^28 numbers"),
    ("h200", "digits", "epoch, batch 64, uint8 pixels, tf32"), ("h200", "digits", "epoch, batch 64, float rows, tf32"),
    ("h200", "backprop", "epoch of 60000 patterns, uint8 pixels"),
    ("h200", "backprop", "epoch of 60000 patterns, float rows"),
    ("cpu-x86_64-2", "sentiment", "2048 sentences, random ids"), ("cpu-x86_64-2", "faces", "64 images"),
)  # fmt: skip
RUNG = "ladder:"
MANY_SIZES = 3
RUNG_HEAD = ("rung", "ms", "x first", "x before", "of floor", "max error")


def markdown(files: Sequence[Results]) -> str:
    """One table per file, of the cases that onchip was measured on, with its command; for ladders, their rungs."""
    if all(row.engine.startswith(RUNG) for results in files for row in results.rows):
        return "\n\n".join(_ladders(files))
    return "\n\n".join(_section(results) for results in files if _measured(results))


def _measured(results: Results) -> list[Row]:
    """The rows of onchip that have a time."""
    return [row for row in results.rows if row.engine == "onchip" and row.checked and row.median_ms is not None]


def _section(results: Results) -> str:
    """The `extra` properties of onchip's rows become columns."""
    rows = _measured(results)
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    lines = [[*_cells(results, row), *(_format(row.extra.get(name, "-")) for name in extras)] for row in rows]
    workloads = ", ".join(dict.fromkeys(row.workload for row in rows))
    where = f"## {workloads} on {machine_title(results.machine)}"
    return f"{where}\n\n{_source(results)}\n\n{_lines([*HEAD, *extras], lines)}"


def _source(results: Results) -> str:
    """The command and commit of a file."""
    return f"`{results.command}` at `{short_commit(results.commit)}`"


def front_rows(files: Sequence[Results]) -> list[tuple[Results, Row]]:
    """The rows of FRONT, in its order, each with its file."""
    found = {
        (results.machine.get("device"), row.workload, case_title(row)): (results, row)
        for results in files
        for row in _measured(results)
    }
    if missing := [key for key in FRONT if key not in found]:
        raise FormatError(
            "a row of the README table is missing", got=", ".join(missing[0]), expected="a row in a result file"
        )
    return [found[key] for key in FRONT]


def front(files: Sequence[Results]) -> str:
    """The table of FRONT; docs/results.md has the commands."""
    rows = [[row.workload, *_cells(results, row), machine_title(results.machine)] for results, row in front_rows(files)]
    return _lines(["workload", *HEAD, "machine"], rows)


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows])


def _ladders(files: Sequence[Results]) -> list[str]:
    """A table per file. Where the same rungs ran over three sizes or more, only the largest has one of its own; the
    times of all sizes are in another."""
    kinds: dict[tuple[str, ...], list[Results]] = {}
    for results in files:
        rungs = [row.engine for row in results.rows]
        kinds.setdefault((machine_title(results.machine), *rungs), []).append(results)
    tables = list[str]()
    for same in kinds.values():
        if len(same) < MANY_SIZES:
            tables += map(_rungs, same)
        else:
            by_size = sorted(same, key=lambda results: int(results.rows[0].case.split()[0]))
            tables += [_rungs(by_size[-1]), _times_by_size(by_size)]
    return tables


def _times_by_size(files: Sequence[Results]) -> str:
    """One line per file: the time of each rung, and the rungs' notes."""
    lines = []
    for results in files:
        notes: dict[str, list[str]] = {}
        for row in results.rows:
            if row.setting:
                notes.setdefault(row.setting, []).append(f"`{row.engine.removeprefix(RUNG)}`")
        note = "; ".join(f"{', '.join(rungs)}: {setting}" for setting, rungs in notes.items())
        lines.append([results.rows[0].case, *(show_ms(row.median_ms) for row in results.rows), note])
    head = [f"`{row.engine.removeprefix(RUNG)}`" for row in files[0].rows]
    sources = "; ".join(map(_source, files))
    return f"{_lines(['ms', *head, 'note'], lines)}\n\n{sources}"


def _rungs(results: Results) -> str:
    """One line per rung, and the machine; a wrong rung has no time. The `extra` properties become columns."""
    timed, lines = list[float](), []
    extras = list(dict.fromkeys(name for row in results.rows for name in row.extra))
    for row in results.rows:
        ratios, floor = ["-", "-"], "-"
        if row.median_ms is not None:
            timed.append(row.median_ms)
            floor = "-" if row.floor_ms is None else of_floor(row.floor_ms, row.median_ms)
            if len(timed) > 1:
                ratios = [times(timed[0] / timed[-1]), times(timed[-2] / timed[-1])]
        error = "-" if row.error is None else f"{row.error:.1e}"
        rung = f"`{row.engine.removeprefix(RUNG)}`"
        known = [_format(row.extra.get(name, "-")) for name in extras]
        lines.append([rung, show_ms(row.median_ms), *ratios, floor, error, *known, row.setting])
    cases = ", ".join(dict.fromkeys(_case_and_threads(row) for row in results.rows))
    where = machine_title(results.machine)
    return f"{_lines([*RUNG_HEAD, *extras, 'note'], lines)}\n\n{cases} on {where}: {_source(results)}"


def _case_and_threads(row: Row) -> str:
    return row.case if row.threads is None else f"{row.case}, {row.threads} threads"


def _format(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _cells(results: Results, row: Row) -> list[str]:
    """The columns of HEAD."""
    peer = best_peer(results.rows, row)
    floor = show_floor(row, float(results.machine.get("launch_us", 0)))
    return [case_title(row), _value(row), "-" if peer is None else f"{_value(peer)} ({peer.engine})",
            show_speedup(results.rows, row), floor]  # fmt: skip


def _value(row: Row) -> str:
    return f"{show_rate(row)} %" if row.unit == ACCURACY else f"{show_ms(row.median_ms)} ms"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def find_results(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """These files, and every result file in these folders, sorted by name."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not found:
        raise FormatError("no result files", got=", ".join(map(str, paths)), expected="files written by onchip bench")
    return found


def replace_table(text: str, table: str, where: str = "README.md") -> str:
    """`text` with everything between the markers replaced."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise FormatError(f"{where} has no markers for results", expected=f"{BEGIN}, then {END}, once each")
    return f"{text[: begin + len(BEGIN)]}\n\n{table}\n\n{text[end:]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m onchip.bench.report.table", description="Insert tables of results into a page."
    )
    parser.add_argument("readme", help="the file with the markers")
    parser.add_argument("results", nargs="+", help="result files, or folders of them")
    parser.add_argument("--front", action="store_true", help="only the rows of the README table")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the table is out of date")
    options = parser.parse_args(argv)
    try:
        with open_input(options.readme) as file:
            old = file.read().decode()
        make = front if options.front else markdown
        table = make([read_results(path) for path in find_results(options.results)])
        new = replace_table(old, table, options.readme)
        if options.check:
            print("up to date" if new == old else f"{options.readme} is out of date", file=sys.stderr)
            return int(new != old)
        if new != old:
            with atomic_write(options.readme) as out:
                out.write(new.encode())
        return 0
    except OnchipError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
