"""Networks: every value forward, every gradient backward; and steps of networks with state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.kernels.reference.training import batch_loss
from onchip.network.graph import Network, Node, value_weights
from onchip.network.recipe import Array, Evaluated, materialise
from onchip.network.types import DTYPE_BYTES, numpy_dtype


def forward_all(
    net: Network, x: Array | tuple[Array, ...], dtype: str = "float64", state: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Every value of the network, by name. Floats are float64, or float32 for narrower types; ints keep their dtype.

    x      (B, ...), or a tuple of such arrays in the order of net.inputs
    state  weights by name, in place of the network's
    """
    xs = x if isinstance(x, tuple) else (x,)
    if len(xs) != len(net.inputs):
        got, expected = f"{len(xs)} arrays", f"{len(net.inputs)}: {', '.join(net.inputs)}"
        raise InputError(f"wrong number of inputs for network '{net.name}'", got=got, expected=expected)
    made = Evaluated()
    made.update(state or {})
    values: dict[str, Array] = {}
    as_weights = value_weights(net)
    with np.errstate(all="ignore"):  # NaN and Inf propagate
        for (name, tensor_type), array in zip(net.inputs.items(), xs, strict=True):
            values[name] = _rounded(array, tensor_type.dtype, dtype)
        for node in net.nodes:
            read = tuple(values[name] for name in node.inputs)
            y = node.layer.forward(read, _weights(net, node, made, dtype))
            values[node.name] = _rounded(y, net.types[node.name].dtype, dtype)
            for recipe in as_weights.get(node.name, ()):
                made[recipe] = values[node.name][0, ...]
    return values


def forward(net: Network, x: Array | tuple[Array, ...], dtype: str = "float64") -> Any:
    """Run the network on x (B, ...) in `dtype`: its only output, or a tuple of several."""
    values = forward_all(net, x, dtype)
    outputs = tuple(values[name] for name in net.outputs)
    return outputs if len(outputs) > 1 else outputs[0]


def run_step(
    net: Network, x: Array | tuple[Array, ...], state: Mapping[str, Array] | None = None, dtype: str = "float64"
) -> tuple[Any, dict[str, Array]]:
    """Run a network with state: its outputs as of `forward`, and the new state.

    state  in place of the network's weights of these names
    """
    state = {name: materialise(name, net.weights) for name in net.state} if state is None else state
    values = forward_all(net, x, dtype, state)
    outputs = tuple(values[name] for name in net.outputs)
    new = {name: values[net.state[name]][0, ...] if net.state.get(name) else array for name, array in state.items()}
    return outputs if len(outputs) > 1 else outputs[0], new


def loss_and_gradients(
    net: Network, x: Array | tuple[Array, ...], target: Array, loss: str, dtype: str = "float64",
    row_weights: Array | None = None, smoothing: float = 0.0,
) -> tuple[float, dict[str, Array]]:  # fmt: skip
    """The loss of a batch and its gradient by every weight, by name.

    "cross_entropy": the network's output is logits, target (B,) holds classes; mean over the batch.
    "half_sse":      half the sum of squared differences to target (B, D_out), over the whole batch.
    "mse":           the mean of the squared differences, over the batch and the outputs.
    Others:          means over the batch and the outputs, too.
    row_weights      (B,): multiplies the loss of each row, and means divide by the sum of the weights.
    smoothing        of "cross_entropy": the fraction of a row's target that is spread evenly over all classes.
    """
    _ = net.output  # a loss needs exactly one output: raise before any work
    values = forward_all(net, x, dtype)
    value, dy = batch_loss(loss, values[net.outputs[0]], target, row_weights, smoothing)
    upstream: dict[str, Array] = {net.outputs[0]: dy}
    gradients: dict[str, Array] = {}
    made: Evaluated = {}
    for node in reversed(net.nodes):
        if node.name not in upstream:  # the loss does not depend on it
            continue
        if not node.layer.is_differentiable:
            raise InputError(
                f"layer '{node.name}' ({node.layer.kind}) has no gradient", hint="end the network before it"
            )
        read, w = tuple(values[name] for name in node.inputs), _weights(net, node, made, dtype)
        dxs, dw = node.layer.backward(read, w, values[node.name], upstream[node.name])
        for name, dx in zip(node.inputs, dxs, strict=True):
            if dx is not None:
                upstream[name] = upstream.get(name, 0) + dx
        for role, gradient in dw.items():
            name = node.weights[role]
            gradients[name] = gradients.get(name, 0) + gradient
    return value, gradients


def _weights(net: Network, node: Node, made: Evaluated, dtype: str) -> dict[str, Array]:
    exact = "float64" if net.state and dtype == "float64" else ""  # weights of a step are not rounded on their way
    return {
        role: _rounded(materialise(name, net.weights, made, exact), net.weight_type(name).dtype, dtype)
        for role, name in node.weights.items()
    }


def _rounded(array: Array, kind: str, dtype: str) -> Array:
    """A float array (`kind` is its dtype in the network) rounded to `dtype`, in the compute dtype."""
    if "float" not in kind:
        return np.asarray(array)
    return np.asarray(array).astype(numpy_dtype(dtype), copy=False).astype(_compute_dtype(dtype), copy=False)


def _compute_dtype(dtype: str) -> np.dtype[Any]:
    if "float" not in dtype or dtype not in DTYPE_BYTES:
        raise InputError("the reference computes in a float dtype", got=dtype)
    return np.dtype(np.float64 if dtype == "float64" else np.float32)
