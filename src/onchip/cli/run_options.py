"""The arguments and options that only `onchip run` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Rows = Annotated[
    list[Path] | None,
    Argument(
        metavar="INPUT",
        show_default=False,
        help="Rows: .npy, idx, .parquet, .arrow or .bin (raw values), of any size; .csv, .tsv, .csv.gz, .npz, idx.gz; "
        ".txt (N, then N rows); several tables, or a folder of them; - for standard input (.csv, .npy or .npz). Texts: "
        ".txt (one per line), .csv or .tsv.",
    ),
]
Text = Annotated[
    list[str] | None, Option("--text", metavar="TEXT", help="A sentence to classify, instead of INPUT; repeatable.")
]
Column = Annotated[
    str | None, Option(metavar="NAME", help="The column of texts in INPUT; default: text, or the only one.")
]
Inputs = Annotated[
    list[str] | None,
    Option("--input", metavar="NAME=FILE", help="Rows of a named input, for a model with several inputs."),
]
Padding = Annotated[
    int | None, Option(metavar="ID", help="Id that pads sentences at the end; lengths are computed from it.")
]
Keep = Annotated[
    str | None,
    Option(metavar="NAME,NAME", help="Columns of the table that are written next to the results, such as ids."),
]
Output = Annotated[
    list[str] | None,
    Option(
        "--output",
        "-o",
        metavar="FILE or NAME=FILE",
        help="Output file: .npy, .npz, .bin, .csv, .parquet; for images .txt, .bmp, .png, .gif; a folder: a table for "
        "each input table. NAME= chooses one of several outputs; -o may be repeated. Without it, some rows are "
        "printed.",
    ),
]
Top = Annotated[
    int | None,
    Option(metavar="N", help="The N most likely classes per row, if the network stores their names."),
]
Weights = Annotated[
    Path | None, Option(metavar="FILE", help="Weights of sentiment (params.bin) or faces (network.bin).")
]
Count = Annotated[int | None, Option(metavar="N", help="Random rows to run instead of INPUT.")]
Grid = Annotated[
    str | None, Option(metavar="NxM", help="Draw N x M random images in M lines, in place of --count and a square.")
]
Walk = Annotated[
    int | None,
    Option(metavar="FRAMES", help="Walk between the random rows of --count, with so many frames to each: -o walk.gif."),
]
Batch = Annotated[int | None, Option(metavar="ROWS", help="Rows per launch; the results do not change.")]
Scale = Annotated[float | None, Option(help="Convert rows to the network's float type and divide them by this.")]
Ranks = Annotated[
    str | None,
    Option(metavar="N", help="Run as N MPI ranks on this machine, each with a GPU or some cores; or auto."),
]
Gpus = Annotated[str | None, Option(metavar="N or I,J", help="Drive N GPUs, or the GPUs I,J, from one process.")]
Resume = Annotated[bool, Option("--resume", help="Continue an interrupted run: compute the missing chunks of -o.")]
Deadline = Annotated[float, Option(metavar="SECONDS", help="End the job if a rank needs longer for one chunk.")]
ShowPlan = Annotated[bool, Option("--plan", help="Show the plan, as -v does.")]


def one_name(rows: list[Path] | None) -> Path | None:
    """Several tables as one name, as `table_files` reads it."""
    return Path(",".join(map(str, rows))) if rows else None
