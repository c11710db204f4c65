"""product: a single Linear whose weights exceed an SM's shared memory, with many and with few rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.bench.peers.gpu import make_network_peers
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import Linear, ReLU
from onchip.network.recipe import Array
from onchip.network.types import TensorType

CUBE = 8_192  # B = D_in = D_out
MANY_ROWS, LAYERS = 16_384, ((4_096, 2_048), (2_048, 1_024), (1_024, 512))  # D_in, D_out
FEW_ROWS, FEW_LAYERS = (1, 16, 64, 128), ((4_096, 4_096), (4_096, 1_024), (1_024, 1_024))
CPU_ROWS = 64
COMPILE_S, JAX_S = 20.0, 10.0  # to compile all cases with many rows: torch.compile, JAX
VERIFIED = 8  # rows compared with the reference: NumPy's 16-bit gemms are slow


def cases(options: Options) -> list[Case]:
    if options.device == "cpu":
        result = []
        for D_in, D_out in LAYERS:
            counts, name = options.rows or (CPU_ROWS,), f"{D_in} to {D_out}, ReLU"
            rows = [Rows(f"{name}, {B} rows", B, functools.partial(inputs, B, D_in)) for B in counts]
            result += inference_cases("product", subject_of(network(D_in, D_out)), rows, options, verified=CPU_ROWS)
        return result
    jobs = [
        GpuJob(
            f"{CUBE} cubed", network(CUBE, CUBE, is_gemm=True), CUBE, inputs_of(CUBE), precision, io, verified=VERIFIED
        )
        for precision, io in (("fp16", "fp16"), ("bf16", "bf16"), ("tf32", "fp32"), ("fp32", "fp32"))
    ]
    many = [(B, *layer) for layer in LAYERS for B in options.rows or (MANY_ROWS,)]
    few = [(B, *layer) for layer in FEW_LAYERS for B in options.rows or FEW_ROWS]
    for B, D_in, D_out in (*many, *few):
        case = f"{D_in} to {D_out}, ReLU, {B} row{'s' if B > 1 else ''}"
        jobs.append(GpuJob(case, network(D_in, D_out), B, inputs_of(D_in), "fp16", "fp16", verified=VERIFIED))
    return gpu_cases("product", jobs, options, make_network_peers(MANY_ROWS, COMPILE_S, JAX_S))


@functools.cache
def network(D_in: int, D_out: int, is_gemm: bool = False) -> Network:
    """A Linear, with bias and ReLU unless `is_gemm`."""
    rng = np.random.default_rng(1)
    weights = {"fc.weight": rng.standard_normal((D_out, D_in), dtype=np.float32) / np.float32(np.sqrt(D_in))}
    if is_gemm:
        return sequential(TensorType(("B", D_in)), [("fc", Linear())], weights, name="product")
    weights["fc.bias"] = rng.standard_normal(D_out, dtype=np.float32) / 4
    return sequential(TensorType(("B", D_in)), [("fc", Linear()), ("relu", ReLU())], weights, name="product")


@functools.cache
def inputs_of(D_in: int) -> Callable[[int], Array]:
    """A function from B to inputs (B, D_in), cached: all precisions share them."""
    return functools.lru_cache(maxsize=2)(functools.partial(inputs, D_in=D_in))


def inputs(B: int, D_in: int) -> Array:
    return np.random.default_rng(2).standard_normal((B, D_in), dtype=np.float32)
