"""The CPU as a device: its measured rates, and how plans run on it."""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.cache import print_unless_quiet, private_folder, read_entry, write_entry
from onchip.errors import InputError
from onchip.network.recipe import Array, Evaluated, Recipe, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.device import Device, Peak
from onchip.plan.host_costs import HOST
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo, steps_of
from onchip.runtime.distributed.ranks import OneRank, Ranks

if TYPE_CHECKING:
    from onchip.kernels.cpu.threading.launches import Launch
    from onchip.kernels.training import SharedData
    from onchip.runtime.backend import BoundRuns, NetworkRun
    from onchip.runtime.cpu.chunks import Chunks
    from onchip.runtime.cpu.step import CpuStep


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    most = core_count()
    if threads is None:
        return most
    if isinstance(threads, bool) or not isinstance(threads, int | np.integer) or not 1 <= threads <= most:
        expected, hint = f"1 to {most}, the cores that this process may use", f"--threads {most} (threads={most})"
        raise InputError("bad number of threads", got=repr(threads), expected=expected, hint=hint)
    return int(threads)


# -- device description -------------------------------------------------------------------------------------


PRECISION = "fp32"  # the only precision of the CPU kernels
L3_CORE_BYTES = 12 << 20  # per core, at most: an EPYC 9684X's 1,152 MiB for 96 (data sheet); others 1.4 to 5 MiB


def this_cpu(measure: bool = False) -> Device:
    """This machine's CPU with measured rates. Measured once (0.3 s), then cached."""
    from onchip.kernels.vectors import VECTOR_BYTES

    name, cores = _model_name(), core_count()
    key = hashlib.sha256(f"{name} {platform.machine()} {cores} {VECTOR_BYTES}".encode()).hexdigest()[:16]
    folder = private_folder("rates")
    cached = read_entry(folder, key)
    rates = earlier = json.loads(cached) if cached is not None else None
    if rates is None:  # printed before planning and loading the compiler, which take a second
        print_unless_quiet("onchip: first run on this machine: measuring the CPU, then compiling kernels", once="new")
    if rates is None or measure:
        rates = {"flops": measure_flops(), "bandwidth": measure_bandwidth(cores)}
        # Other load only makes the machine look slower: the best measurement is the most accurate.
        rates = {name: max(rate, earlier[name] if earlier else 0.0) for name, rate in rates.items()}
        write_entry(folder, key, json.dumps(rates).encode())
    flops, bandwidth = rates["flops"], rates["bandwidth"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Device(
        name=name, kind="cpu", arch=f"{platform.machine()}, {VECTOR_BYTES * 8}-bit vectors", units=cores,
        flops={PRECISION: flops}, bandwidth=bandwidth, launch_us=HOST.launch_us, fast_bytes=l2_bytes(),
        memory_bytes=memory, vector_bytes=VECTOR_BYTES, cache_bytes=_last_cache_bytes(cores), call_us=HOST.call_us,
        # A library's gemm of this size reaches at least three quarters of the cores' rate. A copy may move three
        # bytes for two, as a line is fetched before it is written. A core loads a vector per multiply-add, 2 B/flop.
        peak=Peak({PRECISION: flops * 4 / 3}, bandwidth * 3 / 2, flops * 8 / 3, launch_us=0.0),
        source="measured: float32 gemms of size 768 and a copy, all cores; launches and calls assumed; "
        "peak: 4/3 and 3/2 of these",
    )  # fmt: skip


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()  # platform.processor() starts a subprocess


def cache_bytes(level: int) -> int:
    text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size").read_text().strip()
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]


def l2_bytes() -> int:
    try:
        return cache_bytes(2)
    except (OSError, ValueError, KeyError, IndexError):
        return 1 << 20


def _last_cache_bytes(cores: int) -> int:
    """Capped per core: a virtual machine of two cores reports the whole L3 of its host, 300 MiB."""
    try:
        return min(cache_bytes(3), cores * L3_CORE_BYTES)
    except (OSError, ValueError, KeyError, IndexError):
        return cores * l2_bytes()


def _best_seconds(run: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_flops() -> float:
    n = 768
    a = np.random.default_rng(0).standard_normal((2, n, n), dtype=np.float32)
    return 2 * n**3 / _best_seconds(lambda: a[0] @ a[1])


def measure_bandwidth(cores: int) -> float:
    source = np.random.default_rng(0).standard_normal((cores, 4 << 20), dtype=np.float32)
    target = np.empty_like(source)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        seconds = _best_seconds(lambda: list(pool.map(np.copyto, target, source)))
    return 2 * source.nbytes / seconds


# -- running plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    group: int  # index in the plan's groups
    launch: Launch
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    new: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]  # arrays that its outputs allocate
    seen: tuple[tuple[str, str, tuple[int, ...]], ...]  # views: name, the array that stores the values, row shape
    done: tuple[str, ...]  # arrays that no later step reads


