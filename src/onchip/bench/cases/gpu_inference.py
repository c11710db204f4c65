"""Cases of inference on a GPU: device-resident rows, onchip and peers, timed by CUDA events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onchip.bench.cases.inference import BASELINE_ROWS, PEER_SLACK
from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.gpu_clock import CALLS, PACE, Forward, check, fastest
from onchip.bench.options import Options
from onchip.bench.peers.cpu import explained
from onchip.bench.peers.gpu import Build, GpuTask, make_peers
from onchip.bench.stage import Stage, TorchStage, make_stage
from onchip.errors import DeviceError, PlanError
from onchip.measure.pace import Pace
from onchip.measure.truth import Rows, Truth, Verdict, as_inputs, naive_error
from onchip.network.graph import Network
from onchip.network.io import IO, with_io
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.plan.device import Device
from onchip.plan.kernel import Job
from onchip.runtime.engine import compile
from onchip.runtime.placement import find_device, plan

VERIFIED = 4_096  # rows that are compared with float64
SAMPLE_MS = 5.0  # per sample, at the floor: slow jobs have fewer calls per sample

# The dtype of the baseline error: float16 has as many digits as TF32.
NAIVE = {"fp32": "float32", "tf32": "float16", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, eq=False)
class GpuJob:
    """A case: a network over B rows."""

    case: str
    net: Network
    B: int
    inputs: Callable[[int], Rows]  # B -> rows, float32 or ids; called when the first engine is prepared
    precision: str = "fp16"  # of the gemms
    io: str = "fp16"  # key of IO: the dtype of the rows
    synchronised: bool = False
    verified: int = VERIFIED  # the most rows to compare with float64
    truth: Callable[[Network, Rows, str], Truth] = Truth  # (network, rows, dtype of the baseline error)
    compiled: Mapping[str, Any] = field(default_factory=dict)  # further options of onchip's compile
    module: Callable[[], Any] | None = None  # the torch module that the network comes from; not modified

    @property
    def input_dtypes(self) -> list[str]:
        """The dtype of each input's rows: ids keep theirs."""
        return [IO[self.io] if "float" in t.dtype else t.dtype for t in self.net.inputs.values()]


@dataclass(frozen=True, eq=False)
class LoadedJob:
    """A job on the GPU: every engine gets the same rows and the same reference."""

    job: GpuJob
    stage: Stage
    x: tuple[Any, ...]  # one per input
    verified: Array  # indices of the checked rows
    truth: Truth

    def verify(self, y: Any, slack: float = 1.0) -> Verdict:
        """Whether all of y was written, and the checked rows are correct."""
        allowed = slack * self.truth.allowed
        if tuple(y.shape) != (self.job.B, *self.truth.y.shape[1:]) or not self.stage.is_finite(y):
            return Verdict(float("inf"), allowed)
        return Verdict(self.truth.verify(self.stage.fetch(y, self.verified)).error, allowed)


def load_job(job: GpuJob, index: int) -> LoadedJob:
    stage = make_stage(index)
    x = as_inputs(job.inputs(job.B))
    verified = verified_rows(job.B, job.verified)
    rows, many = _rounded(tuple(rows[verified] for rows in x), job), min(BASELINE_ROWS, job.verified)
    truth = job.truth(job.net, rows, NAIVE[job.precision])
    if len(verified) < many:
        truth = truth.allowing(naive_error(job.net, _rounded(job.inputs(many), job), NAIVE[job.precision]))
    uploaded = tuple(stage.put(rows, dtype) for rows, dtype in zip(x, job.input_dtypes, strict=True))
    return LoadedJob(job, stage, uploaded, verified, truth)


def verified_rows(B: int, most: int) -> Array:
    """Indices of the first row, the last and some between."""
    if most >= B:
        return np.arange(B)
    return np.unique([0, *np.random.default_rng(2).integers(0, B, most - 2), B - 1])


def _rounded(x: Rows, job: GpuJob) -> tuple[Array, ...]:
    """The rows as rounded on the GPU, in the network's dtypes."""
    inputs = zip(as_inputs(x), job.input_dtypes, job.net.inputs.values(), strict=True)
    return tuple(rows.astype(numpy_dtype(dtype)).astype(numpy_dtype(t.dtype)) for rows, dtype, t in inputs)


# -- cases -------------------------------------------------------------------------------------------------


def gpu_cases(
    workload: str,
    jobs: Sequence[GpuJob],
    options: Options,
    peers: Mapping[str, Build] | None = None,
    pace: Pace = PACE,
    unit: str = "rows/s",
) -> list[Case]:
    """onchip and, on request, every peer, job by job.

    peers  engine -> its builder; default: those of dense networks
    """
    device = find_device(options.device)[0]
    index = int(options.device.partition(":")[2] or 0)
    requested = (make_peers() if peers is None else peers) if options.peers else {}
    cases = []
    for job in jobs:
        loaded = functools.cache(functools.partial(load_job, job, index))
        floor = floor_ms(job, device)
        calls = calls_of(floor)
        engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(ours, loaded, options.device, calls)}
        engines |= {name: functools.partial(peer, loaded, name, build, calls) for name, build in requested.items()}
        cases += [
            Case(workload, job.case, name, prepare, work=job.B, unit=unit, precision=job.precision, floor_ms=floor,
                 pace=pace)
            for name, prepare in engines.items()
        ]  # fmt: skip
    return cases


def floor_ms(job: GpuJob, device: Device) -> float | None:
    """The least time for memory, gemms and launches."""
    net = with_io(job.net, IO[job.io])
    try:
        return plan(net, device, Job(job.precision, job.B, **job.compiled)).floor_us / 1e3
    except (DeviceError, PlanError):  # onchip raises it when it is prepared
        return None


def calls_of(floor: float | None) -> int:
    """The number of calls per sample."""
    return max(1, min(CALLS, int(SAMPLE_MS / floor))) if floor else CALLS


def ours(loaded: Callable[[], LoadedJob], device: str, calls: int) -> Ready:
    task = loaded()
    job, stage = task.job, task.stage
    try:
        engine = compile(job.net, device, job.precision, batch_hint=job.B, io=job.io, **job.compiled)
    except (DeviceError, PlanError) as refused:
        raise UnavailableError(f"no kernel for {job.case}, {job.precision}: {refused.what}") from None
    y = stage.empty((job.B, *job.net.output.row_shape), IO[job.io])

    def call() -> Any:
        engine(*task.x, out=y)
        return y

    # If synchronised, the call itself is measured, not a graph of it.
    run, setting = fastest({"": Forward(call, captures=not job.synchronised)}, stage, job.synchronised, calls)
    return Ready(run, functools.partial(check, stage, run, task.verify), _setting(task, setting))


def peer(loaded: Callable[[], LoadedJob], name: str, build: Build, calls: int) -> Ready:
    task = loaded()
    job, stage = task.job, task.stage
    if not isinstance(stage, TorchStage):
        raise UnavailableError("torch for CUDA is not installed")
    with explained(name):
        x, *more = task.x
        variants = build(GpuTask(job.net, job.precision, IO[job.io], x, tuple(more), job.module), stage)
        run, setting = fastest(variants, stage, job.synchronised, calls)
    return Ready(
        run,
        functools.partial(check, stage, run, functools.partial(task.verify, slack=PEER_SLACK)),
        _setting(task, setting),
    )


def _setting(task: LoadedJob, *notes: str) -> str:
    verified = f"checked on {len(task.verified)} rows" if len(task.verified) < task.job.B else ""
    return ", ".join(filter(None, [*notes, "random data, the same in every call: what fits stays in L2", verified]))
