"""An MLP in a GPU's memory, as the training kernels store it: rows, weights and optimiser state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.training import StoredRows
from onchip.kernels.cuda.train.large_batch.bytes import ByteRows
from onchip.kernels.cuda.train.layer import ROW_FLOATS, TrainLayer
from onchip.kernels.training import STATE_NAMES, SharedData, bytes_of, per_step_values
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.plan.device import Device

MOMENTS = ("mean", "square")  # the kernels' names for optimiser state, in the order of STATE_NAMES
EVALUATED_ROWS = 4096  # per evaluation batch, at least


@dataclass(frozen=True)
class StoredMlp(ABC):
    """Rows are x (n, stride) float32, or bytes (n, byte_rows.stride) uint8; weights and state w<l>, mean<l>, square<l>
    (N, stride); activations a<l> (row_count, width<l>). A bias is the weight of an additional input 1, so rows and
    activations have a column of ones.
    """

    layers: tuple[TrainLayer, ...]
    training: TrainingStep
    precision: str
    batch: int  # rows per step
    device: Device
    networks: int = 1  # per launch
    stride_bytes: int = 0  # between networks

    def with_memory(self, networks: int, stride_bytes: int) -> Self:
        return replace(self, networks=networks, stride_bytes=stride_bytes)

    @property
    @abstractmethod
    def byte_rows(self) -> ByteRows | None:
        """How rows of bytes are read; None: rows are float32."""

    @property
    def row_count(self) -> int:
        """Rows of the activation buffers: a batch, and the rows evaluated together."""
        return max(self.batch, EVALUATED_ROWS)

    def width(self, layer: int) -> int:
        """Row stride in floats of a layer's activations."""
        last = layer == len(self.layers) - 1
        return round_up(self.layers[-1].N, ROW_FLOATS) if last else self.layers[layer + 1].stride

    def stored_rows(self, x: Array, shared: SharedData) -> StoredRows:
        first, byte_rows = self.layers[0], self.byte_rows
        name, values, stride, one = "x", x, first.stride, 1
        if byte_rows:
            found = shared.get("bytes", lambda: bytes_of(x))
            assert found is not None, "the plan requires rows of bytes"
            name, values, stride, one = "bytes", found[0], byte_rows.stride, byte_rows.one

        def fill(rows: Array, begin: int) -> None:
            rows[:, : first.D] = values[begin : begin + len(rows)]
            rows[:, first.D : first.terms] = one

        # A network without a bias in its first layer has rows of another layout.
        return StoredRows(name, (len(x), stride), values.dtype, fill, first.terms)

    def constants(self) -> Iterator[StoredRows]:
        for i, layer in enumerate(self.layers[:-1]):
            terms = self.layers[i + 1].terms

            def fill(rows: Array, _: int, N: int = layer.N, terms: int = terms) -> None:
                rows[:, N:terms] = 1  # the constant input of the next layer's bias

            yield StoredRows(f"a{i}", (self.row_count, self.width(i)), np.float32, fill)

    def stored(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        yield from self._stored(weights, "", "w")
        for kind, memory in self._moments if state else ():
            yield from self._stored(state, f"{kind}:", memory)

    def weights(self, read: Callable[[str, Array], Array]) -> dict[str, Array]:
        return self._named(read, "", "w")

    def moments(self, read: Callable[[str, Array], Array]) -> dict[str, Array]:
        named: dict[str, Array] = {}
        for kind, memory in self._moments:
            named |= self._named(read, f"{kind}:", memory)
        return named

    def values(self, weights: Array, done: int, lrs: Array, momentum: float, decay: float) -> Array:
        return per_step_values(self.training, self.layers[-1].N, weights, done, lrs, momentum, decay)

    @property
    def _moments(self) -> list[tuple[str, str]]:
        """The optimiser's state arrays: of a checkpoint, and of the kernels."""
        return list(zip(STATE_NAMES[self.training.optimiser], MOMENTS, strict=False))

    def _stored(self, arrays: Mapping[str, Array], prefix: str, memory: str) -> Iterator[tuple[str, Array]]:
        for i, layer in enumerate(self.layers):
            rows = np.zeros((layer.N, layer.stride), np.float32)
            rows[:, : layer.D] = arrays[prefix + layer.weight]
            if layer.bias:
                rows[:, layer.D] = arrays[prefix + layer.bias]
            yield f"{memory}{i}", rows

    def _named(self, read: Callable[[str, Array], Array], prefix: str, memory: str) -> dict[str, Array]:
        named: dict[str, Array] = {}
        for i, layer in enumerate(self.layers):
            rows = read(f"{memory}{i}", np.empty((layer.N, layer.stride), np.float32))
            named[prefix + layer.weight] = rows[:, : layer.D].copy()
            if layer.bias:
                named[prefix + layer.bias] = rows[:, layer.D].copy()
        return named
