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

DATA = {"float32": "random normals", "int32": "random ints of all sizes"}  # sums of ints wrap
CHUNK = 1 << 22  # random values that a thread draws at a time
VALUES_PER_SAMPLE = 1 << 30  # on the GPU, over several calls
MIN_CALLS = 4
COPY_SAMPLES = 9  # of a copy, measured for comparison


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


def inputs(job: ScanJob) -> Array:
    """x (N,); the same for any number of threads."""
    x: Array = np.empty(job.N, job.dtype)

    def draw(start: int) -> None:
        rng, chunk = np.random.default_rng([1, start]), x[start : start + CHUNK]
        if job.dtype == "float32":
            rng.standard_normal(out=chunk, dtype=np.float32)
        else:
            limits = np.iinfo(x.dtype)
            chunk[...] = rng.integers(limits.min, limits.max, len(chunk), dtype=x.dtype, endpoint=True)

    with concurrent.futures.ThreadPoolExecutor(core_count()) as pool:
        list(pool.map(draw, range(0, job.N, CHUNK)))
    return x


def cases(options: Options) -> list[Case]:
    jobs = tuple(ScanJob(N, dtype) for N in options.rows for dtype in DATA)
    if options.device != "cpu":
        return gpu_cases(jobs or GPU_JOBS, options)
    return cpu_cases(jobs or CPU_JOBS, options)


# -- on the CPU --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LoadedJob:
    """A job in memory: every engine gets the same values and the same reference."""

    job: ScanJob
    x: Array
    y: Array  # output of every engine
    truth: SampledScanTruth

    def ready(self, run: Callable[[], object], *notes: str, peer: bool = False) -> Ready:
        def check() -> Verdict:
            self.y.fill(np.nan if self.y.dtype.kind == "f" else -1)
            run()
            return self.truth.verify(self.y, peer)

        return Ready(run, check, ", ".join(filter(None, [DATA[self.job.dtype], *notes, self.truth.note])))


def load_job(job: ScanJob) -> LoadedJob:
    x = inputs(job)
    return LoadedJob(job, x, np.empty_like(x), SampledScanTruth(x))


def cpu_cases(jobs: tuple[ScanJob, ...], options: Options) -> list[Case]:
    load = functools.lru_cache(maxsize=1)(load_job)  # one job's arrays at a time
    engines: dict[str, Callable[[LoadedJob], Ready]] = {ONCHIP: functools.partial(run_on_cpu, threads=options.threads)}
    if options.peers:
        engines |= {"numpy": numpy_on_cpu, "torch": functools.partial(torch_on_cpu, threads=options.threads)}
    return [
        Case("scan", job.case, name, functools.partial(_prepare, engine, load, job), work=job.N, unit="numbers/s",
             precision=job.precision, floor_ms=floor_ms, threads=options.threads)
        for job in jobs
        for floor_ms in [functools.partial(_cpu_floor_ms, job.N)]
        for name, engine in engines.items()
    ]  # fmt: skip


def _cpu_floor_ms(N: int) -> float:
    return device_floor_ms(this_cpu(), N)


def _prepare(engine: Callable[[Any], Ready], load: Callable[[ScanJob], Any], job: ScanJob) -> Ready:
    return engine(load(job))


def run_on_cpu(loaded: LoadedJob, threads: int) -> Ready:
    return loaded.ready(lambda: scan_into(loaded.x, loaded.y, ScanOp(), "cpu", threads))


def numpy_on_cpu(loaded: LoadedJob) -> Ready:
    return loaded.ready(lambda: np.cumsum(loaded.x, dtype=loaded.x.dtype, out=loaded.y), "1 thread", peer=True)


def torch_on_cpu(loaded: LoadedJob, threads: int) -> Ready:
    with explained("torch"):
        torch = load_torch(threads)
        x, y = torch.from_numpy(loaded.x), torch.from_numpy(loaded.y)

        def with_threads(count: int, _: Array) -> Array:
            torch.set_num_threads(count)
            torch.cumsum(x, 0, dtype=x.dtype, out=y)
            return loaded.y

        counts = {"1 thread": 1} | ({f"{threads} threads": threads} if threads > 1 else {})
        variants = {name: functools.partial(with_threads, count) for name, count in counts.items()}
        run, setting = fastest_on_cpu(variants, (loaded.x,), loaded.y, ())
    return loaded.ready(run, setting, peer=True)


