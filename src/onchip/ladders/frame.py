"""The framework of every ladder: rungs, each one idea above the previous one, checked and then timed.

To add a rung, write a class with a name, an idea and `prepare`, which returns the function to time, and add it to its
ladder's tuple. No other code depends on the number of rungs.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from onchip.errors import InputError, PlanError
from onchip.files import check_memory
from onchip.kernels import reference
from onchip.measure.pace import Pace, Timing, interleave, summarise
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.plan.floor import settle_floors
from onchip.plan.kernel import Cost


class Rows(Protocol):
    """The input of a rung: an array, or any other type that is sliced by rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


class Verifier(Protocol):
    def verify(self, got: Array, /) -> Verdict: ...


X = TypeVar("X", bound=Rows)
UNMARKED = "two runs differ, but the rung is not marked"


class Rung(abc.ABC, Generic[X]):
    name: ClassVar[str]
    idea: ClassVar[str]  # one line: what this rung adds to the previous one
    why: ClassVar[str] = ""  # one line: why it is faster than the previous one, or slower; "" for a first rung
    report_ms: ClassVar[Mapping[int, float]] = {}  # rows -> time in the report that this rung reproduces
    report_on: ClassVar[Mapping[int, str]] = {}  # rows -> machine of that time, if not the report's single device
    precision: ClassVar[str] = "fp32"  # of its gemms; selects the floor
    max_rows: ClassVar[int | None] = None  # a slow rung is timed on this many rows and its time is scaled
    is_engine: ClassVar[bool] = False  # runs the engine's kernels, not its own
    # Why two runs may differ: a deliberate race, or a reduction order that depends on timing. Then their bits are not
    # compared, and compute-sanitizer does not run the rung.
    nondeterministic: ClassVar[str] = ""

    @abc.abstractmethod
    def prepare(self, net: Network, x: X, threads: int) -> Callable[[], Array]:
        """Do all work that is not timed; return a function that runs all of x.

        The function returns y (B, D_out) for inference, the losses and weights (truth.flat_run) for training. It may
        have its own clock (measure.OwnClock) and `facts`, which the table shows. PlanError if the rung cannot run.
        """

    def cost(self, net: Network, B: int) -> Cost | None:
        """The work of B rows, known without a device; None if it is not counted.

        Bytes are those of main memory: every pass over a tensor counts, a value that is cached on chip does not.
        """
        return None

    def verify(self, truth: Any, got: Array) -> Verdict:
        """Check a result with the ladder's reference. Rungs in another precision override this."""
        verdict: Verdict = truth.verify(got)
        return verdict


