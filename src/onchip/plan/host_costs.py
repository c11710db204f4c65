"""What estimates of the host are computed from: its cores, calls, and the bus to a GPU with the copies around it."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.plan.fitted import fitted

_CALLS = (
    "H200, NumPy calls: 7 rows 24 us; 0.43 MB 79 us; decode in fp16: 12,800 rows 230 us, 25,600 rows 390 us, 100,000 "
    "rows 1.09 ms, 2,097,152 rows at 44 GB/s"
)


@dataclass(frozen=True, eq=False)
class HostCosts:
    gemm_flops: float = fitted(50e9, "flop/s of NumPy's matmul, about two cores", "estimated")
    write_bandwidth: float = fitted(2e9, "bytes/s that NumPy writes to untouched memory", "token_tables at small K")
    copy_bandwidth: float = fitted(10e9, "bytes/s from pageable memory, copied by one core", _CALLS)
    launch_us: float = fitted(3.0, "of an empty launch on the CPU", "estimated")
    call_us: float = fitted(1.0, "per call on the CPU, besides", "2.5 GHz Neoverse N1: one row takes 3 to 4 in total")
    pipeline_us: float = fitted(700.0, "to fill the pipeline of copies and kernels, and to drain it", _CALLS)


HOST = HostCosts()  # of all machines
