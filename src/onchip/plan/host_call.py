"""The time of a call with host rows on a device, from the caller's array to the caller's array. Pure data.

A CPU's kernels read the rows in place. A GPU's rows cross the bus as runtime/cuda/staging.py copies them: few rows at
once, by the caller's thread; many in chunks, so that copies overlap with kernels.
"""

from __future__ import annotations

from onchip.network.graph import Network
from onchip.plan.device import Device
from onchip.plan.host_costs import HOST
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan, format_us
from onchip.plan.rewrites import rewrite

SLOT_BYTES = 8 << 20  # per chunk: 150 us of the bus, several times Python's overhead for it; slots fit into most L3s
OFTEN_BYTES = 16 << 10  # of rows that kernels which read an element more than once may read over the bus


def call_us(plan: Plan, B: int) -> float:
    """Microseconds of a call with B host rows, or of a training step. Excludes building the engine."""
    device = plan.device
    if plan.network.state:  # a step within a run, with its rows in device memory
        return plan.estimate_at(B)
    if not device.bus_bandwidth:
        return device.call_us + plan.estimate_at(B)
    net = plan.network
    nbytes = B * sum(net.types[name].row_bytes for name in {*net.inputs, *net.outputs})
    at_once = _work_us(plan, B) + nbytes / min(HOST.copy_bandwidth, device.bus_bandwidth) * 1e6
    if plan.is_read_often and nbytes > OFTEN_BYTES:
        at_once += 2 * device.launch_us  # one copy each way, each waiting for the previous operation
    chunks = -(-nbytes // SLOT_BYTES) or 1
    work_us = chunks * _work_us(plan, -(-B // chunks))
    in_chunks = HOST.pipeline_us + max(work_us, nbytes / device.bus_bandwidth * 1e6)
    return device.call_us + min(at_once, in_chunks)


def _work_us(plan: Plan, B: int) -> float:
    """The launches of a plan on a GPU, as one graph."""
    return plan.estimate_at(B) + plan.device.launch_us - plan.device.graph_launch_us


def min_us(net: Network, job: Job, device: Device, B: int) -> float:
    """A lower bound in microseconds for B rows, whatever kernels the device has: for a training step, its forward pass.

    The CPU kernels take a second to load: if a GPU is faster than this bound, they need not be queried.
    """
    versions = (net.trained.network,) if net.trained else (net, rewrite(net, job.without)[0])
    flop = min(sum(version.row_flop(node) for node in version.nodes) for version in versions)
    return flop * B / device.peak.flops[job.precision] * 1e6


def compare(gpu: str, gpu_us: float, cpu_us: float, B: int, is_least: bool = False) -> str:
    """The faster device and why, for "auto": "cpu (auto: 64 rows take about 9.0 µs, 25.0 µs on cuda:0)".

    B         rows per call
    is_least  the CPU time is a lower bound
    """
    rows = "1 row takes" if B == 1 else f"{B:,} rows take"
    if cpu_us <= gpu_us:
        return f"cpu (auto: {rows} about {format_us(cpu_us)}, {format_us(gpu_us)} on {gpu})"
    least = "at least " if is_least else ""
    return f"{gpu} (auto: {rows} about {format_us(gpu_us)}, {least}{format_us(cpu_us)} on the CPU)"
