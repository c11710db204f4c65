"""Weights that are rearrangements of others, possibly rounded: host side of recipes/derived.cu."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.weights import UNBIASED, narrow_weight, split_weight, tf32_weight
from onchip.network.recipe import Array, Recipe, Weight, as_is, op_name, rearranged
from onchip.network.types import DTYPE_BYTES

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK_ELEMENTS, MAX_WEIGHTS = 1024, 96
FLOAT32, FLOAT16, BFLOAT16, TF32, SPLIT, FLOAT64, COPY16, COPY64 = range(8)
COPIES = {2: COPY16, 4: FLOAT32, 8: COPY64}  # by the bytes of an element
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "float64": FLOAT64}
ROUNDING = {op_name(tf32_weight): TF32, op_name(split_weight): SPLIT}
CASTS = {op_name(as_is), op_name(narrow_weight)}


class DerivedWeightStruct(CStruct):
    source, c_name = SOURCE, "DerivedWeight"
    _fields_ = (
        ("x", c_void_p), ("index", c_void_p), ("result", c_void_p), ("count", c_int64), ("first_block", c_uint32),
        ("kind", c_uint32),
    )  # fmt: skip


class DerivedWeightsStruct(CStruct):
    source, c_name = SOURCE, "DerivedWeights"
    _fields_ = (("weight", DerivedWeightStruct * MAX_WEIGHTS),)


@dataclass(frozen=True)
class Derivation:
    """A weight as a rearrangement of a source: an array's name, or a recipe that is none."""

    source: str | Recipe
    rearrangements: tuple[Recipe, ...]  # the innermost first
    kind: int
    count: int  # elements; of a split, of each part

    def indices(self, shape: tuple[int, ...]) -> Array:
        """Per element the index in the source, of this shape, plus 1; 0: the element is 0."""
        found = np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape)
        for recipe in self.rearrangements:
            found = rearranged(recipe, found)
        return np.ascontiguousarray(found, np.uint32)


def derivation_of(recipe: Recipe, weights: Mapping[str, Weight]) -> Derivation | None:
    """How a recipe rearranges a weight, and rounds one of float32, once; None for any other recipe."""
    kind, rearrangements = -1, list[Recipe]()
    source: str | Recipe = recipe
    while True:
        weight = source if isinstance(source, Recipe) else weights[source]
        if not isinstance(weight, Recipe):
            break
        is_rounded = weight.op in ROUNDING or (weight.op in CASTS and weight.dtype != "float32")
        if is_rounded and (kind >= 0 or (weight.op == op_name(split_weight) and rearrangements)):
            return None
        if is_rounded:
            kind = ROUNDING.get(weight.op, KINDS.get(weight.dtype, -1))
            if kind < 0:
                return None
        elif weight.op not in CASTS and not weight.is_rearrangement:
            break
        elif weight.op not in CASTS:
            rearrangements.insert(0, weight)
        source = weight.sources[0]
    dtype = weight.dtype if isinstance(weight, Recipe) else weight.dtype.name
    if kind < 0 and dtype == recipe.dtype:
        kind = COPIES.get(DTYPE_BYTES[dtype], -1)
    elif dtype != "float32":
        return None
    elif kind < 0:
        kind = KINDS.get(recipe.dtype, -1)
    if source is recipe or kind < 0 or math.prod(recipe.shape) >= 1 << 31:
        return None
    return Derivation(source, tuple(rearrangements), kind, math.prod(recipe.shape) // (2 if kind == SPLIT else 1))


@dataclass(frozen=True)
class DerivedLowering:
    """Several weights in one launch. Inputs: the sources, then the index arrays; outputs: the weights."""

    weights: tuple[tuple[int, int, int, int], ...]  # per weight: kind, elements, source, index array or -1

    def at(self, B: int) -> Steps:
        launches = []
        for first in range(0, len(self.weights), MAX_WEIGHTS):
            part = self.weights[first : first + MAX_WEIGHTS]
            blocks = [0, *itertools.accumulate(-(-count // BLOCK_ELEMENTS) for _, count, _, _ in part)]
            structs = [
                DerivedWeightStruct.of(
                    x=Input(source), index=Input(index) if index >= 0 else NOTHING, result=Output(first + i),
                    count=count, first_block=blocks[i], kind=kind,
                )
                for i, (kind, count, source, index) in enumerate(part)
            ]  # fmt: skip
            scale = int(np.float32(UNBIASED).view(np.uint32))
            arguments = DerivedWeightsStruct.of(weight=structs), UInt32(len(part)), UInt32(scale)
            program = Program(SOURCE, "derived_weights")
            launches.append(KernelLaunch(program, grid_1d(blocks[-1]), arguments, Budget(48)))
        return Steps(tuple(launches))


INSTANCES = (instance("split", DerivedLowering(((SPLIT, 1 << 20, 0, 1),))),)
