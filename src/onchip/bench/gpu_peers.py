"""The peers on a GPU, on rows that lie there, each at the best setting we know for it.

A peer is built for one task and hands back its variants; the fastest is measured, and its name stands in the setting.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onchip.bench.dense import dense_layers
from onchip.bench.frame import UnavailableError
from onchip.bench.gpu_clock import Forward, Variants
from onchip.bench.peers import need, why
from onchip.bench.stage import TorchStage
from onchip.bench.torch_network import torch_module
from onchip.spec.network import Network
from onchip.spec.types import numpy_dtype

COMPILE_S, TUNE_S = 25.0, 8.0  # of all a benchmark's torch.compile; of one task's Triton settings
# Graphs are recorded here, around its kernels. Those that it makes itself copy x first, and while it records them it
# frees the workspace of cuBLAS, which the graphs of others, recorded before, still write to.
MODE = "max-autotune-no-cudagraphs"
COMPILED_ROWS = 12_800  # torch.compile and JAX take long to compile and lose to graphs below
COMPUTE = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # what weights are kept in


@dataclass(frozen=True, eq=False)
class GpuTask:
    """A network over rows on the GPU: everyone computes in `precision`, and reads and writes `io`."""

    net: Network
    precision: str
    io: str  # dtype of x and y
    x: Any  # (B, D_in), a tensor


Build = Callable[[GpuTask, TorchStage], Variants]


# -- torch -------------------------------------------------------------------------------------------------


def torch_call(task: GpuTask, stage: TorchStage) -> Callable[[Any], Any]:
    """The network as torch runs it: weights in the type that it computes in, rows converted on the way in and out."""
    torch = stage.torch
    torch.set_float32_matmul_precision("high" if task.precision == "tf32" else "highest")
    kind, given = getattr(torch, COMPUTE[task.precision]), getattr(torch, task.io)
    module = torch_module(task.net).eval().requires_grad_(False).to(stage.device).to(kind)
    return module if kind == given else lambda x: module(x.to(kind)).to(given)


def torch_eager(task: GpuTask, stage: TorchStage) -> Variants:
    run = torch_call(task, stage)
    return {"": Forward(lambda: run(task.x), captures=False)}


def torch_graph(task: GpuTask, stage: TorchStage) -> Variants:
    run = torch_call(task, stage)
    return {"": Forward(lambda: run(task.x), eager=False)}


class Allowance:
    """Seconds that may be spent on something slow, all together."""

    def __init__(self, seconds: float) -> None:
        self._left = self._given = seconds

    @contextlib.contextmanager
    def spend(self, what: str) -> Iterator[None]:
        if self._left <= 0:
            raise UnavailableError(f"{what} is left out of some cases: its {self._given:.0f} s are spent")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._left -= time.perf_counter() - start


def torch_compiled(allowance: Allowance, task: GpuTask, stage: TorchStage) -> Variants:
    _check_rows("torch.compile", task)
    torch = stage.torch
    with allowance.spend("torch.compile"), contextlib.redirect_stderr(io.StringIO()):  # it prints what it tunes
        torch._dynamo.reset()
        run = torch.compile(torch_call(task, stage), mode=MODE, dynamic=False, fullgraph=True)
        for _ in range(3):  # compiles
            run(task.x)
        stage.synchronise()
    return {MODE: Forward(functools.partial(run, task.x))}


def _check_rows(what: str, task: GpuTask) -> None:
    if len(task.x) < COMPILED_ROWS:
        raise UnavailableError(f"{what} is left out below {COMPILED_ROWS:,} rows: it takes long to compile")


# -- Triton ------------------------------------------------------------------------------------------------


def triton_fused(task: GpuTask, stage: TorchStage) -> Variants:
    """Every setting that there is time to compile. In graphs only: a launch from Python often outlasts the run."""
    need("triton")
    from onchip.bench import triton_mlp

    layers, kind = dense_layers(task.net), getattr(stage.torch, COMPUTE[task.precision])
    y = stage.empty((len(task.x), len(layers[-1].weight)), task.io)
    weights = [triton_mlp.TritonMlp(layers, kind, stage.device, split) for split in (True, False)]
    if weights[0].KB == 0:
        weights.pop()
    # True fp32, or three products in TF32, which ours may use as well.
    precisions = {"fp32": ("ieee", "tf32x3"), "tf32": ("tf32",)}.get(task.precision, ("ieee",))
    settings = triton_mlp.choices(len(task.x), weights[0])
    made: dict[str, Forward] = {}
    failed, until = UnavailableError("no setting was tried"), time.perf_counter() + TUNE_S
    for choice, precision, padded in itertools.product(settings, precisions, weights):
        if made and time.perf_counter() > until:
            break
        call = functools.partial(padded, task.x, y, choice, precision)
        try:
            call()
            stage.synchronise()
        except Exception as error:  # too much shared memory, too many registers: each its own exception
            failed = UnavailableError(f"triton does not work here: {why(error)}")
            continue
        columns = f"{padded.KA}+{padded.KB}" if padded.KB else str(padded.KA)
        made[f"{choice}, {columns} columns{', 3xTF32' if precision == 'tf32x3' else ''}"] = Forward(call, eager=False)
    if not made:
        raise failed
    return made


# -- JAX ---------------------------------------------------------------------------------------------------


def load_jax() -> Any:
    need("jax")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes three quarters of the memory
    jax = importlib.import_module("jax")
    if jax.default_backend() != "gpu":
        raise UnavailableError("jax sees no GPU", hint="pip install 'jax[cuda13]'")
    return jax


def jax_jit(task: GpuTask, stage: TorchStage) -> Variants:
    _check_rows("jax", task)
    jax = load_jax()
    numpy = jax.numpy
    kind, given = numpy_dtype(COMPUTE[task.precision]), numpy_dtype(task.io)
    layers = dense_layers(task.net)
    weights = [
        (numpy.asarray(layer.weight.T, kind), None if layer.bias is None else numpy.asarray(layer.bias, kind))
        for layer in layers
    ]
    exact = jax.lax.Precision.HIGHEST if task.precision == "fp32" else jax.lax.Precision.DEFAULT

    def forward(x: Any, weights: Any) -> Any:
        h = x.astype(kind)
        for layer, (w, b) in zip(layers, weights, strict=True):
            h = numpy.matmul(h, w, precision=exact)
            h = h if b is None else h + b
            h = numpy.maximum(h, 0) if layer.relu else h
        return h.astype(given)

    x = importlib.import_module("jax.dlpack").from_dlpack(task.x)  # the same memory
    run = jax.jit(forward)
    return {"": Forward(lambda: run(x, weights), captures=False, wait=lambda y: y.block_until_ready())}


def make_peers() -> dict[str, Build]:
    """Engine -> what builds it; of one benchmark, as they share an allowance."""
    return {
        "torch eager": torch_eager,
        "torch graph": torch_graph,
        "torch.compile": functools.partial(torch_compiled, Allowance(COMPILE_S)),
        "triton": triton_fused,
        "jax": jax_jit,
    }
