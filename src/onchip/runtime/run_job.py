"""Starting a run: the plan, or that of the run that is resumed; chunks; engines here and on the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onchip.errors import DeviceError, InputError
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import given_weights, plan_to_json
from onchip.plan.scale_out import choose_ranks
from onchip.runtime.backend import Backend
from onchip.runtime.cpu import CpuBackend
from onchip.runtime.cpu_weights import large_weights
from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda
from onchip.runtime.engine import Engine, read_plan
from onchip.runtime.output import PartialOutput
from onchip.runtime.placement import place, plan_and_reason
from onchip.runtime.rank_messages import DEADLINE_S, Orders
from onchip.runtime.ranks import Ranks, rank_threads
from onchip.runtime.row_sources import Source
from onchip.runtime.stream import Chunk, chunks_of, cut_rows, piece_rows, reads_ahead, share_rows
from onchip.runtime.team import Team, pack_sources
from onchip.spec.network import Network


@dataclass(frozen=True)
class RunOptions:
    device: str = "auto"
    threads: int | None = None
    gpus: tuple[int, ...] = ()  # of this process; else one device
    batch: int | None = None  # rows of a chunk
    debug: bool = False
    deadline_s: float = DEADLINE_S


def start_job(
    net: Network,
    sources: Sequence[Source],
    output: PartialOutput | None,
    job: Job,
    how: RunOptions,
    ranks: Ranks,
    team: Team,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> tuple[list[Engine], list[Chunk]]:
    """The engines of this process, ready, and the job's chunks; the other ranks get ready meanwhile.

    on_plan  hears the plan before weights are made
    """
    if how.gpus and ranks.size > 1:
        got, hint = f"--gpus and {ranks.size} ranks", "one of them: a rank has one GPU"
        raise InputError("several GPUs a rank", got=got, expected="one GPU a rank", hint=hint)
    total, text = len(sources[0]), "" if output is None else output.plan
    names = [f"cuda:{number}" for number in how.gpus]
    placed: list[tuple[Plan, Backend, str]] = []
    if text:
        kind = json.loads(text)["device"]["kind"]
        names = names or [kind if how.device == "auto" else how.device]
        weights = given_weights(net)
    else:
        plan, backend, chosen = place(net, names[0] if names else how.device, job, how.threads, how.batch)
        on_plan(plan)
        names = names or [chosen.partition(" ")[0]]
        kind, text, weights = plan.device.kind, plan_to_json(plan), given_weights(plan.network)
        if kind == "cpu" and ranks.size > 1:
            backend = CpuBackend(rank_threads(how.threads, ranks), ranks)
        cuts = _cuts(plan, total, how.batch, len(names) * ranks.size)
        placed = [(plan, backend, chosen)]
    threads = rank_threads(how.threads, ranks) if kind == "cpu" else None
    for name in names[len(placed) :]:
        placed.append((*read_plan(text, weights, (name, threads), ranks), name))
    if output is not None:
        output.begin(text, cuts if output.plan == "" else ())
        cuts = output.cuts
    if ranks.size > 1:
        asked = how.device if how.device.startswith("cuda:") else kind
        slices = None if output is None else output.slices
        meets = kind == "cpu" and bool(large_weights(placed[0][0]))
        packed = pack_sources(sources)
        team.begin(Orders(text, weights, asked, how.threads, how.debug, packed, slices, how.deadline_s, meets))
    engines = [Engine(*each, debug=how.debug) for each in placed]
    for engine in engines:
        engine.warm_up()
    return engines, chunks_of(cuts, total)


def ranks_for(net: Network, device: str, job: Job) -> tuple[int, str]:
    """How many ranks of this machine should do the job, and why."""
    if device == "auto":
        device = "cuda" if cuda_devices() else "cpu"
    if not device.startswith("cuda"):
        return 1, "a process has all cores already"
    if device != "cuda":
        return 1, f"{device} is one GPU"
    return choose_ranks(plan_and_reason(net, device, job)[0], job.batch, len(cuda_devices()))


def _cuts(plan: Plan, total: int, batch: int | None, workers: int) -> tuple[int, ...]:
    """Where the chunks of a job begin."""
    rows = piece_rows(plan) if batch is None else batch
    if batch is None and workers > 1:
        return share_rows(plan, total, rows, workers)
    return cut_rows(total, rows, reads_ahead(plan))


def parse_gpus(text: str) -> tuple[int, ...]:
    """ "4" is the first four GPUs, "0,2" those of these numbers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise InputError("bad --gpus", got=text, expected="a number of GPUs, or numbers as 0,1", hint="--gpus 0,1")
    numbers = tuple(int(part) for part in parts)
    if len(numbers) == 1:
        numbers = tuple(range(numbers[0]))
    count = len(cuda_devices())
    if not numbers or max(numbers) >= count:
        got = f"--gpus {text}, of {count} here" + (f": {why_no_cuda()}" if not count else "")
        hint = f"--gpus {count}" if count else "--device cpu"
        raise DeviceError("no such GPUs", got=got, expected="GPUs of this machine", hint=hint)
    return numbers
