"""LSTM, GRU and RNN by jax.lax.scan, partly unrolled."""

from __future__ import annotations

from onchip.bench.peers.frameworks.jax_forms.context import Context, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import GRU, LSTM, RNN, Recurrent

UNROLLED = 8  # steps per iteration: fewer launches, longer compilation


def recurrent(to: Context, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    layer, numpy = node.layer, to.jax.numpy
    assert isinstance(layer, Recurrent)
    W, H = w["recurrence"].shape[1:]
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[layer.direction]
    rows = numpy.moveaxis(x, -2, 0)  # (S, B, ..., D * W)
    made = []
    for d, is_turned in enumerate(backwards):
        given = rows[..., d * W : (d + 1) * W]
        nothing = numpy.zeros((*given.shape[1:-1], H), given.dtype)
        first = tuple(states[i][..., d, :] if states else nothing for i in range(layer.states))

        def step(before: tuple[Value, ...], gates: Value, d: int = d) -> tuple[tuple[Value, ...], Value]:
            after = _step(to, layer, w, d, gates, before)
            return after, after[0]

        last, steps = to.jax.lax.scan(step, first, given, reverse=is_turned, unroll=UNROLLED)
        output = layer.attributes()["output"]
        made.append(numpy.moveaxis(steps, 0, -2) if output == "sequence" else last[1 if output == "cell" else 0])
    return numpy.concatenate(made, axis=-1)


def _step(
    to: Context, layer: Recurrent, w: Weights, d: int, given: Value, before: tuple[Value, ...]
) -> tuple[Value, ...]:
    """The states (B, ..., H) after a step."""
    numpy, sigmoid = to.jax.numpy, to.jax.nn.sigmoid
    h, R = before[0], w["recurrence"][d]
    H = h.shape[-1]

    def product(state: Value, weight: Value) -> Value:
        return numpy.matmul(state, weight.T, precision=to.precision)

    if isinstance(layer, LSTM):
        i, o, f, g = numpy.split(given + product(h, R), 4, axis=-1)
        c = sigmoid(f) * before[1] + sigmoid(i) * numpy.tanh(g)
        return sigmoid(o) * numpy.tanh(c), c
    if isinstance(layer, GRU) and layer.reset_after:
        inner = product(h, R)  # one gemm for all gates
        new = inner[..., 2 * H :] + w["bias"][d] if "bias" in w else inner[..., 2 * H :]
        z, r = numpy.split(sigmoid(given[..., : 2 * H] + inner[..., : 2 * H]), 2, axis=-1)
        n = numpy.tanh(given[..., 2 * H :] + r * new)
        return ((1 - z) * n + z * h,)
    if isinstance(layer, GRU):
        z, r = numpy.split(sigmoid(given[..., : 2 * H] + product(h, R[: 2 * H])), 2, axis=-1)
        n = numpy.tanh(given[..., 2 * H :] + product(r * h, R[2 * H :]))
        return ((1 - z) * n + z * h,)
    assert isinstance(layer, RNN)
    v = given + product(h, R)
    return (numpy.tanh(v) if layer.activation == "tanh" else numpy.maximum(v, 0),)
