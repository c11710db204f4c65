"""Layers as kernels that train on a GPU see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.kernels.chain import Chain
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import State, Struct

ROW_FLOATS = 8  # rows begin at multiples of 32 bytes: what L2 moves


@dataclass(frozen=True)
class TrainLayer:
    """A Linear with its activation; its bias is a weight of an input that is 1."""

    weight: str  # (N, D)
    bias: str | None
    D: int  # inputs, the 1 not counted
    N: int
    activation: tuple[int, int]  # code and bits of its parameter

    @property
    def terms(self) -> int:
        """Of a sum: inputs, and the 1."""
        return self.D + (self.bias is not None)

    @property
    def stride(self) -> int:
        """Floats from row to row of its weights, and of what it reads."""
        return round_up(self.terms, ROW_FLOATS)


def gives(layers: Sequence[TrainLayer]) -> str:
    """What layers give, as train/large_batch/targets.cuh is told."""
    return ", ".join(f"Gives<{layer.N}, {layer.activation[0]}>" for layer in layers)


def tally_struct() -> Struct:
    return Struct((State("losses"), State("hits"), State("step_losses"), State("step_hits")), b"")


def split_evenly(count: int, most: int) -> int:
    """How many of `count` to take at a time, where `most` can be taken."""
    return -(-count // -(-count // most))


def find_layers(chain: Chain) -> tuple[TrainLayer, ...]:
    return tuple(
        TrainLayer(layer.weight, layer.bias, layer.D_in, layer.D_out, activation_words(layer.activation)[:2])
        for layer in chain.layers
    )
