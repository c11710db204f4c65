"""The README's table of results, made from committed result files:

    python -m onchip.bench.table README.md benchmarks/results

It replaces what stands between the two marker comments; --check only says whether that is up to date.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onchip.bench.results import ACCURACY, Results, Row, best_peer, read_results, show_floor, show_speedup
from onchip.errors import FormatError, OnchipError
from onchip.files import atomic_write, open_input
from onchip.ladders.measure import show_ms

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEAD = ("workload", "case", "onchip", "best peer", "speed-up", "of floor", "machine", "command")


def markdown(files: Iterable[Results]) -> str:
    """A row for every case that onchip was measured on, with the command that made it."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for results in files:
        for row in results.rows:
            if row.engine == "onchip" and row.checked and row.median_ms is not None:
                lines.append("| " + " | ".join(_cell(cell) for cell in _cells(results, row)) + " |")
    return "\n".join(lines)


def _cells(results: Results, row: Row) -> list[str]:
    peer = best_peer(results.rows, row)
    machine = f"{results.machine.get('name')}, {results.machine.get('cores')} cores"
    case = row.case if row.precision == "fp32" else f"{row.case}, {row.precision}"
    floor = show_floor(row, float(results.machine.get("launch_us", 0)))
    return [row.workload, case, _value(row), "-" if peer is None else f"{_value(peer)} ({peer.engine})",
            show_speedup(results.rows, row), floor, machine, f"`{results.command}`"]  # fmt: skip


def _value(row: Row) -> str:
    return f"{row.rate:.2f} %" if row.unit == ACCURACY else f"{show_ms(row.median_ms)} ms"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def find_results(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """These files, and every result file in these folders, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not found:
        raise FormatError("no result files", got=", ".join(map(str, paths)), expected="files that onchip bench wrote")
    return found


def replace_table(text: str, table: str, where: str = "README.md") -> str:
    """`text` with everything between the markers exchanged."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise FormatError(f"{where} has no place for results", expected=f"{BEGIN}, later {END}, once each")
    return f"{text[: begin + len(BEGIN)]}\n\n{table}\n\n{text[end:]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m onchip.bench.table", description="Put result files into a README.")
    parser.add_argument("readme", help="the file with the markers")
    parser.add_argument("results", nargs="+", help="result files, or folders of them")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the table is out of date")
    options = parser.parse_args(argv)
    try:
        with open_input(options.readme) as file:
            before = file.read().decode()
        table = markdown(read_results(path) for path in find_results(options.results))
        after = replace_table(before, table, options.readme)
        if options.check:
            print("up to date" if after == before else f"{options.readme} is out of date", file=sys.stderr)
            return int(after != before)
        if after != before:
            with atomic_write(options.readme) as out:
                out.write(after.encode())
        return 0
    except OnchipError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
