"""conv_images: how conv_wgmma runs many images in 16 bits. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from kernels.test_conv_wgmma import claim_of, conv_inside, exact_of, weight
from onchip.kernels.cuda.conv_images import IMAGES
from onchip.kernels.cuda.conv_wgmma import ConvWgmmaLowering
from onchip.spec.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, ReLU
from onchip.spec.types import numpy_dtype

CASES = {
    "faces": (ConvTranspose2d((2, 2), (1, 1, 2, 2), (1, 1)), (40, 3, 2), (40, 72, 5, 5)),
    "phases of several taps": (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (136, 2, 3), (136, 16, 3, 3)),
    "odd sides": (ConvTranspose2d((2, 2), (1, 1, 1, 0)), (48, 3, 2), (48, 24, 4, 4)),
    "strides that differ": (ConvTranspose2d((4, 1), (0, 2, 1, 0), (2, 0)), (40, 2, 3), (40, 24, 5, 3)),
    "same": (Conv2d(pads=(1, 1, 1, 1)), (40, 3, 5), (64, 40, 3, 3)),
    "many channels": (Conv2d((2, 1), (0, 1, 1, 0)), (72, 5, 3), (264, 72, 2, 2)),
    "dilation": (Conv2d((1, 2), (2, 0, 1, 3), (2, 1)), (40, 5, 4), (136, 40, 2, 3)),
    "a signal": (Conv1d(pads=(2, 1)), (64, 7), (24, 64, 4)),
    "a signal, twice": (ConvTranspose1d((2,)), (40, 5), (40, 136, 3)),
    "from one pixel": (ConvTranspose2d(), (104, 1, 1), (104, 24, 4, 4)),
}


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "dtype", "B"), [("fp16", "float16", 5), ("bf16", "bfloat16", 131)])
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtype, B):
    """As exact as conv_wgmma, and the same bits; also by the blocks of a cluster."""
    layer, row, shape = CASES[name]
    if B > IMAGES and name not in ("faces", "many channels"):
        pytest.skip("more images are no other case")
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim, gpu = claim_of(net, precision), emulated_gpu(monkeypatch)
    x = rows(B, int(np.prod(row))).reshape(B, *row).astype(numpy_dtype(dtype))
    claim = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=6))  # blocks make several tiles
    monkeypatch.setattr(ConvWgmmaLowering, "takes_images", lambda *_: True)
    launch = claim.facts.at(B).launches[0]
    assert launch.program.name_expression.startswith("conv_images")
    assert launch.config.cluster == 1 + (B > IMAGES)
    got = run_claim(gpu, net, claim, x)
    exact = exact_of(net, precision, x)
    assert np.abs(got.astype(float) - exact).max() <= (1e-3 if precision == "fp16" else 8e-3) * np.abs(exact).max()
    monkeypatch.setattr(ConvWgmmaLowering, "takes_images", lambda *_: False)
    some = slice(0, None, 40)
    assert np.array_equal(run_claim(gpu, net, claim, x[some]), got[some])
