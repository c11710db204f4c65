"""The reference of the sentiment ladder: float64 outputs, and the allowed error of each rung."""

from __future__ import annotations

from onchip.kernels import reference
from onchip.ladders.device import DeviceRows
from onchip.measure.truth import Verdict, allowed_error, naive_run, relative_error
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise

REPORT_LIMIT = 1e-3  # of the smaller of absolute and relative error


class SentimentTruth:
    """The float64 outputs of these sentences."""

    def __init__(self, net: Network, x: DeviceRows) -> None:
        self._net, (self._ids,) = reference.with_used_tokens(net, (x.host,))
        self.y: Array = reference.forward(self._net, self._ids)
        self._allowed = {"fp32": REPORT_LIMIT}

    def verify(self, got: Array) -> Verdict:
        return self.verify_in("fp32", got)

    def verify_in(self, arithmetic: str, got: Array) -> Verdict:
        """Check a result; in half precision, against twice the error of a naive run that rounds the same values.

        arithmetic  "fp32", "fp16 convolutions" (fp16 embedding and filters, all else fp32) or "fp16" (every value)
        """
        if arithmetic not in self._allowed:
            self._allowed[arithmetic] = allowed_error(relative_error(self._naive(arithmetic), self.y))
        return Verdict(relative_error(got, self.y), self._allowed[arithmetic])

    def _naive(self, arithmetic: str) -> Array:
        if arithmetic == "fp16":
            return naive_run(self._net, self._ids, "float16")
        filters = {node.weights["weight"] for node in self._net.nodes if node.layer.kind in ("Embedding", "Conv1d")}
        rounded = {name: materialise(name, self._net.weights).astype("float16").astype("float32") for name in filters}
        return naive_run(self._net.replace(weights={**self._net.weights, **rounded}), self._ids, "float32")
