"""Start ranks on this machine and supervise them: `onchip run --ranks 4`.

MPI's launcher starts them. Every rank also reports to the starting process over a socket, one line of JSON each, which
shows one progress bar and names the rank that died, its host and its chunk.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from onchip.errors import DeviceError, InputError, RankError

if TYPE_CHECKING:  # they import NumPy, which the starting process does not need
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.runtime.io.stream import Chunk

SOCKET = "ONCHIP_SUPERVISOR"  # in a rank's environment: the socket to report to
# Most ranks: per core, and on any machine. More would only wait for each other.
RANKS_PER_CORE, RANKS_ANYWHERE = 4, 16
_PROGRESS_S = 0.1  # between two progress reports: the reader shares a core with ranks
_GRACE_S = 3.0  # for the launcher to notice a dead rank, and for ranks to stop
# By default Open MPI refuses root and oversubscription, and binds ranks to cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
}  # fmt: skip

OnProgress = Callable[[str, float, float, str], None]  # what, total, done, text


# -- in a rank ---------------------------------------------------------------------------------------------


class Reporter:
    """Reports from a rank to the process that started it; does nothing without such a process."""

    def __init__(self, ranks: Ranks) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()  # the thread that runs chunks reports, too
        self._last_progress_s = float("-inf")  # time of the last progress report
        path = os.environ.get(SOCKET)
        if path is None or ranks.size == 1:
            return
        self._socket = _connect(path)
        self._send(rank=ranks.rank, pid=os.getpid(), host=ranks.hosts[ranks.rank])
        atexit.register(self._send, bye=True)  # a killed rank sends none
        threading.Thread(target=_end_after, args=(self._socket,), name="onchip-starter", daemon=True).start()
        if ranks.rank == 0:  # rank 0's output is forwarded; the launcher's is shown only on failure
            for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
                stream.flush()
                with _connect(path) as channel:
                    channel.sendall(json.dumps({"stream": fd}).encode() + b"\n")
                    os.dup2(channel.fileno(), fd)

    def chunk(self, chunk: Chunk | None) -> None:
        self._send(chunk=None if chunk is None else (chunk.number, chunk.start, chunk.stop))

    def progress(self, what: str, total: float, done: float, text: str) -> None:
        if time.monotonic() - self._last_progress_s > _PROGRESS_S:
            self._last_progress_s = time.monotonic()
            self._send(progress=(what, total, done, text))

    def _send(self, **what: Any) -> None:
        if self._socket is not None:
            with self._lock, contextlib.suppress(OSError):  # the starting process is gone: this rank will end, too
                self._socket.sendall(json.dumps(what).encode() + b"\n")


def _end_after(starter: socket.socket) -> None:
    """End this rank when its starting process is gone: the launcher has its own session and would keep running."""
    with contextlib.suppress(OSError):
        starter.recv(1)  # nothing is ever sent here: it returns when the other end closes
    os.kill(os.getpid(), signal.SIGTERM)  # an orderly stop, which keeps finished chunks
    time.sleep(_GRACE_S)
    os._exit(1)


def _connect(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.connect(path)
    return found


def is_supervised() -> bool:
    return SOCKET in os.environ


def check_started_once(requested: object, ranks: Ranks) -> None:
    """Refuse --ranks under a launcher, and a rank of --ranks that sees no others.

    requested  the value of --ranks, or None
    """
    if requested is not None and ranks.size > 1 and not is_supervised():
        got, hint = f"--ranks {requested} in {ranks.size} ranks", "omit --ranks: mpiexec sets the number"
        raise InputError("--ranks under an MPI launcher", got=got, expected="mpiexec or --ranks", hint=hint)
    if is_supervised() and ranks.size == 1:
        got, hint = f"--ranks {requested}, 1 seen", "use mpiexec and mpi4py of the same MPI"
        raise DeviceError("this rank sees no others", got=got, expected="a launcher of the same MPI", hint=hint)


# -- in the process that starts them -----------------------------------------------------------------------


@dataclass
class _Rank:
    rank: int
    pid: int
    host: str
    chunk: tuple[int, int, int] | None = None
    has_ended: bool = False


def run_ranks(count: int, args: Sequence[str], on_progress: OnProgress) -> int:
    """Run `onchip ARGS` as `count` ranks on this machine; returns the exit code. RankError if one of them dies."""
    cores = os.cpu_count() or 1
    most = max(RANKS_ANYWHERE, RANKS_PER_CORE * cores)
    if not 1 < count <= most:
        raise InputError(
            "bad number of ranks", got=str(count), expected=f"2 to {most} on this machine",
            hint=f"--ranks {max(2, cores)}, or mpiexec over several machines",
        )  # fmt: skip
    launcher = find_mpiexec()
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        got = "no mpiexec" if launcher is None else "no mpi4py"
        hint = "pip install 'onchip[mpi]', or only mpi4py if the machine has an MPI installed"
        raise DeviceError("cannot start ranks", got=got, expected="an MPI and mpi4py", hint=hint)
    with (
        tempfile.TemporaryDirectory(prefix=f"onchip-ranks-{os.getpid()}-", dir=_short_folder()) as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = os.path.join(folder, "supervisor")
        listener.bind(path)
        listener.listen(2 * count)
        home = str(Path(__file__).parents[3])
        before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        env = {**OPEN_MPI, **os.environ, SOCKET: path, "PYTHONPATH": os.pathsep.join([home, *before])}
        # -P: keep modules in the current folder from being imported.
        command = [launcher, "-n", str(count), sys.executable, "-P", "-m", "onchip", *args]
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        with process, _Watch(process, listener, on_progress) as watch:
            return watch.until_end()


def _short_folder() -> str:
    """The folder for temporary files, or /tmp: a socket path has at most 107 characters."""
    found = tempfile.gettempdir()
    return found if len(found) < 60 else "/tmp"


def find_mpiexec() -> str | None:
    """The launcher next to this Python, which the extra `mpi` installs, else the system's."""
    local = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    return local or shutil.which("mpiexec") or shutil.which("mpirun")