@dataclass(frozen=True)
class Ladder(Generic[X]):
    name: str
    title: str
    rungs: tuple[type[Rung[X]], ...]
    network: Callable[[], Network]
    inputs: Callable[[int], X]  # B -> x (B, ...)
    floor_ms: Callable[[Network, int, str], float]  # (network, B, precision) -> lower bound of the time
    rows: int  # default B
    truth: Callable[[Network, X], Verifier]  # (network, x) -> the reference for a run over x
    checked: int | None = None  # number of rows to check; None: as many as are timed
    parts: int = 1  # the reported time is that of a run divided by this, e.g. epochs
    device: str = "cpu"  # or "cuda", where `threads` is unused
    over_ranks: tuple[type[Rung[X]], ...] = ()  # the rungs of --ranks (ranks.py), instead of the others

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The default number of rows and those that the report measured, sorted."""
        return tuple(sorted({self.rows, *(B for rung in self.rungs for B in rung.report_ms)}))

    def pick(self, names: list[str] | None) -> list[Rung[X]]:
        """The rungs with these names, or all, in ladder order."""
        known = [rung.name for rung in self.rungs]
        chosen = {known_name(name, known, f"rung of the ladder {self.name}", "onchip ladder") for name in names or []}
        return [rung() for rung in self.rungs if not chosen or rung.name in chosen]


@dataclass(frozen=True)
class Step:
    """The result of one rung."""

    rung: str
    idea: str
    verdict: Verdict
    timing: Timing | None  # for all B rows; None for a wrong rung
    rows: int  # rows it was timed on; if fewer than B, the time is scaled
    report_ms: float | None
    floor_ms: float
    precision: str = "fp32"
    facts: Mapping[str, int | str] = field(default_factory=dict)  # other properties: registers, bytes per row, ...
    why: str = ""
    report_on: str = ""
    is_engine: bool = False
    nondeterministic: str = ""  # why two runs may differ; UNMARKED if they did
    kernels: tuple[Mapping[str, int | float | str], ...] = ()  # properties of each kernel, if there are several


@dataclass(frozen=True)
class Climb:
    ladder: str
    title: str
    B: int
    threads: int | None  # of the CPU
    steps: tuple[Step, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # rung -> why it cannot run

    @property
    def floors(self) -> dict[str, float]:
        """Milliseconds by precision, in the order of the rungs."""
        return {step.precision: step.floor_ms for step in self.steps}

    @property
    def all_right(self) -> bool:
        return all(step.verdict.is_right for step in self.steps)

    def speedups(self, i: int) -> tuple[float | None, float | None]:
        """Speedup of step i over the first timed step, and over the previous timed step."""
        timed = [(j, s.timing.median_ms) for j, s in enumerate(self.steps) if s.timing is not None]
        own_ms = dict(timed).get(i)
        earlier = [ms for j, ms in timed if j < i]
        if own_ms is None or not earlier:
            return None, None
        return earlier[0] / own_ms, earlier[-1] / own_ms


def climb(
    ladder: Ladder[X],
    *,
    rows: int | None = None,
    rungs: list[str] | None = None,
    threads: int = 1,
    pace: Pace | None = None,
    progress: Callable[[str], None] = lambda text: None,
    measure_again: Callable[[], object] | None = None,
) -> Climb:
    """Check every rung against float64, then time the correct ones, interleaved.

    measure_again  remeasures the device's rates if a rung beats its floor; None: the rates are not measured
    """
    B = ladder.rows if rows is None else rows
    if B < 1:
        raise InputError("a ladder needs rows", got=str(B), expected="at least 1", hint=f"--rows {ladder.rows}")
    check_memory(B, f"--rows {B}")  # a row is at least one byte
    picked = ladder.pick(rungs)
    net, x = reference.with_arrays(ladder.network()), ladder.inputs(B)  # random weights are drawn once
    truths: dict[int, Verifier] = {}  # by number of rows
    runnable, verdicts, reasons, runs, sizes, skipped = [], [], [], [], [], dict[str, str]()
    for rung in picked:
        progress(f"{rung.name}: preparing and checking")
        size = min(B, rung.max_rows or B)
        checked = min(size, ladder.checked or B)
        try:
            run = rung.prepare(net, x[:size], threads)
            checked_run = run if checked == size else rung.prepare(net, x[:checked], threads)
        except PlanError as error:
            skipped[rung.name] = error.what
            continue
        if checked not in truths:
            truths[checked] = ladder.truth(net, x[:checked])
        verdict = rung.verify(truths[checked], got := np.copy(checked_run()))
        differs = not rung.nondeterministic and not _same_bits(got, checked_run())
        runnable.append(rung)
        runs.append(run)
        sizes.append(size)
        verdicts.append(Verdict(math.inf, verdict.allowed) if differs else verdict)
        reasons.append(UNMARKED if differs else rung.nondeterministic)
    correct = [i for i, verdict in enumerate(verdicts) if verdict.is_right]

    def on_block(round_index: int, i: int) -> None:
        progress(f"{runnable[correct[i]].name}: timing, round {round_index + 1}")

    blocks = interleave([runs[i] for i in correct], pace or Pace(rounds=3, block_s=0.5), on_block)
    timings = {i: summarise(samples, B / sizes[i] / ladder.parts) for i, samples in zip(correct, blocks, strict=True)}
    fastest: dict[str, float] = {}
    for i, timing in timings.items():
        precision = runnable[i].precision
        fastest[precision] = min(timing.median_ms, fastest.get(precision, timing.median_ms))
    floors = settle_floors(
        lambda: {rung.precision: ladder.floor_ms(net, B, rung.precision) for rung in runnable}, fastest, measure_again
    )
    steps = tuple(
        Step(
            rung.name, rung.idea, verdicts[i], timings.get(i), sizes[i], rung.report_ms.get(B),
            floors[rung.precision].ms, rung.precision,
            {**getattr(runs[i], "facts", {}), **work_per_row(rung.cost(net, B), B), **floors[rung.precision].note},
            rung.why, rung.report_on.get(B, ""), rung.is_engine, reasons[i], tuple(getattr(runs[i], "kernels", ())),
        )
        for i, rung in enumerate(runnable)
    )  # fmt: skip
    return Climb(ladder.name, ladder.title, B, threads if ladder.device == "cpu" else None, steps, skipped)


def split_gemms(flop: int, precision: str) -> tuple[int, str]:
    """Flop, and the precision of their rate: "3xtf32" and "3xbf16" are three gemms in the lower precision."""
    return (3 * flop, precision[2:]) if precision.startswith("3x") else (flop, precision)


def work_per_row(cost: Cost | None, B: int) -> dict[str, int | str]:
    """Bytes per row, with a row's share of the weights, and flop per row; empty if the work is not counted."""
    if cost is None:
        return {}
    return {"bytes per row": round(cost.row_bytes + cost.fixed_bytes / B), "flop per row": cost.row_flop}


def _same_bits(a: Array, b: Array) -> bool:
    """Whether two results are bit-identical, NaNs too."""
    first, second = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b))
    return a.dtype == b.dtype and np.array_equal(first, second)
