"""What ranks say to each other in a job: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onchip.errors import OnchipError
from onchip.network.recipe import Array
from onchip.runtime.distributed.schedule import Finished
from onchip.runtime.io.slices import Slices
from onchip.runtime.io.stream import Chunk

DEADLINE_S = 120.0  # a rank that is at one chunk for longer hangs
START_PART = 10  # how many times as long a rank may take until its first chunk: it compiles, and makes weights


@dataclass(frozen=True, eq=False)
class Orders:
    """What rank 0 tells the others before the first chunk."""

    plan: str  # JSON
    weights: Mapping[str, Array]
    device: str  # "cpu", "cuda" (of each rank its own), "cuda:N"
    threads: int | None
    debug: bool
    sources: bytes | None  # pickled; None: the rows are rank 0's alone
    slices: Slices | None  # of the output
    deadline_s: float
    meets: bool = False  # large weights are made by all together: who cannot take part says so at `Ranks.meet`


# Messages. From a rank: Ready, Told, Synced, Bye, Failed; from rank 0: Deal, Rest, End.


@dataclass(frozen=True)
class Ready:
    device: str
    can_read: bool
    can_write: bool


@dataclass(frozen=True, eq=False)
class Told:
    finished: Finished
    y: Array | None  # for a rank that cannot write


@dataclass(frozen=True)
class Failed:
    error: OnchipError


@dataclass(frozen=True)
class Synced:
    """All that this rank wrote is on the disk."""


@dataclass(frozen=True)
class Bye:
    pass


@dataclass(frozen=True, eq=False)
class Deal:
    chunk: Chunk
    rows: tuple[Array, ...] | None  # for a rank that cannot read


@dataclass(frozen=True)
class Rest:
    """No chunk is left: wait for the end."""


@dataclass(frozen=True)
class End:
    pass
