"""A Cast by itself on a GPU: where what stands beside it has other readers."""

import numpy as np
import pytest

import onchip
from checks import rows
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.cast import CastAlone
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.spec.build import sequential
from onchip.spec.io import IO_DTYPES, with_io
from onchip.spec.layers import Cast, Linear
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType, numpy_dtype


def hidden_output():
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3) / np.float32(3), "v": rows(4, 9, seed=4) / np.float32(3)}
    return Network({"x": TensorType(("B", 6))}, nodes, ("a", "b"), weights)


def test_a_hidden_value_that_is_an_output_is_cast_by_itself():
    plan = make_plan(with_io(hidden_output(), "float16"), H200, KERNELS, Job("fp16"))
    assert [group.claim.kernel for group in plan.groups] == ["mlp_tensor", "cast", "mlp_tensor"]
    (cast,) = (group.claim for group in plan.groups if group.claim.kernel == "cast")
    assert cast.label == "cast<fp32,fp16>"
    assert cast.price.row_bytes == 9 * (4 + 2)


def test_launches_cover_every_number():
    net = sequential(TensorType(("B", 3, 5)), [("c", Cast("bfloat16"))], {})
    (claim,) = CastAlone().claims(net, 0, H200, Job())
    launch = claim.facts
    assert launch.program.name_expression == "cast<float, bf16>"
    assert launch.count(7) == 105
    assert launch.launch_config(0).grid == launch.launch_config(68).grid == (1, 1, 1)
    assert launch.launch_config(69).grid == (2, 1, 1)
    assert launch.launch_config(10**9).grid == (132 * 8, 1, 1)


def test_what_it_does_not_cast():
    net = sequential(TensorType(("B", 3), "float64"), [("c", Cast("float32"))], {})
    (refusal,) = CastAlone().claims(net, 0, H200, Job())
    assert "not float64 to float32" in refusal.why
    assert list(CastAlone().claims(hidden_output(), 0, H200, Job())) == []


@pytest.mark.gpu
@pytest.mark.parametrize("to", IO_DTYPES)
@pytest.mark.parametrize("given", IO_DTYPES)
@pytest.mark.parametrize("B", [1, 7, 1000, 100_001])
def test_rounded_as_numpy_rounds(given, to, B):
    if given == to:
        pytest.skip("nothing to cast: the plan has no kernel")
    net = sequential(TensorType(("B", 3), given), [("c", Cast(to))], {})
    x = (100 * rows(B, 3)).astype(numpy_dtype(given))
    got = onchip.compile(net, "cuda")(x)
    assert got.tobytes() == x.astype(np.float32).astype(numpy_dtype(to)).tobytes()


@pytest.mark.gpu
def test_a_network_with_a_hidden_output_in_half_precision():
    net = with_io(hidden_output(), "float16")
    x = rows(77, 6).astype(np.float16)
    hidden, last = onchip.compile(net, "cuda", "fp16")(x)
    truth = onchip.compile(hidden_output(), "cpu")(x.astype(np.float32))
    for got, expected in zip((hidden, last), truth, strict=True):
        assert got.dtype == np.float16
        assert np.abs(got.astype(np.float32) - expected).max() < 0.01 * np.abs(expected).max()
