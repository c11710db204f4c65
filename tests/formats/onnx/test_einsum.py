"""Einsum as sums, permutations and one gemm."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_models import check_meaning, model, numbers, op, refused

ONE = {
    "bij->bji": ["Permute"],
    "bij->bi": ["GlobalSum"],
    "bij->b": ["GlobalSum"],
    "bij": [],
    "b...j->bj...": ["Permute"],
    "bii->bi": ["Reshape", "Slice"],
}
TWO = {
    "bij,bkj->bik": ["Permute", "MatMul"],
    "bij,bij->b": ["Reshape", "Reshape", "MatMul", "Reshape"],
    "bij,bij->bij": ["Mul"],
    "bij,bkj->bikj": None,
    "bij,bkl->bikjl": None,
    "bij,bij->bj": None,
    "bij,bik->bjk": ["Permute", "MatMul"],
    "b...j,b...j->b...": None,
}
CONSTANT = {
    "bij,jk->bik": ["Linear"],
    "bij, ijk -> bk": ["Reshape", "Linear"],
    "bij,ik->bkj": ["Permute", "Linear", "Permute"],
    "jk,bij->bik": ["Linear"],
    "bij,ijo->bio": ["Reshape", "MatMul", "Reshape"],
    "bij,k->bijk": ["Reshape", "Mul"],
    "...j,jk->...k": ["Linear"],
    "bij,j->bi": ["Linear", "Reshape"],
    "bij,jj->bij": ["Mul"],
    "bij,jkl->bikl": None,
}
SIZES = {"i": 3, "j": 4, "k": 5, "l": 2, "o": 2}


def kinds_of(net):
    return [node.layer.kind for node in net.nodes if node.layer.kind != "Identity"]


@pytest.mark.parametrize("equation", ONE)
def test_of_one_value(tmp_path, equation):
    nodes = [op("Einsum", "x", "e", equation=equation), op("Identity", "e")]
    net = check_meaning(tmp_path, model(nodes, {}, ("N", 4 if "ii" in equation else 3, 4)))
    assert kinds_of(net) == ONE[equation]


@pytest.mark.parametrize("equation", TWO)
def test_of_two_values(tmp_path, equation):
    nodes = [op("Sin", "x", "s"), op("Einsum", "x s", equation=equation)]
    if "k" in equation and "bik" in equation.split("->")[0]:
        nodes = [op("MatMul", "x w", "s"), *nodes[1:]]
    net = check_meaning(tmp_path, model(nodes, {"w": numbers(4, 5)}, ("N", 3, 4)), tolerance=1e-5)
    if TWO[equation] is not None:
        assert kinds_of(net)[1:] == TWO[equation]


@pytest.mark.parametrize("equation", CONSTANT)
def test_of_a_value_and_a_constant(tmp_path, equation):
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    side = 0 if terms[0] == "jk" else 1
    constant = numbers(*(SIZES[letter] for letter in terms[side]))
    nodes = [op("Einsum", "w x" if side == 0 else "x w", equation=equation)]
    net = check_meaning(tmp_path, model(nodes, {"w": constant}, ("N", 3, 4)), tolerance=1e-5)
    if CONSTANT[equation] is not None:
        assert kinds_of(net) == CONSTANT[equation]


def test_of_constants(tmp_path):
    nodes = [op("Einsum", "a b", "w", equation="ij,kj->ik"), op("MatMul", "x w")]
    net = check_meaning(tmp_path, model(nodes, {"a": numbers(4, 3), "b": numbers(5, 3)}), tolerance=1e-5)
    assert kinds_of(net) == ["Linear"]


REFUSED = {
    "bij->ij": "would mix the rows of the batch",
    "bij->ibj": "would mix the rows of the batch",
    "bbi->bi": "would mix the rows of the batch",
    "bij->bik": "bad equation",
    "bi->b": "bad equation",
    "bij->bii": "bad equation",
    "b1j->bj": "bad equation",
    "bij,bij->b": "bad equation",
}


@pytest.mark.parametrize("equation", REFUSED)
def test_refused(tmp_path, equation):
    refused(tmp_path, model([op("Einsum", "x", equation=equation)], {}, ("N", 3, 4)), REFUSED[equation])


def test_sizes_that_differ(tmp_path):
    w = np.ones((5, 2), np.float32)
    refused(tmp_path, model([op("Einsum", "x w", equation="bij,jk->bik")], {"w": w}, ("N", 3, 4)), "sizes differ")
