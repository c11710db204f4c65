"""The base class of kernels of Linear layers: where they begin, which dtypes they support, the claim of a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from onchip.kernels.chain import Chain, end_dtypes, first_layer
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.network.graph import Network
from onchip.network.layers import Cast, Layer, Linear, Reshape
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

# Whether another kernel can keep the weights of a chain in shared memory; then no GEMM kernel claims it.
FitsInBlock = Callable[[Network, Chain, Device, Job], bool]


class ChainKernel(CudaKernel):
    """A kernel of one or more Linear layers with their activations and surrounding Casts."""

    layers: ClassVar[tuple[type[Layer], ...]] = (Linear, Cast, Reshape)
    dtypes = tuple(ELEMENT_TYPES)

    def applies(self, net: Network, start: int) -> bool:
        return first_layer(net, start, casts=True) is not None

    def claim_chain(self, net: Network, chain: Chain, lowering: object, **changes: Any) -> Claim:
        fields = {"nodes": chain.nodes, "label": f"{self.name}<{chain.label}>"}
        return self.claim(net, net.by_name[chain.nodes[0]], lowering, **(fields | changes))


def unsupported_dtype(net: Network, chain: Chain) -> str:
    """Why no chain kernel can store y or keep the weights; "" if one can."""
    _, y_dtype = end_dtypes(net, chain)
    if y_dtype not in ELEMENT_TYPES:
        return f"writes {', '.join(ELEMENT_TYPES)}, not {y_dtype}"
    for layer in chain.layers:
        for name in filter(None, (layer.weight, layer.bias)):
            if (dtype := net.weight_type(name).dtype) not in ELEMENT_TYPES:
                return f"keeps weights of {', '.join(ELEMENT_TYPES)}, and {name} is {dtype}"
    return ""


def supported_part(net: Network, chain: Chain) -> tuple[Chain, str]:
    """The chain, or its first layer if only a later one has an unsupported dtype; and why that cannot run, or ""."""
    why_not = unsupported_dtype(net, chain)
    if why_not and len(chain.layers) > 1:
        chain = chain.first(1)
        why_not = unsupported_dtype(net, chain)
    return chain, why_not
