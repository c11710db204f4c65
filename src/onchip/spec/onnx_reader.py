"""ONNX files, opset 6 and newer, to networks. The operators themselves are in onnx_ops/."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from onchip.errors import FormatError
from onchip.files import open_input
from onchip.spec.network import Network
from onchip.spec.onnx_ops.base import READERS, GraphReader, Op
from onchip.spec.onnx_tensors import TensorReader, dtype_of, text
from onchip.spec.reading import MAX_RANK, blaming, show
from onchip.spec.types import BATCH, Dim, TensorType

MAX_MODEL_BYTES = (2 << 30) - 1  # protobuf's own limit; larger weights live in files beside the model
OLDEST_OPSET = 6

# Attribute types of ONNX -> the field that holds the value.
_SCALARS = {1: "f", 2: "i", 3: "s", 4: "t"}
_LISTS = {6: "floats", 7: "ints", 8: "strings"}


def read_onnx(path: str | os.PathLike[str]) -> Network:
    """The network of an ONNX file; its first dimension becomes the batch, fixed or not.

    FormatError, with the file's name in front, where the file is damaged or holds what onchip cannot run.
    """
    source = Path(path)
    with open_input(source) as file, blaming(source):
        return _read_model(_parse(file), source)


def _parse(file: IO[bytes]) -> Any:
    import onnx

    size = os.fstat(file.fileno()).st_size
    if size > MAX_MODEL_BYTES:
        raise FormatError("too large for an ONNX file", got=f"{size:,} B", expected=f"at most {MAX_MODEL_BYTES:,} B")
    try:
        model = onnx.ModelProto.FromString(file.read())
    except Exception:  # protobuf's DecodeError, which has no stable home
        got, hint = f"{size:,} B that are no protobuf, or part of one", "export or copy the file again"
        raise FormatError("not an ONNX file", got=got, expected="a whole ONNX model", hint=hint) from None
    if not model.HasField("graph") or not model.opset_import:
        raise FormatError("not an ONNX file", got="a protobuf without graph or opset", expected="an ONNX model")
    return model


def _read_model(model: Any, source: Path) -> Network:
    graph = model.graph
    opset = _opset(model)
    if graph.sparse_initializer:
        raise FormatError("sparse weights are not supported", expected="dense initializers")
    constants = {text(tensor.name): tensor for tensor in graph.initializer}
    if len(constants) < len(graph.initializer):
        raise FormatError("two initializers have the same name", expected="unique names")
    inputs, batch = _inputs([value for value in graph.input if text(value.name) not in constants])
    ops = [_op(node) for node in graph.node]
    outputs = [text(value.name) for value in graph.output]
    reader = GraphReader(opset, batch, inputs, constants, ops, outputs, TensorReader(source.parent))
    for op in ops:
        if op.kind not in READERS:
            raise FormatError(
                f"{op}: unsupported operator", got=op.kind, expected=f"one of {', '.join(sorted(READERS))}"
            )
        READERS[op.kind](reader, op)
    for name in outputs:
        if name not in reader.values:
            raise FormatError(f"output {show(name)} is made by no node, or is a constant", expected="a node's output")
    named = [reader.values[name] for name in outputs]
    return Network(inputs, tuple(reader.nodes.values()), tuple(named), reader.weights, text(graph.name) or source.stem)


def _opset(model: Any) -> int:
    versions = [entry.version for entry in model.opset_import if text(entry.domain) in ("", "ai.onnx")]
    if not versions:
        raise FormatError("the file names no version of ONNX's operators", expected="an opset_import of domain ''")
    if versions[0] < OLDEST_OPSET:
        raise FormatError(
            "the file is too old", got=f"opset {versions[0]}", expected=f"opset {OLDEST_OPSET} or newer",
            hint="onnx.version_converter.convert_version(model, 17)",
        )  # fmt: skip
    return int(versions[0])


def _inputs(values: list[Any]) -> tuple[dict[str, TensorType], int | None]:
    """The types of the graph's inputs with the batch made symbolic, and the batch if the file fixes it."""
    types: dict[str, TensorType] = {}
    fixed: set[int] = set()
    for value in values:
        name = text(value.name)
        where = f"input {show(name)}"
        if not name or name in types:
            raise FormatError("two inputs have the same name, or one has none", got=show(name))
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise FormatError(f"{where} has no shape", expected="a tensor of known rank, the batch first")
        dims = value.type.tensor_type.shape.dim
        if not 1 <= len(dims) <= MAX_RANK:
            raise FormatError(f"{where} has no batch", got=f"{len(dims)} axes", expected=f"1 to {MAX_RANK}")
        if dims[0].dim_value > 0:
            fixed.add(dims[0].dim_value)
        row_shape: list[Dim] = []
        for axis, dim in enumerate(dims[1:], start=1):
            if not dim.HasField("dim_value") or dim.dim_value < 0:
                got = f"axis {axis}: {show(text(dim.dim_param) or dim.dim_value)}"
                raise FormatError(f"{where}: only the batch may be unknown", got=got, expected="sizes behind axis 0")
            row_shape.append(dim.dim_value)
        types[name] = TensorType((BATCH, *row_shape), dtype_of(value.type.tensor_type.elem_type, where))
    if len(fixed) > 1:
        raise FormatError("the inputs have different numbers of rows", got=show(sorted(fixed)), expected="one batch")
    return types, fixed.pop() if fixed else None


def _op(node: Any) -> Op:
    domain, kind = text(node.domain), text(node.op_type)
    op = Op(
        kind if domain in ("", "ai.onnx") else f"{domain}.{kind}",
        text(node.name),
        tuple(text(name) for name in node.input),
        tuple(text(name) for name in node.output),
        {text(attribute.name): _attribute(attribute) for attribute in node.attribute},
    )
    if not op.outputs:
        raise FormatError(f"a node makes nothing: {show(op.name)} ({op.kind})", expected="an output")
    return op


def _attribute(attribute: Any) -> object:
    if attribute.type in _SCALARS:
        return getattr(attribute, _SCALARS[attribute.type])
    if attribute.type in _LISTS:
        return list(getattr(attribute, _LISTS[attribute.type]))
    return None  # graphs, sparse tensors, types: no operator here has them
