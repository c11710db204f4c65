"""Layers of a network for the CUDA training kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.kernels.chain import Chain
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.precision import round_up

ROW_FLOATS = 8  # rows are 32 B aligned, an L2 sector


@dataclass(frozen=True)
class TrainLayer:
    """A Linear with its activation. The bias is the weight of an additional input 1."""

    weight: str  # (N, D)
    bias: str | None
    D: int  # inputs, without the additional 1
    N: int
    activation: tuple[int, int]  # code, and bits of its parameter

    @property
    def terms(self) -> int:
        """Reduction size K: inputs, and 1 for the bias."""
        return self.D + (self.bias is not None)

    @property
    def stride(self) -> int:
        """Row stride in floats of its weights and of its input."""
        return round_up(self.terms, ROW_FLOATS)


def layer_specs(layers: Sequence[TrainLayer]) -> str:
    """Widths and activations as template arguments for train/large_batch/targets.cuh."""
    return ", ".join(f"LayerSpec<{layer.N}, {layer.activation[0]}>" for layer in layers)


def split_evenly(count: int, limit: int) -> int:
    """Items per round if `count` items take equal rounds of at limit `limit`."""
    return -(-count // -(-count // limit))


def find_layers(chain: Chain) -> tuple[TrainLayer, ...]:
    return tuple(
        TrainLayer(layer.weight, layer.bias, layer.D_in, layer.D_out, activation_words(layer.activation)[:2])
        for layer in chain.layers
    )
