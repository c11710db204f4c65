"""The chart of the README: speedup over the best peer, drawn from committed result files.

    python -m onchip.bench.report.chart docs/speedup.svg benchmarks/results

It shows the cases of the README's table, in the same order; --check only reports whether the file is up to date.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from html import escape

from onchip.bench.report.results import Results, Row, best_peer, case_title, machine_title, read_results
from onchip.bench.report.table import find_results, front_rows
from onchip.errors import OnchipError
from onchip.files import atomic_write, open_input

_LEFT, _RIGHT, _TOP, _LINE = 350, 690, 46, 26  # pixels: where bars begin and end, the top margin, the line height
_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_STYLE = (
    "text{fill:#1f2328}.dim{fill:#656d76}.faster{fill:#0969da}.slower{fill:#bc4c00}.grid{stroke:#d1d9e0}"
    ".one{stroke:#656d76;stroke-width:1.4}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}"
    ".faster{fill:#4493f8}.slower{fill:#db6d28}.grid{stroke:#3d444d}.one{stroke:#9198a1}}"
)


def draw_speedups(found: Sequence[tuple[Results, Row]]) -> str:
    """An SVG with one bar per row that has a peer, on a log scale; 1x is the best peer."""
    bars = [_bar(results, row) for results, row in found]
    shown = [bar for bar in bars if bar is not None]
    ratios = [ratio for _, ratio, _ in shown] or [1.0]
    low = max(tick for tick in _TICKS if tick <= min(1.0, *ratios) or tick == _TICKS[0])
    high = min(tick for tick in _TICKS if tick >= max(2.0, *ratios) or tick == _TICKS[-1])
    height = _TOP + _LINE * len(shown) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" font-family="system-ui, sans-serif" '
        f'font-size="13">',
        f"<title>Speedup of onchip over the best peer</title><style>{_STYLE}</style>",
        '<text x="10" y="20" font-weight="600">Speedup over the best peer</text>',
    ]
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        x = _x_of(tick, low, high)
        kind = "one" if tick == 1 else "grid"
        lines.append(f'<path class="{kind}" d="M{x:.1f} {_TOP - 8}V{height - 8}"/>')
        lines.append(f'<text class="dim" x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">{tick:g}x</text>')
    for i, (title, ratio, peer) in enumerate(shown):
        lines += _draw_bar(title, ratio, peer, _TOP + _LINE * i, low, high)
    return "\n".join([*lines, "</svg>", ""])


def _bar(results: Results, row: Row) -> tuple[str, float, str] | None:
    """Label, speedup and peer; None if no peer was measured."""
    peer = best_peer(results.rows, row)
    if peer is None or not peer.median_ms or not row.median_ms:
        return None
    machine = "CPU" if str(results.machine.get("device")).startswith("cpu") else machine_title(results.machine)
    title = f"{row.workload}, {case_title(row)} · {machine.removeprefix('NVIDIA ')}"
    return title, peer.median_ms / row.median_ms, peer.engine


def _draw_bar(title: str, ratio: float, peer: str, y: float, low: float, high: float) -> list[str]:
    one, end = _x_of(1.0, low, high), _x_of(min(max(ratio, low), high), low, high)
    kind, label_x = "faster" if ratio >= 1 else "slower", max(one, end) + 6
    return [
        f'<text x="{_LEFT - 10}" y="{y + 13}" text-anchor="end" font-size="12">{escape(title)}</text>',
        f'<rect class="{kind}" x="{min(one, end):.1f}" y="{y + 1}" width="{abs(end - one):.1f}" height="16" rx="2"/>',
        f'<text x="{label_x:.1f}" y="{y + 13}">{ratio:.2f}x <tspan class="dim">{escape(peer)}</tspan></text>',
    ]


def _x_of(ratio: float, low: float, high: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * math.log(ratio / low) / math.log(high / low)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m onchip.bench.report.chart", description="Draw the speedups in result files."
    )
    parser.add_argument("picture", help="the .svg to write")
    parser.add_argument("results", nargs="+", help="result files, or folders of them")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the picture is out of date")
    options = parser.parse_args(argv)
    try:
        svg = draw_speedups(front_rows([read_results(path) for path in find_results(options.results)]))
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
