"""Count bank conflicts of GPU rungs with Nsight Compute, which profiles one run of each.

A run is one range between cuProfilerStart and cuProfilerStop. To profile its launches one by one would take seconds per
hundred, and a run may have thousands.

`bank_conflicts` runs this command and parses its output:

    ncu ... python -m onchip.ladders.counters decode 12800 separate coalesced
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence

from onchip.errors import DeviceError
from onchip.kernels import reference
from onchip.ladders import find_ladder
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Gpu

METRICS = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
)


def bank_conflicts(ladder: str, B: int, rungs: Sequence[str]) -> dict[str, int]:
    """Bank conflicts (loads and stores) per rung, for one run over B rows; `rungs` in the ladder's order.

    Raises DeviceError if ncu is missing or lacks permission.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu not found", hint="install NVIDIA Nsight Compute")
    # app-range: if the metrics need several passes, each starts the command again. -P: without it, modules in
    # the current folder would be imported.
    command = [ncu, "--replay-mode", "app-range", "--clock-control", "none", "--profile-from-start", "off",
               "--metrics", ",".join(METRICS), "--csv",
               sys.executable, "-P", "-m", "onchip.ladders.counters", ladder, str(B), *rungs]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        raise DeviceError("ncu failed", got=lines[-1] if lines else f"exit code {result.returncode}")
    counts = read_counts(result.stdout)
    if len(counts) != len(rungs):
        raise DeviceError(
            "ncu profiled another number of runs", got=f"{len(counts)} ranges", expected=f"{len(rungs)} ranges"
        )
    return dict(zip(rungs, counts, strict=True))


def read_counts(output: str) -> list[int]:
    """The sum of the metrics per range, in order, from the output of `ncu --csv`."""
    lines = [line for line in output.splitlines() if line.startswith('"')]  # other lines are ncu's messages
    sums: dict[int, int] = {}
    for row in csv.DictReader(lines):
        if row["Metric Name"] in METRICS:
            number = int(row["ID"])
            sums[number] = sums.get(number, 0) + round(float(row["Metric Value"].replace(",", "")))
    return [sums[number] for number in sorted(sums)]


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
