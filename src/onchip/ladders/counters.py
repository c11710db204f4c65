"""Count bank conflicts of GPU rungs with Nsight Compute, which profiles one run of each.

`bank_conflicts` runs this command and parses its output:

    ncu ... python -m onchip.ladders.counters decode 12800 separate coalesced
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Mapping

from onchip.errors import DeviceError
from onchip.kernels import reference
from onchip.ladders import find_ladder
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Gpu

METRICS = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
)


def bank_conflicts(ladder: str, B: int, launches: Mapping[str, int]) -> dict[str, int]:
    """Bank conflicts (loads and stores) per rung, for one run over B rows; `launches`: kernels per rung.

    Raises DeviceError if ncu is missing or lacks permission.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu not found", hint="install NVIDIA Nsight Compute")
    # -P: without it, modules in the current folder would be imported.
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS), "--csv",
               sys.executable, "-P", "-m", "onchip.ladders.counters", ladder, str(B), *launches]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        raise DeviceError("ncu failed", got=lines[-1] if lines else f"exit code {result.returncode}")
    counts = read_counts(result.stdout)
    if len(counts) != sum(launches.values()):
        got, expected = f"{len(counts)} kernels", f"{sum(launches.values())} kernels"
        raise DeviceError("ncu profiled another number of kernels", got=got, expected=expected)
    remaining = iter(counts)
    return {rung: sum(next(remaining) for _ in range(kernels)) for rung, kernels in launches.items()}


def read_counts(output: str) -> list[int]:
    """The sum of the metrics per kernel, in launch order, from the output of `ncu --csv`."""
    lines = [line for line in output.splitlines() if line.startswith('"')]  # other lines are ncu's messages
    sums: dict[int, int] = {}
    for row in csv.DictReader(lines):
        if row["Metric Name"] in METRICS:
            kernel = int(row["ID"])
            sums[kernel] = sums.get(kernel, 0) + round(float(row["Metric Value"].replace(",", "")))
    return [sums[kernel] for kernel in sorted(sums)]


def main(name: str, B: int, rungs: list[str]) -> None:
    ladder = find_ladder(name, "cuda")
    net, x, gpu = reference.with_arrays(ladder.network()), ladder.inputs(B), Gpu.get()
    for rung in ladder.pick(rungs):
        run = rung.prepare(net, x[: rung.max_rows or B], 1)  # as many rows, and launches, as in the climb
        gpu.wait_for_all()
        call(gpu.driver.cuProfilerStart)  # not before: an engine may have launched kernels that compute its weights
        run()
        gpu.wait_for_all()
        call(gpu.driver.cuProfilerStop)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
