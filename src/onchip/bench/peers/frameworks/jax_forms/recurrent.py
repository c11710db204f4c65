"""LSTM, GRU and RNN by jax.lax.scan, partly unrolled."""

from __future__ import annotations

from onchip.bench.peers.frameworks.jax_forms.context import Context, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import GRU, LSTM, RNN, Recurrent

UNROLLED = 8  # steps per iteration: fewer launches, longer compilation


def recurrent(ctx: Context, node: Node, w: Weights, x: Value, *states: Value) -> Value:
    layer, numpy = node.layer, ctx.jax.numpy
    assert isinstance(layer, Recurrent)
    W, H = w["recurrence"].shape[1:]
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[layer.direction]
    rows = numpy.moveaxis(x, -2, 0)  # (S, B, ..., D * W)
    outputs = []
    for d, is_reverse in enumerate(backwards):
        inputs = rows[..., d * W : (d + 1) * W]
        zeros = numpy.zeros((*inputs.shape[1:-1], H), inputs.dtype)
        first = tuple(states[i][..., d, :] if states else zeros for i in range(layer.states))

        def step(old: tuple[Value, ...], gates: Value, d: int = d) -> tuple[tuple[Value, ...], Value]:
            new = _step(ctx, layer, w, d, gates, old)
            return new, new[0]

        last, steps = ctx.jax.lax.scan(step, first, inputs, reverse=is_reverse, unroll=UNROLLED)
        output = layer.attributes()["output"]
        outputs.append(numpy.moveaxis(steps, 0, -2) if output == "sequence" else last[1 if output == "cell" else 0])
    return numpy.concatenate(outputs, axis=-1)


def _step(ctx: Context, layer: Recurrent, w: Weights, d: int, gates: Value, hc: tuple[Value, ...]) -> tuple[Value, ...]:
    """The states (B, ..., H) after a step; hc: (h,), or (h, c) of an LSTM."""
    numpy, sigmoid = ctx.jax.numpy, ctx.jax.nn.sigmoid
    h, R = hc[0], w["recurrence"][d]
    H = h.shape[-1]

    def matmul(state: Value, weight: Value) -> Value:
        return numpy.matmul(state, weight.T, precision=ctx.precision)

    if isinstance(layer, LSTM):
        i, o, f, g = numpy.split(gates + matmul(h, R), 4, axis=-1)
        c = sigmoid(f) * hc[1] + sigmoid(i) * numpy.tanh(g)
        return sigmoid(o) * numpy.tanh(c), c
    if isinstance(layer, GRU) and layer.reset_after:
        inner = matmul(h, R)  # one gemm for all gates
        new = inner[..., 2 * H :] + w["bias"][d] if "bias" in w else inner[..., 2 * H :]
        z, r = numpy.split(sigmoid(gates[..., : 2 * H] + inner[..., : 2 * H]), 2, axis=-1)
        n = numpy.tanh(gates[..., 2 * H :] + r * new)
        return ((1 - z) * n + z * h,)
    if isinstance(layer, GRU):
        z, r = numpy.split(sigmoid(gates[..., : 2 * H] + matmul(h, R[: 2 * H])), 2, axis=-1)
        n = numpy.tanh(gates[..., 2 * H :] + matmul(r * h, R[2 * H :]))
        return ((1 - z) * n + z * h,)
    assert isinstance(layer, RNN)
    v = gates + matmul(h, R)
    return (numpy.tanh(v) if layer.activation == "tanh" else numpy.maximum(v, 0),)
