"""The reference's weights: drawn once; of tables, only rows that ids look up."""

import numpy as np

from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Cast, Embedding
from onchip.network.types import TensorType
from onchip.workloads import sentiment


def test_random_weights_are_drawn_once():
    net = sentiment.network(vocabulary=9, embedding=4, channels=5, kernels=(2, 3), length=6, hidden=())
    drawn = reference.with_arrays(net)
    assert all(isinstance(weight, np.ndarray) for weight in drawn.weights.values())
    ids = np.zeros((3, 6), np.int32)
    assert np.array_equal(reference.forward(drawn, ids), reference.forward(net, ids))


def looked_up(*nodes, inputs=("a",), outputs=("y",)):
    weights = {name: np.arange(5.0, dtype=np.float32)[:, None] * scale for name, scale in (("w", 1), ("v", 10))}
    return Network({name: TensorType(("B", 3), "int64") for name in inputs}, nodes, outputs, weights)


def emb(name, ids, table="w"):
    return Node(name, Embedding(), (ids,), {"weight": table})


IDS = np.array([[4, 1, 4], [2, 2, 1]])


def test_tables_shrink_to_the_tokens_that_occur():
    net = looked_up(emb("e", "a"), emb("f", "a", "v"), Node("y", Add(), ("e", "f")))
    few, (ids,) = reference.with_used_tokens(net, (IDS,))
    assert ids.tolist() == [[2, 0, 2], [1, 1, 0]]
    assert few.weights["w"].ravel().tolist() == [1, 2, 4]
    assert np.array_equal(reference.forward(few, ids), reference.forward(net, IDS))


def test_ids_with_other_readers_stay():
    shared = looked_up(emb("e", "a"), emb("f", "b"), Node("y", Add(), ("e", "f")), inputs=("a", "b"))
    also = looked_up(emb("y", "a"), Node("c", Cast("float32"), ("a",)), outputs=("y", "c"))
    also_output = looked_up(emb("y", "a"), outputs=("y", "a"))
    for net in (shared, also, also_output):
        xs = (IDS,) * len(net.inputs)
        few, same = reference.with_used_tokens(net, xs)
        assert len(few.weights["w"]) == 5
        assert same == xs
    few, _ = reference.with_used_tokens(looked_up(emb("y", "a")), (IDS[:0],))
    assert len(few.weights["w"]) == 5
