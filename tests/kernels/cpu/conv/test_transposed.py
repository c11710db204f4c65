"""Transposed convolutions of conv_fused without phases: dilated, strides or pads larger than the kernel, groups."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import chain, conv
from onchip.kernels import reference
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, LeakyReLU, Tanh
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.engine import compile


def weights(C, N, *kernel, groups=1):
    return {"weight": (C, N // groups, *kernel), "bias": (N,)}


NETWORKS = {
    "dilated": chain((5, 6, 7), (ConvTranspose2d((2, 1), (1, 2, 0, 1), dilation=(2, 3)), weights(5, 9, 3, 2)), Tanh()),
    "stride past the kernel": chain(
        (4, 3, 5), (ConvTranspose2d((3, 2), output_padding=(2, 1)), weights(4, 17, 2, 1)), LeakyReLU(0.2),
        (Conv2d(pads=(1, 1, 1, 1)), conv(3, 17, 3, 3)),
    ),
    "pads past the kernel": chain((3, 6, 6), (ConvTranspose2d((2, 2), (3, 1, 2, 4)), weights(3, 20, 3, 3))),
    "one tap, cut off": chain((16, 9), (Conv1d(), conv(70, 16, 1)), (ConvTranspose1d((1,), (2, 2)), weights(70, 1, 1))),
    "a signal": chain((70, 11), (ConvTranspose1d((3,), (2, 0), (1,), (2,)), weights(70, 33, 4)), Tanh()),
    "groups": chain((6, 5, 4), (ConvTranspose2d((2, 2), dilation=(2, 1), groups=3), weights(6, 12, 2, 3, groups=3))),
    "groups of whole vectors": chain(
        (4, 7), (ConvTranspose1d((2,), (1, 0), dilation=(3,), groups=2), weights(4, 64, 3, groups=2)), Tanh()
    ),
    "pixels that no tap reaches": chain((5, 9), (ConvTranspose1d((4,)), weights(5, 6, 3))),
}  # fmt: skip


def fused(net, **options):
    engine = compile(net, device="cpu", without=("windows",), **options)
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"], str(engine.plan)
    assert any(getattr(op, "is_transposed", False) for op in engine.plan.groups[0].claim.facts.program.operations)
    return engine


@pytest.mark.parametrize("name", NETWORKS)
def test_right_and_the_same_bits_for_any_batch(name):
    net = NETWORKS[name]
    x = rows(37, *net.input.row_shape)
    got = fused(net, threads=1)(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    engine = fused(net, threads=core_count())
    for B in (1, 2, 20, 37):
        assert np.array_equal(engine(x[:B]), got[:B])


@pytest.mark.skipif(core_count() < 2, reason="needs two cores")
@pytest.mark.parametrize("name", NETWORKS)
def test_threads_share_a_single_image(name, monkeypatch):
    monkeypatch.setattr("onchip.kernels.cpu.conv.fused.SHARED_FLOP", -1)
    net = NETWORKS[name]
    x = rows(1, *net.input.row_shape)
    assert np.array_equal(fused(net, threads=2)(x), fused(net, threads=1)(x))


def test_pixels_that_no_tap_reaches_are_the_bias():
    net, x = NETWORKS["pixels that no tap reaches"], rows(3, 5, 9)
    x[1, 2, 4] = np.inf
    got, truth = fused(net)(x), reference.forward(net, x)
    assert np.array_equal(got[:, :, 3::4], np.broadcast_to(net.weights["n0.bias"][:, None], (3, 6, 8)))
    assert np.array_equal(np.isinf(got), np.isinf(truth))
    assert not np.isnan(got).any()


def test_many_small_groups_are_refused_with_a_reason():
    net, x = chain((5, 9), (ConvTranspose1d((4,), groups=5), weights(5, 5, 3, groups=5))), rows(3, 5, 9)
    engine = compile(net, device="cpu")
    assert "refused: conv_fused at n0: a transposed convolution" in str(engine.plan)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
