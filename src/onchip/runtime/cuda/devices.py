"""The GPUs of this machine, as data for the planner. Probing creates no context and never raises."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from dataclasses import replace
from typing import Any

from onchip.plan.device import (
    H200,
    KNOWN,
    L2_BYTES_PER_CLOCK,
    PCIE_4,
    PCIE_5,
    SUSTAINED_BANDWIDTH,
    SUSTAINED_BUS,
    Device,
    Peak,
    sustained_flops,
)
from onchip.plan.host_costs import HOST
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.cuda.driver import NEEDED_VERSION, call, version_text

# By compute capability: fp32 lanes per SM, and the peak of tensor-core bf16 relative to fp32
# (white papers of A100, GA102, AD102, H100, B200, GB202). tf32 has half the bf16 peak, fp8 twice.
_CHIPS = {(8, 0): (64, 16.0), (8, 6): (128, 2.0), (8, 9): (128, 2.0),
          (9, 0): (128, 14.8), (10, 0): (128, 28.0), (12, 0): (128, 2.0)}  # fmt: skip

NO_DRIVER = "there is no NVIDIA driver on this machine"


def cuda_devices() -> list[Device]:
    """The GPUs of this machine, in the driver's order; empty if there are none. Never raises."""
    return probe()[0]


def why_no_cuda() -> str:
    """Why `cuda_devices()` is empty, in a sentence; "" if it is not."""
    return probe()[1]


def driver_version() -> str:
    """The CUDA version that the driver supports, as "13.0"; "" without a GPU."""
    if not probe()[0]:
        return ""
    from cuda.bindings import driver

    return version_text(call(driver.cuDriverGetVersion))


def probe() -> tuple[list[Device], str]:
    """The GPUs and ""; or [] and the reason."""
    if not _has_driver():
        return [], NO_DRIVER
    try:
        from cuda.bindings import driver
    except Exception:  # a broken install raises more than ImportError
        return [], "the package cuda-bindings is not installed: pip install 'onchip[cuda]'"
    try:
        (result,) = driver.cuInit(0)
    except Exception:  # for a missing libcuda, each version of the bindings raises a different error
        return [], NO_DRIVER
    try:
        if result != driver.CUresult.CUDA_SUCCESS:
            no_gpu = result == driver.CUresult.CUDA_ERROR_NO_DEVICE
            return [], "the NVIDIA driver sees no GPU" if no_gpu else f"the NVIDIA driver does not start: {result.name}"
        if (version := call(driver.cuDriverGetVersion)) < NEEDED_VERSION:
            needed = version_text(NEEDED_VERSION)
            return [], f"the NVIDIA driver is for CUDA {version_text(version)}: update it to one for CUDA {needed}"
        devices = [_describe(driver, index) for index in range(call(driver.cuDeviceGetCount))]
    except Exception as error:
        return [], f"the NVIDIA driver returned an error: {error}"
    return devices, "" if devices else "the NVIDIA driver sees no GPU"


@functools.cache
def _has_driver() -> bool:
    """Whether the driver library can be loaded: if not, skip importing the bindings, which takes 0.1 s."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _describe(driver: Any, index: int) -> Device:
    handle = call(driver.cuDeviceGet, index)

    def attribute_of(attribute: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(call(driver.cuDeviceGetAttribute, key, handle))

    name = call(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode(errors="replace")
    capability = (attribute_of("COMPUTE_CAPABILITY_MAJOR"), attribute_of("COMPUTE_CAPABILITY_MINOR"))
    queried = {
        "name": name,
        "units": attribute_of("MULTIPROCESSOR_COUNT"),
        "fast_bytes": attribute_of("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "memory_bytes": int(call(driver.cuDeviceTotalMem, handle)),
        "cache_bytes": attribute_of("L2_CACHE_SIZE"),
    }
    for known in KNOWN.values():
        if known.kind == "cuda" and known.units == queried["units"] and _names_match(name, known.name):
            return replace(known, **queried, bus_bandwidth=_staged_bandwidth(known.bus_bandwidth))
    # A cubin runs on its own minor version and later ones of the same major version: take the nearest below.
    target = max((c for c in _CHIPS if c[0] == capability[0] and c[1] <= capability[1]), default=capability)
    lanes, ratio = _CHIPS.get(target, (64, 1.0))
    clock = attribute_of("CLOCK_RATE") * 1e3
    fp32 = 2.0 * lanes * queried["units"] * clock
    # Two transfers per clock. Virtual GPUs may report 0: a default keeps the floor finite.
    bandwidth = 2.0 * attribute_of("MEMORY_CLOCK_RATE") * 1e3 * attribute_of("GLOBAL_MEMORY_BUS_WIDTH") / 8 or 256e9
    flops = {"fp32": fp32, "tf32": ratio / 2 * fp32, "bf16": ratio * fp32, "fp16": ratio * fp32}
    flops |= {"fp8": 2 * ratio * fp32} if target >= (8, 9) else {}
    peak = Peak(flops, bandwidth, queried["units"] * L2_BYTES_PER_CLOCK * clock, H200.peak.launch_us)
    return Device(
        kind="cuda", arch=f"sm_{target[0]}{target[1]}{'a' if target[0] == 9 else ''}",
        flops=sustained_flops(flops),
        bandwidth=SUSTAINED_BANDWIDTH * bandwidth, launch_us=5.0, **queried, peak=peak, call_us=H200.call_us,
        # The driver does not report the bus: assume 16 lanes of the PCIe version usual for this architecture.
        bus_bandwidth=_staged_bandwidth(SUSTAINED_BUS * (PCIE_5 if target >= (9, 0) else PCIE_4)),
        graph_launch_us=H200.graph_launch_us,
        source="peak from clocks, SMs and bus width as the driver reports them; sustained rates as the H200's "
        "fraction of peak; launches and calls as on the H200",
    )  # fmt: skip


def _staged_bandwidth(bus: float) -> float:
    """Bytes/s of host rows over a bus of this rate, limited by the cores that copy them to pinned memory."""
    return min(bus, core_count() * HOST.copy_bandwidth)


def _names_match(name: str, known: str) -> bool:
    """Whether "NVIDIA A100-SXM4-80GB" is "NVIDIA A100 80GB SXM": same words in any order, 'GPU' ignored."""
    words = [word for word in re.split(r"[\s-]+", name) if word != "GPU"]
    prefixes = known.split()
    return len(words) == len(prefixes) and all(any(word.startswith(p) for word in words) for p in prefixes)
