"""LSTM, GRU and RNN: a Linear over all steps, followed by a recurrent layer."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.permuted import AxisView
from onchip.network.graph import Node
from onchip.network.layers import GRU, LSTM, RNN, Linear, Permute, Recurrent, Reshape
from onchip.network.reading import show
from onchip.network.recipe import Array

_LAYERS: dict[str, type[Recurrent]] = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
_BIAS, _LENGTHS, _FIRST_STATE, _PEEPHOLES = 3, 4, 5, 7  # input indices
_OUTPUTS = ("sequence", "last", "cell")


@reads(*_LAYERS)
def read_recurrent(graph: GraphReader, op: Op) -> None:
    kind = _LAYERS[op.kind]
    _check_supported(graph, op)
    x = _batch_first(graph, op)
    direction = _text(op, "direction", "forward")
    attributes: dict[str, object] = {"direction": direction}
    if kind is RNN:
        attributes["activation"] = _activations(op, direction, ["tanh"])[0]
    elif _activations(op, direction, _ACTIVATIONS[op.kind]) != _ACTIVATIONS[op.kind]:
        got, expected = show(op.attributes["activations"]), ", ".join(_ACTIVATIONS[op.kind])
        raise FormatError(f"{op}: unsupported activations", got=got, expected=expected)
    if kind is GRU:
        attributes["reset_after"] = op.attribute("linear_before_reset", 0) != 0
    layer = kind(**attributes)  # type: ignore[arg-type]
    weights, linear = _weights(graph, op, x, layer)
    gates = graph.add_step(op, Linear(), (x,), linear) if linear else x
    states = _first_states(graph, op, x, layer, graph.weights[weights["recurrence"]].shape[-1])
    add = graph.add_named  # for the first output that is used
    for index, name in enumerate(op.outputs):
        if not name or not graph.readers[name]:
            continue
        if index > layer.states:
            raise FormatError(f"{op} has no output {index}", got=show(name), expected=f"at most {1 + layer.states}")
        output_layer = kind(**{**attributes, "output": _OUTPUTS[index]})  # type: ignore[arg-type]
        y = add(op, output_layer, (gates, *states), weights)
        add = graph.add_step
        _bind_output(graph, op, index, y, layer.directions)


def _check_supported(graph: GraphReader, op: Op) -> None:
    for name in ("clip", "input_forget"):
        if op.attributes.get(name):
            raise FormatError(f"{op} has a {name}", got=show(op.attributes[name]), expected=f"no {name}")
    if graph.has(op, _PEEPHOLES):
        raise FormatError(f"{op} has peepholes", got=show(op.inputs[_PEEPHOLES]), expected="no peepholes")
    if graph.has(op, _LENGTHS):
        raise FormatError(
            f"{op}: variable-length sequences", got=show(op.inputs[_LENGTHS]), expected="all steps of every row",
            hint="pad the sequences instead of packing them, and select steps after it",
        )  # fmt: skip


def _batch_first(graph: GraphReader, op: Op) -> str:
    """The value (B, S, D_in), or in one row (1, rows, S, D_in)."""
    rows_first = op.attribute("layout", 0) != 0
    view = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if isinstance(view, AxisView) and not rows_first and len(view.axes) == 3 and view.axes[1] == (0,):
        return view.in_order(graph, op, ((0,), view.axes[0], view.axes[2]))
    x = graph.value(op)
    if len(graph.shape(x)) != 3:
        raise FormatError(f"{op} needs three axes", got=str(graph.types[x]), expected="steps, rows, features")
    if rows_first:
        return x
    if not graph.one_row:
        raise FormatError(
            f"{op} runs over the batch axis", got=f"{graph.types[x]}, steps first", expected="the batch first",
            hint="batch_first=True in torch",
        )  # fmt: skip
    return graph.add_step(op, Permute((0, 2, 1, 3)), (x,))


def _text(op: Op, name: str, default: str) -> str:
    value = op.attributes.get(name, default.encode())
    return value.decode(errors="replace") if isinstance(value, bytes) else show(value)


def _activations(op: Op, direction: str, default: list[str]) -> list[str]:
    """The activations of one direction; both must have the same."""
    named: list[object] = op.attribute("activations", [])
    used = [name.decode(errors="replace").lower() if isinstance(name, bytes) else show(name) for name in named]
    if not used:
        return default
    half = len(used) // 2 if direction == "bidirectional" else len(used)
    if used[:half] * (len(used) // max(half, 1)) != used or len(used[:half]) != len(default):
        raise FormatError(f"{op}: activations differ", got=show(used), expected=f"{len(default)} per direction")
    return used[:half]


def _weights(graph: GraphReader, op: Op, x: str, layer: Recurrent) -> tuple[dict[str, str], dict[str, str]]:
    """The layer's weights, and those of the preceding Linear; none if x already is the gate input."""
    W, R = graph.weight_constant(op, 1, x), graph.weight_constant(op, 2, x)
    D, G, H = layer.directions, layer.gates, R.shape[-1] if R.ndim else 0
    if R.shape != (D, G * H, H) or W.ndim != 3 or W.shape[:2] != R.shape[:2]:
        got, expected = f"{W.shape} and {R.shape}", f"({D}, {G} * H, D_in) and ({D}, {G} * H, H)"
        raise FormatError(f"{op}: its weights do not fit", got=got, expected=expected)
    if op.attribute("hidden_size", H) != H:
        raise FormatError(f"{op}: another hidden_size", got=show(op.attributes["hidden_size"]), expected=str(H))
    weights = {"recurrence": graph.weight(op.inputs[2], R)}
    W = W.reshape(D * G * H, -1)
    bias: Array | None = None
    if graph.has(op, _BIAS):
        B = graph.weight_constant(op, _BIAS, x)
        if B.shape != (D, 2 * G * H):
            raise FormatError(f"{op}: its bias does not fit", got=str(B.shape), expected=str((D, 2 * G * H)))
        of_input, of_state = B[:, : G * H], B[:, G * H :].copy()
        if isinstance(layer, GRU) and layer.reset_after:
            inside = of_state[:, 2 * H :].copy()
            of_state[:, 2 * H :] = 0
            if inside.any():
                weights["bias"] = graph.weight(op.inputs[_BIAS], inside)
        bias = (of_input + of_state).reshape(-1)
    has_bias = bias is not None and bias.any()
    if not has_bias and W.shape[0] == W.shape[1] and np.array_equal(W, np.eye(len(W), dtype=W.dtype)):
        return weights, {}
    linear = {"weight": graph.weight(op.inputs[1], W)}
    if bias is not None and has_bias:
        linear["bias"] = graph.weight(op.inputs[_BIAS], bias)
    return weights, linear


