"""The weights that a reference run needs: random values drawn once, and only the table rows that ids look up."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Network
from onchip.network.layers import Embedding, TokenConv
from onchip.network.recipe import Array, Evaluated, Weight, materialise


def with_arrays(net: Network) -> Network:
    """The network with every weight as an array: random ones are drawn here, once for all runs and engines."""
    made: Evaluated = {}
    return net.replace(weights={name: materialise(name, net.weights, made) for name in net.weights})


def with_used_tokens(net: Network, xs: tuple[Array, ...]) -> tuple[Network, tuple[Array, ...]]:
    """The same network with only the tokens of xs in its tables: full tables can take minutes and gigabytes.

    Renumbers an input's ids if all its readers look up rows of tables that no other layer reads.
    """
    weights: dict[str, Weight] = dict(net.weights)
    renumbered = list(xs)
    for i, name in enumerate(net.inputs):
        nodes = net.readers(name)
        tables = {node.weights["weight"] for node in nodes if isinstance(node.layer, Embedding | TokenConv)}
        others = [node for node in net.nodes if node not in nodes and tables & set(node.weights.values())]
        looks_up = all(isinstance(node.layer, Embedding | TokenConv) for node in nodes)
        if not tables or others or not looks_up or name in net.outputs or not xs[i].size:
            continue
        used, new_ids = np.unique(xs[i], return_inverse=True)
        weights |= {table: materialise(table, net.weights)[used] for table in tables}
        renumbered[i] = new_ids.reshape(xs[i].shape).astype(xs[i].dtype)
    return net.replace(weights=weights), tuple(renumbered)
