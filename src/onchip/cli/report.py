"""onchip report: one HTML page from result files, profiles, training logs and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onchip.cli.output import print_message
from onchip.errors import InputError

RESULTS = Path("benchmarks") / "results"


def report(
    files: Annotated[
        list[Path] | None,
        Argument(metavar="[FILE]...", help=f"Files, or folders of them; default: {RESULTS}.", show_default=False),
    ] = None,
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    before: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Older result files or folders, to show what changed; may be repeated."),
    ] = None,
) -> None:
    """Write one HTML page that shows results: open it in a browser.

    \b
    Example:
      onchip bench decode --rows 1000 --quick --peers --out results
      onchip report results -o report.html

    \b
    With everything, and what changed since older results:
      onchip report results profile.json digits.jsonl faces.png
      onchip report --before ../older/benchmarks/results

    \b
    It reads
      results         onchip bench --peers, onchip ladder --out DIR
      profiles        onchip profile MODEL --json > profile.json
      training logs   onchip train digits --log digits.jsonl
      pictures        onchip run faces --count 64 -o faces.png

    and shows speedups over peers, ladders, rooflines, scaling with the batch, training curves and what changed, each
    with its data as a table. The page is one file and loads nothing from elsewhere.
    """
    from onchip.bench.report.report import report as draw_report
    from onchip.bench.report.sources import read_sources
    from onchip.files import atomic_write, check_outputs, check_writable

    if not files and not RESULTS.is_dir():
        raise InputError(
            "nothing to report", got=f"no files, and no folder {RESULTS} here", expected="files or folders",
            hint="onchip bench decode --quick --out results, then onchip report results",
        )  # fmt: skip
    given = [*(files or []), *(before or [])]
    check_outputs({f"FILE {path}": path for path in given}, {"--output": output})
    check_writable(output)
    page = draw_report(read_sources(files or [RESULTS]), read_sources(before) if before else None)
    with atomic_write(output) as file:
        file.write(page.encode())
    print_message(f"wrote {output}: open it in a browser")
