"""Backend, Bound and BoundStep: the protocols that every device implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo

if TYPE_CHECKING:
    from onchip.kernels.training import JointTrainer, SharedData
    from onchip.runtime.arrays.calls import Run


class Backend(Protocol):
    @property
    def requested(self) -> tuple[str, int | None]:
        """The device name and thread count that find_device needs to find it again."""
        ...

    def bind(self, plan: Plan) -> Bound:
        """Prepare a plan: compile its kernels, evaluate its recipes."""
        ...

    def bind_step(self, plan: Plan, state: Mapping[str, Any] | None = None) -> BoundStep:
        """Prepare the plan of a network with state.

        state  arrays on the device that are there already, by name: of another step, or of `hold_array`
        """
        ...

    def hold_array(self, array: Array) -> Any:
        """An array on the device, for the state of steps. On the CPU it is this one."""
        ...


class BoundStep(Protocol):
    """A network with state that is ready to run: each run computes its outputs, then replaces the state."""

    @property
    def plan(self) -> Plan: ...

    @property
    def state(self) -> Mapping[str, Any]:
        """The arrays on the device, by name."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether runs, once begun, continue asynchronously to the host."""
        ...

    @property
    def nbytes(self) -> int:
        """The GPU memory that it holds; 0 on the CPU."""
        ...

    def run(self, inputs: Mapping[str, Array], B: int, count: int = 1) -> dict[str, Array]:
        """Run B host rows `count` times; returns the outputs of the last run."""
        ...

    def hold(self, inputs: Mapping[str, Array], B: int) -> Any:
        """B host rows of the inputs, by name, for several calls of `begin`; compiles kernels for as many."""
        ...

    def with_rows(self, batch: Any, rows: Mapping[str, Any]) -> Any:
        """The batch with other rows of some inputs; arrays on the device are read where they are."""
        ...

    def outputs(self, batch: Any) -> dict[str, Array]:
        """The outputs of the last run over this batch, by name."""
        ...

    def begin(self, batch: Any, count: int = 1) -> None:
        """Run `count` times over rows of `hold`, after the runs that were begun before."""
        ...

    def wait(self) -> float:
        """Wait for the runs that were begun; returns how many seconds they took."""
        ...

    def time_groups(self, batch: Any) -> list[tuple[int, float]]:
        """Microseconds of every launch of a run over this batch, one at a time, with its group's index in the plan. The
        state stays as it is; nothing if there is no memory for a copy of it.
        """
        ...

    def read_state(self, names: Iterable[str] | None = None) -> dict[str, Array]: ...

    def write_state(self, arrays: Mapping[str, Array]) -> None: ...


class Bound(Protocol):
    """A plan that is ready to run: the interface between a device and an engine or training run."""

    @property
    def checks_ids(self) -> bool:
        """Whether the kernels check ids before the lookup, so that `run` raises on a bad one."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """Run the network on B rows of host memory, by name; returns when the outputs are complete."""
        ...

    def run_like(self, x: Any) -> Run | None:
        """A function that runs arrays of x's type in place, if they are in the device's own memory."""
        ...

    def quick_call(self) -> Callable[[tuple[Any, ...], Any], Any] | None:
        """A fast path for few host rows, if there is one. It maps inputs and `out` to the result of a call, or to None
        if the arrays need the full checks. Only for networks without ids whose inputs and outputs are all distinct.
        """
        ...

    def wait(self) -> None:
        """Return when earlier work on the device's own arrays is done; raise the errors that its kernels reported."""
        ...

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        """The launched steps, in order, with their work on B rows."""
        ...

    def together(self, count: int) -> int:
        """For a training plan: how many of `count` networks of the same shape train at a time."""
        ...

    def trainers(
        self, networks: Sequence[Network], x: Array, y: Array, row_weights: Sequence[Array | None],
        orders: Sequence[int], shared: SharedData,
    ) -> JointTrainer:  # fmt: skip
        """For a training plan: training runs on rows x (n, D_in) with targets y, as many as `together` returns.

        networks     same shape as the plan's, with their own weights
        row_weights  per network: (n,) float32, or None for all ones
        orders       row counts of all orders that they will train or evaluate on
        shared       data shared with other runs on the same rows
        """
        ...
