"""What an ONNX file holds, without converting it: also of files that onchip cannot run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.files import open_input
from onchip.formats.onnx.reader import parse_model
from onchip.formats.onnx.tensors import ELEMENT_DTYPES
from onchip.network.reading import naming_file


@dataclass(frozen=True)
class OnnxSummary:
    opset: int
    producer: str  # "pytorch 2.13.0"; "" if the file does not say
    inputs: dict[str, str]  # name -> "float32[N, 3, 224, 224]", open sizes by their names in the file
    outputs: dict[str, str]
    operators: dict[str, int]  # number of nodes, most frequent first; branches included


def summarise_onnx(path: str | os.PathLike[str]) -> OnnxSummary:
    """What the file holds; FormatError if it is missing or no ONNX model."""
    with open_input(Path(path)) as file, naming_file(Path(path)):
        model = parse_model(file.read())
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    return OnnxSummary(
        opset, f"{model.producer_name} {model.producer_version}".strip(),
        {value.name: _type(value) for value in graph.input if value.name not in weights},
        {value.name: _type(value) for value in graph.output},
        dict(Counter(_operators(graph.node)).most_common()),
    )  # fmt: skip


def _operators(nodes: Iterable[Any]) -> Iterable[str]:
    for node in nodes:
        yield node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        for attribute in node.attribute:
            yield from _operators(attribute.g.node)


def _type(value: Any) -> str:
    tensor = value.type.tensor_type
    sizes = [str(size.dim_value) if size.HasField("dim_value") else size.dim_param or "?" for size in tensor.shape.dim]
    return f"{ELEMENT_DTYPES.get(tensor.elem_type, f'ONNX type {tensor.elem_type}')}[{', '.join(sizes)}]"
