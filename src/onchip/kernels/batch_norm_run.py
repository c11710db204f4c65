"""Finding the gradients of a batch norm in a training step: a run of nodes that one launch per device can compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onchip.kernels.batch_norm import BATCH_NORMS
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNormGrad, Mask, WeightGrad
from onchip.network.recipe import value_of


@dataclass(frozen=True)
class BatchNormGradRun:
    """Consecutive nodes that compute gradients of one norm; each part may be missing, but not all."""

    mask: tuple[Node, ...]  # the Mask before, the gradient of a ReLU: only these gradients read it
    sums: Mapping[str, str]  # the gradients of the norm's weights, "new_d_weight" or "new_d_bias" by name
    norm: Node  # the first node after the mask
    dx: tuple[Node, ...]  # the BatchNormGrad, by these sums if there are any

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*(node.name for node in self.mask), *self.sums, *(node.name for node in self.dx))

    @property
    def operands(self) -> dict[str, str]:
        """What each value is that the nodes read: "x", "dy" or "mask"; and dy by its name if a mask computes it."""
        x, dy = self.norm.inputs[0], self.norm.inputs[-1]
        if not self.mask:
            return {x: "x", dy: "dy"}
        return {x: "x", dy: ""} | dict(zip(self.mask[0].inputs, ("dy", "mask"), strict=True))

    @property
    def eps(self) -> float:
        return _eps(self.norm)

    @property
    def label(self) -> str:
        """Template arguments as in a kernel's name."""
        sums = [kind.replace("new_", "") for kind in self.sums.values()]
        return ",".join([*(["Mask"] if self.mask else []), *sums, *(["dx"] if self.dx else [])])


def find_gradients(net: Network, start: int) -> BatchNormGradRun | None:
    """The gradients of a batch norm from net.nodes[start] on; None if none begin there."""
    mask = _mask(net, start)
    sums = _sums(net, start + len(mask))
    dx = _dx(net, start + len(mask) + len(sums), sums)
    return BatchNormGradRun(mask, sums, net.nodes[start + len(mask)], dx) if sums or dx else None


def _mask(net: Network, start: int) -> tuple[Node, ...]:
    """A Mask at `start` of values of one shape, if only the gradients of a batch norm that follow read it."""
    mask = net.nodes[start]
    if not isinstance(mask.layer, Mask) or mask.weights or len({net.types[value] for value in mask.inputs}) > 1:
        return ()
    sums = _sums(net, start + 1)
    names = {*sums, *(node.name for node in _dx(net, start + 1 + len(sums), sums))}
    reads_mask = all(net.by_name[name].inputs[-1] == mask.name != net.by_name[name].inputs[0] for name in names)
    is_closed = mask.name not in net.kept and {node.name for node in net.readers(mask.name)} == names
    return (mask,) if names and reads_mask and is_closed and len({*mask.inputs}) == 2 else ()


def _sums(net: Network, start: int) -> dict[str, str]:
    """The gradients of a norm's weights from `start` on, each once: what each is, by name."""
    found, first = dict[str, str](), next(net.nodes_from(start), None)
    for node in net.nodes_from(start):
        if first is None or not isinstance(node.layer, WeightGrad) or not isinstance(node.layer.of, BATCH_NORMS):
            break
        is_same = node.inputs == first.inputs and node.weights == first.weights and _eps(node) == _eps(first)
        if not is_same or f"new_d_{node.layer.role}" in found.values():
            break
        found[node.name] = f"new_d_{node.layer.role}"
    return found


def _dx(net: Network, start: int, sums: Mapping[str, str]) -> tuple[Node, ...]:
    """The BatchNormGrad at `start`, by these sums if there are any."""
    node = next(net.nodes_from(start), None)
    if node is None or not isinstance(node.layer, BatchNormGrad):
        return ()
    values = {f"new_{role}": value_of(net.weights[node.weights[role]]) for role in ("d_weight", "d_bias")}
    for name in sums:
        of = net.by_name[name]
        same_weights = all(of.weights.get(role) == node.weights[role] for role in ("mean", "var", "weight"))
        if of.inputs != node.inputs or not same_weights or _eps(of) != _eps(node):
            return ()
    return (node,) if not sums or values == {kind: name for name, kind in sums.items()} else ()


def _eps(node: Node) -> float:
    layer = node.layer.of if isinstance(node.layer, WeightGrad) else node.layer
    return float(layer.attributes()["eps"])
