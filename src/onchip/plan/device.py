"""Devices as data: what a plan needs to know about a chip, without the chip.

Each device has two sets of rates. Its sustained rates are measured; the estimates that compare plans use them. Its peak
rates follow from its clocks and buses; floors use them, and no run is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Peak:
    """Rates that no program exceeds."""

    flops: Mapping[str, float]  # precision -> flop/s, of the whole device
    bandwidth: float  # bytes/s to and from main memory
    cache_bandwidth: float  # bytes/s to and from the last-level cache
    launch_us: float  # per launch within a sequence; 0 where a launch is a call

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        """For copy and pickle: a MappingProxyType cannot be pickled."""
        return Peak, (dict(self.flops), self.bandwidth, self.cache_bandwidth, self.launch_us)


@dataclass(frozen=True)
class Device:
    name: str
    kind: str  # "cpu" | "cuda"
    arch: str  # "x86_64 avx512", "sm_90a"
    units: int  # cores, or SMs
    flops: Mapping[str, float]  # precision -> flop/s, of the whole device
    bandwidth: float  # bytes/s to and from main memory
    launch_us: float  # of an empty launch
    fast_bytes: int  # of memory for tiles: L2 per core, or shared memory per block
    memory_bytes: int
    source: str  # where the figures come from
    peak: Peak
    cache_bytes: int  # of the last-level cache: data that fits may still be cached from the previous run
    vector_bytes: int = field(default=0)  # of a SIMD register; 0 on a GPU
    # For calls with host rows (host_call.py):
    call_us: float = field(default=0.0)  # of Python and GPU synchronisation, on top of launches, work and copies
    bus_bandwidth: float = field(default=0.0)  # bytes/s to a GPU and back, copies included; 0: rows are in place
    graph_launch_us: float = field(default=0.0)  # of a launch that follows another in the same graph; 0: no graphs

    def unit_read_us(self, nbytes: int) -> float:
        """The least time in microseconds in which one SM reads this much from L2."""
        return nbytes / (self.peak.cache_bandwidth / self.units) * 1e6

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Device, tuple({**values, "flops": dict(self.flops)}.values())


# Sustained rates as a fraction of the data sheet, for devices that were not measured: those of the H200.
SUSTAINED_FLOPS, SUSTAINED_BANDWIDTH = 0.7, 0.88
# Likewise for the bus: NumPy rows through pinned memory reached 44 GB/s over PCIe 5 x16 (63 GB/s).
SUSTAINED_BUS, PCIE_5, PCIE_4 = 0.7, 63e9, 31.5e9
# An SM reads at most 128 B per clock from L2.
L2_BYTES_PER_CLOCK = 128


def sustained_flops(flops: Mapping[str, float]) -> dict[str, float]:
    return {precision: SUSTAINED_FLOPS * rate for precision, rate in flops.items()}


H200 = Device(
    name="NVIDIA H200", kind="cuda", arch="sm_90a", units=132,
    flops={"fp32": 50.9e12, "tf32": 352e12, "bf16": 669e12, "fp16": 640e12, "fp8": 1275e12},
    bandwidth=4.24e12, launch_us=5.0, fast_bytes=227 << 10, memory_bytes=141 * 10**9,
    source="measured: 8192^3 gemms and a device copy through torch 2.11, CUDA 13.0; peak and capacity from the data "
    "sheet, L2 from its clock, graph launches from a graph of empty kernels; calls and the bus from 7 to 2,097,152 "
    "NumPy rows of decode",
    peak=Peak(
        {"fp32": 66.9e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}, bandwidth=4.8e12,
        cache_bandwidth=132 * L2_BYTES_PER_CLOCK * 1.98e9, launch_us=0.7,
    ),
    cache_bytes=50 << 20, call_us=19.0, bus_bandwidth=SUSTAINED_BUS * PCIE_5, graph_launch_us=2.0,
)  # fmt: skip


def _from_data_sheet(
    name: str, arch: str, flops: Mapping[str, float], *, units: int, clock: float, bandwidth: float, bus: float,
    shared_kib: int, memory_gb: int, cache_mib: int, source: str,
) -> Device:  # fmt: skip
    """A GPU that was not measured: its peak, sustained rates as fractions of it, launches and calls as on the H200.

    clock            Hz, boost
    bandwidth, bus   bytes/s
    """
    peak = Peak(flops, bandwidth, units * L2_BYTES_PER_CLOCK * clock, H200.peak.launch_us)
    return Device(
        name=name, kind="cuda", arch=arch, units=units, flops=sustained_flops(flops),
        bandwidth=SUSTAINED_BANDWIDTH * bandwidth, launch_us=H200.launch_us, fast_bytes=shared_kib << 10,
        memory_bytes=memory_gb * 10**9, peak=peak, cache_bytes=cache_mib << 20, call_us=H200.call_us,
        bus_bandwidth=SUSTAINED_BUS * bus, graph_launch_us=H200.graph_launch_us,
        source=f"{source}; sustained rates as the H200's fraction of peak; launches and calls as on the H200",
    )  # fmt: skip


H100 = _from_data_sheet(
    "NVIDIA H100 80GB HBM3", "sm_90a", H200.peak.flops, units=132, clock=1.98e9, bandwidth=3.35e12, bus=PCIE_5,
    shared_kib=227, memory_gb=80, cache_mib=50, source="NVIDIA H100 SXM data sheet, dense rates",
)  # fmt: skip
A100 = _from_data_sheet(
    "NVIDIA A100 80GB SXM", "sm_80", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}, units=108,
    clock=1.41e9, bandwidth=2.039e12, bus=PCIE_4, shared_kib=163, memory_gb=80, cache_mib=40,
    source="NVIDIA A100 data sheet, dense rates",
)  # fmt: skip
# GeForce cards: dense rates of 16-bit matrix multiplies with float32 accumulation.
RTX_3080_TI = _from_data_sheet(
    "NVIDIA GeForce RTX 3080 Ti", "sm_86", {"fp32": 34.1e12, "tf32": 34.1e12, "bf16": 68.2e12, "fp16": 68.2e12},
    units=80, clock=1.665e9, bandwidth=912e9, bus=PCIE_4, shared_kib=99, memory_gb=12, cache_mib=6,
    source="NVIDIA GA102 white paper at 80 SMs and 1.665 GHz",
)  # fmt: skip
RTX_4060_LAPTOP = _from_data_sheet(
    "NVIDIA GeForce RTX 4060 Laptop", "sm_89", {"fp32": 14.6e12, "tf32": 14.6e12, "bf16": 29.1e12, "fp16": 29.1e12},
    units=24, clock=2.37e9, bandwidth=256e9, bus=PCIE_4 / 2, shared_kib=99, memory_gb=8, cache_mib=32,
    source="NVIDIA Ada white paper scaled to 24 SMs at 2.37 GHz",
)  # fmt: skip
RTX_4090 = _from_data_sheet(
    "NVIDIA GeForce RTX 4090", "sm_89", {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12},
    units=128, clock=2.52e9, bandwidth=1008e9, bus=PCIE_4, shared_kib=99, memory_gb=24, cache_mib=72,
    source="NVIDIA Ada white paper",
)  # fmt: skip

# By the names that --device accepts for devices that this machine does not have.
KNOWN: Mapping[str, Device] = MappingProxyType({
    "h200": H200, "h100": H100, "a100": A100, "rtx4090": RTX_4090, "rtx4060": RTX_4060_LAPTOP,
    "rtx3080ti": RTX_3080_TI,
})  # fmt: skip
