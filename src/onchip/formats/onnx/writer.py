"""Networks to ONNX files that every runtime since 2022 loads. The operators are in ops/."""

from __future__ import annotations

import os
from typing import Any

from onchip.errors import InputError
from onchip.files import atomic_write
from onchip.formats.onnx.ops.base import WRITERS
from onchip.formats.onnx.ops.graph_writer import GraphWriter, OpsetError
from onchip.formats.onnx.tensors import ELEMENT_TYPES
from onchip.network.graph import Network, check_no_step
from onchip.network.types import TensorType

# Tried in order. 22 adds dilated average pools, ceil mode that drops the last window, bfloat16, group norm and wrap
# pads; 23 adds RMSNorm.
OPSETS = (17, 22, 23)
MEANING_KEY = "onchip"  # metadata entry with column and class names
MAX_WEIGHT_BYTES = (2 << 30) - (16 << 20)  # protobuf's limit is 2 GiB, including the graph


def write_onnx(net: Network, path: str | os.PathLike[str]) -> None:
    """Write the network with a symbolic batch "B". The file appears atomically."""
    model = onnx_model(net)
    with atomic_write(path) as file:
        file.write(model.SerializeToString(deterministic=True))


def onnx_model(net: Network) -> Any:
    """The network as an onnx.ModelProto."""
    check_no_step(net)
    import onnx

    if net.weight_bytes > MAX_WEIGHT_BYTES:
        raise InputError(
            f"network '{net.name}' is too large for ONNX", got=f"{net.weight_bytes:,} B of weights",
            expected=f"at most {MAX_WEIGHT_BYTES:,} B", hint="save it as .safetensors",
        )  # fmt: skip
    for opset in OPSETS:
        try:
            model = _make_model(net, opset)
            onnx.checker.check_model(model, full_check=True)
            return model
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            why = str(error).strip().split("\n")[0]
        except OpsetError as error:
            why = error.what
    raise InputError(f"network '{net.name}' cannot be written as ONNX", got=why, hint="save it as .safetensors")


def _make_model(net: Network, opset: int) -> Any:
    import onnx

    graph = GraphWriter(net, opset)
    for node in net.nodes:
        if node.layer.kind not in WRITERS:
            raise InputError(
                f"layer '{node.name}' ({node.layer.kind}) cannot be written as ONNX",
                expected=f"one of {', '.join(sorted(WRITERS))}", hint="save it as .safetensors",
            )  # fmt: skip
        WRITERS[node.layer.kind](graph, node)
    outputs: dict[str, TensorType] = {}
    for name in net.outputs:
        value = graph.values[name]
        if name in net.inputs or value in outputs:  # an ONNX output must be produced by a node, once
            source, value = value, graph.fresh(f"{name}_out")
            graph.emit_part("Identity", value, [source], value)
        outputs[value] = net.types[name]
    onnx_graph = onnx.helper.make_graph(
        graph.nodes,
        net.name or "network",
        [_value_info(graph.values[name], tensor_type) for name, tensor_type in net.inputs.items()],
        [_value_info(value, tensor_type) for value, tensor_type in outputs.items()],
        graph.initializers,
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    oldest = onnx.helper.find_min_ir_version_for(imports)
    model = onnx.helper.make_model(onnx_graph, producer_name="onchip", opset_imports=imports, ir_version=oldest)
    if text := net.meaning.to_text():
        onnx.helper.set_model_props(model, {MEANING_KEY: text})
    return model


def _value_info(name: str, tensor_type: TensorType) -> Any:
    import onnx

    if tensor_type.dtype not in ELEMENT_TYPES:
        raise InputError(
            f"value '{name}' cannot be written as ONNX", got=str(tensor_type), expected=", ".join(ELEMENT_TYPES),
            hint="save it as .safetensors",
        )  # fmt: skip
    return onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[tensor_type.dtype], list(tensor_type.shape))
