"""Convolutions of one tap and few channels, emulated and on a GPU: either layout of y, any number of channels."""

import math

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.build import sequential
from onchip.network.layers import Conv1d, Conv2d, Identity, MaxPool2d, ReLU, Tanh
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan


def inside(C, N, sides, dtype="float32", activation=None, layer=None, taps=1):
    """The convolution 'y' between others, so that its values may lie as they like."""
    layer = layer or (Conv1d() if len(sides) == 1 else Conv2d())
    shape = (N, C // getattr(layer, "groups", 1), *[taps] * len(sides))
    weights = {"y.weight": rows(N, math.prod(shape[1:])).reshape(shape) / np.sqrt(C), "y.bias": rows(1, N, seed=4)[0]}
    layers = [("a", Identity()), ("y", layer), *([("act", activation)] if activation else []), ("z", Identity())]
    typed = {name: weight.astype(numpy_dtype(dtype)) for name, weight in weights.items()}
    return sequential(TensorType(("B", C, *sides), dtype), layers, typed)


CASES = [
    (8, 16, (3, 5), "float32", ReLU()), (4, 3, (7,), "float32", Tanh()), (16, 2, (4, 4), "float16", None),
    (8, 40, (2, 3), "float16", ReLU()), (24, 17, (3, 3), "bfloat16", None), (12, 36, (5,), "float32", None),
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_right(monkeypatch, case):
    gpu = emulated_gpu(monkeypatch)
    net = inside(*case)
    dtype = net.input.dtype
    x = np.random.default_rng(0).standard_normal((5, *net.input.row_shape)).astype(numpy_dtype(dtype))
    claims = claims_of(net, "conv_pixel", start=1)
    assert [bool(claim.gives) for claim in claims] == [False, True]
    truth, naive = reference.forward(net, x), reference.forward(net, x, dtype)
    made = [run_claim(gpu, net, claim, x) for claim in claims]
    assert np.array_equal(*made)
    assert_error_within(made[0].astype(np.float64), truth, naive)
    assert np.array_equal(run_claim(gpu, net, claims[0], x[3:4]), made[0][3:4])


def test_what_it_takes():
    def is_taken(*given, **more):
        return bool(claims_of(inside(*given, **more), "conv_pixel", start=1))

    assert is_taken(8, 16, (4, 4), "float16")
    assert not is_taken(6, 16, (4, 4), "float16")  # pixels begin where no 16 bytes do
    assert not is_taken(8, 8, (4, 4), layer=Conv2d(groups=2))
    assert not is_taken(8, 8, (4, 4), layer=Conv2d(stride=(2, 2)))
    assert not is_taken(8, 8, (4, 4), layer=Conv2d(pads=(1, 0, 0, 1)))
    assert not is_taken(8, 8, (4, 4), taps=2)
    assert not is_taken(128, 128, (4, 4))  # tensor cores are for that
    assert not is_taken(8, 16, (4, 4), "float64")


def between(dtype="float32"):
    """A convolution of one tap that reads its channels last, as others made them."""
    layers = [("p", Conv2d((2, 2), (1, 1, 1, 1))), ("y", Conv2d()), ("r", ReLU()), ("q", MaxPool2d((3, 3), (2, 2)))]
    weights = {"p.weight": rows(8, 27).reshape(8, 3, 3, 3), "y.weight": rows(16, 8)[..., None, None]}
    typed = {name: weight.astype(numpy_dtype(dtype)) for name, weight in weights.items()}
    return sequential(TensorType(("B", 3, 96, 96), dtype), layers, typed)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_it_is_chosen_where_channels_are_few(precision):
    labels = [group.claim.label for group in make_plan(between(), H200, KERNELS, Job(precision, 4096)).groups]
    assert "conv_pixel<8,16,ReLU>" in labels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_on_a_gpu(dtype):
    net = between(dtype)
    x = np.random.default_rng(0).standard_normal((70, *net.input.row_shape)).astype(numpy_dtype(dtype))
    engine = onchip.compile(net, "cuda", {"float32": "fp32", "float16": "fp16"}[dtype], batch_hint=4096)
    assert "conv_pixel" in [group.claim.kernel for group in engine.plan.groups]
    got = engine(x)
    assert_error_within(got.astype(np.float64), reference.forward(net, x), reference.forward(net, x, dtype))
    for B in (0, 1, 7):
        assert np.array_equal(engine(x[:B]), got[:B])
