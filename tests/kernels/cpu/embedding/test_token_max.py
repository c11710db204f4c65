"""Folded text networks on the CPU: sums of table rows and their maxima over time."""

import numpy as np
import pytest

from checks import assert_error_within
from onchip.errors import InputError, KernelError
from onchip.kernels import reference
from onchip.kernels.fp8_tables import in_fp8, scales, table_peaks
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Concat,
    GlobalMax,
    GlobalMean,
    LeakyReLU,
    ReLU,
    SiLU,
    Tanh,
    TokenConv,
)  # fmt: skip
from onchip.network.recipe import materialise
from onchip.network.types import TensorType
from onchip.plan.rewrites import fold_embeddings
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.engine import compile
from text_networks import NETWORKS, some_lengths, text_network, weight, with_lengths


def ids(net, B, seed=0):
    given = net.input
    V = net.weights["emb"].shape[0]
    return np.random.default_rng(seed).integers(0, V, (B, *given.row_shape)).astype(given.dtype)


PAYS = 10**9  # rows for which a table is always worth building


def folded(net, **options):
    engine = compile(net, device="cpu", batch_hint=PAYS, **options)
    assert [group.claim.kernel for group in engine.plan.groups] == ["token_max", "mlp_fused"], str(engine.plan)
    return engine


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("B", [1, 33])
def test_forward_is_right(name, B):
    net = NETWORKS[name]
    x = ids(net, B)
    got = folded(net)(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_sentences_of_different_lengths(name, dtype):
    plain = NETWORKS[name]
    net = with_lengths(plain, dtype)
    engine, given = compile(net, "cpu", batch_hint=PAYS), (ids(plain, 50), some_lengths(net, 50))
    truth, naive = (reference.forward(net, given, kind) for kind in ("float64", "float32"))
    assert_error_within(engine(*given), truth, baseline=naive)
    # Where no window fits, the maximum is 0, but a Sigmoid before it would turn that into 1/2.
    assert ("token_max" in str(engine.plan)) == (name != "pads and stride")
    assert np.array_equal(engine(*(x[31:33] for x in given)), engine(*given)[31:33])
    assert_error_within(compile(net, "cpu", without=("fold",))(*given), truth, baseline=naive)


@pytest.mark.parametrize("tables", ["fp32", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_for_any_batch_and_threads(name, tables):
    net = NETWORKS[name]
    x = ids(net, 50)
    whole = folded(net, threads=1, tables=tables)(x)
    engine = folded(net, threads=core_count(), tables=tables)
    for B in (1, 2, 7, 50):
        assert np.array_equal(engine(x[:B]), whole[:B])
    assert np.array_equal(engine(x[31:33]), whole[31:33])


@pytest.mark.parametrize(("tables", "dtype"), [("fp16", np.float16), ("bf16", None)])
def test_half_tables_are_rounded_once(tables, dtype):
    """The result equals float32 sums over rounded tables, subnormals included."""
    import ml_dtypes

    table = np.concatenate([weight(40, 3, 20), weight(40, 3, 20, scale=1e-6)], axis=2)
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}), Node("m", GlobalMax((-1,)), ("t",)))
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("m",), {"T": table})
    x = np.random.default_rng(0).integers(0, 40, (9, 6)).astype(np.int32)
    rounded = net.replace(weights={"T": table.astype(dtype or ml_dtypes.bfloat16).astype(np.float32)})
    engine = compile(net, device="cpu", tables=tables)
    assert engine.plan.groups[0].claim.label == f"token_max<3,40,{tables}>"
    assert np.array_equal(engine(x), compile(rounded, device="cpu")(x))
    assert not np.array_equal(engine(x), compile(net, device="cpu")(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_fp8_tables(name):
    """The result equals sums over rounded tables; 4 significant bits at any channel magnitude."""
    net, _ = fold_embeddings(NETWORKS[name])
    x, tables = ids(NETWORKS[name], 40), {}
    for node in net.nodes:
        if isinstance(node.layer, TokenConv):
            T = materialise(node.weights["weight"], net.weights)
            peaks = table_peaks(T)
            tables[node.weights["weight"]] = in_fp8(T, peaks).astype(np.float32) * scales(peaks)
    rounded = net.replace(weights={**net.weights, **tables})
    got = folded(NETWORKS[name], tables="fp8")(x)
    assert_error_within(got, reference.forward(rounded, x), baseline=reference.forward(rounded, x, "float32"))
    error = np.abs(got - reference.forward(net, x)).max()
    assert 1e-4 < error / np.abs(got).max() < 0.15


def test_channels_of_any_magnitude_fit_into_fp8():
    sizes = (10.0 ** np.arange(-30, 30, 3)).astype(np.float32)
    table = weight(40, 3, 20) * sizes
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}), Node("m", GlobalMax((-1,)), ("t",)))
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("m",), {"T": table})
    x = np.random.default_rng(0).integers(0, 40, (9, 6)).astype(np.int32)
    got, want = compile(net, device="cpu", tables="fp8")(x), reference.forward(net, x)
    assert (np.abs(got - want).max(axis=0) < 0.1 * np.abs(want).max(axis=0)).all()
    for least in (0, np.float32(1e-40)):
        tiny = compile(net.replace(weights={"T": weight(40, 3, 20) * np.float32(least)}), device="cpu", tables="fp8")
        assert np.abs(tiny(x)).max() == 0
    with pytest.raises(KernelError, match="does not fit into fp8"):
        compile(net.replace(weights={"T": table * np.inf}), device="cpu", tables="fp8")


