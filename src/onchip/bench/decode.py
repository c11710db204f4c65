"""decode: 72-64-64-4 over many rows. The second job is an eighth of the report's: seconds on a CPU, not minutes."""

from __future__ import annotations

import functools

from onchip.bench.frame import Case
from onchip.bench.inference import Rows, inference_cases
from onchip.bench.options import Options
from onchip.bench.peers import subject_of
from onchip.workloads import decode

ROWS = (12_800, 262_144)


def cases(options: Options) -> list[Case]:
    jobs = [Rows(f"{B} rows", B, functools.partial(decode.inputs, B), "random data") for B in options.rows or ROWS]
    return inference_cases("decode", subject_of(decode.network()), jobs, options)
