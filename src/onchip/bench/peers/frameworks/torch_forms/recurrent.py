"""LSTM, GRU and RNN by torch's functions, which use cuDNN on a GPU."""

from __future__ import annotations

import numpy as np

from onchip.bench.peers.frameworks.torch_forms.builder import Builder, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import GRU, LSTM, RNN, Linear, Recurrent
from onchip.network.recipe import Array

_GATES = {LSTM: (0, 2, 3, 1), GRU: (1, 0, 2), RNN: (0,)}  # torch's gate order, as indices of onchip's
_ROLES = ("input", "recurrence", "input_bias", "bias")  # of a direction's weights, in torch's order


def recurrent(to: Builder, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Recurrent)
    if isinstance(layer, GRU) and not layer.reset_after:
        return _steps(to, node, w, x, *states)
    x, weights = _with_product(to, node, x)
    D, H = layer.directions, weights["recurrence"].shape[-1]
    row = to.net.types[node.inputs[0]].row_shape
    x = to.call("reshape", x, (-1, row[-2], weights["input"].shape[-1])) if len(row) > 2 else x
    is_turned = layer.direction == "reverse"  # torch has no such direction: flip the rows before and after
    x = to.call("flip", x, (1,)) if is_turned else x
    if states:
        first = [to.call("permute", to.call("reshape", state, (-1, D, H)), (1, 0, 2)) for state in states]
        first = [to.graph.call_method("contiguous", (state,)) for state in first]
    else:
        B = to.graph.call_method("size", (x, 0))
        first = [to.graph.call_method("new_zeros", (x, (D, B, H)))] * layer.states
    parameters = [to.constant(weights[role][d]) for d in range(D) for role in _ROLES if role in weights]
    function = f"rnn_{layer.activation}" if isinstance(layer, RNN) else layer.kind.lower()
    given = first if isinstance(layer, LSTM) else first[0]
    has_bias, is_both = "bias" in weights, D == 2
    made = to.call(function, x, given, parameters, has_bias, 1, 0.0, False, is_both, True)  # 1 layer, batch first
    shape = (-1, *to.net.types[node.name].row_shape)
    output = layer.attributes()["output"]
    if output == "sequence":
        y = to.part(made, 0)
        y = to.call("flip", y, (1,)) if is_turned else y
    else:  # (D, B, H)
        y = to.call("permute", to.part(made, 2 if output == "cell" else 1), (1, 0, 2))
    return to.call("reshape", y, shape)


def _with_product(to: Builder, node: Node, x: Value) -> tuple[Value, dict[str, Array]]:
    """The input of torch's function, and its weights (D, ...) by role, including those of the preceding Linear if it
    has no other reader; else the input weights only permute gates into torch's order.
    """
    layer = node.layer
    assert isinstance(layer, Recurrent)
    R = to.array(node.weights["recurrence"])
    D, W, H = R.shape
    order = (np.array(_GATES[type(layer)])[:, None] * H + np.arange(H)).reshape(-1)
    given = np.eye(D * W, dtype=R.dtype)
    biases: dict[str, Array] = {}
    product = to.only_reader_of(node.inputs[0])
    if product is not None and isinstance(product.layer, Linear):
        x, given = to.values[product.inputs[0]], to.array(product.weights["weight"])
        if "bias" in product.weights:
            biases["input_bias"] = to.array(product.weights["bias"])
    weights = {"input": given.reshape(D, W, -1)[:, order], "recurrence": R[:, order]}
    if biases or "bias" in node.weights:
        inner = np.zeros((D, W), R.dtype)  # the GRU's bias of the new state: the last gate in both orders
        if "bias" in node.weights:
            inner[:, W - H :] = to.array(node.weights["bias"])
        weights["input_bias"] = biases.get("input_bias", np.zeros(D * W, R.dtype)).reshape(D, W)[:, order]
        weights["bias"] = inner
    return x, weights


def _steps(to: Builder, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    """A GRU that resets before its gemm, which torch does not have: step by step."""
    layer = node.layer
    assert isinstance(layer, GRU)
    S, W = to.net.types[node.inputs[0]].row_shape[-2:]
    D = layer.directions
    width, H = W // D, W // D // 3
    made = []
    for d in range(D):
        R = to.part(w["recurrence"], d)
        gates, new = to.part(R, slice(0, 2 * H)), to.part(R, slice(2 * H, None))
        h = to.part(states[0], ..., d, slice(None)) if states else None
        steps: dict[int, Value] = {}
        for s in range(S)[:: -1 if (layer.direction, d) in (("reverse", 0), ("bidirectional", 1)) else 1]:
            given = to.part(x, ..., s, slice(d * width, (d + 1) * width))
            h = to.call("zeros_like", to.part(given, ..., slice(0, H))) if h is None else h
            zr = to.call("sigmoid", to.call("add", to.part(given, ..., slice(0, 2 * H)), to.call("linear", h, gates)))
            z, r = to.part(zr, ..., slice(0, H)), to.part(zr, ..., slice(H, None))
            product = to.call("linear", to.call("mul", r, h), new)
            n = to.call("tanh", to.call("add", to.part(given, ..., slice(2 * H, None)), product))
            h = steps[s] = to.call("lerp", n, h, z)
        made.append(to.call("stack", [steps[s] for s in range(S)], -2) if layer.output == "sequence" else h)
    return to.call("cat", made, -1)
