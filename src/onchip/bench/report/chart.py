"""The charts of the documents, drawn from committed result files:

    python -m onchip.bench.report.chart docs/speedup.svg benchmarks/results
    python -m onchip.bench.report.chart docs/ladders/decode-h200.svg benchmarks/results/h200/ladder-decode.json

A file of a ladder gives the times of its rungs; several files the speedups of the README's table, in the same order.
--check only reports whether the file is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onchip.bench.report.bars import Bar, bar_chart
from onchip.bench.report.ladder_sections import draw_ladder, is_ladder
from onchip.bench.report.results import Results, Row, best_peer, case_title, machine_title, read_results
from onchip.bench.report.speedup_sections import SIDES, show_ratio, side
from onchip.bench.report.table import find_results, front_rows
from onchip.errors import OnchipError
from onchip.files import atomic_write, open_input
from onchip.svg import standalone

WIDTH = 860.0  # pixels


def draw_chart(files: Sequence[Results]) -> str:
    """The SVG file for these results."""
    if len(files) == 1 and is_ladder(files[0]):
        rows, machine = files[0].rows, machine_title(files[0].machine)
        title = f"Ladder {rows[0].workload}, {rows[0].case}, {machine}"
        return standalone(draw_ladder(files[0], WIDTH, title))
    return standalone(draw_speedups(front_rows(files)))


def draw_speedups(found: Sequence[tuple[Results, Row]]) -> str:
    """One bar per row that has a peer, on a log scale; 1x is the best peer."""
    bars = [bar for bar in (_bar(results, row) for results, row in found) if bar is not None]
    label = "Speedup of onchip over the best peer: " + "; ".join(f"{bar.label}: {bar.shown}" for bar in bars)
    kinds = [entry for entry in SIDES if any(bar.kind == entry.kind for bar in bars)]
    return bar_chart(label, bars, WIDTH, show_ratio, base=1.0, kinds=kinds, title="Speedup over the best peer")


def _bar(results: Results, row: Row) -> Bar | None:
    """None if no peer was measured."""
    peer = best_peer(results.rows, row)
    if peer is None or not peer.median_ms or not row.median_ms:
        return None
    machine = "CPU" if str(results.machine.get("device")).startswith("cpu") else machine_title(results.machine)
    label = f"{row.workload}, {case_title(row)} · {machine.removeprefix('NVIDIA ')}"
    ratio = peer.median_ms / row.median_ms
    return Bar(label, ratio, f"{ratio:.2f}x", peer.engine, side(ratio))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m onchip.bench.report.chart", description="Draw the charts of the documents."
    )
    parser.add_argument("picture", help="the .svg to write")
    parser.add_argument("results", nargs="+", help="result files, or folders of them")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the picture is out of date")
    options = parser.parse_args(argv)
    try:
        svg = draw_chart([read_results(path) for path in find_results(options.results)])
        if options.check:
            with open_input(options.picture) as file:
                is_same = file.read().decode() == svg
            print("up to date" if is_same else f"{options.picture} is out of date", file=sys.stderr)
            return int(not is_same)
        with atomic_write(options.picture) as out:
            out.write(svg.encode())
        return 0
    except OnchipError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
