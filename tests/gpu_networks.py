"""The networks of the tests of engines, on a GPU above all."""

import numpy as np

from checks import random_mlp, rows
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Embedding, Linear, Reshape, Tanh
from onchip.network.types import TensorType

DECODE = (72, 64, 64, 4)
NET = random_mlp(*DECODE)
BATCHES = (1, 7, 1000)


def two_groups():
    """Two launches: what the first one makes is an output too, so no kernel keeps it on the chip."""
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3), "v": rows(4, 9, seed=4)}
    return Network({"x": TensorType(("B", 6))}, nodes, ("a", "b"), weights)


def two_towers() -> Network:
    """Ids and features in, their sum and the features' own way out."""
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((9, 4), dtype=np.float32),
        "w": rng.standard_normal((4, 6), dtype=np.float32),
    }
    nodes = (
        Node("emb", Embedding(), ("ids",), {"weight": "table"}), Node("flat", Reshape(), ("emb",)),
        Node("fc", Linear(), ("x",), {"weight": "w"}), Node("act", Tanh(), ("fc",)),
        Node("sum", Add(), ("flat", "act")),
    )  # fmt: skip
    types = {"ids": TensorType(("B", 1), "int64"), "x": TensorType(("B", 6))}
    return Network(types, nodes, ("sum", "act"), weights)
