"""merge_convs, split_phases, trim_convs: parallel convolutions merged, transposed ones without zero insertion,
and those whose padding is cropped."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import YES_NO, Grow, assert_rewrites, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    GlobalMax,
    GlobalMean,
    Interleave,
    LeakyReLU,
    MaxPool1d,
    MaxPool2d,
    ReLU,
    Slice,
    Softmax,
    Tanh,
    TransposedConvolution,
)
from onchip.network.types import numpy_dtype
from onchip.plan.rewrites import merge_convs, multiply_windows, rewrite, split_phases, trim_convs

# -- merge_convs -----------------------------------------------------------------------------------------------

# Every convolution, and every path after it, keeps the length 5 or the image 3 x 4: any can be concatenated.
CONVS = {
    1: [(Conv1d((1,), (1, 1)), (3,)), (Conv1d((1,), (2, 2), (2,)), (3,)), (Conv1d(), (1,)),
        (Conv1d((1,), (1, 1), groups=2), (3,))],
    2: [(Conv2d((1, 1), (1, 0, 1, 0)), (3, 1)), (Conv2d((1, 1), (1, 1, 1, 1)), (3, 3)), (Conv2d(groups=2), (1, 1))],
}  # fmt: skip
PATHS = {
    1: [(), (ReLU(),), (Tanh(), MaxPool1d((3,), (1,), (1, 1))), (AvgPool1d((3,), (1,), (1, 1)), LeakyReLU(0.1)),
        (LeakyReLU(0.2),), (Softmax(1),), (GlobalMean((1,), keep=True),)],
    2: [(), (ReLU(),), (MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)),), (Tanh(), AvgPool2d((1, 1))), (Softmax(1),)],
}  # fmt: skip
MIXING = [(Softmax(1),), (GlobalMean((1,), keep=True),)]  # over channels: never merged


def parallel_convs(pick):
    """Convolutions in a Concat of channels: most have the same geometry, some differ."""
    rank = pick((1, 2))
    grow = Grow(pick, 2, *((5,) if rank == 1 else (3, 4)))
    axes = tuple(range(2, 2 + rank))
    ends = pick([(), (GlobalMax(axes),), (GlobalMean(axes, keep=True),)])
    usual = pick(CONVS[rank][:2]), pick(PATHS[rank][:4])
    outputs, values, whats = [], [], []
    for _ in range(pick((2, 3, 4))):
        odd = pick(("",) * 8 + ("conv", "path", "source", "read by another", "an output"))
        layer, kernel = pick(CONVS[rank]) if odd == "conv" else usual[0]
        path = pick(PATHS[rank]) if odd == "path" else usual[1]
        source = grow.add(ReLU(), "x") if odd == "source" else "x"
        made = [grow.conv(source, layer, pick(range(1, 4)), *kernel)]
        for step in (*path, *ends):
            made.append(grow.add(step, made[-1]))
        if odd == "read by another":
            outputs.append(grow.add(Tanh(), pick(made)))
        if odd == "an output":
            outputs.append(pick(made))
        values.append(made[-1])
        alone = odd in ("read by another", "an output") or layer.groups > 1 or path in MIXING
        whats.append(made[-1] if alone else (source, layer, kernel, path))
    joined = grow.add(Concat(pick((1, 1 - len(grow.types[values[0]].shape)))), *values)
    return grow.network(joined, *outputs), any(a == b for a, b in pairwise(whats))


@settings(max_examples=150)
@given(data=st.data())
def test_convolutions_side_by_side_become_one(data):
    before, after = assert_rewrites(merge_convs, parallel_convs, drawn(data))
    assert sum(map(after.row_flop, after.nodes)) <= sum(map(before.row_flop, before.nodes)) + sum(
        after.types[node.name].row_size for node in after.nodes
    )  # a bias that only one of them had


def test_the_property_of_convs_is_not_an_empty_one():
    assert 0.5 < share_that_fires(parallel_convs) < 0.9


def three_convs(*kernels: int, order: tuple[int, ...] = (0, 1, 2)):
    grow = Grow(seeded(2), 3, 9)
    convs = [grow.add(GlobalMax((2,)), grow.add(ReLU(), grow.conv("x", Conv1d(), 2, K))) for K in kernels]
    return grow.network(grow.add(Concat(1), *(convs[i] for i in order)))


def test_three_become_one_and_the_concat_goes_too():
    net = three_convs(3, 3, 3)
    after, told = merge_convs(net)
    assert told == ["merged conv1d3, conv1d6 into conv1d0: a single pass over x"]
    assert [node.layer.kind for node in after.nodes] == ["Conv1d", "ReLU", "GlobalMax", "Concat"]
    assert_same_meaning(net, after)
    whole, _ = rewrite(net)
    assert [(node.name, node.layer.kind) for node in whole.nodes][-1] == ("concat9", "GlobalMax")
    assert_same_meaning(net, whole)


def test_the_order_of_channels_is_that_of_the_concat():
    net = three_convs(3, 3, 3, order=(2, 0, 1))
    after, told = merge_convs(net)
    assert len(told) == 1
    assert_same_meaning(net, after)


def test_only_neighbours_merge():
    assert merge_convs(three_convs(3, 4, 3))[0].outputs == ("concat9",)
    net = three_convs(3, 3, 4, order=(0, 2, 1))
    assert merge_convs(net)[0] is net


def test_a_value_that_stands_there_twice_stays():
    grow = Grow(seeded(4), 2, 6)
    a, b = (grow.conv("x", Conv1d(), 2, 3) for _ in range(2))
    net = grow.network(grow.add(Concat(1), a, a, b))
    assert merge_convs(net)[0] is net


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (Conv1d(groups=2), ReLU()),
        (Conv1d(), Softmax(1)),
        (Conv1d(), GlobalMax((1,), keep=True)),
        (Conv1d(), GlobalMean((-2,), keep=True)),
    ],
    ids=str,
)
def test_twins_that_mix_their_channels_stay(layer, path):
    grow = Grow(seeded(5), 4, 6)
    net = grow.network(grow.add(Concat(1), *(grow.add(path, grow.conv("x", layer, 2, 3)) for _ in range(2))))
    assert merge_convs(net)[0] is net


@pytest.mark.parametrize("narrow", [["conv1d0.weight"], ["conv1d0.bias"], ["conv1d0.weight", "conv1d1.bias"]])
def test_weights_of_two_dtypes_stay(narrow):
    grow = Grow(lambda options: options[0], 2, 6)  # every convolution has a bias
    net = grow.network(grow.add(Concat(1), *(grow.conv("x", Conv1d(), 2, 3) for _ in range(2))))
    assert merge_convs(net)[1]
    mixed = {name: w.astype(np.float32) if name in narrow else w for name, w in net.weights.items()}
    assert merge_convs(net.replace(weights=mixed))[1] == []


def test_half_precision_stays_what_it_is():
    """Nothing is computed here, so nothing is rounded."""
    grow = Grow(seeded(11), 2, 6)
    net = grow.network(grow.add(Concat(1), *(grow.conv("x", Conv1d(), 2, 3) for _ in range(3))))
    assert len({tuple(node.weights) for node in net.nodes[:3]}) == 2, "some have a bias"
    narrow = net.replace(
        weights={name: np.asarray(w).astype(numpy_dtype("bfloat16")) for name, w in net.weights.items()}
    )
    after, told = merge_convs(narrow)
    assert told
    assert {after.weight_type(name).dtype for name in after.nodes[0].weights.values()} == {"bfloat16"}
    assert_same_meaning(narrow, after)


def test_a_concat_along_another_axis_stays():
    grow = Grow(seeded(4), 2, 6)
    net = grow.network(grow.add(Concat(2), *(grow.conv("x", Conv1d(), 2, 3) for _ in range(2))))
    assert merge_convs(net)[0] is net


def test_a_concat_of_concats_becomes_one_convolution():
    grow = Grow(seeded(8), 2, 6)
    a, b, c = (grow.conv("x", Conv1d(), 2, 3) for _ in range(3))
    net = grow.network(grow.add(Concat(1), grow.add(Concat(1), a, b), c))
    after, _ = rewrite(net)
    assert [(node.name, node.layer.kind) for node in after.nodes] == [(net.outputs[0], "Conv1d")]
    assert_same_meaning(net, after)


# -- phases ----------------------------------------------------------------------------------------------------


def splits(stride: int, K: int, before: int, n_in: int, n_out: int) -> bool:
    """By definition, the taps of a phase are a window that slides over the whole input."""
    for p in range(stride):
        outputs = range(p, n_out, stride)
        taps = [k for k in range(K) if (p + before - k) % stride == 0]
        if not outputs or not taps:
            return False
        first = min((outputs[0] + before - k) // stride for k in taps)
        last = max((outputs[-1] + before - k) // stride for k in taps)
        if first > 0 or last < n_in - 1:
            return False
    return True


def transposed(pick):
    rank, groups = pick((1, 2)), pick((1, 1, 1, 2))
    axes = []
    for _ in range(rank):
        n, stride, K = pick(range(1, 5)), pick((1, 2, 2, 3)), pick((1, 2, 3, 4, 5, 5))
        extra = pick(range(stride))
        room = (n - 1) * stride + K + extra - 1  # what the pads may crop: at least one element is left
        before = min(room, pick((0, 0, 1, 1, 2)))
        axes.append((n, stride, K, before, min(room - before, pick((0, 0, 1, 1, 2))), extra))
    sizes, stride, kernel, before, after, extra = zip(*axes, strict=True)
    dilated = pick((False,) * 9 + (True,))
    dilation = tuple(2 if dilated and not any((*before, *after, *extra)) else 1 for _ in sizes)
    kind = ConvTranspose1d if rank == 1 else ConvTranspose2d
    grow = Grow(pick, 2 * groups, *sizes)
    layer = kind(stride, (*before, *after), extra, dilation, groups)
    value = grow.transposed("x", layer, pick(range(1, 4)), *kernel)
    fires = all(d == 1 for d in dilation) and all(
        splits(*axis, n_out)
        for axis, n_out in zip(zip(stride, kernel, before, sizes, strict=True), grow.row(value)[1:], strict=True)
    )
    return grow.network(value if pick(YES_NO) else grow.add(ReLU(), value)), fires


@settings(max_examples=250)
@given(data=st.data())
def test_a_transposed_convolution_is_its_phases(data):
    before, after = assert_rewrites(split_phases, transposed, drawn(data))
    if after is before:
        return
    assert not any(isinstance(node.layer, TransposedConvolution) for node in after.nodes)
    convs = [node for node in after.nodes if isinstance(node.layer, Conv1d | Conv2d)]
    stride = before.nodes[0].layer.stride
    assert len(convs) == np.prod(stride)
    assert all(set(node.layer.stride) == {1} for node in convs)
    assert sum(isinstance(node.layer, Interleave) for node in after.nodes) == (len(convs) > 1)
    taps = [np.prod(after.weights[node.weights["weight"]].shape[2:]) for node in convs]
    assert sum(taps) == np.prod(before.weights[before.nodes[0].weights["weight"]].shape[2:])  # each is used once


def test_the_property_of_phases_is_not_an_empty_one():
    assert 0.5 < share_that_fires(transposed) < 0.9


@pytest.mark.parametrize(
    ("K", "pads", "extra"), [(4, (1, 1), 0), (3, (1, 1), 1), (5, (2, 2), 1), (5, (1, 2), 0), (2, (0, 0), 0)]
)
def test_the_usual_upsampling_layers_split(K, pads, extra):
    grow = Grow(seeded(K), 2, 3, 4)
    layer = ConvTranspose2d((2, 2), (pads[0], pads[0], pads[1], pads[1]), (extra, extra))
    net = grow.network(grow.transposed("x", layer, 3, K, K))
    after, told = split_phases(net)
    assert told == ["split convtranspose2d0 into 4 convolutions, one per phase: no multiplications with inserted zeros"]
    assert net.output.row_shape == (3, 6, 8)
    assert [node.name for node in after.nodes] == [
        *(f"convtranspose2d0.{p}_{q}" for p in range(2) for q in range(2)), "convtranspose2d0",
    ]  # fmt: skip
    assert_same_meaning(net, after)


def test_stride_one_is_one_convolution():
    grow = Grow(seeded(1), 2, 4)
    net = grow.network(grow.transposed("x", ConvTranspose1d((1,), (0, 1)), 3, 3))
    after, told = split_phases(net)
    assert told == ["split convtranspose1d0 into a convolution: no multiplications with inserted zeros"]
    assert [(node.name, node.layer) for node in after.nodes] == [("convtranspose1d0", Conv1d(pads=(2, 1)))]
    assert_same_meaning(net, after)


@pytest.mark.parametrize(
    ("layer", "K", "n"),
    [
        (ConvTranspose1d((2,), dilation=(2,)), 3, 3),
        (ConvTranspose1d((2,)), 1, 3),  # its second phase has no tap
        (ConvTranspose1d((2,), (1, 1)), 2, 3),  # its second phase begins after the first element
        (ConvTranspose1d((3,), (0, 2)), 3, 3),  # its last phases end before the last element
        (ConvTranspose1d((2,), (2, 2)), 5, 1),  # one output: its second phase has none
    ],
    ids=str,
)
def test_what_is_no_set_of_plain_convolutions_stays(layer, K, n):
    grow = Grow(seeded(3), 2, n)
    net = grow.network(grow.transposed("x", layer, 2, K))
    assert split_phases(net)[0] is net


def test_several_in_a_row_with_norms_between():
    grow = Grow(seeded(9), 4, 3, 3)
    value = "x"
    for C in (3, 2, 1):
        value = grow.transposed(value, ConvTranspose2d((2, 2), (1, 1, 2, 2)), C, 5, 5)
        value = grow.add(ReLU(), grow.norm(value))
    net = grow.network(value)
    after, told = rewrite(net)
    assert [line.split()[0] for line in told] == ["folded"] * 3 + ["split"] * 3 + ["moved"] * 3
    assert_same_meaning(net, after)


# -- one window, or one pixel ----------------------------------------------------------------------------------


def one_window(pick):
    """A convolution or transposed convolution in 1-D or 2-D; most have one window or one pixel."""
    rank, C, N = pick((1, 2)), pick((1, 3)), pick((1, 4))
    kernel = tuple(pick((1, 2, 3)) for _ in range(rank))
    is_transposed, dilated = pick(YES_NO), pick((1, 1, 2))
    pads = tuple(pick((0, 0, 1)) for _ in range(2 * rank))
    side = pick((0, 0, 0, 1))  # one more: then there are more windows, or pixels
    if is_transposed:
        sides = (1 + side,) * rank
        made = [(n - 1) + dilated * (k - 1) + 1 for n, k in zip(sides, kernel, strict=True)]
        pads = tuple(pad if made[i % rank] > 2 else 0 for i, pad in enumerate(pads))
        layer = (ConvTranspose1d if rank == 1 else ConvTranspose2d)(pads=pads, dilation=(dilated,) * rank)
        grow = Grow(pick, C, *sides)
        value = grow.transposed("x", layer, N, *kernel)
    else:
        sides = tuple(
            max(1, dilated * (k - 1) + 1 + side - before - after)
            for k, before, after in zip(kernel, pads[:rank], pads[rank:], strict=True)
        )
        layer = (Conv1d if rank == 1 else Conv2d)(pads=pads, dilation=(dilated,) * rank)
        grow = Grow(pick, C, *sides)
        value = grow.conv("x", layer, N, *kernel)
    x, y = grow.row("x")[1:], grow.row(value)[1:]
    one, many = (x, y) if is_transposed else (y, x)
    places = [
        {k * dilated - before for k in range(taps)} for taps, before in zip(kernel, pads[:rank], strict=True)
    ]  # of taps, along each axis
    fires = np.prod(one) == 1 and all(set(range(n)) <= found for n, found in zip(many, places, strict=True))
    return grow.network(grow.add(ReLU(), value)), bool(fires)


def test_most_of_these_have_one_window():
    assert 0.5 < share_that_fires(one_window) < 0.9


@settings(max_examples=60)
@given(st.data())
def test_one_window_is_a_product(data):
    net, made = assert_rewrites(multiply_windows, one_window, drawn(data))
    if made is not net:
        assert [node.layer.kind for node in made.nodes] == ["Reshape", "Linear", "Reshape", "ReLU"]


def test_a_window_beside_the_picture_stays():
    """The window covers only padding: a zero tap times an infinity would be NaN."""
    grow = Grow(seeded(1), 2, 1)
    net = grow.network(grow.conv("x", Conv1d((3,), (4, 0)), 4, 3))
    assert multiply_windows(net) == (net, [])


# -- trim_convs ----------------------------------------------------------------------------------------------------


def cut_convs(pick):
    """A convolution and a Slice of it: of its pixels, rarely of its channels, or every second one."""
    rank = pick((1, 2))
    stride, pads, dilated = pick((1, 1, 2)), [pick(range(4)) for _ in range(2 * rank)], pick((1, 2))
    grow = Grow(pick, 2, *((7,), (5, 6))[rank - 1])
    layer = (Conv1d, Conv2d)[rank - 1]((stride,) * rank, tuple(pads), (dilated,) * rank)
    made = grow.conv("x", layer, 3, *(2,) * rank)
    sizes, step = list(grow.row(made)), pick((1, 1, 1, 1, 2))
    starts = [pick((0, 0, 0, 0, 1)), *(pick((0, 0, 1)) for _ in range(rank))]
    kept = [max(0, n - start - (pick((0, 1, 2)) if axis else 0)) // (step if axis else 1)
            for axis, (n, start) in enumerate(zip(sizes, starts, strict=True))]  # fmt: skip
    part = grow.add(Slice(tuple(starts), tuple(kept), (1, *(step,) * rank)), made)
    fires = step == 1 and not starts[0]
    for axis in range(rank):
        first = pads[axis] - stride * starts[axis + 1]
        last = (kept[axis + 1] - 1) * stride + dilated + 1 - grow.row("x")[axis + 1] - first
        is_all = starts[axis + 1] == 0 and kept[axis + 1] == sizes[axis + 1]
        fires &= first >= 0 and (is_all or 0 <= last <= pads[rank + axis]) and kept[axis + 1] > 0
    return grow.network(grow.add(ReLU(), part)), fires


def test_many_of_these_are_cut():
    assert 0.2 < share_that_fires(cut_convs) < 0.8


@settings(max_examples=60)
@given(st.data())
def test_pads_that_are_cut_off(data):
    net, made = assert_rewrites(trim_convs, cut_convs, drawn(data))
    if made is not net:
        assert len(made.nodes) == 2
