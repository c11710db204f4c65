"""Training runs over MPI ranks: every rank calls the same function, trains its share and receives all results.

Results are bit-identical to those of one process: all ranks use rank 0's plans, and each run is trained by one rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.errors import InputError, KernelError, OnchipError
from onchip.kernels.cpu.train.step import BLOCK
from onchip.network.layers import BatchMean
from onchip.plan.plan import Plan
from onchip.runtime.cuda.devices import cuda_devices
from onchip.runtime.distributed.ranks import Ranks, gather_all, rank_device, rank_threads
from onchip.runtime.placement import device_name
from onchip.train.training_run import Epoch, FitResult, PlannedRun


@dataclass(frozen=True, eq=False)
class _Packed:
    """A FitResult without the network graph and the plan, which every rank has already."""

    weights: Mapping[str, Any]
    losses: Any
    history: tuple[Epoch, ...]
    best_epoch: int
    seconds: float
    chosen: str
    state: dict[str, Any]
    gpu_bytes: int
    process_bytes: int
    gpu_busy: float | None


def share_of(ranks: Ranks, runs: int) -> list[int]:
    """Indices of the runs that this rank trains."""
    return list(range(ranks.rank, runs, ranks.size))


def plan_device(text: str, ranks: Ranks, device: str, threads: int | None) -> tuple[str, int | None]:
    """The device name and thread count with which this rank trains rank 0's plan (JSON)."""
    kind = json.loads(text)["device"]["kind"]
    if kind == "cpu":
        return "cpu", rank_threads(threads, ranks)
    name = device_name(device)
    return rank_device("cuda" if name == "auto" else name, ranks, len(cuda_devices())), None


def check_batches(plan: Plan, rows: int, ranks: Ranks) -> None:
    """Raise InputError if these ranks cannot share the batches of a run on `rows` rows, or if sharing does not pay."""
    batch = min(plan.job.batch, rows)
    if plan.whole_step is None:
        got, hint = f"{ranks.size} ranks for '{plan.network.name}'", "one process, or --seeds: each rank trains some"
        if any(isinstance(node.layer, BatchMean) for node in plan.network.nodes):
            got += ", whose batch norms need the statistics of the whole batch"
        raise InputError("ranks share only batches of MLPs", got=got, expected="an MLP", hint=hint)
    if plan.device.kind != "cpu":
        got, hint = f"{ranks.size} ranks on {plan.device.name}", "one process, or --seeds: each rank trains some"
        raise InputError("only ranks on CPUs can share batches", got=got, expected="--device cpu", hint=hint)
    if batch < BLOCK * ranks.size:
        raise InputError(
            "batches are too small to be shared by ranks", got=f"batches of {batch:,} rows, {ranks.size} ranks",
            expected=f"at least {BLOCK * ranks.size:,} rows: {BLOCK:,} per rank, as in a full batch",
            hint="one process: a message to another rank takes as long as a small step; or --seeds",
        )  # fmt: skip


def all_results(
    ranks: Ranks, local: Mapping[int, FitResult | KernelError] | OnchipError, planned: Sequence[PlannedRun]
) -> dict[int, FitResult | KernelError]:
    """Results of all ranks by run index; raises the error of a rank that failed.

    local  results of this rank's runs, or the error that ended them
    """
    if ranks.size == 1:
        if isinstance(local, OnchipError):
            raise local
        return dict(local)
    packed = local if isinstance(local, OnchipError) else {i: _pack(result) for i, result in local.items()}
    results: dict[int, FitResult | KernelError] = {}
    for rank, received in enumerate(gather_all(ranks, packed)):
        if isinstance(received, OnchipError):
            ranks.leave()
            what = f"{received.what} (rank {rank} on {ranks.hosts[rank]})"
            raise type(received)(what, got=received.got, expected=received.expected, hint=received.hint)
        results |= {i: _unpack(result, planned[i]) for i, result in received.items()}
    return results


def _pack(result: FitResult | KernelError) -> _Packed | KernelError:
    if isinstance(result, KernelError):
        return result
    return _Packed(
        dict(result.network.weights), result.losses, result.history, result.best_epoch, result.seconds, result.chosen,
        result.state, result.gpu_bytes, result.process_bytes, result.gpu_busy,
    )  # fmt: skip


def _unpack(packed: _Packed | KernelError, planned: PlannedRun) -> FitResult | KernelError:
    if isinstance(packed, KernelError):
        return packed
    return FitResult(
        planned.net.replace(weights=packed.weights), packed.losses, packed.history, packed.best_epoch, packed.seconds,
        planned.plan, packed.chosen, packed.state, packed.gpu_bytes, packed.process_bytes,
        packed.gpu_busy,
    )  # fmt: skip
