"""A fully-connected network as arrays, for peers that are written layer by layer."""

from __future__ import annotations

from typing import NamedTuple

from onchip.bench.frame import UnavailableError
from onchip.network.graph import Network
from onchip.network.layers import Linear, ReLU
from onchip.network.recipe import Array, Evaluated, materialise


class Dense(NamedTuple):
    weight: Array  # (D_out, D_in)
    bias: Array | None  # (D_out,)
    relu: bool  # whether a ReLU follows


def dense_layers(net: Network) -> list[Dense]:
    """The network's layers, if it is a chain of Linear and ReLU."""
    layers: list[Dense] = []
    materialised: Evaluated = {}
    previous = next(iter(net.inputs))
    for node in net.nodes:
        if node.inputs != (previous,):
            raise UnavailableError(f"network '{net.name}' is not a chain of layers")
        if isinstance(node.layer, Linear):
            w = {role: materialise(name, net.weights, materialised) for role, name in node.weights.items()}
            layers.append(Dense(w["weight"], w.get("bias"), False))
        elif isinstance(node.layer, ReLU) and layers:
            layers[-1] = layers[-1]._replace(relu=True)
        else:
            raise UnavailableError(f"hand-written peers do not support {node.layer.kind}")
        previous = node.name
    return layers
