"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from typer import Argument, Option

from onchip.plan.device import KNOWN

WORKLOADS = ("decode", "digits", "faces", "sentiment", "backprop", "scan")  # onchip.workloads, without importing it
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def completes(names: Iterable[str], *suffixes: str) -> Callable[[str], list[str]]:
    """Shell completion of an argument: these names, folders, and files with these suffixes."""

    def complete(incomplete: str) -> list[str]:
        from pathlib import Path

        found = [name for name in names if name.startswith(incomplete)]
        folder, slash, start = incomplete.rpartition("/")
        if suffixes:
            for path in sorted(Path(folder + slash or ".").glob("*")):
                is_one = path.suffix.lower() in suffixes or path.is_dir()
                if is_one and path.name.startswith(start) and (start or not path.name.startswith(".")):
                    found.append(f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}")
        return found

    return complete


Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help=f"A file (.onnx, .safetensors), or a workload: {', '.join(WORKLOADS)}.",
        autocompletion=completes(WORKLOADS, ".onnx", ".safetensors"),
    ),
]
Shape = Annotated[
    list[str] | None,
    Option(
        "--shape",
        metavar="NAME=B,SIZE,..",
        help="Sizes of an input that an ONNX file leaves open; B is the batch. Once per input.",
    ),
]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.", autocompletion=completes(DEVICES))]
PlanDevice = Annotated[
    str,
    Option(
        help=f"auto, cpu, cuda, cuda:N; or for planning only: {', '.join(KNOWN)}.",
        autocompletion=completes((*DEVICES, *KNOWN)),
    ),
]
Precision = Annotated[
    str, Option(help=f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}.", autocompletion=completes(PRECISIONS))
]
Io = Annotated[str, Option(show_default=False, help="Dtype of float inputs and outputs in memory: fp32, fp16 or bf16.")]
Threads = Annotated[int | None, Option(help="CPU threads; all cores if not given.")]
Commit = Annotated[
    str | None,
    Option(metavar="SHA", help="Commit for the result file, if the tree has no .git."),
]
Seed = Annotated[int | None, Option(help="Seed of the random rows of --count; 0 if not given.")]
Without = Annotated[
    list[str] | None,
    Option(
        "--without",
        metavar="NAME,NAME",
        help="Disable rewrites: fold (embeddings and batch norms into other layers), merge (linear layers and "
        "convolutions), windows (convolutions of one window to linear layers), phases (transposed convolutions split "
        "into phases), early (activations before phases are interleaved).",
    ),
]
Tables = Annotated[str, Option(help="Dtype of folded embedding tables: fp32, fp16, bf16 or fp8.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Verbose = Annotated[
    int,
    Option("--verbose", "-v", count=True, show_default=False, help="-v plan, -vv compile times, -vvv cache paths."),
]


def parse_without(texts: Sequence[str] | None) -> tuple[str, ...]:
    """["phases,fold", "early"] -> ("fold", "phases", "early"): the disabled rewrites, in the order of Job."""
    from onchip.network.names import known_name
    from onchip.plan.kernel import OPTIONAL_REWRITES

    names = [name.strip() for text in texts or [] for name in text.split(",")]
    chosen = [known_name(name, OPTIONAL_REWRITES, "rewrite", hint="--without fold,merge") for name in names]
    return tuple(name for name in OPTIONAL_REWRITES if name in chosen)


def parse_shapes(texts: list[str] | None) -> dict[str, tuple[int | str, ...]] | tuple[int | str, ...] | None:
    """["x=B,3,640,640"] -> {"x": ("B", 3, 640, 640)}; a shape without an input name is returned as a tuple."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for text in texts or []:
        name, _, sizes = text.rpartition("=")
        shape = tuple(int(size) if size.isascii() and size.isdigit() else size for size in sizes.split(","))
        if not all(shape) or not all(isinstance(size, int) for size in shape[1:]) or name in shapes:
            from onchip.errors import InputError

            expected = "NAME=B,SIZE,.. with B for the batch and a size for every other axis, each name once"
            raise InputError("bad --shape", got=text, expected=expected, hint="--shape x=B,3,640,640")
        shapes[name] = shape
    return shapes[""] if list(shapes) == [""] else shapes or None
