"""Ranks: the processes of one job, on one machine or many. The only file that uses MPI.

A job of a single process takes the same path with one rank. A waiting rank sleeps between polls; it never spins.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from onchip import __version__
from onchip.errors import DeviceError, OnchipError, RankError
from onchip.runtime.distributed import shared_memory
from onchip.runtime.distributed.launchers import gpu_rank, launched_as

_TAG = 1
_PART_BYTES = 1 << 30  # per broadcast: MPI counts have 32 bits
_LAST_WORD_S = 2.0  # if rank 0 fails too, it aborts this rank within this time
_SLEEP_S = (0.0005, 0.005)  # between two polls: at first, and after _QUIET_POLLS polls without a message
_QUIET_POLLS = 20


class Ranks(Protocol):
    wait_s: float  # timeout of a collective

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int:
        """The rank within this machine."""
        ...

    @property
    def local_size(self) -> int: ...
    @property
    def gpu_rank(self) -> int:
        """Index among the ranks that see the same GPUs; selects the GPU, round robin."""
        ...

    @property
    def local_cores(self) -> int:
        """Cores that the ranks of this machine may use, in total."""
        ...

    @property
    def machine(self) -> int:
        """The index of this machine among the job's machines."""
        ...

    @property
    def machines(self) -> int: ...
    @property
    def hosts(self) -> tuple[str, ...]:
        """The host name of every rank."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank; arrays in it are sent without a copy."""
        ...

    def send(self, to: int, message: Any) -> None:
        """Asynchronous: returns at once."""
        ...

    def receive(self) -> tuple[int, Any] | None:
        """A received message and its sender; None if there is none."""
        ...

    def exchange(self, arrays: Sequence[Any], cuts: Sequence[int]) -> None:
        """Allgather: rank r has rows cuts[r] .. cuts[r + 1] - 1 of each array; afterwards every rank has all."""
        ...

    def exchange_machines(self, array: Any, cuts: Sequence[int]) -> None:
        """The same between machines: machine m has rows cuts[m] .. cuts[m + 1] - 1 of a shared array."""
        ...

    def share(self, nbytes: int) -> Any:
        """Zeroed memory shared by the ranks of a machine; None unless all ranks of the job can map it. Collective."""
        ...

    def meet(self, error: OnchipError | None = None) -> None:
        """Barrier. If one rank passes an error, it is raised on all ranks."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether this rank is done."""
        ...

    def leave(self, code: int | None = None) -> None:
        """Without a code: this rank is done. With one: all ranks are aborted when this process exits."""
        ...


class OneRank:
    """A job of a single process."""

    rank, size, local_rank, local_size, gpu_rank, machine, machines, is_over = 0, 1, 0, 1, 0, 0, 1, True
    hosts = ("here",)
    wait_s = float("inf")

    @property
    def local_cores(self) -> int:
        return len(available_cores())

    def broadcast(self, value: Any) -> Any:
        return value

    def send(self, to: int, message: Any) -> None:
        raise AssertionError("there is no other rank")

    def receive(self) -> tuple[int, Any] | None:
        return None

    def exchange(self, arrays: Sequence[Any], cuts: Sequence[int]) -> None:
        pass

    def exchange_machines(self, array: Any, cuts: Sequence[int]) -> None:
        pass

    def share(self, nbytes: int) -> Any:
        return None

    def meet(self, error: OnchipError | None = None) -> None:
        if error is not None:
            raise error

    def leave(self, code: int | None = None) -> None:
        pass


