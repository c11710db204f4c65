"""Devices as data: what a plan needs to know of a chip, and nothing that needs the chip.

Two sets of rates. A device's own are those of steady work, as measured: estimates, by which plans are compared, are
made of them. Its peak is physics: clocks, buses and caches at their best. Floors are made of it, and nobody beats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Peak:
    """What no program beats."""

    flops: Mapping[str, float]  # precision -> flop/s, all units together
    bandwidth: float  # bytes/s to and from main memory
    cache_bandwidth: float  # bytes/s to and from the last cache before it
    launch_us: float  # of a launch among others; 0 where one is a call

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        """For copies and other processes: a mapping that cannot be changed cannot be pickled either."""
        return Peak, (dict(self.flops), self.bandwidth, self.cache_bandwidth, self.launch_us)


@dataclass(frozen=True)
class Device:
    name: str
    kind: str  # "cpu" | "cuda"
    arch: str  # "x86_64 avx512", "sm_90a"
    units: int  # cores, or multiprocessors
    flops: Mapping[str, float]  # precision -> flop/s, all units together
    bandwidth: float  # bytes/s to and from main memory
    launch_us: float  # what an empty launch costs
    fast_bytes: int  # the memory a tile should stay in: L2 of a core, or shared memory of a block
    memory_bytes: int
    source: str  # where the numbers come from
    peak: Peak
    cache_bytes: int  # of the last cache before main memory: what fits may still be there from the run before
    vector_bytes: int = field(default=0)  # of a SIMD register; 0 on a GPU
    # Of a call with rows of the host (host_call.py):
    call_us: float = field(default=0.0)  # beside launches, work and copies: Python, and a GPU's wait
    bus_bandwidth: float = field(default=0.0)  # bytes/s to a GPU and back, copied on the way; 0: the rows lie there
    graph_launch_us: float = field(default=0.0)  # of a launch behind another one, both in one graph; 0: there are none

    def unit_read_us(self, nbytes: int) -> float:
        """Microseconds in which one multiprocessor reads what lies in the cache, at its best."""
        return nbytes / (self.peak.cache_bandwidth / self.units) * 1e6

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Device, tuple({**values, "flops": dict(self.flops)}.values())


# Steady work as a share of the data sheet, where we could not measure: the H200's.
SUSTAINED_FLOPS, SUSTAINED_BANDWIDTH = 0.7, 0.88
# Of the bus too: NumPy rows through page-locked memory came at 44 GB/s over PCIe 5 with 16 lanes, 63 GB/s.
SUSTAINED_BUS, PCIE_5, PCIE_4 = 0.7, 63e9, 31.5e9
# A multiprocessor takes at most 128 B a clock from L2.
L2_BYTES_A_CLOCK = 128


def sustained_flops(flops: Mapping[str, float]) -> dict[str, float]:
    return {precision: SUSTAINED_FLOPS * rate for precision, rate in flops.items()}


H200 = Device(
    name="NVIDIA H200", kind="cuda", arch="sm_90a", units=132,
    flops={"fp32": 50.9e12, "tf32": 352e12, "bf16": 669e12, "fp16": 640e12, "fp8": 1275e12},
    bandwidth=4.24e12, launch_us=5.0, fast_bytes=227 << 10, memory_bytes=141 * 10**9,
    source="measured: 8192^3 products and a device copy through torch 2.11, CUDA 13.0; peak and capacity from the data "
    "sheet, L2 from its clock, a launch among others from a graph of empty kernels; calls and the bus: NumPy rows of "
    "decode, 7 to 2,097,152 of them",
    peak=Peak(
        {"fp32": 66.9e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}, bandwidth=4.8e12,
        cache_bandwidth=132 * L2_BYTES_A_CLOCK * 1.98e9, launch_us=0.7,
    ),
    cache_bytes=50 << 20, call_us=19.0, bus_bandwidth=SUSTAINED_BUS * PCIE_5, graph_launch_us=2.0,
)  # fmt: skip


def _from_data_sheet(
    name: str, arch: str, flops: Mapping[str, float], *, units: int, clock: float, bandwidth: float, bus: float,
    shared_kib: int, memory_gb: int, cache_mib: int, source: str,
) -> Device:  # fmt: skip
    """A GPU that was not measured: its peak, steady rates as shares of it, launches and calls as on the H200.

    clock  Hz, at its best; bandwidth and bus in bytes/s
    """
    peak = Peak(flops, bandwidth, units * L2_BYTES_A_CLOCK * clock, H200.peak.launch_us)
    return Device(
        name=name, kind="cuda", arch=arch, units=units, flops=sustained_flops(flops),
        bandwidth=SUSTAINED_BANDWIDTH * bandwidth, launch_us=H200.launch_us, fast_bytes=shared_kib << 10,
        memory_bytes=memory_gb * 10**9, peak=peak, cache_bytes=cache_mib << 20, call_us=H200.call_us,
        bus_bandwidth=SUSTAINED_BUS * bus, graph_launch_us=H200.graph_launch_us,
        source=f"{source}; steady rates as shares of them, launches and calls, as on the H200",
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
# Of the GeForce cards: dense rates of products in 16 bits whose sums are float32.
RTX_3080_TI = _from_data_sheet(
    "NVIDIA GeForce RTX 3080 Ti", "sm_86", {"fp32": 34.1e12, "tf32": 34.1e12, "bf16": 68.2e12, "fp16": 68.2e12},
    units=80, clock=1.665e9, bandwidth=912e9, bus=PCIE_4, shared_kib=99, memory_gb=12, cache_mib=6,
    source="NVIDIA GA102 white paper at 80 multiprocessors and 1.665 GHz",
)  # fmt: skip
RTX_4060_LAPTOP = _from_data_sheet(
    "NVIDIA GeForce RTX 4060 Laptop", "sm_89", {"fp32": 14.6e12, "tf32": 14.6e12, "bf16": 29.1e12, "fp16": 29.1e12},
    units=24, clock=2.37e9, bandwidth=256e9, bus=PCIE_4 / 2, shared_kib=99, memory_gb=8, cache_mib=32,
    source="NVIDIA Ada white paper scaled to 24 multiprocessors at 2.37 GHz",
)  # fmt: skip
RTX_4090 = _from_data_sheet(
    "NVIDIA GeForce RTX 4090", "sm_89", {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12},
    units=128, clock=2.52e9, bandwidth=1008e9, bus=PCIE_4, shared_kib=99, memory_gb=24, cache_mib=72,
    source="NVIDIA Ada white paper",
)  # fmt: skip

# By the name a user types after --device when planning for a chip that is not here.
KNOWN: Mapping[str, Device] = MappingProxyType({
    "h200": H200, "h100": H100, "a100": A100, "rtx4090": RTX_4090, "rtx4060": RTX_4060_LAPTOP,
    "rtx3080ti": RTX_3080_TI,
})  # fmt: skip
