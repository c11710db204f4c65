"""make_channels_last: a gemm that computes an image stores it in the order that convolutions read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import YES_NO, Grow, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.kernels import cuda
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose2d, MaxPool2d, Permute, ReLU, Reshape, Sigmoid
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.rewrites import make_channels_last, rewrite
from onchip.workloads import faces


def images(pick):
    """Linear -> activations -> an image; sometimes several vectors, another reader, or no convolution."""
    vectors = pick(((),) * 5 + ((2,),))
    grow = Grow(pick, *vectors, 3)
    value = grow.linear("x", 12 if vectors else 24)
    fires = not vectors
    outputs = []
    if pick(YES_NO):
        value = grow.add(ReLU(), value)
    if pick((False,) * 5 + (True,)):
        outputs.append(value)
        fires = False
    sides = pick(((2, 3), (1, 6), (6,), (1, 1)))
    C = 24 if sides == (1, 1) else 4
    value = grow.add(Reshape((C, *sides)), value)
    fires = fires and C == 4
    if pick(YES_NO):
        value = grow.add(Sigmoid(), value)
    if pick((False, False, True)):
        outputs.append(value)  # the image keeps its name and its layout
    rank = len(sides)
    last = pick(("conv", "conv", "transposed", "pool")) if rank == 2 else "conv"
    match last:
        case "conv":
            outputs.append(grow.conv(value, Conv2d() if rank == 2 else Conv1d(), 2, *(1,) * rank))
        case "transposed":
            outputs.append(grow.transposed(value, ConvTranspose2d((2, 2)), 3, 2, 2))
        case _:
            outputs.append(grow.add(MaxPool2d((1, 1), (1, 1)), value))
            fires = False
    return grow.network(*outputs), fires


@settings(max_examples=120)
@given(data=st.data())
def test_it_happens_where_it_should_and_keeps_the_meaning(data):
    net, fires = images(drawn(data))
    changed, told = make_channels_last(net)
    assert bool(told) == fires
    assert_same_meaning(net, changed)


def test_the_property_is_not_an_empty_one():
    assert 0.3 < share_that_fires(images) < 0.9


def test_what_it_says_and_makes():
    grow = Grow(seeded(5), 3)
    image = grow.add(ReLU(), grow.add(Reshape((4, 2, 3)), grow.linear("x", 24)))
    net = grow.network(grow.conv(image, Conv2d(), 2, 1, 1))
    after, told = make_channels_last(net)
    assert told == ["stored relu2 in NHWC: permuted the weights of linear0"]
    assert [node.name for node in after.nodes] == ["linear0", "relu2.flat", "relu2.pixels", "relu2", "conv2d3"]
    assert after.nodes[3].layer == Permute((0, 3, 1, 2))
    assert make_channels_last(after)[0] is after


@pytest.mark.parametrize("B", [1, 5_248])
def test_faces_moves_nothing_behind_its_projection(B):
    """In NCHW a pass over memory would permute them: for a GPU whose convolutions read NHWC."""
    plan = make_plan(faces.network(), H200, cuda.KERNELS, Job("fp16", B))
    labels = [group.claim.label for group in plan.groups]
    first = next(i for i, label in enumerate(labels) if label.startswith("conv"))
    assert labels[first - 1] == "view<Permute>"
    assert not any(label.startswith("permute") for label in labels[:first])
    assert "relu0" in plan.network.by_name
    assert "stored relu0 in NHWC" in " ".join(rewrite(faces.network())[1])
