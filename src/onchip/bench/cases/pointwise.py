"""pointwise: elementwise layers over arrays larger than any cache, and a copy for comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case, Ready
from onchip.bench.gpu_clock import PACE, Forward, check, fastest
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.bench.peers.gpu import make_network_peers
from onchip.bench.stage import make_stage
from onchip.measure.truth import Verdict
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.io import IO
from onchip.network.layers import GELU, Add, BatchNorm2d, Clip, Layer, Mul, ReLU, SiLU, Tanh
from onchip.network.recipe import Array
from onchip.network.types import TensorType

COPY = "copy"
ROW = (64, 32, 32)  # an image of 64 channels
GPU_ROWS, CPU_ROWS = 2048, 64  # 2^27 values, 2^22
PRECISIONS = ("fp32", "fp16")
VERIFIED = 32  # rows, of 65,536 values each: float64 takes NumPy a minute for all; all values are checked to be finite
COMPILE_S, JAX_S = 25.0, 10.0  # seconds for torch.compile and JAX, for all ten cases


def networks() -> dict[str, Network]:
    """Over images: expensive and cheap activations, chains, and values broadcast over channels or images."""
    return {
        "ReLU": _chain(ReLU()),
        "GELU": _chain(GELU()),
        "five activations": _chain(Tanh(), Clip(-0.5, 0.5), SiLU(), GELU("tanh"), ReLU()),
        "batch norm, ReLU": _batch_norm(),
        "gated": _gated(),
    }


def _chain(*layers: Layer) -> Network:
    return sequential(TensorType(("B", *ROW)), [(f"f{i}", layer) for i, layer in enumerate(layers)], {})


def _batch_norm() -> Network:
    rng = np.random.default_rng(1)
    weights = {f"norm.{role}": rng.random(ROW[0], np.float32) + 0.5 for role in ("mean", "var", "weight", "bias")}
    return sequential(TensorType(("B", *ROW)), [("norm", BatchNorm2d()), ("relu", ReLU())], weights)


def _gated() -> Network:
    """relu(x * image + x): a constant of an image's shape, and a value that is read twice."""
    nodes = (
        Node("gate", Mul(), ("x",), {"constant": "image"}),
        Node("sum", Add(), ("gate", "x")),
        Node("relu", ReLU(), ("sum",)),
    )
    image = np.random.default_rng(1).random(ROW[1:], np.float32)
    return Network({"x": TensorType(("B", *ROW))}, nodes, ("relu",), {"image": image})


def inputs(B: int) -> Array:
    return np.random.default_rng(2).standard_normal((B, *ROW), dtype=np.float32)


def cases(options: Options) -> list[Case]:
    result = []
    if options.device == "cpu":
        for name, net in networks().items():
            rows = [Rows(f"{name}, {B} rows", B, functools.partial(inputs, B)) for B in options.rows or (CPU_ROWS,)]
            result += inference_cases("pointwise", subject_of(net), rows, options, verified=CPU_ROWS)
        return result
    peers = make_network_peers(1, COMPILE_S, JAX_S)
    for B in options.rows or (GPU_ROWS,):
        draw = functools.cache(inputs)  # the same rows for every network
        for precision in PRECISIONS:
            result += [_copy(B, precision, options, functools.partial(draw, B))]
            jobs = [
                GpuJob(f"{name}, {B} rows", net, B, draw, precision, precision, verified=VERIFIED)
                for name, net in networks().items()
            ]
            result += gpu_cases("pointwise", jobs, options, peers)
    return result


def _copy(B: int, precision: str, options: Options, draw: Callable[[], Array]) -> Case:
    """The time to read and write every value once: a device-to-device memcpy."""

    def prepare() -> Ready:
        stage = make_stage(int(options.device.partition(":")[2] or 0))
        host = draw()
        x, y = stage.put(host, IO[precision]), stage.empty(host.shape, IO[precision])
        run, way = fastest({"": Forward(lambda: stage.copy(x, y))}, stage)

        def verify(copied: Any) -> Verdict:
            return Verdict(0.0 if np.array_equal(stage.fetch(copied), stage.fetch(x)) else float("inf"), 0.0)

        return Ready(run, functools.partial(check, stage, run, verify), way)

    return Case("pointwise", f"copy, {B} rows", COPY, prepare, work=B, precision=precision, pace=PACE)
