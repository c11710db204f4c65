"""A Linear and the residual Add after it, fused in the epilogue of GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onchip.kernels.chain import Chain, forward_cost, is_closed
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Add, Cast
from onchip.plan.kernel import Cost


@dataclass(frozen=True)
class Residual:
    """A chain of one layer; the epilogue adds `residual`, if any, before the activation."""

    chain: Chain
    residual: str = ""

    @property
    def label(self) -> str:
        return f"{self.chain.label},Add" if self.residual else self.chain.label

    def residual_input(self, net: Network) -> int | None:
        """The index of the residual among the group's inputs."""
        x = net.by_name[self.chain.nodes[0]].inputs[0]
        return len({x, self.residual}) - 1 if self.residual else None

    def cost(self, net: Network) -> Cost:
        cost = forward_cost(net, self.chain)
        residual_bytes = net.types[self.residual].row_bytes if self.residual_input(net) else 0
        return replace(cost, row_bytes=cost.row_bytes + residual_bytes)


def residuals(net: Network, start: int, chain: Chain) -> Iterator[Residual]:
    """The chain of one layer at net.nodes[start]: by itself, with the Add after it, and with the activation after that.

    An intermediate value that another node reads is not fused.
    """
    yield Residual(chain)
    (layer,), end = chain.layers, start + len(chain.nodes)
    last, add, active = (net.nodes[i] if i < len(net.nodes) else None for i in range(end - 1, end + 2))
    if (
        last is None
        or add is None
        or not isinstance(add.layer, Add)
        or layer.activation
        or isinstance(last.layer, Cast)
    ):
        return
    others = [value for value in add.inputs if value != last.name]
    alike = len({net.types[value] for value in (*add.inputs, add.name)}) == 1
    if len(add.inputs) != 2 or len(others) != 1 or add.weights or not alike or not is_closed(net, [last, add]):
        return
    nodes = (*chain.nodes, add.name)
    yield Residual(replace(chain, nodes=nodes, ends=(len(nodes),)), *others)
    if active is None or not isinstance(active.layer, ACTIVATIONS) or active.inputs != (add.name,):
        return
    if is_closed(net, [add, active]):
        nodes = (*nodes, active.name)
        active_layers = (replace(layer, activation=active.layer),)
        yield Residual(replace(chain, nodes=nodes, layers=active_layers, ends=(len(nodes),)), *others)