class CpuBackend:
    """Binds plans to the CPU."""

    def __init__(self, threads: int | None, ranks: Ranks | None = None) -> None:
        """threads  as for compile: None for all cores of this process
        ranks    that bind the same plans, and compute their weights together
        """
        self.threads, self._ranks = check_threads(threads), ranks or OneRank()
        self.requested = "cpu", threads

    def bind(self, plan: Plan) -> CpuBound:
        return CpuBound(plan, self.threads, self._ranks)

    def bind_step(self, plan: Plan, state: Mapping[str, Array] | None = None) -> CpuStep:
        from onchip.runtime.cpu.step import CpuStep

        return CpuStep(plan, self.threads, state)

    def bind_runs(
        self, plan: Plan, runs: Sequence[NetworkRun], x: Mapping[str, Array], y: Mapping[str, Array],
        shared: SharedData, evaluation: Plan | None = None,
    ) -> BoundRuns:  # fmt: skip
        from onchip.runtime.cpu.runs import CpuRuns
        from onchip.runtime.layered_runs import LayeredRuns

        if plan.whole_step is not None:
            (rows,), (targets,) = x.values(), y.values()
            return CpuRuns(plan, runs, rows, targets, shared, self.threads)
        backend = CpuBackend(1) if shared.runs > 1 else self  # concurrent runs have one thread each
        return LayeredRuns(backend, plan, runs, x, y, shared, evaluation)

    def runs_at_once(self, plan: Plan, count: int) -> int:
        return 1

    def hold_array(self, array: Array) -> Array:
        return np.ascontiguousarray(array)


class CpuBound:
    """A plan on the CPU. NumPy in, NumPy out."""

    checks_ids = False  # checks inside the kernel are slower than one pass over the ids

    def __init__(self, plan: Plan, threads: int, ranks: Ranks) -> None:
        """Evaluate the recipes and bind every group to its kernel."""
        from onchip.kernels.cpu import INFERENCE
        from onchip.kernels.cpu.compiler.compile_ahead import queue_functions, queue_kernels
        from onchip.kernels.cpu.threading.launches import run_launches
        from onchip.kernels.cpu.threading.threads import load_helpers, queue_helpers, start_helpers
        from onchip.runtime.cpu.weights import make_weights

        plan.check_layers()
        self._start_helpers = start_helpers
        self.plan, self.threads = plan, threads
        kernels = {kernel.name: kernel for kernel in INFERENCE}
        queue_kernels(kernels[group.claim.kernel] for group in plan.groups if group.claim.kernel in kernels)
        queue_functions((run_launches,))
        queue_helpers(threads)
        derived = make_weights(plan, threads, ranks)
        home, between = plan.stored_in, set(plan.between)
        last = {home[name]: i for i, group in enumerate(plan.groups) for name in (*group.inputs, *group.outputs)}
        self._steps: list[Step] = []
        for i, group in enumerate(plan.groups):
            weights = {name: evaluate_weight(recipe, plan, derived) for name, recipe in group.claim.recipes.items()}
            used = (*group.inputs, *group.outputs)
            done = tuple({home[name] for name in used if last[home[name]] == i} & between)
            types = {name: plan.types[name] for name in group.outputs if name in between}
            new = tuple((name, t.row_shape, numpy_dtype(t.dtype)) for name, t in types.items())
            views = tuple((name, home[name], plan.types[name].row_shape) for name in used if home[name] != name)
            if not group.claim.is_view:
                launch = kernels[group.claim.kernel].bind(group.claim, weights)
            elif home[group.inputs[0]] == home[group.outputs[0]]:
                continue
            else:
                launch = _copy
            self._steps.append(Step(i, launch, tuple(group.inputs), tuple(group.outputs), new, views, done))
        self.chunks = self._find_chunks()
        load_helpers(threads)  # at bind time, not in the first call

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        values = {**inputs, **outputs}
        if self.chunks is not None:
            arrays = [values[name] for name in self.chunks.arrays]
            if self.chunks.run(arrays, B, self.chunks.rows_of_chunk(B)):
                return
        self._start_helpers(self.threads)
        for step in self._steps:
            for name, row_shape, dtype in step.new:
                values[name] = np.empty((B, *row_shape), dtype)
            for name, where, row_shape in step.seen:
                values[name] = values[where].reshape(B, *row_shape)
            step.launch([values[name] for name in step.inputs], [values[name] for name in step.outputs], self.threads)
            for name in step.done:
                del values[name]

    def run_like(self, x: Any) -> None:
        return None

    def quick_call(self) -> Callable[[tuple[Any, ...], Any], Any] | None:
        from onchip.runtime.cpu.quick_call import quick_call

        return None if self.chunks is None else quick_call(self.plan, self.chunks)

    def _find_chunks(self) -> Chunks | None:
        """None if a launch cannot run from compiled code."""
        from onchip.kernels.cpu.threading.launches import CompiledLaunch
        from onchip.runtime.cpu.chunks import Chunks

        stored_in = self.plan.stored_in
        launches: list[tuple[CompiledLaunch, list[str]]] = []
        for step in self._steps:
            if not isinstance(step.launch, CompiledLaunch):
                return None
            launches.append((step.launch, [stored_in[name] for name in (*step.inputs, *step.outputs)]))
        return Chunks(self.plan, launches, self.threads) if launches else None

    def wait(self) -> None:
        return

    def with_launches(self, change: Callable[[Step], Launch]) -> CpuBound:
        """The same plan and weights, each step with another launch."""
        changed = copy.copy(self)
        changed._steps = [replace(step, launch=change(step)) for step in self._steps]
        changed.chunks = changed._find_chunks()
        return changed

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return steps_of(self.plan, B)


def _copy(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
    """A view of an input or output that is itself an output."""
    outputs[0].reshape(-1)[...] = inputs[0].reshape(-1)


def evaluate_weight(recipe: Recipe, plan: Plan, derived: Evaluated) -> Array:
    """An array that a kernel needs, computed from the network's weights; `derived` caches shared ones."""
    return materialise(recipe, plan.network.weights, derived)
