"""onchip devices: the available devices, and those that can be planned for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from onchip.cli.options import Json
from onchip.cli.output import print_json, print_message, terminal_width
from onchip.network.text import fitted_columns

if TYPE_CHECKING:
    from onchip.plan.device import Device


def devices(
    measure: Annotated[bool, Option("--measure", help="Measure the CPU again instead of using cached rates.")] = False,
    as_json: Json = False,
) -> None:
    """List the devices here, and those that can be planned for.

    \b
    Example:
      onchip devices
    """
    from onchip.plan.device import KNOWN
    from onchip.runtime.cpu.backend import this_cpu
    from onchip.runtime.cuda.devices import cuda_devices, driver_version, why_no_cuda
    from onchip.runtime.recording import clock_of_profiles

    here = {"cpu": this_cpu(measure), **{f"cuda:{i}": gpu for i, gpu in enumerate(cuda_devices())}}
    no_cuda = why_no_cuda() if len(here) == 1 else None
    if as_json:
        print_json({
            "here": [_facts(name, device) for name, device in here.items()],
            "known": [_facts(name, device) for name, device in KNOWN.items()],
            "no_cuda": no_cuda,
            "cuda_driver": driver_version() or None,
            "profile_clock": None if no_cuda else clock_of_profiles(),
        })  # fmt: skip
        return
    head = [
        "name", "device", "where", "arch", "units", "Gflop/s", "GB/s", "on chip", "memory", "call", "bus GB/s",
        "precisions",
    ]  # fmt: skip
    rows = [_cells(name, device, "here") for name, device in here.items()]
    rows += [_cells(name, device, "plan only") for name, device in KNOWN.items()]
    print(fitted_columns(head, rows, terminal_width(sys.stdout), right=(4, 5, 6, 7, 8, 9, 10)))
    print_message(f"the NVIDIA driver supports CUDA {driver_version()}" if no_cuda is None else f"no GPU: {no_cuda}")
    print_message("units: cores or SMs; Gflop/s in fp32; GB/s of main memory; on chip: L2 or shared memory per unit")
    print_message("call: overhead of a call with one host row; bus: between host and GPU memory")
    if no_cuda is None:
        print_message(f"onchip profile: times of kernels by {clock_of_profiles()}")
        print_message("auto: the device estimated faster for a network; onchip plan MODEL --batch ROWS prints which")


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
