"""LSTM, GRU and RNN by torch's functions, which use cuDNN on a GPU."""

from __future__ import annotations

import numpy as np

from onchip.bench.peers.frameworks.torch_forms.builder import Builder, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import GRU, LSTM, RNN, Linear, Recurrent
from onchip.network.recipe import Array

_GATES = {LSTM: (0, 2, 3, 1), GRU: (1, 0, 2), RNN: (0,)}  # torch's gate order, as indices of onchip's
_ROLES = ("input", "recurrence", "input_bias", "bias")  # of a direction's weights, in torch's order


def recurrent(fx: Builder, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Recurrent)
    if isinstance(layer, GRU) and not layer.reset_after:
        return _steps(fx, node, w, x, *states)
    x, weights = _input_and_weights(fx, node, x)
    D, H = layer.directions, weights["recurrence"].shape[-1]
    row = fx.net.types[node.inputs[0]].row_shape
    x = fx.call("reshape", x, (-1, row[-2], weights["input"].shape[-1])) if len(row) > 2 else x
    is_reverse = layer.direction == "reverse"  # torch has no such direction: flip the steps before and after
    x = fx.call("flip", x, (1,)) if is_reverse else x
    if states:
        first = [fx.call("permute", fx.call("reshape", state, (-1, D, H)), (1, 0, 2)) for state in states]
        first = [fx.graph.call_method("contiguous", (state,)) for state in first]
    else:
        B = fx.graph.call_method("size", (x, 0))
        first = [fx.graph.call_method("new_zeros", (x, (D, B, H)))] * layer.states
    is_trained = {role: role != "bias" or role in node.weights for role in _ROLES}
    parameters = [
        fx.parameter(weights[role][d]) if fx.trains and is_trained[role] else fx.constant(weights[role][d])
        for d in range(D)
        for role in _ROLES
        if role in weights
    ]
    function = f"rnn_{layer.activation}" if isinstance(layer, RNN) else layer.kind.lower()
    initial = first if isinstance(layer, LSTM) else first[0]
    has_bias, is_bidirectional = "bias" in weights, D == 2
    outputs = fx.call(function, x, initial, parameters, has_bias, 1, 0.0, fx.trains, is_bidirectional, True)
    shape = (-1, *fx.net.types[node.name].row_shape)
    output = layer.attributes()["output"]
    if output == "sequence":
        y = fx.getitem(outputs, 0)
        y = fx.call("flip", y, (1,)) if is_reverse else y
    else:  # (D, B, H)
        y = fx.call("permute", fx.getitem(outputs, 2 if output == "cell" else 1), (1, 0, 2))
    return fx.call("reshape", y, shape)


def _input_and_weights(fx: Builder, node: Node, x: Value) -> tuple[Value, dict[str, Array]]:
    """The input of torch's function, and its weights (D, ...) by role, including those of the preceding Linear if it
    has no other reader; else the input weights only permute gates into torch's order.
    """
    layer = node.layer
    assert isinstance(layer, Recurrent)
    R = fx.array(node.weights["recurrence"])
    D, W, H = R.shape
    order = (np.array(_GATES[type(layer)])[:, None] * H + np.arange(H)).reshape(-1)
    matrix = np.eye(D * W, dtype=R.dtype)
    biases: dict[str, Array] = {}
    linear = fx.producer_with_one_reader(node.inputs[0])
    if linear is not None and isinstance(linear.layer, Linear):
        x, matrix = fx.values[linear.inputs[0]], fx.array(linear.weights["weight"])
        if "bias" in linear.weights:
            biases["input_bias"] = fx.array(linear.weights["bias"])
    weights = {"input": matrix.reshape(D, W, -1)[:, order], "recurrence": R[:, order]}
    if biases or "bias" in node.weights:
        inner = np.zeros((D, W), R.dtype)  # the GRU's bias of the new state: the last gate in both orders
        if "bias" in node.weights:
            inner[:, W - H :] = fx.array(node.weights["bias"])
        weights["input_bias"] = biases.get("input_bias", np.zeros(D * W, R.dtype)).reshape(D, W)[:, order]
        weights["bias"] = inner
    return x, weights


def _steps(fx: Builder, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    """A GRU that resets before its gemm, which torch lacks: step by step."""
    layer = node.layer
    assert isinstance(layer, GRU)
    S, W = fx.net.types[node.inputs[0]].row_shape[-2:]
    D = layer.directions
    width, H = W // D, W // D // 3
    outputs = []
    for d in range(D):
        R = fx.getitem(w["recurrence"], d)
        gates, new = fx.getitem(R, slice(0, 2 * H)), fx.getitem(R, slice(2 * H, None))
        h = fx.getitem(states[0], ..., d, slice(None)) if states else None
        steps: dict[int, Value] = {}
        for s in range(S)[:: -1 if (layer.direction, d) in (("reverse", 0), ("bidirectional", 1)) else 1]:
            gx = fx.getitem(x, ..., s, slice(d * width, (d + 1) * width))
            h = fx.call("zeros_like", fx.getitem(gx, ..., slice(0, H))) if h is None else h
            zr = fx.call("sigmoid", fx.call("add", fx.getitem(gx, ..., slice(0, 2 * H)), fx.call("linear", h, gates)))
            z, r = fx.getitem(zr, ..., slice(0, H)), fx.getitem(zr, ..., slice(H, None))
            update = fx.call("linear", fx.call("mul", r, h), new)
            n = fx.call("tanh", fx.call("add", fx.getitem(gx, ..., slice(2 * H, None)), update))
            h = steps[s] = fx.call("lerp", n, h, z)
        outputs.append(fx.call("stack", [steps[s] for s in range(S)], -2) if layer.output == "sequence" else h)
    return fx.call("cat", outputs, -1)