# -- on a GPU ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LoadedGpuJob:
    """A job on the GPU: every engine gets the same values and the same reference."""

    job: ScanJob
    stage: Stage
    x: Any
    y: Any  # output of the engines that can write to a buffer
    truth: SampledScanTruth
    copy_ms: float  # of x to y: one read and one write per value

    def ready(self, variants: Variants, peer: bool = False) -> Ready:
        run, variant = fastest(variants, self.stage, calls=calls_of(self.job.N))

        def verify(y: Any) -> Verdict:
            return self.truth.verify(self.stage.fetch(y), peer)

        data = f"{DATA[self.job.dtype]}, the same in every call: what fits stays in L2"
        copy = f"a copy on the GPU, measured in the same run: {show_ms(self.copy_ms)} ms"
        setting = ", ".join(filter(None, [variant, data, copy, self.truth.note]))
        return Ready(run, functools.partial(check, self.stage, run, verify), setting)


def calls_of(N: int) -> int:
    """Calls per sample: fewer for long rows."""
    return min(CALLS, max(MIN_CALLS, VALUES_PER_SAMPLE // N))


def load_gpu_job(job: ScanJob, index: int) -> LoadedGpuJob:
    stage = make_stage(index)
    host = inputs(job)
    x, y = stage.put(host, job.dtype), stage.empty((job.N,), job.dtype)
    copy, _ = fastest({"": Forward(lambda: stage.copy(x, y))}, stage, calls=calls_of(job.N))
    copy_ms = statistics.median(copy.sample_ms() for _ in range(COPY_SAMPLES))
    return LoadedGpuJob(job, stage, x, y, SampledScanTruth(host), copy_ms)


def gpu_cases(jobs: tuple[ScanJob, ...], options: Options) -> list[Case]:
    device, index = find_device(options.device)[0], int(options.device.partition(":")[2] or 0)
    load = functools.lru_cache(maxsize=1)(functools.partial(load_gpu_job, index=index))  # one job's arrays at a time
    engines: dict[str, Callable[[LoadedGpuJob], Ready]] = {ONCHIP: run_on_gpu}
    if options.peers:
        engines |= {name: functools.partial(_peer, name, build) for name, build in GPU_PEERS.items()}
    return [
        Case("scan", job.case, name, functools.partial(_prepare, engine, load, job), work=job.N, unit="numbers/s",
             precision=job.precision, floor_ms=device_floor_ms(device, job.N), pace=PACE)
        for job in jobs
        for name, engine in engines.items()
    ]  # fmt: skip


def run_on_gpu(loaded: LoadedGpuJob) -> Ready:
    def call() -> Any:
        scan(loaded.x, out=loaded.y)
        return loaded.y

    return loaded.ready({"": Forward(call)})


def _peer(name: str, build: Build, loaded: LoadedGpuJob) -> Ready:
    if not isinstance(loaded.stage, TorchStage):
        raise UnavailableError("torch for CUDA is not installed")
    with explained(name):
        return loaded.ready({"": build(loaded, loaded.stage)}, peer=True)


def torch_on_gpu(loaded: LoadedGpuJob, stage: TorchStage) -> Forward:
    return Forward(lambda: stage.torch.cumsum(loaded.x, 0, dtype=loaded.x.dtype, out=loaded.y))  # else int64 for ints


def cupy_on_gpu(loaded: LoadedGpuJob, stage: TorchStage) -> Forward:
    need("cupy")
    cupy = importlib.import_module("cupy")
    x, y = cupy.asarray(loaded.x), cupy.asarray(loaded.y)  # zero-copy

    def call() -> Any:
        with cupy.cuda.ExternalStream(stage.torch.cuda.current_stream().cuda_stream):
            cupy.cumsum(x, dtype=x.dtype, out=y)
        return loaded.y

    return Forward(call)


def jax_on_gpu(loaded: LoadedGpuJob, stage: TorchStage) -> Forward:
    jax = load_jax()
    x = importlib.import_module("jax.dlpack").from_dlpack(loaded.x)  # zero-copy
    run = jax.jit(lambda x: jax.numpy.cumsum(x, dtype=x.dtype))
    return Forward(lambda: run(x), captures=False, wait=lambda y: y.block_until_ready())


Build = Callable[[LoadedGpuJob, TorchStage], Forward]
GPU_PEERS: dict[str, Build] = {"torch": torch_on_gpu, "cupy": cupy_on_gpu, "jax": jax_on_gpu}
