"""ONNX files to networks. The operators are in ops/."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError, InputError, ShapeError
from onchip.files import open_input
from onchip.formats.onnx.ops.base import FOLDS, READERS, Op
from onchip.formats.onnx.ops.fold import KEEP_ELEMENTS
from onchip.formats.onnx.ops.gather_elements import reads_row_indices
from onchip.formats.onnx.ops.graph_reader import MAX_ROW, GraphReader
from onchip.formats.onnx.ops.missing import INSTEAD, check_operators
from onchip.formats.onnx.ops.norm_parts import NORM, join_norms
from onchip.formats.onnx.ops.permuted import reads_permuted
from onchip.formats.onnx.ops.truth import reads_truth
from onchip.formats.onnx.shapes import Shapes, input_sizes
from onchip.formats.onnx.tensors import TensorReader, dtype_of, text
from onchip.formats.onnx.writer import MEANING_KEY
from onchip.formats.value_names import name_values
from onchip.network.graph import Network
from onchip.network.meaning import Meaning
from onchip.network.names import did_you_mean
from onchip.network.reading import MAX_RANK, naming_file, show
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType

ML = "ai.onnx.ml"  # scikit-learn's operators, versioned separately
MAX_MODEL_BYTES = (2 << 30) - 1  # protobuf's limit; larger weights are in external files
MAX_NODES = 1 << 15
OLDEST_OPSET = 6  # older files go through ONNX's converter
CONVERT_SECONDS = 60
CONVERT = """
import sys
import onnx.version_converter
model = onnx.ModelProto.FromString(sys.stdin.buffer.read())
sys.stdout.buffer.write(onnx.version_converter.convert_version(model, int(sys.argv[1])).SerializeToString())
"""

# ONNX attribute type -> the field with the value.
_SCALARS = {1: "f", 2: "i", 3: "s", 4: "t"}
_LISTS = {6: "floats", 7: "ints", 8: "strings"}
_GRAPH = 5
MAX_DEPTH = 8  # of nested branches


def read_onnx(path: str | os.PathLike[str], shapes: Shapes | None = None) -> Network:
    """Read the network of an ONNX file; its first dimension becomes the batch, fixed or not.

    shapes  sizes of dynamic axes of the inputs
    FormatError, prefixed with the file's name, if the file is damaged or contains something onchip cannot run.
    """
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        size = os.fstat(file.fileno()).st_size
        if size > MAX_MODEL_BYTES:
            expected = f"at most {MAX_MODEL_BYTES:,} B"
            raise FormatError("too large for an ONNX file", got=f"{size:,} B", expected=expected)
        model = parse_model(file.read(size))
        return _with_meaning(read_model(model, source.parent, source.stem, shapes=shapes), model)


def _with_meaning(net: Network, model: Any) -> Network:
    """Attach column and class names from the file's metadata, if onchip wrote it."""
    found = [text(prop.value) for prop in model.metadata_props if text(prop.key) == MEANING_KEY]
    if not found:
        return net
    meaning = Meaning.from_text(found[0])
    inputs, outputs = list(net.inputs.values()), [net.types[name] for name in net.outputs]
    meaning.check(*(types[0].row_size if len(types) == 1 else 0 for types in (inputs, outputs)))
    return net.replace(meaning=meaning)


def parse_model(data: bytes) -> Any:
    import onnx

    try:
        model = onnx.ModelProto.FromString(data)
    except Exception:  # protobuf's DecodeError, whose import path varies
        got, hint = f"{len(data):,} B, not a complete protobuf", "export or copy the file again"
        raise FormatError("not an ONNX file", got=got, expected="a complete ONNX model", hint=hint) from None
    if not model.HasField("graph") or not model.opset_import:
        raise FormatError("not an ONNX file", got="a protobuf without graph or opset", expected="an ONNX model")
    return model


