"""Output of the commands: data on stdout, messages on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from onchip.cli.stop import StoppedError, stopping
from onchip.errors import printable

if TYPE_CHECKING:
    from onchip.plan.plan import Plan

Update = Callable[[float, str], None]


def check_stopped() -> None:
    if stopping.is_set():
        raise StoppedError


def print_message(text: str) -> None:
    """Print to stderr; control characters, e.g. in file names, are escaped."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)


def terminal_width(stream: TextIO) -> int:
    """The width of the terminal; unlimited if the stream is not a terminal."""
    import shutil

    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(json_value(document), indent=2, allow_nan=False))


def json_value(value: Any) -> Any:
    """The same value in JSON types: null for NaN and infinity, strings for paths."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rate(per_second: float, unit: str = "rows") -> str:
    """1234567 -> '1.23 M rows/s'."""
    for limit, prefix in ((1e9, "G "), (1e6, "M "), (1e3, "k ")):
        if per_second >= limit:
            return f"{per_second / limit:.2f} {prefix}{unit}/s"
    return f"{per_second:.1f} {unit}/s"


@contextlib.contextmanager
def progress(what: str, total: float) -> Iterator[Update]:
    """A progress bar on stderr; yields update(done, text). No bar if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, text: check_stopped()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=total, text="")

        def update(done: float, text: str) -> None:
            check_stopped()
            bar.update(task, completed=done, text=text)

        yield update


@contextlib.contextmanager
def ranks_progress() -> Iterator[Callable[[str, float, float, str], None]]:
    """One bar for all ranks, updated by rank 0; it appears at rank 0's first update."""
    with contextlib.ExitStack() as stack:
        bars: list[Update] = []

        def show(what: str, total: float, done: float, text: str) -> None:
            if not bars:
                bars.append(stack.enter_context(progress(what, total)))
            bars[0](done, text)

        yield show


@contextlib.contextmanager
def resumable(command: str, checkpoint: Path | None) -> Iterator[None]:
    """If a stopped run left a checkpoint, print how to resume it."""
    try:
        yield
    except StoppedError:
        if checkpoint is None or not any(checkpoint.glob("checkpoint-*")):
            raise
        import typer

        print_message(f"stopped: continue with {command} --checkpoint {checkpoint} --resume and the same options")
        raise typer.Exit(2) from None


def print_device(chosen: str, plan: Plan, verbose: int, compile_seconds: float) -> None:
    """Log the device and why; -v the plan, -vv compile (or load) times, -vvv the cache's path."""
    print_message(f"device: {chosen}")
    if verbose >= 1:
        print_message(plan.text(terminal_width(sys.stderr)))
    if verbose >= 2:
        print_message(f"planned and compiled, or loaded from the cache, in {compile_seconds * 1e3:.0f} ms")
    if verbose >= 3:
        from onchip.cache import safe_cache_dir

        print_message(f"cache: {safe_cache_dir() or 'none'}")
