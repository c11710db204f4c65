"""Backend and Bound: all that the house knows of a device that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo

if TYPE_CHECKING:
    from onchip.kernels.training import SharedData, TrainerTeam
    from onchip.runtime.arrays.calls import Run


class Backend(Protocol):
    @property
    def asked(self) -> tuple[str, int | None]:
        """The device's name and the number of threads by which find_device finds it again."""
        ...

    def bind(self, plan: Plan, debug: bool = False) -> Bound:
        """Make a plan ready: compile its kernels, evaluate its recipes."""
        ...


class Bound(Protocol):
    """A plan that is ready to run: all that an engine or a training run knows of a device."""

    @property
    def checks_ids(self) -> bool:
        """Whether its kernels look at ids before they look them up, and `run` raises what they found."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """Run the network on B rows of the host, by name; returns when the outputs are complete."""
        ...

    def run_like(self, x: Any) -> Run | None:
        """How arrays of x's kind are run where they lie, if that is the device's own memory."""
        ...

    def quick_call(self) -> Callable[[tuple[Any, ...], Any], Any] | None:
        """A quicker way for few rows of the host, if there is one: of inputs and `out` what a call gives, or None if
        they need to be looked at more closely. Only for networks without ids whose inputs and outputs all differ.
        """
        ...

    def wait(self) -> None:
        """Return when earlier work on the device's own arrays is done; raise what its kernels found."""
        ...

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        """What is run, in order, and its work on B rows."""
        ...

    def together(self, count: int) -> int:
        """Of a plan for training: how many of so many networks like its own it trains at a time."""
        ...

    def trainers(
        self, networks: Sequence[Network], x: Array, y: Array, row_weights: Sequence[Array | None],
        orders: Sequence[int], shared: SharedData,
    ) -> TrainerTeam:  # fmt: skip
        """Of a plan for training: runs on rows x (n, D_in) with targets y, as many as `together` says.

        networks  like the plan's own, but for their weights
        row_weights  of each network: (n,) float32, or None: all are 1
        orders    the rows of all orders that they will be trained or judged on
        shared    with other runs on the same rows
        """
        ...
