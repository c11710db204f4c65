"""How a value lies in memory between groups: as its type says, or with its channels behind its pixels."""

from __future__ import annotations

from onchip.network.types import TensorType

ROWS = "rows"  # (B, C, H, W), row-major: every input and output of a network, and what every kernel takes
CHANNELS_LAST = "channels_last"  # (B, H, W, C)


def has_channels(given: TensorType) -> bool:
    """Whether its numbers lie elsewhere with channels last: there is more than one channel, and more than one pixel."""
    return len(given.shape) > 2 and 1 < given.row_shape[0] < given.row_size


def lying(given: TensorType, layout: str) -> TensorType:
    """The type of the array that a value is in memory."""
    if layout == ROWS:
        return given
    B, C, *pixels = given.shape
    return TensorType((B, *pixels, C), given.dtype)


def row_axis_lying(axis: int, rank: int, layout: str) -> int:
    """Where an axis of a value (0 is the batch) stands in the shape of a row as it lies."""
    if layout == ROWS:
        return axis - 1
    return rank - 2 if axis == 1 else axis - 2  # the channels are last, and all others one further ahead
