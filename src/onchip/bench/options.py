"""The options of a measurement, passed to every builder of cases."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.errors import InputError
from onchip.formats.onnx.shapes import Shapes


@dataclass(frozen=True)
class Options:
    device: str = "cpu"  # or "cuda", "cuda:1"
    threads: int = 1
    peers: bool = False
    accuracy: bool = False
    rows: tuple[int, ...] = ()  # empty: the workload's defaults
    batches: tuple[int, ...] = ()  # rows per training step; empty: the workload's defaults
    quick: bool = False  # a first look in under two minutes
    shapes: Shapes | None = None  # for dynamic sizes of ONNX files


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """ "12800,262144" -> (12800, 262144). `what` names the counts in errors."""
    try:
        counts = tuple(int(count.replace("_", "")) for count in text.split(",") if count.strip())
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise InputError(f"bad number of {what}", got=repr(text), expected="integers of at least 1", hint="64,1024")
    return tuple(dict.fromkeys(counts))
