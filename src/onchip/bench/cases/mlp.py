"""mlp: fully-connected networks of other shapes than decode's, with biases, over many rows and few."""

from __future__ import annotations

import functools

import numpy as np

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import BASELINE_ROWS, Rows, inference_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth, naive_error
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.recipe import Array

SHAPES: dict[str, tuple[int, ...]] = {
    "48-128-128-128-3": (48, 128, 128, 128, 3),
    "16-32-1": (16, 32, 1),
    "128-64x5-3": (128, *[64] * 5, 3),
    "128-128x5-3": (128, *[128] * 5, 3),
    "100-200-200-10": (100, 200, 200, 10),
}
ROWS = (262_144, 1_000, 7, 1)
PACE = Pace(rounds=5, block_s=0.1, warm_up_s=0.05, pause_s=0.05)  # for twenty cases


def cases(options: Options) -> list[Case]:
    counts = options.rows or ROWS
    networks = {name: network(*widths) for name, widths in SHAPES.items()}
    if options.device != "cpu":
        jobs = [
            GpuJob(f"{name}, {_rows(B)}", net, B, functools.partial(inputs, D_in=net.input.row_size))
            for name, net in networks.items()
            for B in counts
        ]
        return gpu_cases("mlp", jobs, options)
    result = []
    for name, net in networks.items():
        rows = [
            Rows(f"{name}, {_rows(B)}", B, functools.partial(inputs, B, net.input.row_size), "random data")
            for B in counts
        ]
        truth = functools.partial(steady_truth, net)
        result += inference_cases("mlp", subject_of(net), rows, options, truth=truth, pace=PACE)
    return result


def steady_truth(net: Network, x: Array) -> Truth:
    """The reference for x with a baseline error measured on at least BASELINE_ROWS rows."""
    many = x if len(x) >= BASELINE_ROWS else inputs(BASELINE_ROWS, net.input.row_size)
    return Truth(net, x).allowing(naive_error(net, many))


def network(*widths: int) -> Network:
    """An MLP with nonzero biases."""
    net, rng = mlp(*widths, name="mlp"), np.random.default_rng(1)
    biases = {
        name: rng.standard_normal(w.shape, dtype=np.float32) / 4
        for name, w in net.weights.items()
        if name.endswith("bias")
    }
    return net.replace(weights={**net.weights, **biases})


def inputs(B: int, D_in: int) -> Array:
    return np.random.default_rng(2).standard_normal((B, D_in), dtype=np.float32)


def _rows(B: int) -> str:
    return f"{B} row{'s' if B > 1 else ''}"