def read_model(
    model: Any,
    folder: Path | None = None,
    name: str = "network",
    operands: Mapping[str, Array] | None = None,
    one_row: bool = False,
    shapes: Shapes | None = None,
) -> Network:
    """Convert a ModelProto to a network.

    folder    the folder of external weight files
    name      the network's name if the graph has none
    operands  graph inputs that are constants here: a convolution's weights, the shape of a Reshape
    one_row   the first dimension is not a batch: all values of the model form a single row
    shapes    sizes of dynamic axes of the inputs
    """
    if len(model.graph.node) > MAX_NODES:
        got, expected = f"{len(model.graph.node):,} nodes", f"at most {MAX_NODES:,}"
        raise FormatError("the graph is too large", got=got, expected=expected)
    _check_ir_version(model)
    model, opset = _modern(model)
    graph = model.graph
    if graph.sparse_initializer:
        raise FormatError("sparse weights are not supported", expected="dense initializers")
    constants: dict[str, Any] = {text(tensor.name): tensor for tensor in graph.initializer}
    if len(constants) < len(graph.initializer):
        raise FormatError("two initializers have the same name", expected="unique names")
    constants |= operands or {}
    values = [value for value in graph.input if text(value.name) not in constants]
    outputs, tensors = [text(value.name) for value in graph.output], TensorReader(folder)
    ops = join_norms([_op(node) for node in graph.node], outputs, _small_constants(graph, constants, tensors))
    every = _with_branches(ops)
    check_operators(every, [text(value.name) for value in values])  # first: no size of an input can help then
    inputs, batch = _inputs(values, one_row, shapes)
    ml_opset = next((int(entry.version) for entry in model.opset_import if text(entry.domain) == ML), 1)
    for op in every:
        _check_op(op, ml_opset if op.kind.startswith(ML) else opset)
    reader = GraphReader(opset, batch, one_row, inputs, constants, every, outputs, tensors)
    with np.errstate(all="ignore"):
        for op in ops:
            _read_op(reader, op)
    for output in outputs:
        if output in reader.unfinished and not reader.finish(output):
            raise FormatError(
                f"output {show(output)} is part of a layer", expected=reader.unfinished[output].expected,
                hint=reader.unfinished[output].hint,
            )  # fmt: skip
        if output not in reader.values:
            raise FormatError(f"output {show(output)} is missing or constant", expected="a value that a node computes")
    named = tuple(reader.values[output] for output in outputs)
    nodes = reader.needed_nodes(named)
    used = {weight: reader.weights[weight] for node in nodes for weight in node.weights.values()}
    return name_values(Network(inputs, nodes, named, used, text(graph.name) or name), {}, outputs)


def _small_constants(graph: Any, constants: dict[str, Any], tensors: TensorReader) -> Callable[[str], Array | None]:
    """A lookup of small initializers and Constants by name; None for anything else."""
    found = {text(node.output[0]): node.attribute for node in graph.node if node.op_type == "Constant" and node.output}

    def find(name: str) -> Array | None:
        tensor = constants.get(name)
        if tensor is None and len(found.get(name, ())) == 1 and text(found[name][0].name) == "value":
            tensor = found[name][0].t
        if isinstance(tensor, np.ndarray) or tensor is None:
            return tensor
        return tensors.read(tensor, name) if math.prod(tensor.dims) <= MAX_RANK else None

    return find


def _with_branches(ops: Sequence[Op], depth: int = 0) -> list[Op]:
    """All operators; those in both branches of an If precede it."""
    every: list[Op] = []
    for op in ops:
        if op.kind == "If":
            inside = [_op(node) for graph in _branches(op) for node in graph.node]
            if depth == MAX_DEPTH or len(every) + len(inside) > MAX_NODES:
                raise FormatError(f"{op}: too many branches", expected=f"at most {MAX_DEPTH} nested levels")
            every += _with_branches(inside, depth + 1)
        every.append(op)
    return every


def _branches(op: Op) -> list[Any]:
    """The graphs of an If: the branch for true, then for false."""
    found = [op.attributes.get(name) for name in ("then_branch", "else_branch")]
    if not all(hasattr(graph, "node") for graph in found):
        raise FormatError(f"{op} needs two branches", got=show(list(op.attributes)), expected="a graph for each")
    return found