class MpiRanks:
    """The processes that an MPI launcher started together."""

    def __init__(self, expected: int) -> None:
        import socket

        try:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise DeviceError(
                "cannot reach the other ranks", got=str(error).splitlines()[0], expected="mpi4py and an MPI library",
                hint="pip install 'onchip[mpi]', or only mpi4py if the machine has an MPI installed",
            ) from None  # fmt: skip
        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        if self.size == 1 < expected:
            raise DeviceError(
                "this rank sees no others", got=f"{expected} started, 1 seen by {MPI.Get_library_version().split()[0]}",
                expected="mpiexec and mpi4py of the same MPI", hint="python -m mpi4py --mpi-library-version",
            )  # fmt: skip
        self._local = local = same_machine(self._comm, MPI)
        self.local_rank, self.local_size = local.rank, local.size
        self.gpu_rank = gpu_rank(local.rank, local.size)
        self._firsts = self._comm.Split(0 if local.rank == 0 else MPI.UNDEFINED)  # the first rank of each machine
        first = (self._firsts.rank, self._firsts.size) if local.rank == 0 else None
        self.machine, self.machines = local.bcast(first)
        self.local_cores = len(set().union(*local.allgather(available_cores())))
        self.wait_s = float("inf")
        versions_of = self._comm.allgather((socket.gethostname(), __version__))
        self.hosts = tuple(host for host, _ in versions_of)
        self._check_versions([version for _, version in versions_of])
        self._sent: list[tuple[Any, Any]] = []  # requests in flight, and their buffers
        self.is_over, self._code = False, 1
        atexit.register(self._end)  # before MPI's finalise, which would wait for hanging ranks

    def _check_versions(self, versions: Sequence[str]) -> None:
        """Raise DeviceError on rank 0 if a rank has another version of onchip: results may differ."""
        other = next((rank for rank, version in enumerate(versions) if version != versions[0]), None)
        if other is None:
            return
        if self.rank:
            raise SystemExit(DeviceError.exit_code)
        raise DeviceError(
            f"rank {other} on {self.hosts[other]} runs another version of onchip", got=f"onchip {versions[other]}",
            expected=f"onchip {versions[0]}, as rank 0 on {self.hosts[0]}",
            hint=f"pip install onchip=={versions[0]} on every machine",
        )  # fmt: skip

    def broadcast(self, value: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append) if self.rank == 0 else b""
        raw = [np.frombuffer(part.raw(), np.uint8) for part in buffers]
        sizes = np.array([len(raw), len(data)], np.int64)
        self._broadcast(sizes)
        lengths = np.array([len(part) for part in raw], np.int64) if self.rank == 0 else np.empty(sizes[0], np.int64)
        self._broadcast(lengths)
        if self.rank:
            raw = [np.empty(length, np.uint8) for length in lengths]
        head = np.frombuffer(bytearray(data), np.uint8) if self.rank == 0 else np.empty(sizes[1], np.uint8)
        for part in (head, *raw):
            self._broadcast(part)
        return value if self.rank == 0 else pickle.loads(head.tobytes(), buffers=raw)

    def _broadcast(self, array: Any) -> None:
        data = array.view(np.uint8)
        for start in range(0, len(data), _PART_BYTES):
            self._wait(self._comm.Ibcast([data[start : start + _PART_BYTES], self._mpi.BYTE], root=0))

    def send(self, to: int, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        self._sent.append((self._comm.Isend([data, self._mpi.BYTE], to, _TAG), data))

    def receive(self) -> tuple[int, Any] | None:
        self._sent = [entry for entry in self._sent if not entry[0].Test()]
        status = self._mpi.Status()
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            return None
        data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        source = status.Get_source()
        self._comm.Recv([data, self._mpi.BYTE], source, _TAG)
        return source, pickle.loads(data.data)

    def exchange(self, arrays: Sequence[Any], cuts: Sequence[int]) -> None:
        for array in arrays:
            row_bytes = array[:1].nbytes
            offsets = [cut * row_bytes for cut in cuts]
            counts = [stop - start for start, stop in pairwise(offsets)]
            all_rows = [array, counts, offsets[:-1], self._mpi.BYTE]
            self._wait(self._comm.Iallgatherv(self._mpi.IN_PLACE, all_rows))

    def exchange_machines(self, array: Any, cuts: Sequence[int]) -> None:
        if self.local_rank:
            return
        row = self._mpi.BYTE.Create_contiguous(array[:1].nbytes).Commit()  # counts are rows: MPI counts have 32 bits
        counts = [stop - start for start, stop in pairwise(cuts)]
        self._wait(self._firsts.Iallgatherv(self._mpi.IN_PLACE, [array, counts, cuts[:-1], row]))
        row.Free()

    def share(self, nbytes: int) -> Any:
        self.meet()
        memory, path = None, ""
        with contextlib.suppress(OSError):
            if self.local_rank == 0:
                path, memory = shared_memory.create(nbytes)
        path = self._local.bcast(path)
        with contextlib.suppress(OSError):
            if self.local_rank and path:
                memory = shared_memory.attach(path, nbytes)
        all_can = self._comm.allreduce(memory is not None, self._mpi.LAND)
        if self.local_rank == 0 and path:
            shared_memory.forget(path)
        return memory if all_can else None

    def meet(self, error: OnchipError | None = None) -> None:
        failed = np.array([0 if error is None else self.rank + 1])
        self._wait(self._comm.Iallreduce(self._mpi.IN_PLACE, failed, self._mpi.MAX))
        if failed[0]:
            rank = int(failed[0]) - 1
            raise of_rank(self._comm.bcast(error, root=rank), rank, self.hosts[rank])

    def _wait(self, request: Any) -> None:
        started = time.monotonic()
        for _ in Naps():
            if request.Test():
                return
            if time.monotonic() - started > self.wait_s:
                raise silent("a rank hangs while weights are computed", self.wait_s)

    def leave(self, code: int | None = None) -> None:
        self.is_over, self._code = code is None, code or 0

    def _end(self) -> None:
        if not self.is_over and not self._mpi.Is_finalized():
            sys.stderr.flush()
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 2)  # the error is already printed; this hides MPI's own abort message
            self._comm.Abort(self._code)


