"""The frame of every ladder: rungs, each one idea above the one before, checked and then timed.

A new rung is a class with a name, an idea and `prepare`, which hands back what is timed; it goes into its
ladder's tuple. Nothing else knows how many rungs there are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from onchip.errors import InputError, PlanError
from onchip.files import check_memory
from onchip.measure.pace import Pace, Timing, interleave, summarise
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.plan.floor import settle_floors


class Rows(Protocol):
    """What rungs work on: an array, or whatever else is sliced by rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


class Judge(Protocol):
    def judge(self, got: Array, /) -> Verdict: ...


X = TypeVar("X", bound=Rows)


class Rung(abc.ABC, Generic[X]):
    name: ClassVar[str]
    idea: ClassVar[str]  # one line: what this rung does that the one before does not
    report_ms: ClassVar[Mapping[int, float]] = {}  # rows -> what the report that it repeats measured
    precision: ClassVar[str] = "fp32"  # of its products; its floor is that of this precision
    max_rows: ClassVar[int | None] = None  # a slow rung is timed on this many rows and its time scaled

    @abc.abstractmethod
    def prepare(self, net: Network, x: X, threads: int) -> Callable[[], Array]:
        """Everything that need not be timed; the function handed back runs all of x and gives what is judged.

        Of inference that is y (B, D_out); of training the losses and the weights (truth.flat_run). The function may
        have a clock of its own (measure.OwnClock) and `facts` that are shown beside its time. PlanError: cannot run.
        """

    def judge(self, truth: Any, got: Array) -> Verdict:
        """What the ladder's judge says; a rung in another precision asks it another question."""
        verdict: Verdict = truth.judge(got)
        return verdict


@dataclass(frozen=True)
class Ladder(Generic[X]):
    name: str
    title: str
    rungs: tuple[type[Rung[X]], ...]
    network: Callable[[], Network]
    inputs: Callable[[int], X]  # B -> x (B, ...)
    floor_ms: Callable[[Network, int, str], float]  # (network, B, precision): no run is much faster
    rows: int  # B unless told otherwise
    truth: Callable[[Network, X], Judge]  # (network, x): the judge of a run over x
    checked: int | None = None  # a run over so many rows is judged; None: one over as many as are timed
    parts: int = 1  # the time that is told is that of a run divided by this: epochs
    device: str = "cpu"  # or "cuda", where the number of threads means nothing

    def pick(self, names: list[str] | None) -> list[Rung[X]]:
        """The rungs of these names, or all, from the lowest to the highest."""
        known = [rung.name for rung in self.rungs]
        chosen = {known_name(name, known, f"rung of the ladder {self.name}", "onchip ladder") for name in names or []}
        return [rung() for rung in self.rungs if not chosen or rung.name in chosen]


@dataclass(frozen=True)
class Step:
    """What one rung showed."""

    rung: str
    idea: str
    verdict: Verdict
    timing: Timing | None  # for all B rows; a wrong rung has no time
    rows: int  # rows it was timed on; fewer than B: the time is scaled
    report_ms: float | None
    floor_ms: float
    precision: str = "fp32"
    facts: Mapping[str, int | str] = field(default_factory=dict)  # what else is known: registers, shared bytes, ...


@dataclass(frozen=True)
class Climb:
    ladder: str
    title: str
    B: int
    threads: int | None  # of the CPU
    steps: tuple[Step, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # rung -> why it cannot run here

    @property
    def floors(self) -> dict[str, float]:
        """Milliseconds by precision, in the order of the rungs."""
        return {step.precision: step.floor_ms for step in self.steps}

    @property
    def all_right(self) -> bool:
        return all(step.verdict.is_right for step in self.steps)

    def speedups(self, i: int) -> tuple[float | None, float | None]:
        """How many times faster step i is than the first timed step, and than the timed step before it."""
        timed = [(j, s.timing.median_ms) for j, s in enumerate(self.steps) if s.timing is not None]
        mine = dict(timed).get(i)
        before = [ms for j, ms in timed if j < i]
        if mine is None or not before:
            return None, None
        return before[0] / mine, before[-1] / mine


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
    """Check every rung against float64, then time those that are right, in turns.

    measure_again  the device's rates, where a rung beats its floor; None: they are no measured ones
    """
    B = ladder.rows if rows is None else rows
    if B < 1:
        raise InputError("a ladder needs rows", got=str(B), expected="at least 1", hint=f"--rows {ladder.rows}")
    check_memory(B, f"--rows {B}")  # a row is a byte at least
    picked = ladder.pick(rungs)
    net, x = ladder.network(), ladder.inputs(B)
    truths: dict[int, Judge] = {}  # by the number of rows
    here, verdicts, runs, sizes, skipped = [], [], [], [], dict[str, str]()
    for rung in picked:
        progress(f"{rung.name}: preparing and checking")
        size = min(B, rung.max_rows or B)
        checked = min(size, ladder.checked or B)
        try:
            run = rung.prepare(net, x[:size], threads)
            short = run if checked == size else rung.prepare(net, x[:checked], threads)
        except PlanError as error:
            skipped[rung.name] = error.what
            continue
        if checked not in truths:
            truths[checked] = ladder.truth(net, x[:checked])
        here.append(rung)
        runs.append(run)
        sizes.append(size)
        verdicts.append(rung.judge(truths[checked], short()))
    right = [i for i, verdict in enumerate(verdicts) if verdict.is_right]

    def on_block(turn: int, i: int) -> None:
        progress(f"{here[right[i]].name}: timing, round {turn + 1}")

    blocks = interleave([runs[i] for i in right], pace or Pace(rounds=3, block_s=0.5), on_block)
    timings = {i: summarise(taken, B / sizes[i] / ladder.parts) for i, taken in zip(right, blocks, strict=True)}
    fastest: dict[str, float] = {}
    for i, timing in timings.items():
        precision = here[i].precision
        fastest[precision] = min(timing.median_ms, fastest.get(precision, timing.median_ms))
    floors = settle_floors(
        lambda: {rung.precision: ladder.floor_ms(net, B, rung.precision) for rung in here}, fastest, measure_again
    )
    steps = tuple(
        Step(
            rung.name, rung.idea, verdicts[i], timings.get(i), sizes[i], rung.report_ms.get(B),
            floors[rung.precision].ms, rung.precision,
            {**getattr(runs[i], "facts", {}), **floors[rung.precision].note},
        )
        for i, rung in enumerate(here)
    )  # fmt: skip
    return Climb(ladder.name, ladder.title, B, threads if ladder.device == "cpu" else None, steps, skipped)
