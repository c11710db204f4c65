"""Profile a network on random rows: its calls without a recorder and with one."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import DeviceError
from onchip.files import check_memory
from onchip.measure.profile import EngineProfile, Profile, summarise
from onchip.network.graph import Network
from onchip.network.text import size_text
from onchip.plan.kernel import Job
from onchip.plan.plan import format_us
from onchip.runtime.backend import Backend
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.engine import Engine
from onchip.runtime.io.row_sources import random_inputs
from onchip.runtime.placement import place
from onchip.runtime.process_memory import peak_process_bytes
from onchip.runtime.sampling import FIRST
from onchip.runtime.spans import Recorder

if TYPE_CHECKING:
    from onchip.runtime.cuda.gpu import Gpu

MIN_CALLS = 5
WRONG = 1.5  # an estimate is reported if it is off by more: estimates choose the kernels
SHOW_S = 0.1
ROUNDS = 4  # without and with a recorder, interleaved: a slow second of the machine affects both


@dataclass(frozen=True)
class NetworkProfile:
    """Times of one network on B rows in host memory."""

    engine: EngineProfile  # of the recorded calls
    B: int
    plan_ms: float  # to choose the kernels
    build_ms: float  # to compile or load them, and to compute their weights
    first_call_us: float
    call_us: float  # median of plain calls, from host to host
    p95_us: float
    overhead: float  # how much longer calls take with a recorder, as a share: of all calls, recorded or not
    weight_bytes: int
    peak_bytes: int  # the process's memory at its largest, on the host; 0 where the system does not report it
    gpu_peak_bytes: int  # allocated on the GPU at most, with other engines' weights; 0 on a CPU

    @property
    def rows_per_s(self) -> float:
        return self.B / self.call_us * 1e6

    @property
    def utilisation(self) -> float:
        """The share of a recorded call in which kernels run."""
        return self.engine.kernel_us / self.engine.call_us

    def fitted(self, width: int) -> str:
        """The table, and the times around it, in lines of at most `width` characters."""
        peaks = (self.peak_bytes, "host"), (self.gpu_peak_bytes, "GPU")
        peak = ", ".join(f"{size_text(nbytes)} on the {where}" for nbytes, where in peaks if nbytes)
        lines = [
            self.engine.fitted(width),
            f"plain calls: median {format_us(self.call_us)}, p95 {format_us(self.p95_us)}, "
            f"{self.rows_per_s:,.0f} rows/s; recording takes {self.overhead:+.1%} of their time",
            f"kernels run for {self.utilisation:.0%} of a recorded call; first call {format_us(self.first_call_us)}, "
            f"planned in {self.plan_ms:.1f} ms, built in {self.build_ms:.0f} ms",
            f"{size_text(self.weight_bytes)} of weights"
            + (f"; the process took at most {peak}" if peak else ""),
        ]  # fmt: skip
        lines += [
            f"estimate: {kernel.kernel} takes {kernel.mean_us / kernel.estimate_us:.1f}x its estimate"
            for kernel in self.engine.kernels
            if kernel.mean_us > 1 and not 1 / WRONG < kernel.mean_us / max(kernel.estimate_us, 1e-9) < WRONG
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows_per_s": self.rows_per_s, "utilisation": self.utilisation}


def profile_network(
    net: Network, B: int, device: str, job: Job, threads: int | None = None, seconds: float = 2.0,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> tuple[NetworkProfile, Profile]:  # fmt: skip
    """Run B random rows for about `seconds`, half of it with a recorder; returns times, and what a timeline shows."""
    ends = (*net.inputs, *net.outputs)
    check_memory(B * sum(net.types[name].row_bytes for name in ends), f"a batch of {B:,} rows")
    begin = time.perf_counter()
    placed = place(net, device, job, threads)
    planned = time.perf_counter()
    gpu = _gpu_of(placed[1])
    if gpu is not None:
        gpu.reset_peak()
    engine = Engine(*placed)
    engine.warm_up()
    built = time.perf_counter()
    x = tuple(np.ascontiguousarray(source.read(0, B)) for source in random_inputs(net, B, seed=0))
    first = _call_us(engine, x)
    recorder, plain, others = Recorder(engine.plan), list[float](), list[float]()  # others: with the recorder
    for number in range(2 * ROUNDS):
        is_recorded = number % 2 == 1
        show = functools.partial(progress, number / (2 * ROUNDS), "recorded calls" if is_recorded else "plain calls")
        show()
        engine.record(recorder if is_recorded else None)
        if is_recorded:
            before = len(recorder.calls)
            for _ in range(FIRST):
                _call_us(engine, x)
            del recorder.calls[before:]
        times = others if is_recorded else plain
        times += _sample(engine, x, seconds / (2 * ROUNDS), show)
    engine.record(None)
    if not recorder.calls:
        got = f"no times of {recorder.lost:,} calls, by {recorder.clock}"
        raise DeviceError("the calls could not be recorded", got=got, expected="a time of each kernel")
    median, p95 = np.percentile(plain, [50, 95])
    found = NetworkProfile(
        summarise(engine.chosen, recorder), B, (planned - begin) * 1e3, (built - planned) * 1e3, first, float(median),
        float(p95), statistics.fmean(others) / statistics.fmean(plain) - 1, engine.plan.weight_bytes,
        peak_process_bytes(), 0 if gpu is None else gpu.peak_bytes,
    )  # fmt: skip
    return found, Profile([(engine.chosen, recorder)])


def _sample(engine: Engine, x: tuple[Any, ...], seconds: float, show: Callable[[], None]) -> list[float]:
    """The time of each call for so long. `show` is called now and then: it may stop the program."""
    times_us, now = list[float](), time.perf_counter()
    until, shown = now + seconds, now
    while len(times_us) < MIN_CALLS or now < until:
        times_us.append(_call_us(engine, x))
        now = time.perf_counter()
        if now - shown > SHOW_S:
            shown = now
            show()
    return times_us


def _call_us(engine: Engine, x: tuple[Any, ...]) -> float:
    begin = time.perf_counter_ns()
    engine(*x)
    return (time.perf_counter_ns() - begin) / 1e3


def _gpu_of(backend: Backend) -> Gpu | None:
    if isinstance(backend, CpuBackend):
        return None
    from onchip.runtime.cuda.backend import CudaBackend

    assert isinstance(backend, CudaBackend)
    return backend.gpu
