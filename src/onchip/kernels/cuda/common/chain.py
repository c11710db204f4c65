"""What every kernel that runs a chain of Linear layers checks first."""

from __future__ import annotations

from collections.abc import Callable

from onchip.kernels.chain import Chain, end_dtypes
from onchip.kernels.cuda.common.program import ELEMENT_TYPES, EVERY_CHIP
from onchip.network.graph import Network
from onchip.plan.device import Device
from onchip.plan.kernel import Job

# Whether another kernel can keep the weights of a chain in shared memory; then no GEMM kernel claims it.
FitsInBlock = Callable[[Network, Chain, Device, Job], bool]


def chain_refusal(net: Network, chain: Chain, device: Device, job: Job) -> str:
    """Why no chain kernel can run this chain; "" if one can."""
    if job.is_training:
        return "runs forward only: it keeps no activations for a backward pass"
    if device.arch not in EVERY_CHIP:
        return f"compiles for {', '.join(EVERY_CHIP)}, not {device.arch}"
    for dtype in end_dtypes(net, chain):
        if dtype not in ELEMENT_TYPES:
            return f"reads and writes {', '.join(ELEMENT_TYPES)}, not {dtype}"
    for layer in chain.layers:
        for name in filter(None, (layer.weight, layer.bias)):
            if (dtype := net.weight_type(name).dtype) not in ELEMENT_TYPES:
                return f"keeps weights of {', '.join(ELEMENT_TYPES)}, and {name} is {dtype}"
    return ""
