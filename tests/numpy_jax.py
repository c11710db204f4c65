"""A stand-in for JAX made of NumPy: as much of it as networks are written with, called as JAX is called."""

import itertools
import types

import numpy as np
from scipy import special

NUMPY = (
    "abs", "arctan", "argmax", "argmin", "asarray", "broadcast_arrays", "ceil", "clip", "concatenate", "cos",
    "cumsum", "exp", "flip", "floor", "fmod", "log", "max", "maximum", "mean", "min", "minimum", "mod", "moveaxis",
    "reciprocal", "reshape", "round", "sign", "sin", "split", "sqrt", "sum", "take", "tanh", "transpose", "where",
    "zeros", "zeros_like",
)  # fmt: skip


def numpy_jax():
    numpy = types.SimpleNamespace(**{name: getattr(np, name) for name in NUMPY}, matmul=matmul)
    nn = types.SimpleNamespace(
        sigmoid=special.expit, silu=lambda x: x * special.expit(x), gelu=gelu, softmax=special.softmax,
        log_softmax=special.log_softmax, elu=elu, selu=selu, softplus=lambda x: np.logaddexp(x, 0),
        soft_sign=lambda x: x / (1 + np.abs(x)), hard_swish=lambda x: x * np.clip(x + 3, 0, 6) / 6,
        mish=lambda x: x * np.tanh(np.logaddexp(x, 0)),
    )  # fmt: skip
    lax = types.SimpleNamespace(
        conv_general_dilated=conv_general_dilated, reduce_window=reduce_window, max=np.maximum, add=np.add, scan=scan,
        rsqrt=lambda x: 1 / np.sqrt(x), erf=special.erf, top_k=top_k, div=lambda a, b: np.trunc(a / b).astype(a.dtype),
        Precision=types.SimpleNamespace(HIGHEST="highest", DEFAULT="default"),
    )  # fmt: skip
    return types.SimpleNamespace(numpy=numpy, nn=nn, lax=lax, jit=jit)


def top_k(x, k):
    places = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, places, -1), places


class Result(np.ndarray):
    def block_until_ready(self):
        return self


def jit(function):
    return lambda *given: function(*given).view(Result)


def scan(f, init, xs, *, reverse, unroll):
    made = [None] * len(xs)
    for i in range(len(xs))[:: -1 if reverse else 1]:
        init, made[i] = f(init, xs[i])
    return init, np.stack(made)


def matmul(a, b, *, precision):
    return a @ b


def elu(x, alpha):
    return np.where(x > 0, x, alpha * np.expm1(x))


def selu(x):
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


def gelu(x, *, approximate):
    if approximate:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * special.ndtr(x)


def _padded(x, padding, fill):
    """Zeros around the axes behind the channels; numbers below 0 cut off."""
    wide = np.pad(x, ((0, 0), (0, 0), *((max(a, 0), max(b, 0)) for a, b in padding)), constant_values=fill)
    return wide[(..., *(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(padding, wide.shape[2:], strict=True)))]


def _taps(x, kernel, stride, dilation):
    """For each tap of a window, the numbers that it reads at all places."""
    counts = [(n - d * (K - 1) - 1) // s + 1 for n, K, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    for taps in itertools.product(*map(range, kernel)):
        places = [
            slice(t * d, t * d + (P - 1) * s + 1, s) for t, P, s, d in zip(taps, counts, stride, dilation, strict=True)
        ]
        yield taps, x[(..., *places)]


def conv_general_dilated(
    lhs, rhs, window_strides, padding, lhs_dilation=None, rhs_dilation=None, *, dimension_numbers,
    feature_group_count, precision,
):  # fmt: skip
    axes = "HW"[: lhs.ndim - 2]
    assert dimension_numbers == (f"NC{axes}", f"OI{axes}", f"NC{axes}")
    assert lhs.dtype == rhs.dtype
    step = lhs_dilation or (1,) * len(axes)
    x = np.zeros((*lhs.shape[:2], *((n - 1) * s + 1 for n, s in zip(lhs.shape[2:], step, strict=True))), lhs.dtype)
    x[(..., *(slice(None, None, s) for s in step))] = lhs
    groups = np.split(_padded(x, padding, 0), feature_group_count, axis=1)
    parts = [
        sum(
            np.einsum("bc...,oc->bo...", read, w[(..., *taps)])
            for taps, read in _taps(part, rhs.shape[2:], window_strides, rhs_dilation)
        )
        for part, w in zip(groups, np.split(rhs, feature_group_count), strict=True)
    ]
    return np.concatenate(parts, axis=1)


def reduce_window(operand, init_value, computation, window_dimensions, window_strides, padding, *, window_dilation):
    assert window_dimensions[:2] == window_strides[:2] == window_dilation[:2] == (1, 1)
    assert padding[:2] == ((0, 0), (0, 0))
    y = init_value
    x = _padded(operand, padding[2:], init_value)
    for _, read in _taps(x, window_dimensions[2:], window_strides[2:], window_dilation[2:]):
        y = computation(y, read)
    return y.astype(operand.dtype)
