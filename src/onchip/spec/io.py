"""What a network takes and hands out in memory, whatever it computes in: Casts at its ends."""

from __future__ import annotations

import dataclasses
from typing import cast

from onchip.errors import InputError
from onchip.spec.layers import Cast
from onchip.spec.layers.cast import CastTo
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType

IO_DTYPES = ("float32", "float16", "bfloat16")


def with_io(net: Network, dtype: str) -> Network:
    """The same network with float inputs and outputs of `dtype`, between Casts from and to the types it computes in.

    Inputs and outputs keep their names and their order; ints stay ints. The network itself where nothing changes.
    """
    if dtype not in IO_DTYPES:
        raise InputError("no dtype for inputs and outputs", got=str(dtype), expected=", ".join(IO_DTYPES))
    changed = {name for name, given in net.types.items() if "float" in given.dtype and given.dtype != dtype}
    inputs = {name: TensorType(t.shape, dtype) if name in changed else t for name, t in net.inputs.items()}
    inner = {name: _inner_name(net, name) for name in (*net.inputs, *dict.fromkeys(net.outputs)) if name in changed}
    # In front: what the network reads. An input that is an output too is handed on as it is.
    nodes = [
        Node(inner[name], Cast(cast(CastTo, net.types[name].dtype)), (name,))
        for name in net.inputs
        if name in inner and net.readers(name)
    ]
    for node in net.nodes:
        reads = tuple(inner.get(value, value) for value in node.inputs)
        nodes.append(dataclasses.replace(node, name=inner.get(node.name, node.name), inputs=reads))
    # Behind: each output once, under the name that its node had.
    nodes += [Node(name, Cast(cast(CastTo, dtype)), (inner[name],)) for name in inner if name not in net.inputs]
    return Network(inputs, tuple(nodes), net.outputs, net.weights, net.name) if inner else net


def _inner_name(net: Network, name: str) -> str:
    """A new name for what the network computes with under the cover of an input or output: 'x.float32'."""
    wanted = f"{name}.{net.types[name].dtype}"
    while wanted in net.types:
        wanted += "_"
    return wanted
