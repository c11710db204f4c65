"""Training steps as networks: their first state, and what is right after a step."""

import dataclasses

import numpy as np

from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Mul, Reshape
from onchip.plan.gradient.step import VALUES
from onchip.plan.gradient.training_form import DRAW
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cpu.step import CpuStep


def trained_through(net: Network) -> Network:
    """The network with a trainable factor on every float input, and its output in one axis."""
    nodes, weights, names = [], dict(net.weights), {}
    for name, kind in net.inputs.items():
        if "float" in kind.dtype:
            names[name] = f"{name}.scaled"
            factor = np.linspace(0.5, 1.5, kind.row_size).reshape(kind.row_shape)
            weights[f"{name}.factor"] = factor.astype(np.float32)
            nodes.append(Node(names[name], Mul(), (name,), {"constant": f"{name}.factor"}))
    nodes += [
        Node(node.name, node.layer, tuple(names.get(value, value) for value in node.inputs), node.weights)
        for node in net.nodes
    ]
    nodes.append(Node("flat", Reshape(), (net.outputs[0],)))
    return Network(net.inputs, tuple(nodes), ("flat",), weights)


def by_layers(step: Network) -> Network:
    """The step as one that no kernel runs whole."""
    return dataclasses.replace(step, trained=None)


def begin(step: Network, lr=0.1) -> dict[str, np.ndarray]:
    """The first state: its velocities are gradients after a step."""
    values = np.array([lr, 0.0, 0.9, 1.0, 1.0], np.float32)
    state = {name: np.asarray(step.weights[name]) for name in step.state} | {VALUES: values}
    return state | ({DRAW: np.array([7, 1])} if DRAW in state else {})


def assert_right(step: Network, got, rows, state):
    """Each array is at most twice as far from float64 as the reference in float32."""
    (loss, truth), (naive_loss, naive) = (
        reference.run_step(step, rows, state, dtype) for dtype in ("float64", "float32")
    )
    truth["loss"], naive["loss"] = loss, naive_loss
    ulp = max(DTYPE_ULP.get(kind.dtype, ULP["fp32"]) for kind in step.types.values())
    for name in truth:
        array, naively, found = map(np.atleast_1d, (truth[name], naive[name], got[name]))
        few = 4 if array.size < 8 else 2  # a chain of layers; the naive errors of few numbers may happen to be small
        allowed, error = FACTOR * scaled_error(naively, array) + few * ULPS * ulp, scaled_error(found, array)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def run_step(bound, rows, state) -> dict[str, np.ndarray]:
    """The state after a run on either device, and the loss."""
    is_on_cpu = isinstance(bound, CpuStep)
    if is_on_cpu:
        for name, array in state.items():
            bound.state[name][...] = array
    else:
        bound.write_state(state)
    outputs = bound.run(dict(zip(bound.plan.network.inputs, rows, strict=True)), len(rows[-1]))
    after = bound.state if is_on_cpu else bound.read_state()
    return {name: array.copy() for name, array in (*after.items(), *outputs.items())}
