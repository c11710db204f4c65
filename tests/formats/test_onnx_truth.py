"""Comparisons of ids: masks, exactly as ONNX Runtime has them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnx_models import check_meaning, model, op, refused

KINDS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
CAST = op("Cast", "m", to=TensorProto.FLOAT)


def masks(nodes, weights, element=TensorProto.INT64):
    proto = model(nodes, weights, ("N", 7), element=element)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


@pytest.mark.parametrize("operands", ["x k", "k x"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", [TensorProto.INT64, TensorProto.INT32])
def test_comparisons(tmp_path, kind, operands, element):
    for number in (0, 2, -1):  # ids are 0 to 4
        k = np.array(number, "i8" if element == TensorProto.INT64 else "i4")
        check_meaning(tmp_path, masks([op(kind, operands, "m"), CAST], {"k": k}, element), rows=40)


def test_a_mask_of_ids_that_are_no_padding(tmp_path):
    nodes = [
        op("Equal", "x k", "same"), op("Not", "same", "other"), op("Unsqueeze", "other last", "m"),
        op("Cast", "m", "mask", to=TensorProto.FLOAT), op("Gather", "table x", "rows"), op("Mul", "rows mask"),
    ]  # fmt: skip
    weights = {"k": np.array(0), "last": np.array([-1]), "table": np.ones((5, 3), "f4")}
    check_meaning(tmp_path, masks(nodes, weights))


REFUSED = {
    "floats": ([op("Greater", "y0 f", "m"), CAST], "only ints can be compared"),
    "several numbers": ([op("Equal", "x many", "m"), CAST], "only with one number"),
    "an output": ([op("Equal", "x k")], "a Cast to a float"),
    "a sum": ([op("Equal", "x k", "m"), op("Add", "m m")], "a Cast to a float"),
    "not of numbers": ([op("Not", "x")], "needs a comparison before it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    nodes, word = REFUSED[case]
    weights = {"k": np.array(0), "many": np.arange(7), "f": np.array(0.5, "f4")}
    first = [op("Cast", "x", "y0", to=TensorProto.FLOAT)] if case == "floats" else []
    refused(tmp_path, masks([*first, *nodes], weights), word)
