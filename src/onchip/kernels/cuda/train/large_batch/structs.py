"""Structs that the training kernels take by value."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Int64, State
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.train.large_batch.rows import MAX_WIDTHS

FOLDER = Path(__file__).parent
MAX_LAYERS = 16  # per launch that updates weights


class Networks(CStruct):
    source, c_name = FOLDER / "launches.cuh", "Networks"
    _fields_ = (("stride_bytes", c_int64),)


class Warps(CStruct):
    source, c_name = FOLDER / "launches.cuh", "Warps"
    _fields_ = (("m", c_int32), ("n", c_int32), ("k", c_int32))


class Step(CStruct):
    source, c_name = FOLDER / "launches.cuh", "Step"
    _fields_ = (
        ("progress", c_void_p), ("order", c_void_p), ("per_step_values", c_void_p), ("offset", c_int64),
        ("batch", c_int64), ("networks", Networks),
    )  # fmt: skip


class Shape(CStruct):
    source, c_name = FOLDER / "epilogue.cuh", "Shape"
    _fields_ = (
        ("x_stride", c_int32), ("w_stride", c_int32), ("y_stride", c_int32), ("K", c_int32), ("N", c_int32),
        ("is_gathered", c_uint32), ("code", c_uint32), ("a", c_uint32), ("warps", Warps),
    )  # fmt: skip


class Tally(CStruct):
    source, c_name = FOLDER / "epilogue.cuh", "Tally"
    _fields_ = (
        ("losses", c_void_p), ("correct", c_void_p), ("step_losses", c_void_p), ("step_correct", c_void_p),
    )  # fmt: skip


TALLY = Tally.of(
    losses=State("losses"), correct=State("correct"), step_losses=State("step_losses"),
    step_correct=State("step_correct"),
)  # fmt: skip
NO_TALLY = Tally.of(losses=NOTHING, correct=NOTHING, step_losses=NOTHING, step_correct=NOTHING)


class LayerMemory(CStruct):
    source, c_name = FOLDER / "epilogue.cuh", "LayerMemory"
    _fields_ = (
        ("w", c_void_p), ("mean", c_void_p), ("square", c_void_p), ("a", c_void_p), ("dz", c_void_p),
        ("partials", c_void_p),
    )  # fmt: skip


class LayerSizes(CStruct):
    source, c_name = FOLDER / "epilogue.cuh", "LayerSizes"
    _fields_ = (
        ("K", c_int32), ("N", c_int32), ("w_stride", c_int32), ("a_stride", c_int32), ("dz_stride", c_int32),
        ("is_gathered", c_uint32), ("blocks_n", c_int32), ("slices", c_int32),
    )  # fmt: skip


class Layers(CStruct):
    source, c_name = FOLDER / "epilogue.cuh", "Layers"
    _fields_ = (
        ("memory", LayerMemory * MAX_LAYERS), ("blocks", c_int32), ("chunks", c_int32), ("optimiser", c_uint32),
        ("warps", Warps), ("first_block", c_int32 * MAX_LAYERS), ("sizes", LayerSizes * MAX_LAYERS),
    )  # fmt: skip


class Squares(CStruct):
    source, c_name = FOLDER / "launches.cu", "Squares"
    _fields_ = (("block_sums", c_void_p), ("first", c_int32), ("count", c_int32))


class Head(CStruct):
    source, c_name = FOLDER / "launches.cu", "Head"
    _fields_ = (
        ("a", c_void_p), ("w", c_void_p), ("z", c_void_p), ("targets", c_void_p), ("weights", c_void_p),
        ("dz", c_void_p), ("prev_dz", c_void_p), ("losses", c_void_p), ("correct", c_void_p),
        ("a_stride", c_int32), ("w_stride", c_int32), ("z_stride", c_int32), ("K", c_int32), ("N", c_int32),
        ("D", c_int32), ("is_gathered", c_uint32), ("loss", c_uint32), ("code", c_uint32), ("slope", c_uint32),
        ("prev_code", c_uint32), ("prev_slope", c_uint32), ("smoothing", c_float),
    )  # fmt: skip


class ByteGradient(CStruct):
    source, c_name = FOLDER / "bytes.cu", "ByteGradient"
    _fields_ = (
        ("x", c_void_p), ("dz", c_void_p), ("partials", c_void_p), ("x_stride", c_int32), ("w_stride", c_int32),
        ("K", c_int32), ("N", c_int32), ("all_stages", c_int32), ("slice_stages", c_int32), ("scale", c_float),
    )  # fmt: skip


class SplitWeights(CStruct):
    source, c_name = FOLDER / "pixels.cu", "SplitWeights"
    _fields_ = (
        ("x", c_void_p), ("splits", c_void_p), ("x_stride", c_int32), ("stride", c_int32), ("N", c_int32),
        ("K", c_int32), ("scale", c_float),
    )  # fmt: skip


class RowMemory(CStruct):
    source, c_name = FOLDER / "layers.cuh", "RowMemory"
    _fields_ = (("w", c_void_p), ("a", c_void_p), ("dz", c_void_p), ("partials", c_void_p))


class RowLayer(CStruct):
    source, c_name = FOLDER / "layers.cuh", "RowLayer"
    _fields_ = (
        ("w_stride", c_int32), ("stride", c_int32), ("code", c_uint32), ("slope", c_uint32), ("has_bias", c_uint32),
        ("unused", c_uint32),
    )  # fmt: skip


class RowLayers(CStruct):
    source, c_name = FOLDER / "layers.cuh", "RowLayers"
    _fields_ = (
        ("memory", RowMemory * MAX_WIDTHS), ("targets", c_void_p), ("losses", c_void_p), ("correct", c_void_p),
        ("weights", c_void_p), ("layer", RowLayer * MAX_WIDTHS), ("loss", c_uint32), ("smoothing", c_float),
    )  # fmt: skip


def state_if(exists: bool, name: str) -> State | Int64:
    """The memory of this name, or a null pointer."""
    return State(name) if exists else NOTHING
