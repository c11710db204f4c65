"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

Model = Annotated[str, Argument(metavar="MODEL", help="A file (.onnx, .safetensors), or decode, digits.")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[str, Option(help="fp32, tf32, bf16, fp16 or fp8.")]
Threads = Annotated[int | None, Option(help="CPU threads; all cores if not given.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Verbose = Annotated[
    int,
    Option("--verbose", "-v", count=True, show_default=False, help="-v plan, -vv compile times, -vvv cache paths."),
]
