"""Start a run: create or reload its plan, cut the chunks, create the engines here and on the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.errors import DeviceError, InputError
from onchip.network.graph import Network
from onchip.network.reading import is_count
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import (
    array_weights,
    plan_digest,
    plan_record,
    plan_to_json,
    recorded_device,
    recorded_kind,
)
from onchip.plan.planner import make_plan
from onchip.plan.scale_out import choose_ranks
from onchip.runtime.backend import Backend
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.cpu.weights import large_weights
from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda
from onchip.runtime.distributed.leader import RankGroup, pack_sources
from onchip.runtime.distributed.messages import DEADLINE_S, Orders
from onchip.runtime.distributed.ranks import Ranks, rank_threads
from onchip.runtime.engine import Engine, read_plan
from onchip.runtime.io.output import PartialOutput
from onchip.runtime.io.row_sources import Source
from onchip.runtime.io.stream import Chunk, chunk_rows, chunks_of, cut_rows, reads_ahead, share_rows
from onchip.runtime.placement import device_name, find_device, kernels_for, place, plan_and_reason


@dataclass(frozen=True)
class RunOptions:
    device: str = "auto"
    threads: int | None = None
    gpus: tuple[int, ...] = ()  # GPUs of this process; empty: one device
    batch: int | None = None  # rows per chunk
    deadline_s: float = DEADLINE_S
    records: bool = False  # the other ranks record their calls and send them to rank 0


def start_job(
    net: Network,
    sources: Sequence[Source],
    output: PartialOutput | None,
    job: Job,
    how: RunOptions,
    ranks: Ranks,
    group: RankGroup,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> tuple[list[Engine], list[Chunk]]:
    """The warmed-up engines of this process and the job's chunks; the other ranks prepare at the same time.

    on_plan  called with the plan before the weights are computed
    """
    if how.gpus and ranks.size > 1:
        got, hint = f"--gpus and {ranks.size} ranks", "use only one of the two: each rank has one GPU"
        raise InputError("several GPUs per rank", got=got, expected="one GPU per rank", hint=hint)
    total = len(sources[0])
    names = [f"cuda:{index}" for index in how.gpus]
    placed: list[tuple[Plan, Backend, str]] = []
    if output is not None and output.is_resumed:
        with output.manifest_errors():
            names = names or [recorded_kind(output.plan) if how.device == "auto" else how.device]
            plan = _rebuild_plan(output.plan, net, job, names[0])
        cuts = output.cuts
    else:
        plan, backend, chosen = place(net, names[0] if names else how.device, job, how.threads, how.batch)
        names = names or [chosen.partition(" ")[0]]
        if plan.device.kind == "cpu" and ranks.size > 1:
            backend = CpuBackend(rank_threads(how.threads, ranks), ranks)
        cuts = _cuts(plan, total, how.batch, len(names) * ranks.size)
        placed = [(plan, backend, chosen)]
    on_plan(plan)
    kind, text, weights = plan.device.kind, plan_to_json(plan), array_weights(plan.network)
    threads = rank_threads(how.threads, ranks) if kind == "cpu" else None
    for name in names[len(placed) :]:
        placed.append((*read_plan(text, weights, (name, threads), ranks), name))
    if output is not None:
        output.begin(plan_record(plan), cuts)
    if ranks.size > 1:
        name = device_name(how.device)
        requested = name if name.startswith("cuda:") else kind
        slices = None if output is None else output.slices
        meets = kind == "cpu" and bool(large_weights(placed[0][0]))
        packed = pack_sources(sources)
        group.begin(Orders(text, weights, requested, how.threads, packed, slices, how.deadline_s, meets, how.records))
    engines = [Engine(*each) for each in placed]
    for engine in engines:
        engine.warm_up()
    return engines, chunks_of(cuts, total)


def _rebuild_plan(record: Any, net: Network, job: Job, name: str) -> Plan:
    """The plan of a resumed run, rebuilt with the recorded rates: a plan read from a file could compute anything.

    record  a plan_record read from a file
    """
    recorded_kind(record)
    device = recorded_device(record, find_device(name)[0])
    plan = make_plan(net, device, kernels_for(device), job)
    if plan_digest(plan) != record["sha256"]:
        raise InputError(
            "cannot resume the run: its plan has changed", got="other kernels, or other derived weights",
            expected="the plan that ran the finished chunks", hint="start over without --resume",
        )  # fmt: skip
    return plan


def ranks_for(net: Network, device: str, job: Job) -> tuple[int, str]:
    """How many ranks of this machine should run the job, and why."""
    device = device_name(device)
    if device == "auto":
        device = "cuda" if cuda_devices() else "cpu"
    if not device.startswith("cuda"):
        return 1, "one process uses all cores"
    if device != "cuda":
        return 1, f"{device} is one GPU"
    return choose_ranks(plan_and_reason(net, device, job)[0], job.batch, len(cuda_devices()))


def _cuts(plan: Plan, total: int, batch: int | None, workers: int) -> tuple[int, ...]:
    """The first row of each chunk of a job."""
    rows = chunk_rows(plan) if batch is None else batch
    if batch is None and workers > 1:
        return share_rows(plan, total, rows, workers)
    return cut_rows(total, rows, reads_ahead(plan))


def parse_gpus(text: str) -> tuple[int, ...]:
    """ "4" is the first four GPUs, "0,2" the GPUs with these indices."""
    parts = text.split(",")
    if not all(is_count(part.strip()) for part in parts):
        raise InputError("bad --gpus", got=text, expected="a number of GPUs, or indices such as 0,1", hint="--gpus 0,1")
    indices = tuple(int(part) for part in parts)
    count = len(cuda_devices())
    if len(indices) == 1:
        indices = tuple(range(min(indices[0], count + 1)))  # one too many is enough for the error below
    if not indices or max(indices) >= count:
        got = f"--gpus {text}, of {count} here" + (f": {why_no_cuda()}" if not count else "")
        hint = f"--gpus {count}" if count else "--device cpu"
        raise DeviceError("no such GPUs", got=got, expected="GPUs of this machine", hint=hint)
    return indices
