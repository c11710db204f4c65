"""The messages between the ranks of a job: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onchip.errors import OnchipError
from onchip.network.recipe import Array
from onchip.runtime.distributed.schedule import Finished
from onchip.runtime.io.slices import Slices
from onchip.runtime.io.stream import Chunk
from onchip.runtime.spans import Call, Resources

DEADLINE_S = 120.0  # a rank that spends longer on one chunk hangs
START_PART = 10  # factor on the deadline until a rank's first chunk: it compiles and computes weights


@dataclass(frozen=True, eq=False)
class Orders:
    """What rank 0 broadcasts before the first chunk."""

    plan: str  # JSON
    weights: Mapping[str, Array]
    device: str  # "cpu", "cuda" (each rank its own), "cuda:N"
    threads: int | None
    sources: bytes | None  # pickled; None: only rank 0 has the rows
    slices: Slices | None  # of the output
    deadline_s: float
    meets: bool = False  # ranks compute large weights together: one that fails reports it at `Ranks.meet`
    records: bool = False  # ranks record their calls and send them with Synced


# From a rank: ClockRequest, Ready, ChunkResult, Synced, Bye, Failed; from rank 0: ClockAnswer, Assignment, Rest, End.


@dataclass(frozen=True)
class Ready:
    device: str
    can_read: bool
    can_write: bool


@dataclass(frozen=True, eq=False)
class ChunkResult:
    finished: Finished
    y: Array | None  # from a rank that cannot write


@dataclass(frozen=True)
class Failed:
    error: OnchipError


@dataclass(frozen=True)
class ClockRequest:
    sent_ns: int  # on the rank's clock


@dataclass(frozen=True)
class ClockAnswer:
    sent_ns: int  # of the request
    ns: int  # on rank 0's clock


@dataclass(frozen=True, eq=False)
class Recorded:
    """The calls of a rank's engine, on rank 0's clock."""

    chosen: str  # the device
    calls: list[Call]
    resources: dict[int, Resources]
    clock: str
    lost: int


@dataclass(frozen=True, eq=False)
class Synced:
    """All rows written by this rank are on disk."""

    recorded: Recorded | None = None


@dataclass(frozen=True)
class Bye:
    pass


@dataclass(frozen=True, eq=False)
class Assignment:
    chunk: Chunk
    rows: tuple[Array, ...] | None  # for a rank that cannot read


@dataclass(frozen=True)
class Rest:
    """No chunk is left: sync the file and wait for End."""


@dataclass(frozen=True)
class End:
    pass
