"""dx of selections and linear resizes on an emulated GPU: of any axes, dtype and layout."""

import numpy as np
import pytest

from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from layer_cases import CASES
from onchip.kernels import reference
from onchip.kernels.selection import gradient_sums
from onchip.network.graph import Network, Node
from onchip.network.layers import Gather, Identity, InputGrad, LinearResize, NearestResize, Pad, Selection, Slice, Tile
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SELECTIONS = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, Selection | LinearResize)]
# Elements that nothing reads, and one that all outputs read; vectors of channels and of runs; channels themselves; one
# axis to many of one element; more axes than tables; an empty dy.
SELECTIONS += [
    (Gather(1, (2, 2, 0, 2, 2, 2, 0)), (4, 8)), (Gather(1, (1, 0, 1, 1, 1, 1)), (2, 5, 3)),
    (Gather(2, (0,) * 40), (3, 1)),
    (NearestResize((8, 7, 5), (1.0, 1.75, 5 / 3)), (8, 4, 3)), (NearestResize((7,), (3.5,), rounding="floor"), (2,)),
    (LinearResize((4, 8, 10), (1.0, 2.0, 2.0)), (4, 4, 5)), (LinearResize((4, 2, 3), (1.0, 0.5, 0.5)), (4, 4, 6)),
    (LinearResize((3, 6, 5, 7), (1.0, 2.0, 1.25, 7 / 3)), (3, 3, 4, 3)),
    (LinearResize((6, 9, 5), (2.0, 1.0, 1.25), "asymmetric"), (3, 9, 4)),
    (Pad((0, 9, 1, 0, 8, 2), "edge"), (4, 3, 5)), (Tile((1, 2, 3)), (2, 3, 2)), (Slice((0, 0), (3, 0), (1, 1)), (3, 6)),
    (Pad((6, 7, 6, 7) * 2, "edge"), (2, 1, 2, 2)),
]  # fmt: skip


def gradient_of(layer, x):
    """dx between other layers, so that it may have any layout."""
    inputs = {"x": x, "dy": one_layer(layer, x).output}
    nodes = Node("dx", InputGrad(layer), ("x", "dy")), Node("z", Identity(), ("dx",))
    return Network(inputs, nodes, ("dx",), {})


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("layer", "row"), SELECTIONS, ids=str)
def test_sums_of_what_reads_an_element(monkeypatch, layer, row, dtype):
    gpu, net = emulated_gpu(monkeypatch), gradient_of(layer, TensorType(("B", *row), dtype))
    claims = claims_of(net, "select_grad")
    assert len(claims) == 1 + all(has_channels(each) for each in net.inputs.values())
    for B in (1, 5, 33):
        rng = np.random.default_rng(B)
        kinds = net.inputs.values()
        xs = tuple(rng.standard_normal((B, *each.row_shape)).astype(numpy_dtype(dtype)) for each in kinds)
        truth = reference.forward(net, xs, "float64")
        baseline = truth if dtype == "float64" else reference.forward(net, xs, dtype)
        for claim in claims:
            got = run_claim(gpu, net, claim, *xs)
            assert_error_within(got, truth, baseline, ulps=2**-20 if dtype == "float64" else 4.0)


def test_terms_of_a_resize():
    """Twice as many: an inner element is read by four, with 1/4, 3/4, 3/4 and 1/4."""
    sums = gradient_sums(LinearResize((2, 8), (1.0, 2.0)), (2, 4), ROWS)
    assert (sums.outer, sums.dy_row, sums.sizes, sums.run) == (2, 8, (1, 1, 4), 1)
    begin, end = sums.starts[4:][1:3]
    assert sums.offsets[begin:end].tolist() == [1, 2, 3, 4]
    assert sums.factors[begin:end].tolist() == [0.25, 0.75, 0.75, 0.25]
    of_channels = gradient_sums(LinearResize((2, 8), (1.0, 2.0)), (2, 4), CHANNELS_LAST)
    assert (of_channels.outer, of_channels.sizes, of_channels.run) == (1, (1, 1, 4), 2)
    assert of_channels.offsets[begin:end].tolist() == [2, 4, 6, 8]
