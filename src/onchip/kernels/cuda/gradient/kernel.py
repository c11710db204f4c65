"""The base class of kernels that are templates on one element type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.network.graph import Network
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.plan import values_read, values_written


class OneDtypeKernel(CudaKernel):
    """All floats that a claim reads and writes have one dtype. Weights may have another: recipes convert them."""

    writes_other_dtypes: ClassVar[bool] = False  # gradients of weights have the weights' dtypes

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        for answer in super().claims(net, start, device, job):
            dtypes = self._dtypes(net, answer) if isinstance(answer, Claim) else {}
            if len(dtypes) > 1:
                yield Refusal(self.name, net.nodes[start].name, f"computes on one dtype, not {' and '.join(dtypes)}")
                return
            yield answer

    def _dtypes(self, net: Network, claim: Claim) -> dict[str, None]:
        """Of the floats of a claim that must have one, each once."""
        written = () if self.writes_other_dtypes else values_written(net, claim.nodes)
        dtypes = (net.types[name].dtype for name in (*values_read(net, claim), *written))
        return dict.fromkeys(dtype for dtype in dtypes if "float" in dtype)
