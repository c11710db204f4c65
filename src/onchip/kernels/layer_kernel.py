"""The base class of the kernels of all devices: the checks before a claim, and the claim of one layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from onchip.network.graph import Network, Node
from onchip.network.layers import Layer, StepLayer
from onchip.network.recipe import Recipe
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import ROWS


class LayerKernel:
    """A kernel that begins at a layer of certain types.

    A subclass for single layers writes `lower`, and overrides `label`, `cost` and `order` where they differ. One that
    fuses layers, or offers several layouts, writes `offers`.
    """

    name: ClassVar[str]
    device_kind: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]]
    layers: ClassVar[tuple[type[Layer], ...]]
    dtypes: ClassVar[Collection[str]]  # of the layer's first input, and of a step layer's result
    architectures: ClassVar[tuple[str, ...]] = ()  # of the device; (): all
    order: ClassVar[str] = ""  # of the reduction

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, self.layers) or not self.applies(net, start):
            return
        if job.precision not in self.precisions:
            why = f"computes in {', '.join(self.precisions)}, not {job.precision}"
            yield Refusal(self.name, node.name, why)
            return
        x = net.types[node.inputs[0]]
        if isinstance(node.layer, StepLayer) and x.dtype in self.dtypes:  # its result may have the dtype of a weight
            x = net.types[node.name]
        if x.dtype not in self.dtypes or (self.architectures and device.arch not in self.architectures):
            what = " on ".join(map(", ".join, filter(None, (self.dtypes, self.architectures))))
            yield Refusal(self.name, node.name, f"computes on {what}, not {x} on {device.arch}")
            return
        yield from self.offers(net, start, device, job)

    def applies(self, net: Network, start: int) -> bool:
        """Whether the kernel is meant for net.nodes[start]: if not, it yields nothing, not even a Refusal."""
        return True

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """The claims from net.nodes[start] on, after the checks."""
        node = net.nodes[start]
        facts = self.lower(node, net.types, device)
        yield Refusal(self.name, node.name, facts) if isinstance(facts, str) else self.claim(net, node, facts)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> object:
        """The claim's facts, or why the kernel cannot run the layer."""
        raise NotImplementedError

    def claim(self, net: Network, node: Node, facts: object, layout: str = ROWS, **changes: Any) -> Claim:
        """The claim of one layer, its inputs and output in this layout; `changes` replace fields."""
        fields: dict[str, Any] = {
            "kernel": self.name, "label": self.label(net, node), "nodes": (node.name,), "cost": self.cost(net, node),
            "why": "single layer", "order": self.order, "facts": facts,
            "reads": {} if layout == ROWS else dict.fromkeys(node.inputs, Use(layout)),
            "writes": {} if layout == ROWS else {node.name: layout},
        }  # fmt: skip
        return Claim(**(fields | changes))

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<{node.layer.kind}>"

    def cost(self, net: Network, node: Node) -> Cost:
        """The inputs are read once, the output is written once."""
        return Cost(net.row_flop(node), sum(net.types[value].row_bytes for value in (*node.inputs, node.name)))


def recipe_bytes(recipes: Mapping[str, Recipe]) -> int:
    """Bytes of the weights that a launch reads."""
    return sum(recipe.nbytes for recipe in recipes.values())
