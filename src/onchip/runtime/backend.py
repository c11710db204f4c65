"""Backend, Bound, BoundStep and BoundRuns: the protocols that every device implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo

if TYPE_CHECKING:
    from onchip.kernels.training import Epochs, LaunchTime, SharedData, Trained

Run = Callable[[Sequence[Any], Any], Any]  # run(rows, out) -> results


class Backend(Protocol):
    @property
    def requested(self) -> tuple[str, int | None]:
        """The device name and thread count that find_device needs to find it again."""
        ...

    def bind(self, plan: Plan) -> Bound:
        """Prepare a plan for inference: compile its kernels, evaluate its recipes."""
        ...

    def bind_step(self, plan: Plan, state: Mapping[str, Any] | None = None) -> BoundStep:
        """Prepare the plan of a network with state, to run it step by step.

        state  arrays on the device that are there already, by name: of another step, or of `hold_array`
        """
        ...

    def bind_runs(
        self, plan: Plan, runs: Sequence[NetworkRun], x: Mapping[str, Array], y: Mapping[str, Array],
        shared: SharedData, evaluation: Plan | None = None,
    ) -> BoundRuns:  # fmt: skip
        """Prepare training runs on rows x (n, ...) by input, as many as `runs_at_once` returns.

        y           targets, by the step's input that reads them
        plan        of a training step: of a kernel that runs it whole, or by layers over the rows (over_rows)
        shared      data shared with other runs on the same rows
        evaluation  by layers: the plan that evaluates held-out rows, if there are any
        """
        ...

    def runs_at_once(self, plan: Plan, count: int) -> int:
        """How many of `count` training runs share launches."""
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


@dataclass(frozen=True, eq=False)
class NetworkRun:
    """What one run trains, and on how many rows."""

    network: Network  # that is trained, with its weights
    how: TrainingStep
    rows: int  # per epoch
    held: int  # rows that are evaluated; 0: none
    row_weights: Array | None  # (n,) float32; None: all are 1
    seed: int  # of dropouts


class BoundRuns(Protocol):
    """Training runs, bound to a device with their rows, weights and optimiser state; known by their index.

    Their networks differ only in their weights, and train together: on a GPU by the same launches.
    """

    @property
    def is_asynchronous(self) -> bool:
        """Whether training, once begun, runs asynchronously to the host."""
        ...

    def make_ready(self) -> None:
        """Compile the kernels before the first step."""
        ...

    def begin(self, epochs: Sequence[Epochs | None]) -> None:
        """Train each run on its epochs, without a wait between them; None: the run is skipped."""
        ...

    def end(self) -> list[Trained]:
        """Wait for the epochs that were begun, and return their results; nothing for a skipped run."""
        ...

    @property
    def seconds(self) -> float:
        """The time of the epochs that ended last, excluding other host work."""
        ...

    def evaluate(self, run: int, order: Array) -> tuple[float, Any]:
        """The loss of the rows `order` of x as one batch, and the number of correct predictions; of several outputs
        (outputs,), the loss of each.
        """
        ...

    def weights(self, run: int) -> dict[str, Array]:
        """The weights, with the network's names and shapes."""
        ...

    def moments(self, run: int) -> dict[str, Array]:
        """The optimiser state as '<kind>:<weight>'."""
        ...

    def write(self, run: int, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """Continue from these weights and this state: `moments`, and the number of steps as 'steps' (1,)."""
        ...

    def gpu_bytes(self, run: int) -> int:
        """GPU memory that the run holds, including data that it shares with others; 0 on the CPU."""
        ...

    def time_steps(self) -> None:
        """Before the first step: `launch_times` will be called."""
        ...

    def launch_times(self) -> tuple[LaunchTime, ...]:
        """The launches of a step. On the CPU, of some of the steps until now.

        On a GPU, measured on a copy of the state: of the epochs that ended last, one launch at a time. Call it before
        anything else begins. Nothing if there is no memory for a copy.
        """
        ...


class Bound(Protocol):
    """A plan that is ready to run: the interface between a device and an engine."""

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
