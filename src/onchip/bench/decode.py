"""decode: 72-64-64-4 over many rows. The second job is an eighth of the report's: seconds on a CPU, not minutes."""

from __future__ import annotations

import functools

from onchip.bench.frame import Case
from onchip.bench.inference import inference_cases
from onchip.bench.options import Options
from onchip.workloads import decode

ROWS = (12_800, 262_144)


def cases(options: Options) -> list[Case]:
    net = decode.network()
    made: list[Case] = []
    for B in options.rows or ROWS:
        inputs = functools.partial(decode.inputs, B)
        made += inference_cases("decode", f"{B} rows", net, inputs, B, options, "random data")
    return made
