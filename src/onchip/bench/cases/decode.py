"""decode: 72-64-64-4 over many rows. On a CPU the second job is an eighth of the report's: seconds, not minutes."""

from __future__ import annotations

import functools

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.workloads import decode

ROWS = (12_800, 262_144)
FEW, MANY = decode.ROWS


def cases(options: Options) -> list[Case]:
    if options.device != "cpu":
        return gpu_cases("decode", gpu_jobs(options.rows), options)
    jobs = [Rows(f"{B} rows", B, functools.partial(decode.inputs, B), "random data") for B in options.rows or ROWS]
    return inference_cases("decode", subject_of(decode.network()), jobs, options)


def gpu_jobs(counts: tuple[int, ...]) -> list[GpuJob]:
    """Many rows in every precision and few in fp16; or other row counts, in fp16."""
    net, rows = decode.network(), functools.cache(decode.inputs)

    def job(B: int, note: str = "", precision: str = "fp16", io: str = "fp16", synchronised: bool = False) -> GpuJob:
        return GpuJob(f"{B} rows{note}", net, B, rows, precision, io, synchronised)

    if counts:
        return [job(B) for B in counts]
    return [
        job(MANY),
        job(FEW, ", in a graph"),
        job(FEW, ", a call, synchronised", synchronised=True),
        job(MANY, ", fp32 in and out", io="fp32"),
        job(MANY, precision="bf16", io="bf16"),
        job(MANY, precision="tf32", io="fp32"),
        job(MANY, precision="fp32", io="fp32"),
    ]
