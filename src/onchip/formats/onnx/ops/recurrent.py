"""LSTM, GRU and RNN: a Linear over all steps, followed by a recurrent layer."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.turned import Turned
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
    _refuse_the_rare(graph, op)
    x = _steps_behind_rows(graph, op)
    direction = _text(op, "direction", "forward")
    given: dict[str, object] = {"direction": direction}
    if kind is RNN:
        given["activation"] = _activations(op, direction, ["tanh"])[0]
    elif _activations(op, direction, _ACTIVATIONS[op.kind]) != _ACTIVATIONS[op.kind]:
        got, expected = show(op.attributes["activations"]), ", ".join(_ACTIVATIONS[op.kind])
        raise FormatError(f"{op}: other activations than usual", got=got, expected=expected)
    if kind is GRU:
        given["reset_after"] = op.attribute("linear_before_reset", 0) != 0
    layer = kind(**given)  # type: ignore[arg-type]
    weights, product = _weights(graph, op, x, layer)
    gates = graph.add_step(op, Linear(), (x,), product) if product else x
    states = _first_states(graph, op, x, layer, graph.weights[weights["recurrence"]].shape[-1])
    add = graph.add_named  # for the first output that is used
    for index, name in enumerate(op.outputs):
        if not name or not graph.readers[name]:
            continue
        if index > layer.states:
            raise FormatError(f"{op} has no output {index}", got=show(name), expected=f"at most {1 + layer.states}")
        made_by = kind(**{**given, "output": _OUTPUTS[index]})  # type: ignore[arg-type]
        made = add(op, made_by, (gates, *states), weights)
        add = graph.add_step
        _hand_out(graph, op, index, made, layer.directions)


def _refuse_the_rare(graph: GraphReader, op: Op) -> None:
    for name in ("clip", "input_forget"):
        if op.attributes.get(name):
            raise FormatError(f"{op} has a {name}", got=show(op.attributes[name]), expected=f"no {name}")
    if graph.has(op, _PEEPHOLES):
        raise FormatError(f"{op} has peepholes", got=show(op.inputs[_PEEPHOLES]), expected="an LSTM without")
    if graph.has(op, _LENGTHS):
        raise FormatError(
            f"{op}: sequences of different lengths", got=show(op.inputs[_LENGTHS]), expected="all steps of every row",
            hint="no packed sequences: pad them, and take the steps that you want behind it",
        )  # fmt: skip


def _steps_behind_rows(graph: GraphReader, op: Op) -> str:
    """The value (B, S, D_in), or in one row (1, rows, S, D_in)."""
    rows_first = op.attribute("layout", 0) != 0
    given = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if isinstance(given, Turned) and not rows_first and len(given.axes) == 3 and given.axes[1] == (0,):
        return given.in_order(graph, op, ((0,), given.axes[0], given.axes[2]))
    x = graph.value(op)
    if len(graph.shape(x)) != 3:
        raise FormatError(f"{op} needs three axes", got=str(graph.types[x]), expected="steps, rows, numbers")
    if rows_first:
        return x
    if not graph.one_row:
        raise FormatError(
            f"{op} walks along the batch", got=f"{graph.types[x]}, steps first", expected="the batch first",
            hint="batch_first=True in torch",
        )  # fmt: skip
    return graph.add_step(op, Permute((0, 2, 1, 3)), (x,))


def _text(op: Op, name: str, default: str) -> str:
    value = op.attributes.get(name, default.encode())
    return value.decode(errors="replace") if isinstance(value, bytes) else show(value)


def _activations(op: Op, direction: str, default: list[str]) -> list[str]:
    """The activations of one direction; both must have the same."""
    named: list[object] = op.attribute("activations", [])
    given = [name.decode(errors="replace").lower() if isinstance(name, bytes) else show(name) for name in named]
    if not given:
        return default
    half = len(given) // 2 if direction == "bidirectional" else len(given)
    if given[:half] * (len(given) // max(half, 1)) != given or len(given[:half]) != len(default):
        raise FormatError(f"{op}: activations differ", got=show(given), expected=f"{len(default)} a direction")
    return given[:half]


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
    product = {"weight": graph.weight(op.inputs[1], W)}
    if bias is not None and has_bias:
        product["bias"] = graph.weight(op.inputs[_BIAS], bias)
    return weights, product


def _first_states(graph: GraphReader, op: Op, x: str, layer: Recurrent, H: int) -> tuple[str, ...]:
    """The initial states (B, D, H); none if they are 0."""
    places = [index for index in range(_FIRST_STATE, _FIRST_STATE + layer.states) if graph.has(op, index)]
    constants = [index for index in places if graph.is_constant(op, index)]
    if any(graph.constant(op, index).any() for index in constants):
        raise FormatError(f"{op} begins with a constant state", expected="zeros, or a value for each row")
    values = [index for index in places if index not in constants]
    if not values:
        return ()
    if len(values) < layer.states:
        raise FormatError(f"{op} begins with one of two states", expected="both, or none")
    return tuple(_first_state(graph, op, index) for index in values)


def _first_state(graph: GraphReader, op: Op, index: int) -> str:
    given = graph.unfinished.get(op.inputs[index])
    if isinstance(given, Turned) and len(given.axes) == 3 and given.axes[1] == (0,):
        return given.in_order(graph, op, ((0,), given.axes[0], given.axes[2]))
    value = graph.value(op, index)
    if op.attribute("layout", 0):
        return value
    if graph.one_row:
        return graph.add_step(op, Permute((0, 2, 1, 3)), (value,))
    raise FormatError(
        f"{op}: its state has no batch in front", got=str(graph.types[value]), expected="a Transpose before it",
        hint="h.transpose(0, 1), in front of the LSTM, of a state with the batch first",
    )  # fmt: skip


def _hand_out(graph: GraphReader, op: Op, index: int, made: str, D: int) -> None:
    """Bind the node's output in ONNX's layout: (S, D, B, H), or (D, B, H) of the last step."""
    *front, width = graph.types[made].shape
    shape = (*front, D, int(width) // D)
    is_sequence, rows_first = index == 0, op.attribute("layout", 0) != 0
    if graph.one_row:  # (1, rows, S, D, H)
        split = graph.add_step(op, Reshape(tuple(int(d) for d in shape[1:])), (made,))
        turn = Permute((0, 2, 3, 1, 4) if is_sequence else (0, 2, 1, 3))
        graph.hand_out(op, index, split if rows_first else graph.add_step(op, turn, (split,)))
        return
    steps_first = (1, 2, 0, 3) if is_sequence else (1, 0, 2)
    graph.begin(op, Turned.seen(made, shape, range(len(shape)) if rows_first else steps_first), index)


@writes(LSTM, GRU, RNN)
def write_recurrent(graph: GraphWriter, node: Node) -> None:
    layer, given = node.layer, graph.net.input_types(node)[0]
    assert isinstance(layer, Recurrent)
    if len(given.shape) != 3:
        raise InputError(f"layer '{node.name}': ONNX has one axis of sequences", got=str(given), expected="(B, S, D)")
    D, G = layer.directions, layer.gates
    H = graph.net.weights[node.weights["recurrence"]].shape[-1]
    steps_first = graph.emit_step("Transpose", node, [graph.value(node)], perm=[1, 0, 2])
    dtype = graph.numpy_dtype(node)
    nothing = np.eye(D * G * H, dtype=dtype).reshape(D, G * H, D * G * H)  # identity: x already is the gate input
    inputs = [steps_first, graph.constant(f"{node.name}_input", nothing), graph.weight(node, "recurrence"), "", ""]
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
    place = _OUTPUTS.index(layer.output)
    made = graph.fresh(f"{node.name}_{layer.output}")
    graph.emit_outputs(layer.kind, node.name, inputs, [""] * place + [made], **attributes)
    rows_first = [2, 0, 1, 3] if place == 0 else [1, 0, 2]
    turned = graph.emit_step("Transpose", node, [made], perm=rows_first)
    shape = graph.constant(f"{node.name}_shape", np.array([0, *graph.net.types[node.name].row_shape], np.int64))
    graph.emit_part("Reshape", f"{node.name}_rows", [turned, shape], graph.values[node.name])


def _whole_bias(bias: Array) -> Array:
    """(D, H) of a GRU's new state as ONNX's (D, 6 H)."""
    H = bias.shape[1]
    whole = np.zeros((len(bias), 6 * H), bias.dtype)
    whole[:, 5 * H :] = bias
    return whole