class _Connection:
    """Reports of a rank, or rank 0's stdout or stderr, which is forwarded to this process's."""

    def __init__(self, on_report: Callable[[int, dict[str, Any]], None]) -> None:
        self.rank: int | None = None
        self._on_report, self._rest = on_report, b""
        self._stream: TextIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, source: socket.socket) -> bool:
        """Handle received data; False at the end of the stream."""
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        self._rest += data
        while self._stream is None and b"\n" in self._rest:
            line, self._rest = self._rest.split(b"\n", 1)
            report = json.loads(line)
            if "stream" in report:
                self._stream = sys.stdout if report["stream"] == 1 else sys.stderr
                break
            self.rank = report.get("rank", self.rank)
            assert self.rank is not None
            self._on_report(self.rank, report)
        if self._stream is not None:
            self._stream.write(self._decoder.decode(self._rest))
            self._stream.flush()
            self._rest = b""
        return bool(data)


class _Watch:
    def __init__(self, process: subprocess.Popen[bytes], listener: socket.socket, on_progress: OnProgress) -> None:
        self._process, self._on_progress = process, on_progress
        self._ranks: dict[int, _Rank] = {}
        self._log = bytearray()  # output of the launcher
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, self._read_log)
        self._died: _Rank | None = None

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process running: rank 0 may stop in order, then all are killed."""
        if self._process.poll() is None and self._died is None:
            self._signal(self._ranks.get(0), signal.SIGTERM)
            self._watch_for(2 * _GRACE_S)
        if self._process.poll() is None:
            for rank in self._ranks.values():
                self._signal(rank, signal.SIGKILL)
            self._process.kill()
        self._selector.close()

    def until_end(self) -> int:
        self._watch_for(None)
        if self._died is not None:
            self._watch_for(_GRACE_S)
            at = "between chunks"
            if self._died.chunk is not None:
                number, start, stop = self._died.chunk
                at = f"at chunk {number}, rows {start:,} to {stop - 1:,}"
            raise RankError(
                f"rank {self._died.rank} on {self._died.host} died", got=f"process {self._died.pid} ended {at}",
                expected="every rank to finish", hint="--resume continues from finished chunks",
            )  # fmt: skip
        code = self._process.returncode
        if code and not (0 in self._ranks and self._ranks[0].has_ended):  # rank 0 has not reported the reason
            sys.stderr.write(self._log.decode(errors="replace"))
        return code if code in (0, 1, 2) else 1

    def _watch_for(self, seconds: float | None) -> None:
        """Until the launcher has ended, a rank died (if none had), or the time is over."""
        started, had_died = time.monotonic(), self._died is not None
        while self._process.poll() is None and (had_died or self._died is None):
            self._poll(0.05)
            if seconds is not None and time.monotonic() - started > seconds:
                return
        while self._poll(0.0):  # drain the last reports
            pass

    def _poll(self, seconds: float) -> bool:
        found = self._selector.select(seconds)
        for key, _ in found:
            key.data(key.fileobj)
        return bool(found)

    def _accept(self, listener: socket.socket) -> None:
        source, _ = listener.accept()
        connection = _Connection(self._on_report)

        def read(source: socket.socket) -> None:
            if not connection.read(source):
                self._selector.unregister(source)
                source.close()
                if connection.rank is not None:
                    self._ended(self._ranks[connection.rank])

        self._selector.register(source, selectors.EVENT_READ, read)

    def _on_report(self, number: int, report: dict[str, Any]) -> None:
        if "pid" in report:
            self._ranks[number] = _Rank(**report)
        elif "chunk" in report:
            self._ranks[number].chunk = report["chunk"]
        elif "progress" in report:
            self._on_progress(*report["progress"])
        elif "bye" in report:
            self._ranks[number].has_ended = True

    def _ended(self, rank: _Rank) -> None:
        if not any(other.has_ended for other in self._ranks.values()) and self._died is None:
            self._died = rank

    def _read_log(self, pipe: Any) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        self._log.extend(data)
        if not data:
            self._selector.unregister(pipe)

    def _signal(self, rank: _Rank | None, number: int) -> None:
        if rank is not None:
            with contextlib.suppress(OSError):
                os.kill(rank.pid, number)