def test_a_table_that_overflows_half_precision_is_rejected():
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}), Node("m", GlobalMax((-1,)), ("t",)))
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("m",), {"T": weight(5, 3, 2, scale=1e6)})
    with pytest.raises(KernelError, match="does not fit into fp16"):
        compile(net, device="cpu", tables="fp16")
    compile(net, device="cpu", tables="bf16")


def test_nan_in_a_table_propagates():
    table = weight(5, 2, 20)
    table[3, 1, 7] = np.nan
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}), Node("m", GlobalMax((-1,)), ("t",)))
    net = Network({"ids": TensorType(("B", 4), "int64")}, nodes, ("m",), {"T": table})
    x = np.array([[0, 3, 1, 2], [3, 0, 1, 2], [1, 2, 1, 3], [0, 1, 2, 4]])
    got = compile(net, device="cpu")(x)
    assert np.isnan(got[:, 7]).tolist() == [True, False, True, False]
    assert np.isfinite(np.delete(got, 7, axis=1)).all()


def test_fold_or_not_is_the_same_network():
    net = NETWORKS["pads and stride"]
    x = ids(net, 20)
    direct = compile(net, device="cpu", batch_hint=PAYS, without=("fold",))
    assert "token_max" not in str(direct.plan)
    np.testing.assert_allclose(folded(net)(x), direct(x), rtol=1e-4, atol=1e-5)


def run_tokens(*layers):
    """Run a token convolution followed by layers and compare with the reference; returns the plan."""
    net = sequential(TensorType(("B", 9), "int32"), [("t", TokenConv()), *layers], {"t.weight": weight(30, 3, 21)})
    engine = compile(net, device="cpu")
    x = np.random.default_rng(0).integers(0, 30, (40, 9)).astype(np.int32)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    return engine.plan


@pytest.mark.parametrize("layer", [GELU(), GELU("tanh"), SiLU(), LeakyReLU(-0.5)], ids=str)
def test_non_monotonic_activations_before_the_maximum_are_refused(layer):
    """f(max x) differs from max f(x)."""
    plan = run_tokens(("f", layer), ("m", GlobalMax((-1,))))
    assert "refused: token_max at t: " in str(plan)


def test_an_activation_after_the_maximum_is_not_fused_if_one_precedes_it():
    plan = run_tokens(("f", ReLU()), ("m", GlobalMax((-1,))), ("g", Tanh()))
    assert [group.claim.nodes for group in plan.groups] == [("t", "f", "m"), ("g",)]


def test_an_intermediate_output_ends_the_claim():
    layers = [("t", TokenConv()), ("m", GlobalMax((-1,))), ("f", Tanh())]
    net = sequential(TensorType(("B", 4), "int64"), layers, {"t.weight": weight(5, 2, 20)})
    plan = compile(net.replace(outputs=("f", "m")), device="cpu").plan
    assert [group.claim.nodes for group in plan.groups] == [("t", "m"), ("f",)]


def test_branches_of_an_unsupported_concat_are_claimed_one_by_one():
    net = text_network(branches=((3, 20), (5, 12)), E=300)
    cat = Node("cat", Concat(1), ("GlobalMax0", "GlobalMax1", "GlobalMax0"))
    nodes = [cat if node.name == "cat" else node for node in net.nodes]
    net = net.replace(nodes=nodes, weights={**net.weights, "fc": weight(4, 52)})
    engine = compile(net, device="cpu", batch_hint=PAYS)
    assert [group.claim.kernel for group in engine.plan.groups] == ["token_max", "token_max", "move", "mlp_fused"]
    x = ids(net, 9)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


def test_a_token_convolution_without_a_maximum_is_refused_with_a_reason():
    nodes = (
        Node("t", TokenConv(), ("ids",), {"weight": "T"}), Node("m", GlobalMean((-1,)), ("t",)),
    )  # fmt: skip
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("m",), {"T": weight(9, 3, 5)})
    engine = compile(net, device="cpu")
    assert "refused: token_max at t" in str(engine.plan)
    x = np.random.default_rng(0).integers(0, 9, (7, 6)).astype(np.int32)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize(("bad", "message"), [(60, "row 2, position 5"), (-1, "id -1")])
def test_ids_out_of_range_are_rejected_before_any_launch(bad, message):
    net = NETWORKS["two branches"]
    x = ids(net, 4)
    x[2, 5] = bad
    for engine in (folded(net), compile(net, device="cpu", without=("fold",))):
        with pytest.raises(InputError, match=message):
            engine(x)
