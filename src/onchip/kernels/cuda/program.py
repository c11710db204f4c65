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


class Launch(Protocol):
    """`Claim.facts` of every CUDA kernel.

    Its parameters are, in this order: a pointer for each input of the group, for each recipe of the claim and
    for each output of the group, then one long long: `count(B)`, the rows that the kernel sees.
    """

    @property
    def program(self) -> Program: ...

    @property
    def budget(self) -> Budget: ...

    def count(self, B: int) -> int: ...

    def launch_config(self, B: int) -> LaunchConfig: ...


@dataclass(frozen=True)
class Fixed:
    """A launch whose numbers are known: `Launch` for a batch of its own size."""

    program: Program
    config: LaunchConfig
    budget: Budget

    def count(self, B: int) -> int:
        return B

    def launch_config(self, B: int) -> LaunchConfig:
        return self.config


@dataclass(frozen=True)
class Instance:
    """One compilable case of a kernel, for `make check-kernels`; each kernel's module lists its own as INSTANCES.

    The first of the list is the representative that `make test` compiles.
    """

    name: str  # "decode fp16": the network and the precision
    launch: Callable[[Device], Launch]  # for any device of an architecture that the module's ARCHITECTURES name
