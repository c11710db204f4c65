"""The dtypes of a network's inputs and outputs in memory, independent of its compute dtype: Casts at its ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast
from onchip.network.layers.cast import CastTo
from onchip.network.types import TensorType

IO = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by the short names of options
IO_DTYPES = tuple(IO.values())


def short_name(dtype: str) -> str:
    """The name in IO of a dtype: "fp16" for "float16"."""
    return next(short for short, long in IO.items() if long == dtype)


def with_io(net: Network, dtype: str) -> Network:
    """The same network with float inputs and outputs of `dtype`, between Casts from and to the dtypes it computes in.

    Inputs and outputs keep their names and order; ints stay ints. Returns the network itself if nothing changes.
    """
    if dtype not in IO_DTYPES:
        raise InputError("unsupported dtype for inputs and outputs", got=str(dtype), expected=", ".join(IO_DTYPES))
    ends = (*net.inputs, *net.outputs)
    return with_io_dtypes(net, {name: dtype for name in ends if "float" in net.types[name].dtype})


def with_io_dtypes(net: Network, dtypes: Mapping[str, str]) -> Network:
    """The same network with these dtypes of inputs and outputs, by name, between Casts."""
    changed = {name: dtype for name, dtype in dtypes.items() if net.types[name].dtype != dtype}
    if not changed:
        return net
    inputs = {name: TensorType(t.shape, changed.get(name, t.dtype)) for name, t in net.inputs.items()}
    taken, nodes = set(net.types), list[Node]()

    def name_for(value: str) -> str:
        wanted = f"{value}.{net.types[value].dtype}"
        while wanted in taken:
            wanted += "_"
        taken.add(wanted)
        return wanted

    def to(dtype: str) -> Cast:
        return Cast(cast(CastTo, dtype))

    # Each reader of an input has its own Cast right before it, and each output's Cast follows its node, so that a
    # kernel can fuse them.
    inner = {name: name_for(name) for name in changed if name not in net.inputs}
    for node in net.nodes:
        reads = {value: name_for(value) for value in node.inputs if value in changed and value in net.inputs}
        nodes += [Node(name, to(net.types[value].dtype), (value,)) for value, name in reads.items()]
        inputs_of = tuple(reads.get(value, inner.get(value, value)) for value in node.inputs)
        nodes.append(dataclasses.replace(node, name=inner.get(node.name, node.name), inputs=inputs_of))
        if node.name in inner:
            nodes.append(Node(node.name, to(changed[node.name]), (inner[node.name],)))
    return Network(inputs, tuple(nodes), net.outputs, net.weights, net.name, net.meaning)
