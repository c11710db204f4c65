"""A network in one .safetensors file: the weights as tensors, the graph as JSON in the metadata."""

from __future__ import annotations

import os
from pathlib import Path

from onchip.errors import FormatError
from onchip.formats.graph_json import graph_from_json, graph_to_json
from onchip.formats.weights.tensor_file import read_tensors, write_tensors
from onchip.network.graph import Network, check_no_step
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Evaluated, materialise


def write_safetensors(net: Network, path: str | os.PathLike[str]) -> None:
    """Write the graph and every weight that a layer uses; recipes are evaluated. The file appears atomically."""
    check_no_step(net)
    used = {name for node in net.nodes for name in node.weights.values()}
    evaluated: Evaluated = {}
    arrays = {name: materialise(name, net.weights, evaluated) for name in net.weights if name in used}
    write_tensors(path, arrays, {"onchip": graph_to_json(net)})


def read_safetensors(path: str | os.PathLike[str]) -> Network:
    """Read a network that write_safetensors wrote. Anything else is a FormatError, also weights without a graph."""
    metadata, arrays = read_tensors(path)
    with naming_file(Path(path)):
        return graph_from_json(_graph(metadata), arrays)


def _graph(metadata: object) -> str:
    graph = metadata.get("onchip") if isinstance(metadata, dict) else None
    if graph is None:
        raise FormatError(
            "the safetensors file has weights but no graph", got="no 'onchip' entry in its metadata",
            expected="a file that onchip.save wrote", hint="load the ONNX export, or build the network and save it",
        )  # fmt: skip
    if not isinstance(graph, str):
        raise FormatError("the 'onchip' metadata is not a string", got=show(graph))
    return graph