def same_machine(comm: Any, mpi: Any) -> Any:
    """The ranks of this machine, according to MPI."""
    return comm.Split_type(mpi.COMM_TYPE_SHARED)


_world: MpiRanks | None = None  # a singleton: MPI is initialised once per process


def find_ranks() -> Ranks:
    """The ranks of this job: MPI's if a launcher started this process, else a single one."""
    global _world
    launched = launched_as()
    if launched is None or launched[1] == 1:
        return OneRank()
    _world = _world or MpiRanks(launched[1])
    _world.is_over, _world.wait_s = False, float("inf")
    return _world


def silence_other_ranks(ranks: Ranks) -> None:
    """Only rank 0 prints: the output of another rank is shown only if that rank alone fails."""
    if ranks.rank == 0:
        return
    shown, hidden = sys.stderr, io.StringIO()
    sys.stdout = sys.stderr = hidden

    def print_hidden() -> None:
        if not ranks.is_over:
            time.sleep(_LAST_WORD_S)
            print(f"rank {ranks.rank} on {ranks.hosts[ranks.rank]}: {hidden.getvalue()}", file=shown)

    atexit.register(print_hidden)


class Naps:
    """A polling loop with short sleeps, longer after _QUIET_POLLS quiet polls; `news` ends a sleep."""

    def __init__(self) -> None:
        self._news = threading.Event()

    def news(self) -> None:
        """End the sleep: a message arrived or another thread has a result."""
        self._news.set()

    def __iter__(self) -> Iterator[None]:
        quiet = 0
        while True:
            yield
            quiet = 0 if self._news.wait(_SLEEP_S[quiet > _QUIET_POLLS]) else quiet + 1
            self._news.clear()


def wait_for(ranks: Ranks, seconds: float | None, what: str) -> tuple[int, Any]:
    """The next message; RankError if none arrives within `seconds`. None: no limit."""
    started = time.monotonic()
    for _ in Naps():
        if (found := ranks.receive()) is not None:
            return found
        if seconds is not None and time.monotonic() - started > seconds:
            break
    assert seconds is not None
    raise silent(what, seconds)


def silent(what: str, seconds: float) -> RankError:
    """The error for a rank that sent no message for `seconds`."""
    hint = "a longer --deadline if it is only slow; --resume continues from finished chunks"
    return RankError(what, got=f"no message for {seconds:g} s", expected="a message", hint=hint)


def gather_all(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's value, on every rank; waits for the slowest."""
    values = [value] * ranks.size
    if ranks.rank:
        ranks.send(0, value)
    for _ in range(ranks.size - 1 if ranks.rank == 0 else 0):
        source, answer = wait_for(ranks, None, "")
        values[source] = answer
    found: list[Any] = ranks.broadcast(values)
    return found


def name_of(rank: int, ranks: Ranks) -> str:
    return f"rank {rank} on {ranks.hosts[rank]}"


def of_rank(error: OnchipError, rank: int, host: str) -> OnchipError:
    """The same error, with its rank and host."""
    what = f"{error.what} (rank {rank} on {host})"
    return type(error)(what, got=error.got, expected=error.expected, hint=error.hint)


def rank_device(device: str, ranks: Ranks, gpus: int) -> str:
    """A rank's device: "cuda" becomes a GPU of its machine, by gpu_rank; other names are unchanged."""
    if device != "cuda" or ranks.size == 1 or gpus == 0:
        return device
    return f"cuda:{ranks.gpu_rank % gpus}"


def rank_threads(threads: int | None, ranks: Ranks) -> int | None:
    """A rank's CPU threads: the ranks of a machine share its cores, unless `threads` is given."""
    if threads is not None or ranks.local_size == 1:
        return threads
    return max(1, min(len(available_cores()), ranks.local_cores // ranks.local_size))


def available_cores() -> set[int]:
    """The indices of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
