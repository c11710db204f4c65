"""What a launch passes to a kernel, in parameter order: memory by name, integers, TMA descriptors, structs."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.types import DTYPE_BYTES


@dataclass(frozen=True)
class Input:
    """The group's input of this index."""

    index: int


@dataclass(frozen=True)
class Output:
    """The group's output of this index."""

    index: int


@dataclass(frozen=True)
class Weight:
    """The output of the claim's recipe of this name."""

    name: str


@dataclass(frozen=True)
class State:
    """Named memory that persists across calls and that launches modify: weights in training, optimiser moments."""

    name: str


@dataclass(frozen=True)
class StatusWord:
    """Where a kernel records the first out-of-range id (common/status.cuh), and what the host reports about it.

    The ids are (B, *row_shape), each below `limit`. For integer division, `ids` holds the layers' names, and a limit
    of 0 marks divisors of 0.
    """

    ids: str
    row_shape: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Scratch:
    """A byte offset in the scratch memory that the launches of one Steps share."""

    offset: int


@dataclass(frozen=True)
class Int64:
    value: int


NOTHING = Int64(0)  # a null pointer


@dataclass(frozen=True)
class UInt32:
    value: int


Memory = Input | Output | Weight | State | Scratch


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor (CUtensorMap, tiled mode) of 128 bytes, passed as a `const __grid_constant__` parameter.

    Sizes are in elements, the fastest axis first.
    """

    of: Memory
    dtype: str  # a key of TENSOR_MAP_DTYPES
    shape: tuple[int, ...]
    box: tuple[int, ...]  # the tile that one TMA instruction moves
    swizzle_bytes: int = 0  # 32, 64 or 128: TMA swizzle mode in shared memory; 0: none


@dataclass(frozen=True)
class WindowMap:
    """A TMA descriptor in im2col mode, of an NHWC image, for implicit GEMM. Pairs are (W, H).

    A tile holds `channels` channels of `pixels` consecutive positions of the window's first tap, over rows and images.
    Positions start `before` pixels before the image, advance by `stride` and end `after` pixels past its end.
    """

    of: Memory
    dtype: str
    shape: tuple[int, int, int, int]  # C, W, H, B
    channels: int
    pixels: int
    before: tuple[int, int]
    after: tuple[int, int]  # negative: the first tap stays inside the image
    stride: tuple[int, int]
    swizzle_bytes: int = 0


@dataclass(frozen=True)
class Texture:
    """A texture object over float32 elements, as tex1Dfetch<float> reads them; passed by its 64-bit handle."""

    of: Weight | State
    elements: int


TENSOR_MAP_DTYPES = {
    "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16",
    "float32": "FLOAT32", "float64": "FLOAT64", "tfloat32": "TFLOAT32",
}  # fmt: skip
TENSOR_MAP_BYTES = {**DTYPE_BYTES, "tfloat32": 4}  # tfloat32: float32 that TMA rounds to tf32 on load


@dataclass(frozen=True)
class Struct:
    """A struct passed by value, as CStruct.of packs it. A launch takes at most 4 KB of parameters."""

    data: bytes
    pointers: tuple[tuple[int, Memory], ...] = ()  # with the byte offset of each


Argument = Memory | StatusWord | Int64 | UInt32 | TensorMap | WindowMap | Struct | Texture
