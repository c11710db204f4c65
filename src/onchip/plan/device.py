"""Devices as data: what a plan needs to know of a chip, and nothing that needs the chip.

Rates are what a kernel can hope for: measured where we measured, else the vendor's data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


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
    vector_bytes: int = field(default=0)  # of a SIMD register; 0 on a GPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        """For copies and other processes: a mapping that cannot be changed cannot be pickled either."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Device, tuple({**values, "flops": dict(self.flops)}.values())


H200 = Device(
    name="NVIDIA H200", kind="cuda", arch="sm_90a", units=132,
    flops={"fp32": 50.9e12, "tf32": 352e12, "bf16": 780e12, "fp16": 780e12, "fp8": 1275e12},
    bandwidth=4.24e12, launch_us=5.0, fast_bytes=227 << 10, memory_bytes=141 * 10**9,
    source="measured: 8192^3 products and a device copy through torch 2.11, CUDA 13.0; capacity from the data sheet",
)  # fmt: skip
A100 = Device(
    name="NVIDIA A100 80GB SXM", kind="cuda", arch="sm_80", units=108,
    flops={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    bandwidth=2.039e12, launch_us=5.0, fast_bytes=163 << 10, memory_bytes=80 * 10**9,
    source="NVIDIA A100 data sheet, dense rates; launch time assumed like the H200's",
)  # fmt: skip
RTX_4060_LAPTOP = Device(
    name="NVIDIA GeForce RTX 4060 Laptop", kind="cuda", arch="sm_89", units=24,
    flops={"fp32": 14.6e12, "tf32": 14.6e12, "bf16": 29.1e12, "fp16": 29.1e12},
    bandwidth=256e9, launch_us=5.0, fast_bytes=99 << 10, memory_bytes=8 * 10**9,
    source="NVIDIA Ada architecture white paper scaled to 24 multiprocessors at 2.37 GHz; launch time assumed",
)  # fmt: skip

# By the name a user types after --device when planning for a chip that is not here.
KNOWN: Mapping[str, Device] = MappingProxyType({"h200": H200, "a100": A100, "rtx4060": RTX_4060_LAPTOP})
