"""Rows of a batch become NHWC images: several numbers of channels, with and without a zero border."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import chain, conv
from onchip.kernels import reference
from onchip.network.layers import Conv2d
from onchip.runtime.engine import compile


@pytest.mark.parametrize("C", range(1, 7))
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (5, 37)], ids=str)
def test_nchw_becomes_nhwc(C, kernel, size):
    net = chain((C, *size), (Conv2d(pads=(kernel // 2,) * 4), conv(3, C, kernel, kernel)))
    engine = compile(net, device="cpu", threads=1, without=("windows",))
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"]
    x = rows(3, C, *size)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[1:2]), got[1:2])
