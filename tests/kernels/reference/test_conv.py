"""Convolutions in NumPy (network/layers/): against their definitions, value by value, and torch if any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from onchip.network.types import TensorType

SETTINGS = settings(max_examples=60)


@st.composite
def convolutions(draw, transposed, symmetric=False):
    """A layer, x (B, C, ...) and weights that fit: odd sizes, every attribute, windows up to the whole input."""
    rank = draw(st.integers(1, 2))

    def numbers(low, high, count=rank):
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    kernel, stride, dilation = numbers(1, 3), numbers(1, 3), numbers(1, 3)
    before = numbers(0, 2)
    pads = (*before, *(before if symmetric else numbers(0, 2)))
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    groups, C_in, C_out = numbers(1, 3, 3)
    options = {"stride": stride, "pads": pads, "dilation": dilation, "groups": groups}
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        # So many inputs that something is left between the pads.
        cut = [b + a for b, a in zip(pads[:rank], pads[rank:], strict=True)]
        least = [max(1, -(-(c + 1 - span) // s) + 1) for c, span, s in zip(cut, spans, stride, strict=True)]
        layer = (ConvTranspose1d, ConvTranspose2d)[rank - 1](output_padding=extra, **options)
        weight_shape = (C_in * groups, C_out, *kernel)
    else:
        least = [max(1, span - b - a) for span, b, a in zip(spans, pads[:rank], pads[rank:], strict=True)]
        layer = (Conv1d, Conv2d)[rank - 1](**options)
        weight_shape = (C_out * groups, C_in, *kernel)
    sizes = [n + draw(st.integers(0, 3)) for n in least]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((draw(st.integers(0, 2)), C_in * groups, *sizes))
    w = {"weight": rng.standard_normal(weight_shape)}
    if draw(st.booleans()):
        w["bias"] = rng.standard_normal(C_out * groups)
    return layer, x, w


def run(layer, x, w):
    y = layer.forward((x,), w)
    types = {role: TensorType(array.shape) for role, array in w.items()}
    assert y.shape[1:] == layer.infer((TensorType(("B", *x.shape[1:])),), types).row_shape
    assert y.shape[0] == x.shape[0]
    return y


@SETTINGS
@given(convolutions(transposed=False))
def test_convolution_is_its_definition(case):
    """y[o, p] = bias[o] + sum over c, k of weight[o, c, k] * x[c, p * stride - before + k * dilation]."""
    layer, x, w = case
    y, weight = run(layer, x, w), w["weight"]
    C_out, C_group = weight.shape[:2]
    for b, o, *p in np.ndindex(y.shape):
        total = w["bias"][o] if "bias" in w else 0.0
        first_channel = o // (C_out // layer.groups) * C_group
        for c, *k in np.ndindex(weight.shape[1:]):
            at = [p[a] * layer.stride[a] - layer.pads[a] + k[a] * layer.dilation[a] for a in range(layer.rank)]
            if all(0 <= i < n for i, n in zip(at, x.shape[2:], strict=True)):
                total += weight[(o, c, *k)] * x[(b, first_channel + c, *at)]
        assert y[(b, o, *p)] == pytest.approx(total, rel=1e-12, abs=1e-12)


@SETTINGS
@given(convolutions(transposed=True))
def test_transposed_convolution_is_its_definition(case):
    """y[o, p * stride - before + k * dilation] += weight[c, o, k] * x[c, p]; then + bias[o]."""
    layer, x, w = case
    y, weight = run(layer, x, w), w["weight"]
    C_in, C_group = weight.shape[:2]
    expected = np.zeros(y.shape)
    for b, c, *p in np.ndindex(x.shape):
        first_channel = c // (C_in // layer.groups) * C_group
        for o, *k in np.ndindex(weight.shape[1:]):
            at = [p[a] * layer.stride[a] - layer.pads[a] + k[a] * layer.dilation[a] for a in range(layer.rank)]
            if all(0 <= i < n for i, n in zip(at, y.shape[2:], strict=True)):
                expected[(b, first_channel + o, *at)] += weight[(c, o, *k)] * x[(b, c, *p)]
    if "bias" in w:
        expected += w["bias"].reshape(-1, *(1,) * layer.rank)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


@SETTINGS
@given(convolutions(transposed=False))
def test_convolution_is_torchs(case):
    torch = pytest.importorskip("torch")
    layer, x, w = case
    rank = layer.rank
    sides = [side for a in reversed(range(rank)) for side in (layer.pads[a], layer.pads[rank + a])]
    x_t, weight, bias = torch.tensor(x), torch.tensor(w["weight"]), torch.tensor(w["bias"]) if "bias" in w else None
    function = (torch.conv1d, torch.conv2d)[rank - 1]
    padded = torch.nn.functional.pad(x_t, sides)
    expected = function(padded, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    np.testing.assert_allclose(run(layer, x, w), expected.numpy(), rtol=1e-11, atol=1e-11)


@SETTINGS
@given(convolutions(transposed=True, symmetric=True))
def test_transposed_convolution_is_torchs(case):
    torch = pytest.importorskip("torch")
    layer, x, w = case
    rank = layer.rank
    x_t, weight, bias = torch.tensor(x), torch.tensor(w["weight"]), torch.tensor(w["bias"]) if "bias" in w else None
    function = (torch.conv_transpose1d, torch.conv_transpose2d)[rank - 1]
    rest = (layer.stride, layer.pads[:rank], layer.output_padding, layer.groups, layer.dilation)
    expected = function(x_t, weight, bias, *rest)
    np.testing.assert_allclose(run(layer, x, w), expected.numpy(), rtol=1e-11, atol=1e-11)


def test_faces_transposed_convolution():
    """5x5, stride 2, pads 1 before and 2 after: y[2i - 1 + r] += x[i] w[r], twice the size."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 1, 4, 1)), rng.standard_normal((1, 1, 5, 1))
    y = run(ConvTranspose2d((2, 1), (1, 0, 2, 0)), x, {"weight": w})
    expected = np.zeros(8)
    for i in range(4):
        for r in range(5):
            if 0 <= 2 * i - 1 + r < 8:
                expected[2 * i - 1 + r] += x[0, 0, i, 0] * w[0, 0, r, 0]
    np.testing.assert_allclose(y[0, 0, :, 0], expected, rtol=1e-14)


@SETTINGS
@given(convolutions(transposed=False) | convolutions(transposed=True))
def test_gradients_are_the_transposes_of_the_forward(case):
    """A convolution is linear in x, weight and bias: <dy, f(x) - f(0)> = <dx, x>, and so for each weight."""
    layer, x, w = case
    y = run(layer, x, w)
    dy = np.random.default_rng(0).standard_normal(y.shape)
    (dx,), dw = layer.backward((x,), w, y, dy)
    assert dw.keys() == w.keys()
    without_bias = run(layer, x, {"weight": w["weight"]})
    assert dx.shape == x.shape
    assert (dx * x).sum() == pytest.approx((dy * without_bias).sum(), rel=1e-9, abs=1e-9)
    assert dw["weight"].shape == w["weight"].shape
    assert (dw["weight"] * w["weight"]).sum() == pytest.approx((dy * without_bias).sum(), rel=1e-9, abs=1e-9)
    if "bias" in w:
        assert (dw["bias"] * w["bias"]).sum() == pytest.approx((dy * (y - without_bias)).sum(), rel=1e-9, abs=1e-9)
