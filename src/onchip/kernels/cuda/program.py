"""What a CUDA kernel hands to the runtime: its source, its resources, how to launch it. Plain data, no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onchip.plan.device import Device

# The chips that we compile for. A kernel says which of them it is for: ARCHITECTURES in its module.
EVERY_CHIP = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
NUMBERS = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}  # in memory, as number.cuh names them


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


# What a kernel is told, in the order of its parameters. The first four are pointers.


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
class Scratch:
    """A place in the memory that the launches of these steps have for themselves, in bytes from its beginning."""

    offset: int


@dataclass(frozen=True)
class Int64:
    value: int


@dataclass(frozen=True)
class UInt32:
    value: int


Pointer = Input | Output | Weight | Scratch


@dataclass(frozen=True)
class Struct:
    """A parameter that is passed by value: its pointers, then its other bytes. A launch has room for 4 KB."""

    pointers: tuple[Pointer | Int64, ...]  # Int64(0): none there
    data: bytes


Argument = Pointer | Int64 | UInt32 | Struct


@dataclass(frozen=True)
class KernelLaunch:
    """One launch, as data."""

    program: Program
    config: LaunchConfig
    arguments: tuple[Argument, ...]
    budget: Budget


@dataclass(frozen=True)
class Steps:
    """The launches of a claim, one after the other, and the memory that they share."""

    launches: tuple[KernelLaunch, ...]
    scratch_bytes: int = 0


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
