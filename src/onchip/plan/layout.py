"""The memory layout of a value between groups: NCHW as in its type, or NHWC."""

from __future__ import annotations

from onchip.network.types import TensorType

ROWS = "rows"  # (B, C, H, W), row-major: every network input and output, and what every kernel accepts
CHANNELS_LAST = "channels_last"  # (B, H, W, C)


def has_channels(t: TensorType) -> bool:
    """Whether NHWC differs from NCHW in memory: more than one channel and more than one pixel."""
    return len(t.shape) > 2 and 1 < t.row_shape[0] < t.row_size


def stored_type(t: TensorType, layout: str) -> TensorType:
    """The type of the array that holds a value in memory."""
    if layout == ROWS:
        return t
    B, C, *pixels = t.shape
    return TensorType((B, *pixels, C), t.dtype)


def stored_row_axis(axis: int, rank: int, layout: str) -> int:
    """The index of a value's axis (0 is the batch) in the shape of a stored row."""
    if layout == ROWS:
        return axis - 1
    return rank - 2 if axis == 1 else axis - 2  # the channels are last; all other axes move one forward
