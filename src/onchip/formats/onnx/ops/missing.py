"""The error for unsupported operators: lists all of them, with alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import FOLDS, READERS, Op
from onchip.network.reading import show

FLOAT_MODEL = (
    "the float model that it was quantized from, often model.onnx next to model_quantized.onnx; "
    "precision='fp16' or 'bf16' makes it smaller",
    "or quantize that with onnxruntime.quantization.quantize_static(..., quant_format=QuantFormat.QDQ), whose "
    "QuantizeLinear and DequantizeLinear onchip reads",
)
_QUANTIZED = re.compile(r"(com\.microsoft\.)?Q[A-Z]|.*(Quantize|Integer|NBits)")
# Advice beyond "remove it", by operator family.
_INSTEAD = {
    ("NonMaxSuppression", "NonZero", "Unique", "Compress"): "end the network before it: "
    "its output size depends on the values",
    ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"): "compute the ints in NumPy before the network",
    ("ScatterND",): "a sum with one-hot rows, F.one_hot(ids, n) * x, or torch.cat of slices",
    ("If", "Loop", "Scan"): "a forward without branches and loops over values, "
    "sequences of one length, an EmbeddingBag as an Embedding and a mean",
    ("GridSample", "AffineGrid", "RoiAlign"): "end the network before it: its indices depend on the values",
    ("MelWeightMatrix",): "a constant, or a Linear with the matrix as its weight",
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"):
    "random numbers as an input of the network",
    ("ai.onnx.ml.TreeEnsembleClassifier", "ai.onnx.ml.TreeEnsembleRegressor", "ai.onnx.ml.TreeEnsemble",
     "ai.onnx.ml.SVMClassifier", "ai.onnx.ml.SVMRegressor"): "ONNX Runtime: trees and SVMs are not networks",
    ("ai.onnx.ml.LabelEncoder", "ai.onnx.ml.OneHotEncoder", "ai.onnx.ml.CategoryMapper", "StringNormalizer"):
    "encode the columns as numbers before the network",
}  # fmt: skip
_BY_DOMAIN = {"com.microsoft": "the file from before ONNX Runtime optimised it"}
INSTEAD = (
    "another layer instead, or split the network (an ONNX file: onnx.utils.extract_model) "
    "and compute this step in NumPy"
)
INFERENCE = "eval mode: a dropout that depends on module.training, a norm with running statistics"


def check_operators(ops: Sequence[Op], inputs: Iterable[str]) -> None:
    """Raise FormatError for operators that are unsupported, or supported only on constants but used on values."""
    varying = set(inputs)  # values that depend on the inputs; a shape does not
    missing: dict[str, list[Op]] = {}
    folded: set[str] = set()
    for op in ops:
        is_varying = any(name in varying for name in op.inputs)
        if op.kind == "If" and not is_varying:  # replaced by one branch, which precedes it
            varying.update(op.outputs)
            continue
        if op.kind != "Shape" and is_varying:
            varying.update(op.outputs)
        if op.kind not in READERS and (is_varying or op.kind not in FOLDS):
            missing.setdefault(op.kind, []).append(op)
            if op.kind in FOLDS:
                folded.add(op.kind)
    if not missing:
        return
    kinds = [f"{kind}{' of values' if kind in folded else ''} ({_nodes(of)})" for kind, of in missing.items()]
    known = ", ".join(sorted(kind for kind in READERS if kind[0].isalpha()))
    raise FormatError(
        f"{'unsupported operators' if len(missing) > 1 else 'unsupported operator'}",
        got=f"{', '.join(kinds)}; {sum(map(len, missing.values()))} of {len(ops)} nodes",
        expected=f"one of {known}", hint=tuple(dict.fromkeys(chain.from_iterable(map(_instead, missing)))),
    )  # fmt: skip


def _nodes(of: list[Op]) -> str:
    count = "1 node" if len(of) == 1 else f"{len(of)} nodes"
    return f"{count}, {'' if len(of) == 1 else 'first '}{show(of[0].name)}" if of[0].name else count


def _instead(kind: str) -> tuple[str, ...]:
    if _QUANTIZED.match(kind):
        return FLOAT_MODEL
    for family, advice in _INSTEAD.items():
        if kind in family:
            return (advice,)
    return (_BY_DOMAIN.get(kind.rpartition(".")[0], INSTEAD),)
