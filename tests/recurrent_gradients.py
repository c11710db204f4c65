"""Networks of one RecurrentGrad, and a claim of it against the reference."""

import dataclasses

import numpy as np

from checks import assert_error_within
from emulated_engine import claims_of, one_layer, run_claim
from onchip.network.layers import GRU, LSTM, RNN, RecurrentGrad
from onchip.network.types import TensorType, numpy_dtype

CELLS = [LSTM(), GRU(), GRU(reset_after=False), RNN(), RNN(activation="relu")]


def gradient(layer, index, leading, H, has_extras=False, dtype="float32"):
    """The network with a RecurrentGrad of rows (*leading, D * G * H).

    has_extras  a bias, or an initial cell
    """
    D, G, rng = layer.directions, layer.gates, np.random.default_rng(0)
    weights = {"recurrence": rng.standard_normal((D, G * H, H)) / H**0.5}
    if has_extras and isinstance(layer, GRU) and layer.reset_after:
        weights["bias"] = rng.standard_normal((D, H))
    weights = {role: array.astype(numpy_dtype(dtype)) for role, array in weights.items()}
    x = TensorType(("B", *leading, D * G * H), dtype)
    dy = layer.infer((x,), {role: TensorType(array.shape, dtype) for role, array in weights.items()})
    sums, before = (TensorType(("B", *leading, width), dtype) for width in (G * H, H))
    cell = [TensorType(("B", *leading[:-1], D, H), dtype)] * (has_extras and isinstance(layer, LSTM))
    return one_layer(RecurrentGrad(layer, index), x, dy, *[sums] * D, *[before] * D, *cell, weights=weights)


def check(gpu, net, B, change=lambda lowering: lowering, kernel="recurrent_grad"):
    """A claim of `net` at B rows, against the reference: the inputs and the gradients."""
    (claim,) = claims_of(net, kernel)
    claim = dataclasses.replace(claim, facts=change(claim.facts))
    xs = inputs_of(net, B)
    got = run_claim(gpu, net, claim, *xs)
    verify(net, xs, got)
    return xs, got


def inputs_of(net, B):
    rng = np.random.default_rng(B)
    return [rng.standard_normal((B, *t.row_shape)).astype(numpy_dtype(t.dtype)) for t in net.inputs.values()]


def verify(net, xs, got):
    layer = net.nodes[0].layer
    truth, naive = (
        layer.forward(tuple(x.astype(t) for x in xs), {role: w.astype(t) for role, w in net.weights.items()})
        for t in (np.float64, np.float32)
    )
    assert_error_within(got.astype(np.float64), truth, baseline=naive.astype(xs[0].dtype))
