"""A node of an ONNX graph, as readers of operators see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from onchip.errors import FormatError
from onchip.network.reading import show

T = TypeVar("T")

MAX_SIZE = 2**31 - 1  # of windows, strides, pads: kernels would overflow with larger values


@dataclass(frozen=True)
class Op:
    """One node of an ONNX graph, decoded from its protobuf."""

    kind: str
    name: str
    inputs: tuple[str, ...]  # "": an omitted optional input
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]

    def __str__(self) -> str:
        unnamed = f"the {self.kind} that computes {show(self.outputs[0])}"
        return f"node {show(self.name)} ({self.kind})" if self.name else unnamed

    def attribute(self, name: str, default: T) -> T:
        """The attribute's value, of the default's type."""
        value = self.attributes.get(name, default)
        if type(value) is not type(default):
            raise FormatError(f"{self}: bad attribute '{name}'", got=show(value), expected=type(default).__name__)
        return value

    def number(self, name: str, default: float) -> float:
        """A float attribute as written: ONNX stores 32 bits, and 0.01 must not become 0.0099999998."""
        return float(str(np.float32(self.attribute(name, default))))

    def sizes(self, name: str, default: list[int], length: int = 0) -> list[int]:
        """A list of ints of at most MAX_SIZE; `length` of them, if not 0."""
        value = self.attribute(name, default)
        if not all(type(n) is int and abs(n) <= MAX_SIZE for n in value) or length not in (0, len(value)):
            expected = f"{length or 'some'} ints of at most {MAX_SIZE:,}"
            raise FormatError(f"{self}: bad attribute '{name}'", got=show(value), expected=expected)
        return value
