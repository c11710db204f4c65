"""Predicted time of a job on several devices, and its bottleneck, from the plan's estimates.

Nothing here is measured on a cluster: kernel and bus times come from the plan; the rest is assumed and printed as such.
Chunks are assigned on demand, so devices idle only at the end. Startup time does not shrink with more devices. Each GPU
computes its own derived weights, as that is faster than sending them. The CPU ranks of a machine share that work, and
machines share it too where exchanging the results is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.errors import InputError
from onchip.network.text import columns
from onchip.plan.host_call import call_us
from onchip.plan.plan import Plan
from onchip.plan.plan_json import array_weights

START_S = 3.0  # assumed: until ranks have started, connected and loaded their kernels
NETWORK_BANDWIDTH = 12.5e9  # assumed, bytes/s per machine: 100 Gbit/s
FILE_BANDWIDTH = 2e9  # assumed, bytes/s per machine: a shared file system
MAX_COUNT = 1 << 16  # of machines, and of GPUs per machine


@dataclass(frozen=True)
class Prediction:
    """Seconds of a job on several machines with several devices each."""

    nodes: int
    devices: int  # in total
    start_s: float  # to start the ranks; 0 for one process
    weights_s: float  # to send the stored weights to every machine, and to compute the derived ones
    kernels_s: float
    bus_s: float  # rows to the device and back; overlaps with kernels
    files_s: float  # rows from the file system and back; overlaps with kernels
    making: str  # which ranks compute which derived weights

    @property
    def seconds(self) -> float:
        return self.start_s + self.weights_s + max(self.kernels_s, self.bus_s, self.files_s)

    @property
    def bottleneck(self) -> str:
        """The step that takes longest."""
        seconds = {
            "starting ranks": self.start_s, "weights": self.weights_s, "kernels": self.kernels_s,
            "the bus": self.bus_s, "the file system": self.files_s,
        }  # fmt: skip
        return max(seconds, key=lambda name: seconds[name])


def predict(plan: Plan, rows: int, nodes: int = 1, devices_per_node: int = 1, threads: int | None = None) -> Prediction:
    """A prediction for `nodes` machines with `devices_per_node` GPUs each.

    On CPUs, devices are the ranks of a machine, which share its cores.

    threads  per rank, on a CPU; None: the ranks use all cores
    """
    for what, got in (("nodes", nodes), ("GPUs per node", devices_per_node)):
        if not 1 <= got <= MAX_COUNT:
            raise InputError(f"bad number of {what}", got=str(got), expected=f"1 to {MAX_COUNT:,}", hint="1")
    net, devices = plan.network, nodes * devices_per_node
    row_bytes = sum(net.types[name].row_bytes for name in {*net.inputs, *net.outputs})
    share = math.ceil(rows / devices)
    weight_bytes = sum(weight.nbytes for weight in array_weights(net).values())
    bus, make_us = plan.device.bus_bandwidth, plan.build_us
    making = "every GPU computes its own derived weights"
    if bus:
        kernels_us = plan.estimate_at(share)
    else:
        making = "derived weights are computed once per machine, by all its ranks"
        slower = 1.0 if threads is None else plan.device.units / min(plan.device.units, devices_per_node * threads)
        kernels_us, make_us = call_us(plan, math.ceil(rows / nodes)) * slower, make_us * slower
        if pays_to_exchange(make_us, plan.weight_bytes, nodes):
            make_us = make_us / nodes + plan.weight_bytes / NETWORK_BANDWIDTH * 1e6
            making = "all ranks compute derived weights in slices, then exchange them"
    return Prediction(
        nodes, devices,
        start_s=START_S if devices > 1 else 0.0,
        weights_s=weight_bytes / NETWORK_BANDWIDTH * math.ceil(math.log2(nodes)) + make_us * 1e-6,
        kernels_s=kernels_us * 1e-6,
        bus_s=share * row_bytes / bus if bus else 0.0,
        files_s=math.ceil(rows / nodes) * row_bytes / FILE_BANDWIDTH,
        making=making,
    )  # fmt: skip


def pays_to_exchange(make_us: float, nbytes: int, machines: int) -> bool:
    """Whether machines should each compute a slice of a weight and exchange the slices, instead of all of it each."""
    return make_us / machines + nbytes / NETWORK_BANDWIDTH * 1e6 < make_us


def choose_ranks(plan: Plan, rows: int, devices: int) -> tuple[int, str]:
    """How many of this machine's devices to use, and why: a small job finishes sooner on fewer."""
    found = [predict(plan, rows, 1, count) for count in range(1, devices + 1)]
    best = min(found, key=lambda each: each.seconds)
    other = found[-1] if best.devices == 1 else found[0]
    why = f"about {best.seconds:.2g} s"
    if other is not best:
        ranks = "rank" if other.devices == 1 else "ranks"
        why += f", {other.seconds:.2g} s as {other.devices} {ranks}: {other.bottleneck} takes most of it"
    return best.devices, why


def table(predictions: Sequence[Prediction]) -> str:
    head = ["nodes", "devices", "seconds", "start", "weights", "kernels", "bus", "files", "bottleneck"]
    rows = [
        [str(p.nodes), str(p.devices), *(f"{s:.3g}" for s in (
            p.seconds, p.start_s, p.weights_s, p.kernels_s, p.bus_s, p.files_s)), p.bottleneck]
        for p in predictions
    ]  # fmt: skip
    return "\n".join([
        columns(head, rows, right=range(8)),
        "A prediction. Kernels and bus: the plan's estimates. Assumed: "
        f"{START_S:g} s to start ranks, {NETWORK_BANDWIDTH / 1e9:g} GB/s between machines, "
        f"{FILE_BANDWIDTH / 1e9:g} GB/s of file access per machine. With {predictions[-1].devices:,} devices, "
        f"{predictions[-1].making}.",
    ])  # fmt: skip
