"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A file (.onnx, .safetensors), or a workload: decode, digits, faces, sentiment, backprop, scan.",
    ),
]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[str, Option(help="fp32, tf32, bf16, fp16 or fp8.")]
Io = Annotated[str, Option(show_default=False, help="What float inputs and outputs are in memory: fp32, fp16 or bf16.")]
Threads = Annotated[int | None, Option(help="CPU threads; all cores if not given.")]
Seed = Annotated[int | None, Option(help="Of the random rows that --count makes; 0 if not given.")]
NoFold = Annotated[
    bool, Option("--no-fold", help="Leave out a rewrite, to compare: embeddings and batch norms fold into others.")
]
NoMerge = Annotated[
    bool, Option("--no-merge", help="Leave out a rewrite, to compare: linear layers and convolutions become one.")
]
NoWindows = Annotated[
    bool, Option("--no-windows", help="Leave out a rewrite, to compare: convolutions of one window become linear.")
]
NoPhases = Annotated[
    bool, Option("--no-phases", help="Leave out a rewrite, to compare: transposed convolutions split into phases.")
]
NoEarly = Annotated[
    bool, Option("--no-early", help="Leave out a rewrite, to compare: activations move in front of woven phases.")
]
Tables = Annotated[str, Option(help="Folded embedding tables in fewer bits: fp16, bf16 or fp8; else fp32.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Verbose = Annotated[
    int,
    Option("--verbose", "-v", count=True, show_default=False, help="-v plan, -vv compile times, -vvv cache paths."),
]


def left_out(no_fold: bool, no_merge: bool, no_windows: bool, no_phases: bool, no_early: bool) -> tuple[str, ...]:
    """The rewrites that a user asked to leave out, by the names that a Job knows."""
    asked = {"fold": no_fold, "merge": no_merge, "windows": no_windows, "phases": no_phases, "early": no_early}
    return tuple(name for name, off in asked.items() if off)