def _read_branch(reader: GraphReader, op: Op) -> None:
    """Inline one branch of an If whose condition is constant, such as one on sizes."""
    graph = _branches(op)[0 if reader.constant(op, 0).all() else 1]
    if len(graph.output) != len(op.outputs):
        raise FormatError(f"{op}: wrong number of outputs", got=str(len(graph.output)), expected=str(len(op.outputs)))
    for tensor in graph.initializer:
        reader.add_constant(Op("Constant", "", (), (text(tensor.name),), {}), tensor)
    for node in graph.node:
        _read_op(reader, _op(node))
    for value, output in zip(graph.output, op.outputs, strict=True):
        _read_op(reader, Op("Identity", "", (text(value.name),), (output,), {}))


def _read_op(reader: GraphReader, op: Op) -> None:
    if op.kind == "If":
        _read_branch(reader, op)
        return
    try:
        if reads_row_indices(reader, op):
            return
        known = [reader.is_constant(op, index) for index, name in enumerate(op.inputs) if name]
        if op.kind in FOLDS and known and all(known):
            origin = op.inputs[0] if op.kind in KEEP_ELEMENTS else ""
            reader.add_constant(op, np.asarray(FOLDS[op.kind](reader, op)), origin)
        elif not (reads_permuted(reader, op) or reads_truth(reader, op)):
            READERS[op.kind](reader, op)
    except ShapeError as error:  # from a layer, which does not know its ONNX node
        hint = error.hint or INSTEAD
        raise FormatError(f"{op}: {error.what}", got=error.got, expected=error.expected, hint=hint) from None
    except InputError as error:
        hint = error.hint or INSTEAD
        raise FormatError(error.what, got=error.got, expected=error.expected, hint=hint) from None
    except (ValueError, IndexError, TypeError, ArithmeticError) as error:  # from NumPy, on constants
        raise FormatError(
            f"{op}: its constants do not fit", got=show(str(error)), expected=f"valid constants of {op.kind}"
        ) from None


def _check_op(op: Op, opset: int) -> None:
    """Raise FormatError for attributes or inputs that the operator lacks in this opset: they would be ignored."""
    import onnx

    if op.kind == NORM:
        return
    try:
        domain, _, name = op.kind.rpartition(".")
        schema = onnx.defs.get_schema(name, opset, domain)
    except (onnx.defs.SchemaError, TypeError, ValueError):  # TypeError, ValueError: the version is not an int32
        got, expected = f"opset {opset}", f"an operator of opset {opset}"
        hint = "set opset_import to the opset of the operators"
        raise FormatError(f"{op}: no such operator in this opset", got=got, expected=expected, hint=hint) from None
    known = sorted(schema.attributes)
    if unknown := next((name for name in op.attributes if name not in known), None):
        raise FormatError(
            f"{op}: unknown attribute {show(unknown)}", got=f"{show(unknown)} in opset {opset}",
            expected=", ".join(known) or "none", hint=did_you_mean(unknown, known),
        )  # fmt: skip
    if missing := [name for name in known if schema.attributes[name].required and name not in op.attributes]:
        raise FormatError(f"{op}: missing attribute '{missing[0]}'", got=show(list(op.attributes)), expected=missing[0])
    if len(op.inputs) > schema.max_input:
        got, expected = f"{len(op.inputs)} in opset {opset}", f"at most {schema.max_input}"
        raise FormatError(f"{op}: wrong number of inputs", got=got, expected=expected)


def _check_ir_version(model: Any) -> None:
    import onnx

    if model.ir_version > onnx.IR_VERSION:  # the parser has dropped newer fields
        raise FormatError(
            "the file is too new", got=f"IR version {model.ir_version}",
            expected=f"at most {onnx.IR_VERSION}, as onnx {onnx.__version__} supports", hint="pip install -U onnx",
        )  # fmt: skip


