"""Networks with state on the CPU, against float64: what the tests of training kernels share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Layer
from onchip.network.types import TensorType
from onchip.plan.kernel import Job
from onchip.runtime.check import FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan

Arrays = Mapping[str, np.ndarray]


def one_gradient(layer: Layer, inputs: Mapping[str, TensorType], weights: Arrays) -> Network:
    """A network of one layer of training steps; its weights are state, and without any it has an unused one."""
    node = Node("out", layer, tuple(inputs), {role: role for role in weights})
    state = weights or {"unused": np.zeros(1, np.float32)}
    return Network(inputs, (node,), ("out",), {**state}, state=dict.fromkeys(state, ""))


def bind(net: Network, kernel: str, batch: int, threads: int = 2) -> CpuStep:
    """A network with state on the CPU; its last group must be run by this kernel."""
    bound = CpuStep(plan(net, "cpu", Job(batch=batch)), threads)
    assert bound.plan.groups[-1].claim.kernel == kernel, str(bound.plan)
    return bound


def run(bound: CpuStep, rows: tuple[np.ndarray, ...], state: Arrays | None = None) -> dict[str, np.ndarray]:
    """The outputs of a run from this state, or from the network's own; and the state after it."""
    net = bound.plan.network
    for name in net.state:
        bound.state[name][...] = net.weights[name] if state is None else state[name]
    outputs = bound.run(dict(zip(net.inputs, rows, strict=True)), len(rows[0]))
    return {name: array.copy() for name, array in (*outputs.items(), *bound.state.items())}


def expected(net: Network, rows: tuple[np.ndarray, ...], dtype: str) -> dict[str, np.ndarray]:
    """The same by the layers' own functions."""
    outputs, state = reference.run_step(net, rows, None, dtype)
    return dict(zip(net.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)) | state


def check_step(net: Network, kernel: str, rows: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Run on two threads and on one: equal bits, at most twice as far from float64 as the layers in float32."""
    got = run(bind(net, kernel, max(1, len(rows[0]))), rows)
    truth, naive = (expected(net, rows, dtype) for dtype in ("float64", "float32"))
    for name, array in truth.items():
        assert got[name].shape == array.shape, name
        allowed = FACTOR * scaled_error(naive[name], array) + ULPS * ULP["fp32"]
        error = scaled_error(got[name], array)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    alone = run(bind(net, kernel, max(1, len(rows[0])), threads=1), rows)
    assert all(got[name].tobytes() == array.tobytes() for name, array in alone.items()), "other bits on one thread"
    return got
