"""A network from a user's file: over many rows and few, with its floor and, on request, its peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.errors import InputError
from onchip.formats.load import load_file
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth, naive_error
from onchip.network.graph import Network
from onchip.network.outputs import one_output
from onchip.network.recipe import Array
from onchip.network.text import plural
from onchip.runtime.io.row_sources import random_inputs

ROWS = (1, 64, 1_024, 16_384)
VERIFIED = 64  # rows: a large network takes long in float64
PACE = Pace(rounds=5, block_s=0.2, warm_up_s=0.1, pause_s=0.1)


def is_model(name: str) -> bool:
    """Whether this is a network file, not the name of a benchmark."""
    return Path(name).suffix != ""


def model_cases(path: str, options: Options) -> list[Case]:
    """Cases of the network in a file, over random rows."""
    net, name = load_file(path, options.shapes), Path(path).stem
    if len(net.inputs) > 1:
        got = plural(len(net.inputs), "input")
        raise InputError(f"{path} cannot be timed", got=got, expected="one", hint="onchip plan for its floor")
    net = one_output(net, options.output, "--output")
    counts, draw = options.rows or ROWS, functools.cache(functools.partial(_draw, net))
    if options.device != "cpu":
        jobs = [GpuJob(plural(B, "row"), net, B, draw, "fp32", "fp32", verified=VERIFIED) for B in counts]
        return gpu_cases(name, jobs, options)
    cpu_jobs = [Rows(plural(B, "row"), B, functools.partial(draw, B), "random data") for B in counts]
    truth = functools.partial(_truth, net, draw)
    return inference_cases(name, subject_of(net), cpu_jobs, options, verified=VERIFIED, truth=truth, pace=PACE)


def _draw(net: Network, B: int) -> Array:
    (source,) = random_inputs(net, B, seed=0)
    return source.read(0, B)


def _truth(net: Network, draw: Callable[[int], Array], x: Array) -> Truth:
    """The reference for x with a baseline error measured on VERIFIED rows."""
    return Truth(net, x).allowing(naive_error(net, draw(VERIFIED)))