def _modern(model: Any) -> tuple[Any, int]:
    """The model converted to a supported opset, and that opset."""
    opset = _opset(model)
    if opset >= OLDEST_OPSET:
        return model, opset
    # In a subprocess: the converter is C++ and may crash on a damaged file. -P: do not import an onnx.py of the
    # current folder.
    command = [sys.executable, "-P", "-c", CONVERT, str(OLDEST_OPSET)]
    try:
        done = subprocess.run(command, input=model.SerializeToString(), capture_output=True, timeout=CONVERT_SECONDS)
        *_, last_line = done.stderr.decode(errors="replace").strip().split("\n")
        why = "" if done.returncode == 0 else last_line[-200:] or "it crashed"
    except subprocess.TimeoutExpired:
        why = f"not done after {CONVERT_SECONDS} s"
    if why:
        raise FormatError(
            "the file is too old, and ONNX cannot convert it", got=f"opset {opset}: {why}",
            expected=f"opset {OLDEST_OPSET} or newer", hint="export the model in a newer opset",
        )  # fmt: skip
    return parse_model(done.stdout), OLDEST_OPSET


def _opset(model: Any) -> int:
    import onnx

    versions = sorted({int(entry.version) for entry in model.opset_import if text(entry.domain) in ("", "ai.onnx")})
    if not versions:
        raise FormatError("the file has no opset", expected="an opset_import of domain ''")
    if len(versions) > 1:
        what, got = "the file has several opsets", f"opsets {show(versions)}"
        raise FormatError(what, got=got, expected="one opset_import of domain '' or 'ai.onnx'")
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= versions[0] <= newest:
        raise FormatError(
            "unknown opset", got=f"opset {versions[0]}",
            expected=f"opset 1 to {newest}, as onnx {onnx.__version__} supports",
            hint="pip install -U onnx",
        )  # fmt: skip
    return versions[0]


def _inputs(values: list[Any], one_row: bool, shapes: Shapes | None) -> tuple[dict[str, TensorType], int | None]:
    """The types of the graph's inputs with a symbolic batch, and the batch size if the file or the caller fixes it."""
    types: dict[str, TensorType] = {}
    names = [text(value.name) for value in values]
    if "" in names or len(set(names)) < len(names):
        raise FormatError("two inputs have the same name, or one has none", got=show(names))
    sizes = input_sizes(values, shapes, one_row)
    for name, value in zip(names, values, strict=True):
        where = f"input {show(name)}"
        types[name] = TensorType((BATCH, *sizes[name][1]), dtype_of(value.type.tensor_type.elem_type, where))
        if types[name].row_size > MAX_ROW:
            expected = f"at most {MAX_ROW:,} elements per row"
            raise FormatError(f"{where}: rows are too large", got=str(types[name]), expected=expected)
    fixed = {batch for batch, _ in sizes.values() if batch is not None}
    if len(fixed) > 1:
        raise FormatError("the inputs have different numbers of rows", got=show(sorted(fixed)), expected="one batch")
    return types, fixed.pop() if fixed else None


def _op(node: Any) -> Op:
    domain, kind = text(node.domain), text(node.op_type)
    attributes = {text(attribute.name): _attribute(attribute) for attribute in node.attribute}
    op = Op(
        kind if domain in ("", "ai.onnx") else f"{domain}.{kind}",
        text(node.name),
        tuple(text(name) for name in node.input),
        tuple(text(name) for name in node.output),
        attributes,
    )
    if not op.outputs:
        raise FormatError(f"a node has no output: {show(op.name)} ({op.kind})", expected="an output")
    if len(attributes) < len(node.attribute):
        got = show([text(attribute.name) for attribute in node.attribute])
        raise FormatError(f"{op}: repeated attribute", got=got, expected="unique names")
    return op


def _attribute(attribute: Any) -> object:
    if attribute.ref_attr_name:  # refers to an enclosing function; there is none
        return None
    if attribute.type in _SCALARS:
        return getattr(attribute, _SCALARS[attribute.type])
    if attribute.type in _LISTS:
        return list(getattr(attribute, _LISTS[attribute.type]))
    if attribute.type == _GRAPH:
        return attribute.g
    return None  # sparse tensors, types: not used by any supported operator
