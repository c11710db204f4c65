"""The networks of the tests of engines on a GPU."""

from checks import random_mlp, rows
from onchip.spec.layers import Linear
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType

DECODE = (72, 64, 64, 4)
NET = random_mlp(*DECODE)
BATCHES = (1, 7, 1000)


def two_groups():
    """Two launches: what the first one makes is an output too, so no kernel keeps it on the chip."""
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3), "v": rows(4, 9, seed=4)}
    return Network({"x": TensorType(("B", 6))}, nodes, ("a", "b"), weights)
