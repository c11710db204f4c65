"""fold_embeddings: an embedding and the gemm after it become tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import YES_NO, Grow, assert_rewrites, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.network.layers import Conv1d, Embedding, Linear, Permute, ReLU, Reshape, TokenConv
from onchip.network.recipe import Recipe, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.rewrites import embedding as module
from onchip.plan.rewrites import fold_embeddings, rewrite

FOLD = ("conv", "conv", "linear", "flat linear")
STAY = ("dilated", "grouped", "turned", "relu", "linear over half", "output")


def tokens(pick):
    """An embedding with several readers, some of which can be folded."""
    S, V, E = pick(range(2, 7)), pick(range(1, 6)), pick((2, 4))
    grow = Grow(pick, S, dtype=pick(("int32", "int64")))
    emb = grow.embedding("x", V, E)
    turned = grow.add(Permute((0, 2, 1)), emb)
    outputs, kinds = [], []
    for _ in range(pick((1, 1, 2, 3))):
        kind = pick((*FOLD, *FOLD, *STAY))
        kinds.append(kind)
        C = pick(range(1, 4))
        if kind == "conv":
            layer = Conv1d((pick((1, 1, 2)),), (pick((0, 0, 2)), pick((0, 1))))
            value = grow.conv(turned, layer, C, pick(range(1, S + 1)))
        elif kind == "linear":
            value = grow.linear(emb)
        elif kind == "flat linear":
            value = grow.linear(grow.add(Reshape((-1,)), emb))
        elif kind == "dilated":
            value = grow.conv(turned, Conv1d((1,), (1, 1), (2,)), C, 2)
        elif kind == "grouped":
            value = grow.conv(turned, Conv1d(groups=2), C, 1)
        elif kind == "turned":  # channels are positions here
            value = grow.conv(grow.add(Permute((0, 1, 2)), emb), Conv1d(), C, 1)
        elif kind == "linear over half":
            value = grow.linear(grow.add(Reshape((S * 2, E // 2)), emb))
        else:
            value = emb if kind == "output" else grow.add(ReLU(), emb)
        outputs.append(grow.add(ReLU(), value) if pick(YES_NO) else value)
    return grow.network(*outputs), bool({*kinds} & {*FOLD})


@settings(max_examples=150)
@given(data=st.data())
def test_what_reads_an_embedding_becomes_look_ups(data):
    before, after = assert_rewrites(fold_embeddings, tokens, drawn(data))
    if after is before:
        return
    folded = [node for node in after.nodes if isinstance(node.layer, TokenConv)]
    assert all(after.weights[node.weights["weight"]].op.endswith(":token_tables") for node in folded)
    assert all(node.inputs == ("x",) for node in folded)
    if sum(map(bool, (node.weights for node in after.nodes))) == len(folded):  # nothing else is left to read it
        reads = {value for node in after.nodes for value in node.inputs} | set(after.outputs)
        assert {node.name for node in after.nodes if isinstance(node.layer, Embedding)} <= reads


def test_the_property_is_not_an_empty_one():
    assert 0.5 < share_that_fires(tokens) < 0.9


def sentence(V=7, E=3, S=6, kernels=(2, 3), dtype="float64"):
    grow = Grow(seeded(0), S, dtype="int32")
    turned = grow.add(Permute((0, 2, 1)), grow.embedding("x", V, E))
    net = grow.network(*(grow.add(ReLU(), grow.conv(turned, Conv1d(), 4, K)) for K in kernels))
    return net.replace(weights={name: np.asarray(w).astype(numpy_dtype(dtype)) for name, w in net.weights.items()})


def test_what_it_says_and_what_the_tables_are():
    net = sentence()
    after, told = fold_embeddings(net)
    assert told == [
        "folded embedding0 into conv1d2: 2 tables of 7 x 4 instead of a gemm",
        "folded embedding0 into conv1d4: 3 tables of 7 x 4 instead of a gemm",
    ]
    assert [node.layer.kind for node in after.nodes] == ["TokenConv", "ReLU"] * 2
    tables = after.weights["conv1d4.tables"]
    assert isinstance(tables, Recipe)
    assert tables.shape == (7, 3, 4)
    assert tables.flop == 2 * 7 * 3 * 3 * 4
    emb, W = net.weights["embedding0.weight"], net.weights["conv1d4.weight"]
    np.testing.assert_allclose(materialise(tables, net.weights), np.einsum("ve,oek->vko", emb, W), rtol=1e-13)


@pytest.mark.parametrize("V", [1, 4, 9, 13])
def test_tables_are_built_in_blocks_of_tokens(V, monkeypatch):
    monkeypatch.setattr(module, "SLICE_ROWS", 4)
    net = sentence(V=V)
    assert_same_meaning(net, fold_embeddings(net)[0])


def test_tables_have_the_dtype_of_their_weights():
    net = sentence(dtype="float32")
    after, _ = fold_embeddings(net)
    assert after.weights["conv1d2.tables"].dtype == "float32"
    assert_same_meaning(net, after, tolerance=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_not_stored_in_less_than_float32(dtype):
    net = sentence(dtype=dtype)
    assert fold_embeddings(net)[0] is net


def test_weights_of_two_dtypes_stay():
    net = sentence()
    mixed = {name: w.astype(np.float32) if name.startswith("emb") else w for name, w in net.weights.items()}
    assert fold_embeddings(net.replace(weights=mixed))[1] == []


@pytest.mark.parametrize("row_shape", [(), (2, 3)])
def test_ids_of_another_rank_stay(row_shape):
    grow = Grow(seeded(0), *row_shape, dtype="int64")
    net = grow.network(grow.linear(grow.embedding("x", 5, 3)))
    assert fold_embeddings(net)[0] is net


def test_the_flat_case_behind_a_permute_that_is_absorbed_first():
    grow = Grow(seeded(1), 4, dtype="int64")
    turned = grow.add(Permute((0, 2, 1)), grow.embedding("x", 5, 3))
    net = grow.network(grow.linear(grow.add(Reshape((-1,)), turned), 2))
    plain, _ = rewrite(net, ("tables",))
    after, told = fold_embeddings(plain)
    assert told == ["folded embedding0 into linear3: 4 tables of 5 x 2 instead of a gemm"]
    assert [node.layer.kind for node in after.nodes] == ["TokenConv", "Reshape"]
    assert_same_meaning(net, after)


def test_a_norm_and_a_second_linear_are_folded_before_the_embedding():
    grow = Grow(seeded(2), 4, dtype="int32")
    emb = grow.embedding("x", 5, 3)
    conv = grow.norm(grow.conv(grow.add(Permute((0, 2, 1)), emb), Conv1d(), 2, 3))
    net = grow.network(conv, grow.linear(grow.linear(emb, 8), 2))
    plain, _ = rewrite(net, ("tables",))
    after, told = fold_embeddings(plain)
    assert len(told) == 2
    assert not [node for node in after.nodes if isinstance(node.layer, Embedding | Linear)]
    assert_same_meaning(net, after)
