"""Networks as JAX functions: on a NumPy stand-in and, if JAX sees a GPU, on JAX."""

import numpy as np
import pytest

from checks import rows
from image_networks import residual
from layer_cases import CASES, network, random_inputs
from numpy_jax import numpy_jax
from onchip.bench.frame import UnavailableError
from onchip.bench.peers.frameworks.jax_network import FORMS, jax_function
from onchip.kernels import reference
from onchip.network.layers import LAYERS, Interleave, TokenConv, ToPixels
from text_networks import text_network

NO_JAX = (TokenConv, Interleave)  # only rewrites create them, and peers get networks before rewrites
SUPPORTED = [case for case in CASES if not isinstance(case.layer, NO_JAX)]


def test_all_other_layers_are_supported():
    assert {kind for kind in LAYERS.values() if kind not in FORMS and not getattr(kind, "jax", "")} == set(NO_JAX)


def truth_of(case, xs):
    """The float64 outputs and a tolerance: casts round, and a pixel may be off by one."""
    rounded = {"float16": 1e-3, "bfloat16": 1e-2}.get(getattr(case.layer, "dtype", ""), 1e-5)
    return reference.forward(network(case), xs), 1 if isinstance(case.layer, ToPixels) else rounded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer(case):
    jax, net = numpy_jax(), network(case)
    if isinstance(case.layer, NO_JAX):
        with pytest.raises(UnavailableError, match="JAX"):
            jax_function(jax, net, "float32", jax.lax.Precision.HIGHEST)
        return
    forward, weights = jax_function(jax, net, "float32", jax.lax.Precision.HIGHEST)
    xs = random_inputs(case, 3)
    truth, near = truth_of(case, xs)
    got = forward(xs, weights)
    assert got.shape == truth.shape
    np.testing.assert_allclose(got.astype(np.float64), truth, rtol=near, atol=near)


def test_whole_networks():
    jax = numpy_jax()
    ids = np.random.default_rng(0).integers(0, 60, (7, 11))
    for net, x in ((residual(), rows(5, 3, 9, 11)), (text_network(dtype="int64"), ids)):
        for dtype, near in (("float32", 1e-5), ("float16", 0.1)):
            forward, weights = jax_function(jax, net, dtype, jax.lax.Precision.DEFAULT)
            kinds = {w.dtype for by_role in weights.values() for w in by_role.values()}
            assert {str(kind) for kind in kinds} == {dtype}
            y = forward([x if x.dtype.kind == "i" else x.astype(dtype)], weights)
            assert y.dtype == dtype
            np.testing.assert_allclose(y.astype(np.float64), reference.forward(net, x), rtol=near, atol=near)


@pytest.mark.gpu
def test_every_layer_by_jax_itself():
    """All in one function: compiling a hundred takes long."""
    pytest.importorskip("jax")
    from onchip.bench.peers.gpu import load_jax

    try:
        jax = load_jax()
    except UnavailableError as reason:
        pytest.skip(reason.what)
    cases = [case for case in SUPPORTED if not getattr(case.layer, "dtype", "").endswith("64")]  # JAX's default
    functions = [jax_function(jax, network(case), "float32", jax.lax.Precision.HIGHEST) for case in cases]
    inputs = [random_inputs(case, 3) for case in cases]

    def all_of_them(inputs, weights):
        return [forward(xs, w) for (forward, _), xs, w in zip(functions, inputs, weights, strict=True)]

    results = jax.jit(all_of_them)(inputs, [weights for _, weights in functions])
    for case, xs, got in zip(cases, inputs, results, strict=True):
        truth, near = truth_of(case, xs)
        assert got.shape == truth.shape, case
        np.testing.assert_allclose(
            np.asarray(got, np.float64), truth, rtol=10 * near, atol=10 * near, err_msg=str(case)
        )
