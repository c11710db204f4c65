"""A kernel launch as data: source, launch configuration, resources. The arguments are in arguments.py. No CUDA here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onchip.kernels.cuda.common.arguments import Argument, StatusWord
from onchip.plan.device import Device

# All target architectures. ARCHITECTURES of a kernel's module: those it supports, if not all.
EVERY_CHIP = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
OVERLAPPING = ("sm_90a", "sm_100", "sm_120")  # with programmatic dependent launch


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


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch, as data."""

    program: Program
    config: LaunchConfig
    arguments: tuple[Argument, ...]
    budget: Budget
    # Indices of the earlier launches in Steps that it waits for. None: the previous one; (): none.
    after: tuple[int, ...] | None = None
    # Of a training step: matrix products per row, of the first layer and of the others. They split the step's estimate.
    row_flop: tuple[int, int] = (0, 0)


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
    """A launch to compile, for `make check-kernels`. INSTANCES of a kernel's module lists them; `make test` compiles
    the first."""

    name: str  # "decode fp16": the network and the precision
    launch: Callable[[Device], KernelLaunch]  # for any device whose architecture is in ARCHITECTURES
