"""What a network is, what it needs on each device, and what a device refuses. Nothing runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onchip.errors import OnchipError
from onchip.network.graph import Network
from onchip.plan.device import H200, Device
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.cuda.devices import cuda_devices
from onchip.runtime.placement import kernels_for


@dataclass(frozen=True)
class DeviceInfo:
    """A network on one device."""

    device: str
    kernels: int
    weight_bytes: int  # as the kernels store them
    row_bytes: int  # per row of the batch: inputs, outputs, and values between kernels
    refused: dict[str, str]  # layers without a kernel, and why
    error: str = ""  # why there is no plan at all

    @property
    def can_run(self) -> bool:
        return not (self.refused or self.error)


@dataclass(frozen=True)
class NetworkInfo:
    name: str
    inputs: dict[str, str]  # name -> type
    outputs: dict[str, str]
    layers: dict[str, int]  # number of each kind, most frequent first
    parameters: int
    weight_bytes: int
    row_flop: int
    devices: tuple[DeviceInfo, ...]  # this CPU, then its GPUs; an H200 if it has none


def describe_network(net: Network, batch: int = 1024) -> NetworkInfo:
    """Plan the network on each device in fp32, for calls with `batch` rows."""
    devices = [this_cpu(), *(cuda_devices() or [H200])]
    return NetworkInfo(
        net.name,
        {name: str(kind) for name, kind in net.inputs.items()},
        {name: str(net.types[name]) for name in net.outputs},
        dict(Counter(node.layer.kind for node in net.nodes).most_common()),
        net.parameters, net.weight_bytes, sum(map(net.row_flop, net.nodes)),
        tuple(_describe_on(net, device, batch) for device in devices),
    )  # fmt: skip


def _describe_on(net: Network, device: Device, batch: int) -> DeviceInfo:
    try:
        plan = make_plan(net, device, kernels_for(device), Job(batch=batch), whole=False)
    except OnchipError as error:
        return DeviceInfo(device.name, 0, 0, 0, {}, error.what)
    ends = (*net.inputs, *net.outputs)
    row_bytes = plan.between_bytes + sum(net.types[name].row_bytes for name in ends)
    kernels = sum(1 for group in plan.groups if group.claim.kernel and not group.claim.is_view)
    return DeviceInfo(device.name, kernels, plan.weight_bytes, row_bytes, _refused(plan))


def _refused(plan: Plan) -> dict[str, str]:
    why: dict[str, list[str]] = {name: [] for name in plan.without_kernel}
    for refusal in plan.refusals:
        if refusal.node in why:
            why[refusal.node].append(f"{refusal.kernel}: {refusal.why}")
    return {name: "; ".join(reasons) or "no kernel for this layer" for name, reasons in why.items()}
