"""training: steps of networks that are no MLPs: forward, backward and update. With --accuracy, LeNet-5 to 99 %."""

from __future__ import annotations

import functools
from collections.abc import Callable

from onchip.bench.cases import lenet
from onchip.bench.cases.step_job import StepJob, floor_ms, ours, theirs
from onchip.bench.cases.training_networks import NETWORKS
from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.torch_steps import make_step_peers
from onchip.measure.pace import Pace

BATCHES = {  # rows of a step; the batch of its description where none is listed
    "lenet5": (64, 512), "resnet8": (64, 512),
}  # fmt: skip
PRECISIONS = ("fp32", "bf16")
PACE = Pace(rounds=3, block_s=0.05, warm_up_s=0.02, pause_s=0, min_runs=3, max_runs=30)
CPU_PACE = Pace(rounds=5, block_s=0.5, warm_up_s=0.1, min_runs=3)


def cases(options: Options) -> list[Case]:
    is_cpu, result = options.device == "cpu", list[Case]()
    peers = make_step_peers(is_cpu) if options.peers else {}
    for name, network in NETWORKS.items():
        for batch in options.batches or BATCHES.get(name, (network.batch,)):
            for precision in PRECISIONS[:1] if is_cpu else PRECISIONS:
                job = StepJob(name, network, batch, precision, options.device, options.threads)
                engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(ours, job)}
                engines |= {peer: functools.partial(theirs, job, peer, build) for peer, build in peers.items()}
                result += [
                    Case("training", f"{name}, batch {batch}", engine, prepare, work=batch, precision=precision,
                         floor_ms=functools.partial(floor_ms, job), threads=options.threads if is_cpu else None,
                         pace=CPU_PACE if is_cpu else PACE)
                    for engine, prepare in engines.items()
                ]  # fmt: skip
    return result + (lenet.cases(options) if options.accuracy else [])
