"""What a CUDA kernel hands to the runtime: its source, its resources, how to launch it. Plain data, no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device

# The chips that we compile for. A kernel says which of them it is for: ARCHITECTURES in its module.
EVERY_CHIP = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
NUMBERS = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}  # in memory, as common/dtype.cuh names them
FLOATS = NUMBERS | {"float64": "double"}  # and those that general kernels compute with (common/accumulator.cuh)


@dataclass(frozen=True)
class Program:
    """One kernel of one .cu file, with its template arguments filled in."""

    source: Path
    name_expression: str  # "mlp_fused<32, 12, ...>", as NVRTC is asked for it
    options: tuple[str, ...] = ()  # for NVRTC, besides the architecture and the language


@dataclass(frozen=True)
class Budget:
    """What the compiled kernel may use a thread; a test holds it against what the compiler reports."""

    registers: int
    spill_bytes: int = 0


@dataclass(frozen=True)
class LaunchConfig:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int  # dynamic shared memory a block
    # Programmatic stream serialisation: the kernel may begin before the one before it ends, and itself waits
    # (griddepcontrol.wait) before it touches what that one writes or reads.
    overlaps: bool = False
    cluster: int = 1  # blocks of a cluster, along x; the grid counts blocks all the same
    cooperative: bool = False  # all blocks are on the GPU at a time, so they may wait for each other


def in_line(blocks: int, threads: int = 256) -> LaunchConfig:
    """Blocks along x, one at least, without dynamic shared memory."""
    return LaunchConfig((max(1, blocks), 1, 1), (threads, 1, 1), 0)


# What a kernel is told, in the order of its parameters. The first six are pointers.


@dataclass(frozen=True)
class Input:
    """The group's input with this number."""

    index: int


@dataclass(frozen=True)
class Output:
    """The group's output with this number."""

    index: int


@dataclass(frozen=True)
class Weight:
    """What the claim's recipe of this name makes."""

    name: str


@dataclass(frozen=True)
class State:
    """Memory of this name that launches change and the next call finds as it was left: weights in training, moments."""

    name: str


@dataclass(frozen=True)
class StatusWord:
    """Where a kernel that looks up ids writes the first bad one (common/status.cuh), and what the host then says.

    The ids are (B, *row_shape), each should be below `limit`. Of a kernel that divides ints, `ids` is the layers'
    names and the limit 0: what is bad is a divisor of 0.
    """

    ids: str
    row_shape: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Scratch:
    """A place in the memory that the launches of these steps have for themselves, in bytes from its beginning."""

    offset: int


@dataclass(frozen=True)
class Int64:
    value: int


NOTHING = Int64(0)  # a pointer to nothing


@dataclass(frozen=True)
class UInt32:
    value: int


Memory = Input | Output | Weight | State | Scratch


@dataclass(frozen=True)
class TensorMap:
    """A descriptor by which the tensor memory accelerator moves boxes of an array, 128 bytes: a kernel takes it as a
    `const __grid_constant__` parameter. Sizes are in numbers, the fastest axis first.
    """

    of: Memory
    dtype: str  # of TENSOR_MAP_DTYPES
    shape: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0  # 32, 64 or 128: how a box's rows of that size are mixed in shared memory


@dataclass(frozen=True)
class WindowMap:
    """A TensorMap of an image (B, H, W, C) whose pixels are moved as windows go over them. Pairs are (W, H).

    A box is `channels` of `pixels`: those where a window's first tap is, one after the other, from line to line and
    from image to image: `before` pixels outside of the image at first, in steps of `stride`, `behind` its end at last.
    """

    of: Memory
    dtype: str
    shape: tuple[int, int, int, int]  # C, W, H, B
    channels: int
    pixels: int
    before: tuple[int, int]
    behind: tuple[int, int]  # below 0: the first tap stays inside
    stride: tuple[int, int]
    swizzle_bytes: int = 0


TENSOR_MAP_DTYPES = {
    "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16",
    "float32": "FLOAT32", "float64": "FLOAT64", "tfloat32": "TFLOAT32",
}  # fmt: skip
TENSOR_MAP_BYTES = {**DTYPE_BYTES, "tfloat32": 4}  # of a float32 that is rounded to tf32 when it is read


@dataclass(frozen=True)
class Struct:
    """A parameter that is passed by value: its pointers, then its other bytes. A launch has room for 4 KB."""

    pointers: tuple[Memory | Int64, ...]  # Int64(0): none there
    data: bytes


Argument = Memory | StatusWord | Int64 | UInt32 | TensorMap | WindowMap | Struct


@dataclass(frozen=True)
class KernelLaunch:
    """One launch, as data."""

    program: Program
    config: LaunchConfig
    arguments: tuple[Argument, ...]
    budget: Budget
    # Which earlier launches of these steps it waits for; None: the one before, (): none, so it begins at once.
    after: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Steps:
    """The launches of a claim, one after the other where they do not say otherwise, and the memory that they share."""

    launches: tuple[KernelLaunch, ...]
    scratch_bytes: int = 0
    cleared_bytes: int = 0  # of scratch, from its beginning: zero when the first launch begins


def status_words(steps: Steps) -> list[StatusWord]:
    """In the order of the launches."""
    return [a for launch in steps.launches for a in launch.arguments if isinstance(a, StatusWord)]


class Lowering(Protocol):
    """`Claim.facts` of every CUDA kernel: what is launched, for any number of rows. Plain data."""

    def at(self, B: int) -> Steps: ...


@dataclass(frozen=True)
class Instance:
    """One compilable case of a kernel, for `make check-kernels`; each kernel's module lists its own as INSTANCES.

    The first of the list is the representative that `make test` compiles.
    """

    name: str  # "decode fp16": the network and the precision
    launch: Callable[[Device], KernelLaunch]  # for any device of an architecture that the module's ARCHITECTURES name
