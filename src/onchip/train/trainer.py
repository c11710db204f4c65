"""One run of a BoundRuns, for those who read or restore it: its weights, its optimiser state, its number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.kernels.training import check_restored
from onchip.network.recipe import Array
from onchip.runtime.backend import BoundRuns


class Trainer:
    """One training run."""

    def __init__(self, bound: BoundRuns, run: int) -> None:
        self._bound, self._run, self.steps_done = bound, run, 0

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that the run holds, including data that it shares with others; 0 on the CPU."""
        return self._bound.gpu_bytes(self._run)

    def evaluate(self, order: Array) -> tuple[float, Any]:
        """The loss of the rows `order` of x as one batch, and the number of correct predictions; of several outputs
        (outputs,), the loss of each.
        """
        return self._bound.evaluate(self._run, order)

    def weights(self) -> dict[str, Array]:
        """The weights, with the network's names and shapes."""
        return self._bound.weights(self._run)

    def state(self) -> dict[str, Array]:
        """The optimiser state: the number of steps, and arrays per weight as '<kind>:<weight>'."""
        return {"steps": np.array([self.steps_done])} | self._bound.moments(self._run)

    def check(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """FormatError if they are not the weights and the state of a run of this network."""
        check_restored(weights, state, self.weights(), self.state())

    def restore(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """Continue from the weights and the state of another run of the same network."""
        self.check(weights, state)
        self._bound.write(self._run, weights, state)
        self.steps_done = int(state["steps"][0])
