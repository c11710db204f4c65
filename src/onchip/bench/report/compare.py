"""Compare two result files of one machine: which cases became faster or slower by more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.bench.report.results import Results, Row, machine_title
from onchip.errors import InputError

RESAMPLES, COVERAGE = 2000, 0.99  # of the bootstrap
MIN_CHANGE = 0.02  # smaller changes count as noise: the samples of one run do not show the spread between runs

FASTER, SLOWER, SAME, WRONG, GONE, NEW = "faster", "slower", "same", "wrong now", "gone", "new"


@dataclass(frozen=True)
class Change:
    """One engine at one case, in both files."""

    workload: str
    case: str
    engine: str
    precision: str
    old_ms: float | None
    new_ms: float | None
    speedup: float | None  # old time over new time
    low: float | None  # bounds of its bootstrap interval
    high: float | None
    verdict: str
    is_peer: bool

    @property
    def is_regression(self) -> bool:
        return not self.is_peer and self.verdict in (SLOWER, WRONG)


def compare_results(old: Results, new: Results) -> list[Change]:
    """In the order of the new file; cases that are gone come last. InputError if the machines differ."""
    machines = [machine_title(results.machine) for results in (old, new)]
    if machines[0] != machines[1]:
        raise InputError("the files are from different machines", got=" and ".join(machines), expected="one machine")
    before, after = ({_key(row): row for row in results.rows} for results in (old, new))
    changes = [_change(before.get(key), row) for key, row in after.items()]
    return changes + [_change(row, None) for key, row in before.items() if key not in after]


def peer_drift(changes: Sequence[Change]) -> float | None:
    """The median speedup of the peers: the effect of the machine and of their versions, not of onchip."""
    found = [each.speedup for each in changes if each.is_peer and each.speedup is not None]
    return statistics.median(found) if found else None


def bootstrap_speedup(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """The bootstrap interval of median(old) / median(new): COVERAGE of RESAMPLES. Deterministic."""
    random = np.random.default_rng(0)
    medians = [
        np.median(random.choice(np.asarray(samples, np.float64), (RESAMPLES, len(samples))), axis=1)
        for samples in (old, new)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def _key(row: Row) -> tuple[str, str, str, str, int | None]:
    return row.workload, row.case, row.engine, row.precision, row.threads


def _change(old: Row | None, new: Row | None) -> Change:
    row = new or old
    assert row is not None
    old_ms, new_ms = (each.median_ms if each is not None else None for each in (old, new))
    speedup = low = high = None
    if old is None or new is None:
        verdict = NEW if old is None else GONE
    elif old_ms is None or new_ms is None:
        verdict = WRONG if new_ms is None and old_ms is not None else SAME
    else:
        speedup = old_ms / new_ms
        low, high = bootstrap_speedup(old.samples_ms or (old_ms,), new.samples_ms or (new_ms,))
        is_noise = low <= 1 <= high or abs(math.log(speedup)) < math.log1p(MIN_CHANGE)
        verdict = SAME if is_noise else FASTER if speedup > 1 else SLOWER
    return Change(
        row.workload, row.case, row.engine, row.precision, old_ms, new_ms, speedup, low, high, verdict, row.is_peer
    )
