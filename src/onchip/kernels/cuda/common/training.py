"""Whole training steps as data: what a kernel stores in a GPU's memory, and its launches. No CUDA here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.training import SharedData, StepPhase
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep

# State that the runtime writes,
TARGETS, ROW_WEIGHTS = "targets", "row_weights"  # as the caller has them; weights (n,) float32, if rows have weights
ORDER = "order"  # (rows,) int64: ids of rows, batch after batch
PROGRESS = "progress"  # (2,) int64: the next step, and the end of the rows of these steps in the order
STEP_VALUES = "per_step_values"  # of `values`
# and reads.
STEP_LOSSES, STEP_CORRECT = "step_losses", "step_correct"  # (steps, groups) float64, int64: sums over rows
STATUS = "status"  # (2,) uint32, of kernels with grid barriers: the second word is set after a timeout
PHASE_CLOCKS = "phase_clocks"  # of `with_phase_clocks`


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A matrix in a GPU's memory. It is written slice by slice: zeros, into which `fill` writes."""

    name: str  # of its State
    shape: tuple[int, int]
    dtype: Any
    fill: Callable[[Array, int], None]  # a slice, and the index of its first row
    layout: object = None  # rows of one data set with the same name and layout are the same


class TrainingLowering(Protocol):
    """`Claim.facts` of a kernel that runs whole training steps over rows on the GPU. Frozen.

    Memory is State by name. Networks of the same launches have memory of their own, with the same layout and
    `stride_bytes` apart; rows and targets are shared.
    """

    @property
    def training(self) -> TrainingStep: ...
    @property
    def batch(self) -> int:
        """Rows per step."""
        ...

    @property
    def row_count(self) -> int:
        """Rows per evaluation."""
        ...

    @property
    def networks(self) -> int:
        """That share the launches."""
        ...

    @property
    def groups(self) -> int:
        """Of blocks that report losses and correct predictions of a step."""
        ...

    @property
    def is_persistent(self) -> bool:
        """Whether one launch runs all steps; it counts clocks per phase on request."""
        ...

    def for_networks(self, count: int) -> Self:
        """The lowering for as many of `count` networks as one launch trains, with bit-identical results."""
        ...

    def with_memory(self, networks: int, stride_bytes: int) -> Self:
        """The same launches for so many networks, whose memory is so far apart."""
        ...

    # -- memory ------------------------------------------------------------------------------------------------

    def stored_rows(self, x: Array, shared: SharedData) -> StoredRows:
        """Rows x (n, D_in) float32."""
        ...

    def memory(self, orders: Sequence[int], n: int) -> Mapping[str, int]:
        """The bytes of each State of one network; it begins as zeros.

        orders  lengths of the row orders that it trains or evaluates on
        n       rows of x
        """
        ...

    def constants(self) -> Iterator[StoredRows]:
        """Memory that does not begin as zeros."""
        ...

    def stored(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Weights, and optimiser state as '<kind>:<weight>' or nothing: each State with its content."""
        ...

    def weights(self, read: Callable[[str, Array], Array]) -> dict[str, Array]:
        """The weights, with the network's names and shapes; `read` copies a State into an array."""
        ...

    def moments(self, read: Callable[[str, Array], Array]) -> dict[str, Array]:
        """The optimiser state, as '<kind>:<weight>'."""
        ...

    def values(self, weights: Array, done: int, lrs: Array, momentum: float, decay: float) -> Array:
        """STEP_VALUES of steps.

        weights, lrs  per step: the sum of the weights of its rows, and its learning rate
        done          steps before these
        """
        ...

    # -- launches ----------------------------------------------------------------------------------------------

    def graphs_of(self, count: int) -> Sequence[int]:
        """Graph sizes that make up `count` steps; 0: one graph runs them all."""
        ...

    def steps(self, count: int) -> Steps:
        """`count` steps of all networks."""
        ...

    def losses(self) -> Steps:
        """The losses of the next `row_count` rows of one network, as one step that trains nothing."""
        ...

    def launch_estimates(self, count: int) -> list[float]:
        """Microseconds of each launch of `steps(count)`, for one network."""
        ...

    def with_phase_clocks(self, steps: Steps) -> tuple[Steps, tuple[int, int]]:
        """Of a persistent kernel: launches with the same results that also write PHASE_CLOCKS, and its shape."""
        ...

    def phases(self, clocks: Array, us: float) -> tuple[StepPhase, ...]:
        """The phases of a step that takes `us`, from phase clocks."""
        ...
