"""scan: prefix sums of long rows of float32 and int32."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.bench.cases.scan_truth import SampledScanTruth
from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.gpu_clock import CALLS, PACE, Forward, Variants, check, fastest
from onchip.bench.options import Options
from onchip.bench.peers.cpu import explained, load_torch, need
from onchip.bench.peers.cpu import fastest as fastest_on_cpu
from onchip.bench.peers.gpu import load_jax
from onchip.bench.stage import Stage, TorchStage, make_stage
from onchip.ladders.scan import device_floor_ms
from onchip.measure.pace import show_ms
from onchip.measure.truth import Verdict
from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp
from onchip.runtime.cpu.backend import core_count, this_cpu
from onchip.runtime.placement import find_device
from onchip.runtime.scan import scan, scan_into

DATA = {"float32": "random normals", "int32": "random ints of all sizes"}  # whose sums wrap
PIECE = 1 << 22  # random values that one thread draws at a time
LONG = 1 << 30  # values per sample on the GPU, over several calls
FEWEST_CALLS = 4
COPIES = 9  # samples of the copy that is measured for comparison


@dataclass(frozen=True)
class ScanJob:
    N: int
    dtype: str = "float32"

    @property
    def case(self) -> str:
        power = self.N.bit_length() - 1
        return f"{f'2^{power}' if power >= 10 and 1 << power == self.N else self.N} numbers"

    @property
    def nbytes(self) -> int:
        return self.N * np.dtype(self.dtype).itemsize

    @property
    def precision(self) -> str:
        return {"float32": "fp32"}.get(self.dtype, self.dtype)


CPU_JOBS = (ScanJob(1 << 20), ScanJob(1 << 24), ScanJob(1 << 24, "int32"))
GPU_JOBS = tuple(ScanJob(1 << power, dtype) for power in (20, 24, 28, 30) for dtype in DATA)


def numbers(job: ScanJob) -> Array:
    """x (N,); the same for any number of threads."""
    x: Array = np.empty(job.N, job.dtype)

    def draw(start: int) -> None:
        rng, piece = np.random.default_rng([1, start]), x[start : start + PIECE]
        if job.dtype == "float32":
            rng.standard_normal(out=piece, dtype=np.float32)
        else:
            limits = np.iinfo(x.dtype)
            piece[...] = rng.integers(limits.min, limits.max, len(piece), dtype=x.dtype, endpoint=True)

    with concurrent.futures.ThreadPoolExecutor(core_count()) as pool:
        list(pool.map(draw, range(0, job.N, PIECE)))
    return x


def cases(options: Options) -> list[Case]:
    jobs = tuple(ScanJob(N, dtype) for N in options.rows for dtype in DATA)
    if options.device != "cpu":
        return gpu_cases(jobs or GPU_JOBS, options)
    return cpu_cases(jobs or CPU_JOBS, options)


# -- on the CPU --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Given:
    """A job in memory: every engine gets the same values and the same reference."""

    job: ScanJob
    x: Array
    y: Array  # every engine writes here
    truth: SampledScanTruth

    def ready(self, run: Callable[[], object], *notes: str, peer: bool = False) -> Ready:
        def check() -> Verdict:
            self.y.fill(np.nan if self.y.dtype.kind == "f" else -1)
            run()
            return self.truth.verify(self.y, peer)

        return Ready(run, check, ", ".join(filter(None, [DATA[self.job.dtype], *notes, self.truth.note])))


def give(job: ScanJob) -> Given:
    x = numbers(job)
    return Given(job, x, np.empty_like(x), SampledScanTruth(x))


def cpu_cases(jobs: tuple[ScanJob, ...], options: Options) -> list[Case]:
    given = functools.lru_cache(maxsize=1)(give)  # one job's arrays at a time
    engines: dict[str, Callable[[Given], Ready]] = {ONCHIP: functools.partial(ours_on_cpu, threads=options.threads)}
    if options.peers:
        engines |= {"numpy": numpy_on_cpu, "torch": functools.partial(torch_on_cpu, threads=options.threads)}
    return [
        Case("scan", job.case, name, functools.partial(_prepare, engine, given, job), work=job.N, unit="numbers/s",
             precision=job.precision, floor_ms=floor_ms, threads=options.threads)
        for job in jobs
        for floor_ms in [functools.partial(_cpu_floor_ms, job.N)]
        for name, engine in engines.items()
    ]  # fmt: skip


def _cpu_floor_ms(N: int) -> float:
    return device_floor_ms(this_cpu(), N)


def _prepare(engine: Callable[[Any], Ready], given: Callable[[ScanJob], Any], job: ScanJob) -> Ready:
    return engine(given(job))


def ours_on_cpu(task: Given, threads: int) -> Ready:
    return task.ready(lambda: scan_into(task.x, task.y, ScanOp(), "cpu", threads))


def numpy_on_cpu(task: Given) -> Ready:
    return task.ready(lambda: np.cumsum(task.x, dtype=task.x.dtype, out=task.y), "1 thread", peer=True)


def torch_on_cpu(task: Given, threads: int) -> Ready:
    with explained("torch"):
        torch = load_torch(threads)
        x, y = torch.from_numpy(task.x), torch.from_numpy(task.y)

        def with_threads(count: int, _: Array) -> Array:
            torch.set_num_threads(count)
            torch.cumsum(x, 0, dtype=x.dtype, out=y)
            return task.y

        counts = {"1 thread": 1} | ({f"{threads} threads": threads} if threads > 1 else {})
        variants = {name: functools.partial(with_threads, count) for name, count in counts.items()}
        run, setting = fastest_on_cpu(variants, (task.x,), task.y, ())
    return task.ready(run, setting, peer=True)


# -- on a GPU ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GpuGiven:
    """A job on the GPU: every engine gets the same values and the same reference."""

    job: ScanJob
    stage: Stage
    x: Any
    y: Any  # engines that can write here
    truth: SampledScanTruth
    copy_ms: float  # of x to y: reads and writes everything once

    def ready(self, variants: Variants, peer: bool = False) -> Ready:
        run, way = fastest(variants, self.stage, calls=calls_of(self.job.N))

        def verify(y: Any) -> Verdict:
            return self.truth.verify(self.stage.fetch(y), peer)

        data = f"{DATA[self.job.dtype]}, the same in every call: what fits stays in L2"
        copy = f"a copy on the GPU, measured beside it: {show_ms(self.copy_ms)} ms"
        setting = ", ".join(filter(None, [way, data, copy, self.truth.note]))
        return Ready(run, functools.partial(check, self.stage, run, verify), setting)


def calls_of(N: int) -> int:
    """Calls per sample: fewer for long rows."""
    return min(CALLS, max(FEWEST_CALLS, LONG // N))


def give_gpu(job: ScanJob, index: int) -> GpuGiven:
    stage = make_stage(index)
    host = numbers(job)
    x, y = stage.put(host, job.dtype), stage.empty((job.N,), job.dtype)
    copy, _ = fastest({"": Forward(lambda: stage.copy(x, y))}, stage, calls=calls_of(job.N))
    copy_ms = statistics.median(copy.sample_ms() for _ in range(COPIES))
    return GpuGiven(job, stage, x, y, SampledScanTruth(host), copy_ms)


def gpu_cases(jobs: tuple[ScanJob, ...], options: Options) -> list[Case]:
    device, index = find_device(options.device)[0], int(options.device.partition(":")[2] or 0)
    given = functools.lru_cache(maxsize=1)(functools.partial(give_gpu, index=index))  # one job's arrays at a time
    engines: dict[str, Callable[[GpuGiven], Ready]] = {ONCHIP: ours_on_gpu}
    if options.peers:
        engines |= {name: functools.partial(_peer, name, build) for name, build in GPU_PEERS.items()}
    return [
        Case("scan", job.case, name, functools.partial(_prepare, engine, given, job), work=job.N, unit="numbers/s",
             precision=job.precision, floor_ms=device_floor_ms(device, job.N), pace=PACE)
        for job in jobs
        for name, engine in engines.items()
    ]  # fmt: skip


def ours_on_gpu(task: GpuGiven) -> Ready:
    def call() -> Any:
        scan(task.x, out=task.y)
        return task.y

    return task.ready({"": Forward(call)})


def _peer(name: str, build: Build, task: GpuGiven) -> Ready:
    if not isinstance(task.stage, TorchStage):
        raise UnavailableError("torch for CUDA, which holds the peers' numbers, is not installed")
    with explained(name):
        return task.ready({"": build(task, task.stage)}, peer=True)


def torch_on_gpu(task: GpuGiven, stage: TorchStage) -> Forward:
    return Forward(lambda: stage.torch.cumsum(task.x, 0, dtype=task.x.dtype, out=task.y))  # else int64 for ints


def cupy_on_gpu(task: GpuGiven, stage: TorchStage) -> Forward:
    need("cupy")
    cupy = importlib.import_module("cupy")
    x, y = cupy.asarray(task.x), cupy.asarray(task.y)  # zero-copy

    def call() -> Any:
        with cupy.cuda.ExternalStream(stage.torch.cuda.current_stream().cuda_stream):
            cupy.cumsum(x, dtype=x.dtype, out=y)
        return task.y

    return Forward(call)


def jax_on_gpu(task: GpuGiven, stage: TorchStage) -> Forward:
    jax = load_jax()
    x = importlib.import_module("jax.dlpack").from_dlpack(task.x)  # zero-copy
    run = jax.jit(lambda x: jax.numpy.cumsum(x, dtype=x.dtype))
    return Forward(lambda: run(x), captures=False, wait=lambda y: y.block_until_ready())


Build = Callable[[GpuGiven, TorchStage], Forward]
GPU_PEERS: dict[str, Build] = {"torch": torch_on_gpu, "cupy": cupy_on_gpu, "jax": jax_on_gpu}
