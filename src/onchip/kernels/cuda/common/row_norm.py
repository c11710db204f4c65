"""The segments and weights of a row norm: host side of common/row_norm.cuh."""

from __future__ import annotations

from ctypes import c_double, c_uint32
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.network.layers.norm import NormSegments

MAX_ELEMENTS = 1 << 30  # per segment


class NormStruct(CStruct):
    source, c_name = Path(__file__).with_suffix(".cuh"), "Norm"
    _fields_ = (("run", Divider), ("groups", c_uint32), ("each", c_uint32), ("is_centred", c_uint32), ("eps", c_double))


def norm_struct(segments: NormSegments, weights: int, is_centred: bool, eps: float) -> Struct:
    """weights: elements of the weight and of the bias."""
    channels = segments.size // segments.run
    return NormStruct.of(
        run=divider(segments.run), groups=weights // channels or 1, each=channels, is_centred=is_centred, eps=eps
    )
