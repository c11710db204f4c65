"""A CUDA kernel as the runtime sees it: source, resources, launch configuration, arguments. Plain data, no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device

# All target architectures. ARCHITECTURES in a kernel's module lists the ones it supports.
EVERY_CHIP = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
OVERLAPPING = ("sm_90a", "sm_100", "sm_120")  # with programmatic dependent launch
ELEMENT_TYPES = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}  # as common/dtype.cuh names them
IDS = {"int32": "int", "int64": "long long"}
FLOATS = ELEMENT_TYPES | {"float64": "double"}  # plus float64, for general kernels (common/accumulator.cuh)


@dataclass(frozen=True)
class Program:
    """One kernel of one .cu file, with its template arguments filled in."""

    source: Path
    name_expression: str  # "mlp_fused<32, 12, ...>", as passed to NVRTC
    options: tuple[str, ...] = ()  # NVRTC options besides the architecture and the language standard


@dataclass(frozen=True)
class Budget:
    """Per-thread limits of the compiled kernel; a test compares them with what the compiler reports."""

    registers: int
    spill_bytes: int = 0


@dataclass(frozen=True)
class LaunchConfig:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int  # dynamic, per block
    # Programmatic dependent launch: the kernel may begin before the previous one ends. It executes griddepcontrol.wait
    # before it touches memory that the previous one reads or writes.
    overlaps: bool = False
    cluster: int = 1  # blocks per cluster, along x; the grid still counts blocks
    cooperative: bool = False  # cooperative launch: all blocks are co-resident, so grid barriers work


def grid_1d(blocks: int, threads: int = 256) -> LaunchConfig:
    """A 1-D grid of at least one block, without dynamic shared memory."""
    return LaunchConfig((max(1, blocks), 1, 1), (threads, 1, 1), 0)


# Kernel arguments, in parameter order. The first six kinds are pointers.


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


def pointers_first(pointers: tuple[Memory | Int64, ...], data: bytes) -> Struct:
    whole = bytearray(8 * len(pointers)) + data
    found = []
    for i, memory in enumerate(pointers):
        if isinstance(memory, Int64):
            whole[8 * i : 8 * i + 8] = memory.value.to_bytes(8, "little", signed=memory.value < 0)
        else:
            found.append((8 * i, memory))
    return Struct(bytes(whole), tuple(found))


Argument = Memory | StatusWord | Int64 | UInt32 | TensorMap | WindowMap | Struct


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch, as data."""

    program: Program
    config: LaunchConfig
    arguments: tuple[Argument, ...]
    budget: Budget
    # Indices of the earlier launches in Steps that it waits for. None: the previous one; (): none.
    after: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Steps:
    """The launches of a claim, sequential unless `after` says otherwise, and their shared scratch memory."""

    launches: tuple[KernelLaunch, ...]
    scratch_bytes: int = 0
    cleared_bytes: int = 0  # leading scratch bytes that are zero when the first launch begins


def status_words(steps: Steps) -> list[StatusWord]:
    """All StatusWord arguments, in launch order."""
    return [a for launch in steps.launches for a in launch.arguments if isinstance(a, StatusWord)]


class Lowering(Protocol):
    """`Claim.facts` of every CUDA kernel: the launches for any batch size. Plain data."""

    def at(self, B: int) -> Steps: ...


@dataclass(frozen=True)
class Instance:
    """One compilable case of a kernel, for `make check-kernels`; INSTANCES of a kernel's module lists its cases.

    `make test` compiles the first of the list.
    """

    name: str  # "decode fp16": the network and the precision
    launch: Callable[[Device], KernelLaunch]  # for any device whose architecture is in ARCHITECTURES
