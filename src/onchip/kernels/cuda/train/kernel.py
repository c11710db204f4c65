"""The base class of kernels that train a whole MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from onchip.errors import PlanError
from onchip.kernels.chain import Chain, find_chain
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import Instance, KernelLaunch
from onchip.kernels.cuda.common.training import TrainingLowering
from onchip.kernels.pointwise import TRAINED
from onchip.kernels.training import trained_chain
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.training import TrainingStep
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal


class ClaimedTraining(TrainingLowering, Protocol):
    """The facts of a claim, and what the claim says of them."""

    @property
    def why(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def fast_bytes(self) -> int: ...
    def cost(self, net: Network) -> Cost: ...


class MakeLowering(Protocol):
    def __call__(
        self, chain: Chain, training: TrainingStep, precision: str, batch: int, device: Device
    ) -> ClaimedTraining | str:
        """The lowering of a training step with `batch` rows, or the reason for a refusal."""
        ...


class TrainKernel(CudaKernel):
    make_lowering: ClassVar[MakeLowering]
    runs_whole_steps = True

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        step = net.trained
        if step is None or start != 0:
            return
        chain = trained_chain(step)
        if chain is None or (self.architectures and device.arch not in self.architectures):
            return  # mlp_train reports the reason
        lowering = self.make_lowering(chain, step.how, job.precision, job.batch, device)
        if isinstance(lowering, str):
            yield Refusal(self.name, net.nodes[0].name, lowering)
            return
        yield Claim(
            self.name, f"{self.name}<{chain.label},{step.how.loss}>", tuple(node.name for node in net.nodes),
            lowering.cost(step.network), lowering.why, fast_bytes=lowering.fast_bytes, facts=lowering,
            order=lowering.order,
        )  # fmt: skip


def step_instance(
    name: str, make: MakeLowering, step: tuple[TrainingStep, Job], widths: tuple[int, ...],
    device: Device | None = None, kernel: str = "", networks: int = 1,
) -> Instance:  # fmt: skip
    """The first launch of a step of an MLP whose kernel name contains `kernel`; `device` replaces that of the check."""

    def launch(checked: Device) -> KernelLaunch:
        chain = find_chain(mlp(*widths), 0, TRAINED)
        assert chain is not None
        how, job = step
        lowering = make(chain, how, job.precision, job.batch, device or checked)
        assert not isinstance(lowering, str)
        for each in lowering.for_networks(networks).steps(1).launches:
            if kernel in each.program.name_expression:
                return each
        raise PlanError(f"no launch of {kernel} on this GPU")

    return Instance(name, launch)