def _first_states(graph: GraphReader, op: Op, x: str, layer: Recurrent, H: int) -> tuple[str, ...]:
    """The initial states (B, D, H); none if they are 0."""
    indices = [index for index in range(_FIRST_STATE, _FIRST_STATE + layer.states) if graph.has(op, index)]
    constants = [index for index in indices if graph.is_constant(op, index)]
    if any(graph.constant(op, index).any() for index in constants):
        raise FormatError(f"{op} has a constant initial state", expected="zeros, or a value per row")
    values = [index for index in indices if index not in constants]
    if not values:
        return ()
    if len(values) < layer.states:
        raise FormatError(f"{op} has one of two initial states", expected="both or none")
    return tuple(_first_state(graph, op, index) for index in values)


def _first_state(graph: GraphReader, op: Op, index: int) -> str:
    view = graph.unfinished.get(op.inputs[index])
    if isinstance(view, AxisView) and len(view.axes) == 3 and view.axes[1] == (0,):
        return view.in_order(graph, op, ((0,), view.axes[0], view.axes[2]))
    value = graph.value(op, index)
    if op.attribute("layout", 0):
        return value
    if graph.one_row:
        return graph.add_step(op, Permute((0, 2, 1, 3)), (value,))
    raise FormatError(
        f"{op}: the batch is not first in its state", got=str(graph.types[value]), expected="a Transpose before it",
        hint="h.transpose(0, 1) before the LSTM, of a state with the batch first",
    )  # fmt: skip


def _bind_output(graph: GraphReader, op: Op, index: int, y: str, D: int) -> None:
    """Bind the node's output in ONNX's layout: (S, D, B, H), or (D, B, H) of the last step."""
    *leading, width = graph.types[y].shape
    shape = (*leading, D, int(width) // D)
    is_sequence, rows_first = index == 0, op.attribute("layout", 0) != 0
    if graph.one_row:  # (1, rows, S, D, H)
        split = graph.add_step(op, Reshape(tuple(int(d) for d in shape[1:])), (y,))
        permute = Permute((0, 2, 3, 1, 4) if is_sequence else (0, 2, 1, 3))
        graph.bind_output(op, index, split if rows_first else graph.add_step(op, permute, (split,)))
        return
    steps_first = (1, 2, 0, 3) if is_sequence else (1, 0, 2)
    graph.begin(op, AxisView.permuted(y, shape, range(len(shape)) if rows_first else steps_first), index)


@writes(LSTM, GRU, RNN)
def write_recurrent(graph: GraphWriter, node: Node) -> None:
    layer, x = node.layer, graph.net.input_types(node)[0]
    assert isinstance(layer, Recurrent)
    if len(x.shape) != 3:
        raise InputError(f"layer '{node.name}': ONNX has only one batch axis", got=str(x), expected="(B, S, D)")
    D, G = layer.directions, layer.gates
    H = graph.net.weights[node.weights["recurrence"]].shape[-1]
    steps_first = graph.emit_step("Transpose", node, [graph.value(node)], perm=[1, 0, 2])
    dtype = graph.numpy_dtype(node)
    identity = np.eye(D * G * H, dtype=dtype).reshape(D, G * H, D * G * H)  # identity: x already is the gate input
    inputs = [steps_first, graph.constant(f"{node.name}_input", identity), graph.weight(node, "recurrence"), "", ""]
    if "bias" in node.weights:
        inputs[_BIAS] = graph.weight(node, "bias", change=_whole_bias)
    inputs += [graph.emit_step("Transpose", node, [state], perm=[1, 0, 2]) for state in graph.inputs(node)[1:]]
    while not inputs[-1]:
        inputs.pop()
    attributes = {"hidden_size": H, "direction": layer.direction}
    if isinstance(layer, RNN):
        attributes["activations"] = [layer.activation.capitalize()] * D
    if isinstance(layer, GRU):
        attributes["linear_before_reset"] = int(layer.reset_after)
    output = _OUTPUTS.index(layer.output)
    y = graph.fresh(f"{node.name}_{layer.output}")
    graph.emit_outputs(layer.kind, node.name, inputs, [""] * output + [y], **attributes)
    rows_first = [2, 0, 1, 3] if output == 0 else [1, 0, 2]
    transposed = graph.emit_step("Transpose", node, [y], perm=rows_first)
    shape = graph.constant(f"{node.name}_shape", np.array([0, *graph.net.types[node.name].row_shape], np.int64))
    graph.emit_part("Reshape", f"{node.name}_rows", [transposed, shape], graph.values[node.name])


def _whole_bias(bias: Array) -> Array:
    """(D, H) of a GRU's new state as ONNX's (D, 6 H)."""
    H = bias.shape[1]
    whole = np.zeros((len(bias), 6 * H), bias.dtype)
    whole[:, 5 * H :] = bias
    return whole
