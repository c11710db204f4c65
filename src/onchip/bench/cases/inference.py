"""Cases of inference: a network over rows in memory, by onchip and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.cpu import CHUNKS, INFERENCE, Build, Forward, Subject, explained, fastest
from onchip.measure.pace import Pace
from onchip.measure.truth import Rows as InputRows
from onchip.measure.truth import Truth, Verdict, as_inputs
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import plan

# onchip guarantees at most twice the naive error. Peers get more slack: torch has 2.1 times the naive error on faces.
PEER_SLACK = 10.0
BASELINE_ROWS = 1_000  # minimum rows of the naive run: on a single row its error may be small by chance


@dataclass(frozen=True, eq=False)
class Task:
    """B rows to run a network over; every engine gets the same rows and the same reference."""

    B: int
    x: Callable[[], InputRows]  # (B, ...)
    output: TensorType
    truth: Callable[[], Truth]  # of the checked rows, from the first on
    verified: int | None = None  # number of checked rows; None: all
    data: str = ""  # description of the rows, for the setting

    def ours(self, build: Callable[[], Engine], *notes: str) -> Ready:
        engine, x, out = build(), as_inputs(self.x()), self._empty()
        return Ready(lambda: engine(*x, out=out), lambda: self.verify(engine(*x)), self._setting(*notes))

    def peer(self, name: str, build: Callable[[], Mapping[str, Forward]], chunks: Sequence[int], *notes: str) -> Ready:
        """The fastest of a peer's variants, called with all rows or in `chunks` of these sizes."""
        with explained(name):
            run, setting = fastest(build(), as_inputs(self.x()), self._empty(), chunks)
        return Ready(run, lambda: self.verify(run(), PEER_SLACK), self._setting(setting, *notes))

    def verify(self, y: Array, slack: float = 1.0) -> Verdict:
        verdict = self.truth().verify(y[: self.verified])
        return Verdict(verdict.error if len(y) == self.B else float("inf"), slack * verdict.allowed)

    def _empty(self) -> Array:
        return np.empty((self.B, *self.output.row_shape), numpy_dtype(self.output.dtype))

    def _setting(self, *notes: str) -> str:
        few = self.verified is not None and self.verified < self.B
        return ", ".join(filter(None, [self.data, *notes, f"checked on {self.verified} rows" if few else ""]))


@dataclass(frozen=True, eq=False)
class Rows:
    """A case: its name and its rows."""

    case: str
    B: int
    inputs: Callable[[], InputRows]  # (B, ...); called once, when the first engine is prepared
    data: str = ""  # description of the rows


def inference_cases(
    workload: str,
    subject: Subject,
    jobs: Sequence[Rows],
    options: Options,
    *,
    peers: Mapping[str, Mapping[str, Build]] = INFERENCE,
    chunks: Sequence[int] = CHUNKS,
    unit: str = "rows/s",
    verified: int | None = None,
    truth: Callable[[InputRows], Truth] | None = None,
    pace: Pace | None = None,
) -> list[Case]:
    """onchip and, on request, every peer on the same rows, job by job.

    peers     engine -> its variants; each is built once for all jobs
    chunks    rows per call to try for a peer, besides all rows
    verified  number of rows to compare with float64, if all would take too long
    truth     of x, if it is not the network's float64 output
    """
    net = subject.net
    built = {name: functools.cache(functools.partial(build_variants, v, subject, options)) for name, v in peers.items()}
    cases = []
    for job in jobs:
        x = functools.cache(job.inputs)
        exact = functools.cache(functools.partial(_first_truth, truth or functools.partial(Truth, net), x, verified))
        task = Task(job.B, x, net.output, exact, verified, job.data)
        build = functools.partial(compile, net, options.device, threads=options.threads, batch_hint=job.B)
        engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(task.ours, build)}
        if options.peers:
            engines |= {name: functools.partial(task.peer, name, variants, chunks) for name, variants in built.items()}
        floor_ms = functools.partial(_floor_ms, net, options.device, job.B)
        cases += [
            Case(workload, job.case, name, prepare, work=job.B, unit=unit, floor_ms=floor_ms, threads=options.threads,
                 pace=pace)
            for name, prepare in engines.items()
        ]  # fmt: skip
    return cases


def _floor_ms(net: Network, device: str, B: int) -> float:
    return plan(net, device, Job(batch=B)).floor_us / 1e3


def build_variants(variants: Mapping[str, Build], subject: Subject, options: Options) -> dict[str, Forward]:
    return {name: build(subject, options.threads) for name, build in variants.items()}


def _first_truth(truth: Callable[[InputRows], Truth], x: Callable[[], InputRows], verified: int | None) -> Truth:
    return truth(tuple(rows[:verified] for rows in as_inputs(x())))
