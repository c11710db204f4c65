"""Cases of inference on a GPU over rows of the host or a file: copy in, kernels, copy out, by the host's clock."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onchip.bench.cases.gpu_inference import NAIVE, verified_rows
from onchip.bench.cases.inference import PEER_SLACK
from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.options import Options
from onchip.bench.peers.cpu import explained
from onchip.bench.stage import Stage, TorchStage, make_stage
from onchip.errors import DeviceError, PlanError
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth, Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.runtime.engine import Engine, compile
from onchip.runtime.io.row_sources import open_input_rows
from onchip.runtime.io.stream import chunk_rows, run_rows

PACE = Pace(rounds=3, block_s=0.15, warm_up_s=0.01, pause_s=0, min_runs=2, max_runs=40)


@dataclass(frozen=True, eq=False)
class HostJob:
    """A case: a network over B rows, from host memory to host memory."""

    case: str
    net: Network  # its inputs and outputs have the host's dtypes
    B: int
    inputs: Callable[[int], Array]  # B -> rows; called when the first engine is prepared
    precision: str
    truth: Callable[[Array, str], Truth]  # (rows, dtype of the baseline error)
    verified: int
    compiled: Mapping[str, Any] = field(default_factory=dict)  # further options of onchip's compile
    is_pinned: bool = True  # pinned memory; else pageable


@dataclass(frozen=True, eq=False)
class LoadedHostJob:
    """A job in memory: every engine gets the same arrays and the same reference."""

    job: HostJob
    stage: Stage
    x: Array
    y: Array  # every engine writes here
    verified: Array  # indices of the checked rows
    truth: Truth

    def ready(self, run: Callable[[], object], slack: float, *notes: str) -> Ready:
        def check() -> Verdict:
            self.y.fill(np.nan if self.y.dtype.kind == "f" else 0)
            run()
            verdict = self.truth.verify(self.y[self.verified])
            return Verdict(verdict.error, slack * verdict.allowed)

        setting = [
            "random data",
            "pinned memory" if self.job.is_pinned else "",
            *notes,
            f"checked on {len(self.verified)} rows",
        ]
        return Ready(run, check, ", ".join(filter(None, setting)))


def load_job(job: HostJob, index: int) -> LoadedHostJob:
    stage, x, output = make_stage(index), job.inputs(job.B), job.net.output
    y = np.empty((job.B, *output.row_shape), numpy_dtype(output.dtype))
    if job.is_pinned:
        rows, x, y = x, stage.pinned(x.shape, x.dtype.name), stage.pinned(y.shape, output.dtype)
        x[...] = rows
    verified = verified_rows(job.B, job.verified)
    return LoadedHostJob(job, stage, x, y, verified, job.truth(x[verified], NAIVE[job.precision]))


Build = Callable[[LoadedHostJob, TorchStage], tuple[Callable[[], object], str]]  # runs all rows, x to y; its setting


def host_cases(
    workload: str, jobs: Sequence[HostJob], options: Options, peers: Mapping[str, Build], unit: str
) -> list[Case]:
    """onchip and, on request, every peer, job by job.

    peers  engine -> its builder
    """
    index = int(options.device.partition(":")[2] or 0)
    load = functools.lru_cache(maxsize=1)(functools.partial(load_job, index=index))  # one job's arrays at a time
    cases = []
    for job in jobs:
        engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(_onchip, load, job, options.device)}
        if options.peers:
            engines |= {name: functools.partial(_peer, load, job, name, build) for name, build in peers.items()}
        cases += [
            Case(workload, job.case, name, prepare, work=job.B, unit=unit, precision=job.precision, pace=PACE)
            for name, prepare in engines.items()
        ]
    return cases


def _onchip(load: Callable[[HostJob], LoadedHostJob], job: HostJob, device: str) -> Ready:
    task, engine = load(job), _compile(job, device)
    return task.ready(lambda: engine(task.x, out=task.y), 1.0)


def _compile(job: HostJob, device: str) -> Engine:
    try:
        return compile(job.net, device, job.precision, batch_hint=job.B, **job.compiled)
    except (DeviceError, PlanError) as refused:
        raise UnavailableError(f"no kernel for {job.case}, {job.precision}: {refused.what}") from None


def _peer(load: Callable[[HostJob], LoadedHostJob], job: HostJob, name: str, build: Build) -> Ready:
    task = load(job)
    if not isinstance(task.stage, TorchStage):
        raise UnavailableError("torch for CUDA is not installed")
    with explained(name):
        run, setting = build(task, task.stage)
        run()
    return task.ready(run, PEER_SLACK, setting)


# -- files -------------------------------------------------------------------------------------------------


class _Collector:
    """A sink that stores the results for the check."""

    def __init__(self, y: Array) -> None:
        self._y, self._rows = y, 0

    def write(self, rows: Array) -> None:
        self._y[self._rows : self._rows + len(rows)] = rows
        self._rows += len(rows)


def file_cases(workload: str, job: HostJob, options: Options, unit: str) -> list[Case]:
    """onchip over raw values in a file, in chunks, as `onchip run` does it; the results are not written."""
    index = int(options.device.partition(":")[2] or 0)

    def prepare() -> Ready:
        task, engine = load_job(job, index), _compile(job, options.device)
        folder, chunk = Path(tempfile.mkdtemp(prefix="onchip-bench-")), chunk_rows(engine.plan)
        path = folder / "inputs.bin"
        task.x.tofile(path)

        def run() -> None:
            with open_input_rows(path, job.net.input) as source:
                run_rows(engine, [source], _Collector(task.y), chunk)

        weakref.finalize(run, shutil.rmtree, folder)
        return task.ready(run, 1.0, f"chunks of {chunk:,} rows, the file in the page cache")

    return [Case(workload, job.case, ONCHIP, prepare, work=job.B, unit=unit, precision=job.precision, pace=PACE)]
