"""The CUDA backend: binds plans to one GPU, for host arrays and GPU arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from onchip.errors import DeviceError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.program import Lowering
from onchip.kernels.cuda.layout.permute import PermuteLowering
from onchip.kernels.training import SharedData
from onchip.network.recipe import Array
from onchip.plan.build_cost import recipe_rates_of
from onchip.plan.plan import Plan
from onchip.runtime.arrays.calls import device_run
from onchip.runtime.backend import BoundRuns, NetworkRun, Run
from onchip.runtime.cuda.bound_plan import BoundGroup, BoundPlan
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.runs import CudaRuns, lowering_of
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.cuda.weights import make_weights
from onchip.runtime.layered_runs import LayeredRuns


class CudaBound(BoundPlan):
    """A plan on a GPU, with the interface that engines use."""

    checks_ids = True  # in the lookup kernel: a check on the host would read them twice while the GPU waits

    def run_like(self, x: Any) -> Run | None:
        """A function that runs arrays of x's type in place; None if x is not on a GPU."""
        return device_run(x, self)

    def quick_call(self) -> None:
        return None


class CudaBackend:
    """Binds plans to one GPU."""

    def __init__(self, device_index: int = 0) -> None:
        self.gpu = Gpu.get(device_index)
        self.device = self.gpu.device
        self.requested: tuple[str, int | None] = f"cuda:{device_index}", None

    def bind(self, plan: Plan) -> CudaBound:
        """Compile each group for this GPU and compute its weights, on the GPU or the host."""
        self._check_arch(plan)
        plan.check_layers()
        wanted = [recipe for group in plan.groups for recipe in group.claim.recipes.values()]
        built = make_weights(self.gpu, wanted, plan.network.weights, recipe_rates_of(KERNELS, self.device))
        groups = []
        for i, group in enumerate(plan.groups):
            inputs, outputs = (tuple(plan.stored_in[name] for name in names) for names in (group.inputs, group.outputs))
            lowering = cast(Lowering, group.claim.facts)
            if group.claim.is_view:
                if inputs == outputs:
                    continue
                # A view that must be copied: a permute that keeps the order of the axes.
                t, units = plan.types[group.outputs[0]], self.device.units
                lowering = PermuteLowering((t.dtype,) * 2, t.row_shape, tuple(range(len(t.shape))), units)
            weights = {name: built[recipe] for name, recipe in group.claim.recipes.items()}
            groups.append(BoundGroup(i, lowering, inputs, weights, outputs))
        bound = CudaBound(self.gpu, plan, groups)
        bound.at(plan.job.batch)  # compiles the job's kernels before it is timed
        return bound

    def bind_step(self, plan: Plan, state: Mapping[str, Buffer] | None = None) -> CudaStep:
        return CudaStep(self.gpu, plan, state)

    def bind_runs(
        self, plan: Plan, runs: Sequence[NetworkRun], x: Mapping[str, Array], y: Mapping[str, Array],
        shared: SharedData, evaluation: Plan | None = None,
    ) -> BoundRuns:  # fmt: skip
        self._check_arch(plan)
        if plan.whole_step is None:
            with self.gpu:  # of this thread, too: several runs train concurrently
                return LayeredRuns(self, plan, runs, x, y, shared, evaluation)
        (rows,), (targets,) = x.values(), y.values()
        return CudaRuns(self.gpu, plan, runs, rows, targets, shared)

    def runs_at_once(self, plan: Plan, count: int) -> int:
        return lowering_of(plan).for_networks(count).networks if plan.whole_step else 1

    def hold_array(self, array: Array) -> Buffer:
        return self.gpu.upload(array)

    def _check_arch(self, plan: Plan) -> None:
        if plan.device.arch != self.device.arch:
            raise DeviceError("the plan is for another device", got=plan.device.arch, expected=self.device.arch)
