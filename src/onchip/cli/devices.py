"""onchip devices: the available devices, and those that can be planned for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from onchip.cli.options import Json
from onchip.cli.talk import columns_of, print_json, say
from onchip.network.text import fitted_columns

if TYPE_CHECKING:
    from onchip.plan.device import Device


def devices(
    measure: Annotated[bool, Option("--measure", help="Measure the CPU anew, not the kept rates.")] = False,
    as_json: Json = False,
) -> None:
    """List the devices that are here and those that can be planned for.

    \b
    Example:
      onchip devices
    """
    from onchip.plan.device import KNOWN
    from onchip.runtime.cpu.backend import this_cpu
    from onchip.runtime.cuda.devices import cuda_devices, driver_version, why_no_cuda

    here = {"cpu": this_cpu(measure), **{f"cuda:{i}": gpu for i, gpu in enumerate(cuda_devices())}}
    no_cuda = why_no_cuda() if len(here) == 1 else None
    if as_json:
        print_json({
            "here": [_facts(name, device) for name, device in here.items()],
            "known": [_facts(name, device) for name, device in KNOWN.items()],
            "no_cuda": no_cuda,
            "cuda_driver": driver_version() or None,
        })  # fmt: skip
        return
    head = [
        "name", "device", "where", "arch", "units", "Gflop/s", "GB/s", "on chip", "memory", "call", "bus GB/s",
        "precisions",
    ]  # fmt: skip
    rows = [_cells(name, device, "here") for name, device in here.items()]
    rows += [_cells(name, device, "plan only") for name, device in KNOWN.items()]
    print(fitted_columns(head, rows, columns_of(sys.stdout), right=(4, 5, 6, 7, 8, 9, 10)))
    say(f"the NVIDIA driver is for CUDA {driver_version()}" if no_cuda is None else f"no GPU: {no_cuda}")
    say("units: cores or multiprocessors; Gflop/s in fp32; GB/s to main memory; on chip: L2 or shared memory of a unit")
    say("call: with one row of the host, beside the work; bus: of the host's rows to a GPU and back")
    if no_cuda is None:
        say("auto: for every network the one that should do a call sooner; onchip plan MODEL --batch ROWS tells which")


def _cells(name: str, device: Device, where: str) -> list[str]:
    return [
        name, device.name, where, device.arch, str(device.units), f"{device.flops['fp32'] / 1e9:,.0f}",
        f"{device.bandwidth / 1e9:,.0f}", f"{device.fast_bytes >> 10:,} KiB",
        f"{device.memory_bytes / 2**30:,.0f} GiB", f"{device.call_us + device.launch_us:.0f} µs",
        f"{device.bus_bandwidth / 1e9:,.0f}" if device.bus_bandwidth else "", " ".join(device.flops),
    ]  # fmt: skip


def _facts(name: str, device: Device) -> dict[str, Any]:
    return {
        "name": name, "device": device.name, "kind": device.kind, "arch": device.arch, "units": device.units,
        "flops": dict(device.flops), "bytes_per_s": device.bandwidth, "launch_us": device.launch_us,
        "fast_bytes": device.fast_bytes, "memory_bytes": device.memory_bytes, "vector_bytes": device.vector_bytes,
        "peak_flops": dict(device.peak.flops), "peak_bytes_per_s": device.peak.bandwidth,
        "cache_bytes": device.cache_bytes, "call_us": device.call_us, "bus_bytes_per_s": device.bus_bandwidth,
        "graph_launch_us": device.graph_launch_us, "source": device.source,
    }  # fmt: skip
