"""What few images cost: every convolution kernel's estimate against what its launches took on an H200."""

import pytest

from kernels.cuda.conv.test_sm90 import conv_inside, weight
from onchip.kernels.cuda import KERNELS
from onchip.network.io import with_io
from onchip.network.layers import Conv2d, ConvTranspose2d, ReLU
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job
from onchip.plan.planner import make_plan
from onchip.workloads import faces

TWICE = ConvTranspose2d((2, 2), (1, 1, 2, 2), (0, 0))
SAME = Conv2d(pads=(1, 1, 1, 1))
# Microseconds of a launch among others of its kind in a graph, by kernel.
MEASURED = [
    (TWICE, (512, 4, 4), (512, 256, 5, 5), "fp16", 1, {"conv_sm90": 8.0, "conv_implicit_gemm": 29.6}),
    (TWICE, (512, 4, 4), (512, 256, 5, 5), "fp16", 100, {"conv_sm90": 27.7, "conv_implicit_gemm": 65.1}),
    (
        TWICE,
        (128, 16, 16),
        (128, 64, 5, 5),
        "fp16",
        10,
        {"conv_sm90": 7.3, "conv_implicit_gemm": 15.4, "conv_direct": 99.2},
    ),
    (TWICE, (64, 32, 32), (64, 3, 5, 5), "fp16", 10, {"conv_last_layer_sm90": 4.6, "conv_last_layer": 7.8}),
    (SAME, (64, 32, 32), (64, 64, 3, 3), "fp16", 1, {"conv_sm90": 3.7, "conv_implicit_gemm": 6.5, "conv_direct": 32.9}),
    (
        SAME,
        (64, 32, 32),
        (64, 64, 3, 3),
        "fp32",
        64,
        {"conv_sm90": 58.3, "conv_implicit_gemm": 90.9, "conv_direct": 171.4},
    ),
    (
        SAME,
        (48, 64, 64),
        (16, 48, 3, 3),
        "fp16",
        1,
        {"conv_sm90": 3.4, "conv_last_layer_sm90": 4.6, "conv_last_layer": 5.9},
    ),
    (Conv2d(), (64, 6, 6), (128, 64, 1, 1), "fp16", 1, {"conv_sm90": 2.0, "conv_direct": 6.1}),
    (Conv2d(), (32, 12, 12), (64, 32, 1, 1), "fp32", 64, {"conv_sm90": 4.6, "conv_direct": 6.1}),
    (
        Conv2d(),
        (256, 3, 3),
        (256, 256, 1, 1),
        "fp32",
        1,
        {"conv_sm90": 4.6, "conv_implicit_gemm": 7.4, "conv_direct": 16.8},
    ),
]


@pytest.mark.parametrize(("layer", "row", "shape", "precision", "B", "took"), MEASURED)
def test_estimates_of_few_images(layer, row, shape, precision, B, took):
    dtype = "float16" if precision == "fp16" else "float32"
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    job, told = Job(precision, B), dict[str, float]()
    for kernel in KERNELS:
        found = [
            claim for claim in kernel.claims(net, 1, H200, job) if isinstance(claim, Claim) and len(claim.nodes) > 1
        ]
        if found and kernel.name in took:
            told[kernel.name] = min(claim.cost.estimate_us(H200, precision, B) for claim in found)
    assert told.keys() == took.keys()
    for name, us in took.items():
        assert us / 1.7 <= told[name] <= 1.7 * us, f"{name} took {us} us, {told[name]:.1f} are told"
    assert min(told, key=told.__getitem__) == min(took, key=took.__getitem__)


@pytest.mark.parametrize("B", [1, 10])
def test_few_faces_are_made_by_tensor_cores_in_half_precision(B):
    """10 images took 94 us by conv_implicit_gemm and conv_last_layer over values in float32, and 39 so."""
    net = faces.network()
    plan = make_plan(with_io(net, "float16"), H200, KERNELS, Job("fp16", B))
    kernels = [group.claim.kernel for group in plan.groups]
    assert kernels.count("conv_sm90") == 3
    assert kernels[-1] == "conv_last_layer_sm90"
    assert {plan.types[name].dtype for name in plan.between} == {"float16"}
