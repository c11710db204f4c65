"""make check-kernels: compile every instance of each CUDA kernel for Hopper, and one for each other chip, without GPU.

python -m onchip.runtime.cuda.kernel_check onchip.kernels.cuda onchip.ladders [--sample 4]

It reads INSTANCES of the modules in these packages, and ARCHITECTURES of those that do not run on every chip. It exits
with 1 if a kernel does not compile, exceeds its budget of registers, spills or shared memory, has its wgmma serialised,
or fits no chip. With --sample N it compiles for Hopper the first instance of each kernel of a file and every N-th after
it, and every N-th for other chips.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import multiprocessing
import pkgutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from onchip.errors import OnchipError, PlanError
from onchip.kernels.cuda.common.program import EVERY_CHIP, Instance
from onchip.plan.device import H200, Device
from onchip.runtime.cuda.nvrtc import Binary, compile_program

PROCESSES = 2

# Architecture -> SMs of its largest chip, KiB of shared memory per block (opt-in maximum). sm_86 and sm_89 are left out
# to save minutes: no kernel has code for only them, they run what sm_80 runs (for fp8, what sm_120 runs).
_CHIPS = {"sm_80": (108, 163), "sm_90a": (132, 227), "sm_100": (148, 227), "sm_120": (170, 99)}
DEVICES: Mapping[str, Device] = MappingProxyType({
    arch: dataclasses.replace(H200, name=arch, arch=arch, units=units, fast_bytes=KiB << 10)
    for arch, (units, KiB) in _CHIPS.items()
})  # fmt: skip


OTHER_ARCHS = ("sm_80", "sm_100", "sm_120")  # similar to sm_90a: one instance of each kernel is enough


@dataclass(frozen=True)
class Task:
    """One compilation, in a form that can be pickled."""

    module: str
    index: int  # in the module's INSTANCES
    arch: str

    @property
    def kernel(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def instance(self) -> Instance:
        found: Instance = importlib.import_module(self.module).INSTANCES[self.index]
        return found


@dataclass(frozen=True)
class Outcome:
    task: Task
    registers: str = ""
    spill_bytes: str = ""
    static_bytes: str = ""
    seconds: str = ""
    refused: str = ""  # why this kernel does not exist for this chip
    failed: str = ""


def find_modules(packages: Iterable[str]) -> list[ModuleType]:
    """The modules in these packages, recursively, that have INSTANCES."""
    names = [
        info.name
        for package in packages
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    ]
    modules = map(importlib.import_module, names)
    return [module for module in modules if hasattr(module, "INSTANCES")]


def tasks_of(module: ModuleType, archs: Iterable[str] = DEVICES) -> list[Task]:
    """Every instance of a module, in order, for every architecture that it runs on."""
    declared = [arch for arch in archs if arch in getattr(module, "ARCHITECTURES", EVERY_CHIP)]
    return [Task(module.__name__, i, arch) for i in range(len(module.INSTANCES)) for arch in declared]


def every_task(packages: Iterable[str]) -> list[Task]:
    """Every instance for Hopper, and a subset for OTHER_ARCHS."""
    return list(_reduced([task for module in find_modules(packages) for task in tasks_of(module)]))


def run_task(task: Task) -> Outcome:
    device = DEVICES[task.arch]
    try:
        launch = task.instance.launch(device)
        start = time.perf_counter()
        binary = compile_program(launch.program, task.arch)
        seconds = time.perf_counter() - start
    except PlanError as error:
        return Outcome(task, refused=error.what)
    except OnchipError as error:
        return Outcome(task, failed=str(error))
    static, budget = static_shared_bytes(binary), launch.budget
    return Outcome(
        task,
        f"{binary.registers} of {budget.registers}",
        f"{binary.spill_bytes} of {budget.spill_bytes}",
        f"{static:,}",
        "cached" if binary.is_cached else f"{seconds:.1f} s",
        failed=_excess(
            ("registers", binary.registers, budget.registers),
            ("spilled bytes", binary.spill_bytes, budget.spill_bytes),
            ("bytes of shared memory", static + launch.config.shared_bytes, device.fast_bytes),
            ("kernel with serialised wgmma", int(binary.is_serialised), 0),
        ),
    )


def _excess(*measured: tuple[str, int, int]) -> str:
    return ", ".join(f"{got:,} {what}, at most {most:,} allowed" for what, got, most in measured if got > most)


def static_shared_bytes(binary: Binary) -> int:
    """The static shared memory of a kernel: the size of its section in the cubin, an ELF file."""
    cubin = binary.cubin
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * entry_size) for i in range(count)]
    sizes: dict[bytes, int] = {}
    for name, _, _, _, _, size in headers:
        start = headers[names][4] + name
        sizes[cubin[start : cubin.index(b"\0", start)]] = size
    # From sm_90 on, the first 1 KiB is reserved by the system. It does not count against the block's limit.
    reserved = 1024 if b".nv.shared.reserved.0" in sizes else 0
    return sizes.get(b".nv.shared." + binary.entry.encode(), reserved) - reserved


def main(packages: Sequence[str], sample: int = 1) -> int:
    tasks = every_task(packages)
    if sample > 1:
        tasks = list(_sampled(tasks, sample))
    if not tasks:
        print(f"no INSTANCES in {', '.join(packages)}", file=sys.stderr)
        return 1
    kernels, names = (task.kernel for task in tasks), (task.instance.name for task in tasks)
    widths = [max(map(len, ("kernel", *kernels))), max(map(len, ("instance", *names))), 7, 12, 10, 15, 8]
    _print(widths, "kernel", "instance", "arch", "registers", "spilled B", "static shared B", "compiled")
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(run_task, tasks):  # in order, each as soon as it is done
            outcomes.append(outcome)
            task, verdict = outcome.task, "FAIL" if outcome.failed else "refused" if outcome.refused else ""
            _print(
                widths, task.kernel, task.instance.name, task.arch, outcome.registers, outcome.spill_bytes,
                outcome.static_bytes, outcome.seconds, verdict,
            )  # fmt: skip
    wrong = [f"{o.task.kernel} {o.task.instance.name}, {o.task.arch}: {o.failed}" for o in outcomes if o.failed]
    wrong += _fit_nowhere(outcomes)
    print(f"{len(outcomes)} instances, {sum(bool(o.refused) for o in outcomes)} do not fit, {len(wrong)} failed")
    for line in wrong:
        print(f"FAIL {line}", file=sys.stderr)
    return 1 if wrong else 0


def _reduced(tasks: Sequence[Task]) -> Iterator[Task]:
    """All tasks for Hopper; for OTHER_ARCHS the first that fits of each kernel, and those that fit no Hopper chip."""
    seen: set[tuple[str, str, str]] = set()
    elsewhere = {(task.module, task.index) for task in tasks if task.arch not in OTHER_ARCHS and _kernel_of(task)}
    for task in tasks:
        if task.arch in OTHER_ARCHS:
            kernel = _kernel_of(task)
            key = (task.module, task.arch, kernel)
            if not kernel or (key in seen and (task.module, task.index) in elsewhere):
                continue
            seen.add(key)
        yield task


def _sampled(tasks: Iterable[Task], n: int) -> Iterator[Task]:
    """For Hopper, the first of each kernel of a file and every n-th after it; for OTHER_ARCHS, every n-th."""
    seen: Counter[tuple[str, str]] = Counter()
    for task in filter(_kernel_of, tasks):  # only those that fit: else _fit_nowhere would report them
        key = ("", "") if task.arch in OTHER_ARCHS else (task.module, _kernel_of(task))
        if seen[key] % n == 0:
            yield task
        seen[key] += 1


def _kernel_of(task: Task) -> str:
    """The name of an instance's kernel in its file; "" if the chip is too small for it."""
    try:
        return task.instance.launch(DEVICES[task.arch]).program.name_expression.partition("<")[0]
    except PlanError:
        return ""


def _fit_nowhere(outcomes: list[Outcome]) -> list[str]:
    """Messages for instances that fit no chip: nothing compiles them."""
    somewhere = {(o.task.module, o.task.index) for o in outcomes if not o.refused}
    refused = {(o.task.module, o.task.index): o for o in outcomes if o.refused}
    return [
        f"{o.task.kernel} {o.task.instance.name} fits no chip: {o.refused}"
        for key, o in refused.items()
        if key not in somewhere
    ]


def _print(widths: list[int], *cells: str) -> None:
    text = "  ".join(cell.ljust(width) for cell, width in zip(cells, [*widths, 0], strict=False))
    print(text.rstrip(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--sample", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(main(arguments.packages, arguments.sample))
