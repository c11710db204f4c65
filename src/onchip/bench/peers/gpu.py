"""The peers on a GPU, on device-resident rows, each at its best known setting.

A peer is built for one task and returns its variants; the fastest is measured, and its name is in the setting.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onchip.bench.frame import UnavailableError
from onchip.bench.gpu_clock import TRIALS, Forward, Variants
from onchip.bench.peers.cpu import need
from onchip.bench.peers.dense import dense_layers
from onchip.bench.peers.framework import framework
from onchip.bench.peers.triton_search import RETRIED, Search, best_settings
from onchip.bench.stage import TorchStage
from onchip.network.graph import Network
from onchip.network.types import numpy_dtype
from onchip.plan.rewrites import fold_batchnorm

COMPILE_S, JAX_S = 25.0, 30.0  # seconds for torch.compile, and for JAX, per benchmark
NETWORKS_COMPILE_S, NETWORKS_JAX_S = 110.0, 100.0  # for networks that are not dense
# The benchmark captures graphs itself. torch.compile's own graphs copy x first, and capturing them frees the cuBLAS
# workspace, to which graphs captured before still write.
MODE = "max-autotune-no-cudagraphs"
COMPILED_ROWS = 12_800  # below, torch.compile and JAX take long to compile and are slower than graphs
COMPUTE = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # the dtype of the weights


@dataclass(frozen=True, eq=False)
class GpuTask:
    """A network over rows on the GPU: every engine computes in `precision`, and reads and writes `io`."""

    net: Network
    precision: str
    io: str  # dtype of x and y
    x: Any  # (B, ...), a tensor: of `io`, or of ids
    more: tuple[Any, ...] = ()  # the tensors of further inputs
    module: Callable[[], Any] | None = None  # the torch module that the network comes from; not modified

    @property
    def inputs(self) -> tuple[Any, ...]:
        return (self.x, *self.more)


Build = Callable[[GpuTask, TorchStage], Variants]
Call = Callable[..., Any]  # of x, and of further inputs


# -- torch -------------------------------------------------------------------------------------------------


def torch_call(task: GpuTask, stage: TorchStage, module: Any = None, **options: Any) -> Call:
    """The network in torch: weights in the compute dtype, rows converted on input and output.

    module   run instead of the network layer by layer; it is modified
    options  memory format of its weights
    """
    torch = stage.torch
    torch.set_float32_matmul_precision("high" if task.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = task.precision == "tf32"  # else its fp32 convolutions use TF32
    torch.backends.cudnn.benchmark = True  # tries convolution algorithms and keeps the fastest
    compute_dtype, io_dtype = getattr(torch, COMPUTE[task.precision]), getattr(torch, task.io)
    module = module or framework("torch_network").torch_module(task.net)
    module = module.eval().requires_grad_(False).to(stage.device, **options).to(compute_dtype)
    if compute_dtype == io_dtype:
        return module  # type: ignore[no-any-return]
    return lambda *xs: module(*(x.to(compute_dtype) if x.is_floating_point() else x for x in xs)).to(io_dtype)


def torch_calls(task: GpuTask, stage: TorchStage) -> dict[str, Call]:
    """By name: layer by layer with batch norms folded, and the module as written, with torch's attention; for images
    also in NHWC (channels_last): each call converts its rows.
    """
    modules = {"": framework("torch_network").torch_module(fold_norms(task.net))}
    if task.module is not None:
        modules["as written"] = task.module()
    calls: dict[str, Call] = {}
    nhwc = stage.torch.channels_last
    for name, module in modules.items():
        calls[name] = torch_call(task, stage, copy.deepcopy(module))
        if task.x.ndim == 4:
            call = torch_call(task, stage, copy.deepcopy(module), memory_format=nhwc)
            calls[", ".join(filter(None, [name, "NHWC"]))] = functools.partial(_in_format, call, nhwc)
    return calls


def fold_norms(net: Network) -> Network:
    """With batch norms folded into the weights, as tools for torch and JAX do for inference."""
    return fold_batchnorm(net)[0]


def _in_format(call: Call, memory_format: Any, x: Any, *more: Any) -> Any:
    return call(x.contiguous(memory_format=memory_format), *more)


def torch_eager(task: GpuTask, stage: TorchStage) -> Variants:
    calls = torch_calls(task, stage)
    return {name: Forward(functools.partial(call, *task.inputs), captures=False) for name, call in calls.items()}


def torch_graph(task: GpuTask, stage: TorchStage) -> Variants:
    calls = torch_calls(task, stage)
    return {name: Forward(functools.partial(call, *task.inputs), eager=False) for name, call in calls.items()}


class Allowance:
    """A time budget in seconds for slow work, e.g. compilation."""

    def __init__(self, seconds: float) -> None:
        self._left = self._budget = seconds

    @contextlib.contextmanager
    def spend(self, what: str) -> Iterator[None]:
        if self._left <= 0:
            raise UnavailableError(f"{what} is skipped in some cases: its {self._budget:.0f} s are spent")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._left -= time.perf_counter() - start


def torch_compiled(
    allowance: Allowance, task: GpuTask, stage: TorchStage, mode: str = "", min_rows: int = 0
) -> Variants:
    """Images in the memory format that is faster uncompiled: compiling both would take twice as long.

    mode, min_rows  default: MODE and COMPILED_ROWS
    """
    mode = mode or MODE
    _check_rows("torch.compile", task, min_rows or COMPILED_ROWS)
    name, run = compile_faster(allowance, torch_calls, task, stage, mode)
    return {", ".join(filter(None, [mode, name])): Forward(functools.partial(run, *task.inputs))}


Calls = Callable[[GpuTask, TorchStage], dict[str, Call]]  # the ways in which torch can run a task, by name


def compile_faster(
    allowance: Allowance, calls: Calls, task: GpuTask, stage: TorchStage, mode: str = "default"
) -> tuple[str, Call]:
    """The call that is faster uncompiled, compiled for the task's number of rows; returns its name first."""
    torch = stage.torch
    with allowance.spend("torch.compile"), contextlib.redirect_stderr(io.StringIO()):  # it prints its tuning
        name, call = _faster(calls(task, stage), task, stage)
        torch._dynamo.reset()
        torch._dynamo.config.allow_rnn = True  # else it rejects networks with an LSTM
        run = torch.compile(call, mode=mode, dynamic=False, fullgraph=True)
        for _ in range(3):  # compiles
            run(*task.inputs)
        stage.synchronise()
    return name, run


def _faster(calls: dict[str, Call], task: GpuTask, stage: TorchStage) -> tuple[str, Call]:
    def ms(name: str) -> float:
        work = functools.partial(calls[name], *task.inputs)
        work()  # the first call tries cuDNN's algorithms
        return statistics.median(stage.ms(work) for _ in range(TRIALS))

    name = min(calls, key=ms) if len(calls) > 1 else next(iter(calls))
    return name, calls[name]


def _check_rows(what: str, task: GpuTask, min_rows: int) -> None:
    if len(task.x) < min_rows:
        raise UnavailableError(f"{what} is skipped below {min_rows:,} rows: it takes long to compile")


# -- Triton ------------------------------------------------------------------------------------------------


class TritonPeer:
    """The kernel of triton_mlp at its best setting; rankings are reused by later tasks of the same kind."""

    def __init__(self) -> None:
        self._rankings: dict[tuple[Network, int, str], list[Any]] = {}

    def __call__(self, task: GpuTask, stage: TorchStage) -> Variants:
        need("triton")
        triton_mlp = framework("triton_mlp")

        layers, dtype = dense_layers(task.net), getattr(stage.torch, COMPUTE[task.precision])
        nets = [triton_mlp.TritonMlp(layers, dtype, stage.device, split) for split in (True, False)]
        if nets[0].KB == 0:
            nets.pop()
        # True fp32, or 3xTF32, which onchip may use too and which compiles faster.
        precisions = {"fp32": ("tf32x3", "ieee"), "tf32": ("tf32",)}.get(task.precision, ("ieee",))
        B, y = len(task.x), stage.empty((len(task.x), len(layers[-1].weight)), task.io)
        search = Search(task.x, y, torch_call(task, stage)(task.x), stage)
        key = task.net, B, f"{dtype.itemsize} bytes"
        known, is_small = self._rankings.get(key, []), B < triton_mlp.FEW_ROWS
        first = known[:RETRIED] or list(triton_mlp.choices(B, nets[0]))
        variants = best_settings(search, nets, precisions, first, None if known or is_small else triton_mlp.around)
        self._rankings.setdefault(key, search.ranking())
        return variants


# -- JAX ---------------------------------------------------------------------------------------------------


def load_jax() -> Any:
    need("jax")
    # JAX never frees memory: without these options it reserves three quarters at once, or grows to that.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    jax, *_ = (importlib.import_module(name) for name in ("jax", "jax.numpy", "jax.lax", "jax.nn"))
    if jax.default_backend() != "gpu":
        raise UnavailableError("jax sees no GPU", hint="pip install 'jax[cuda13]'")
    return jax


def jax_jit(allowance: Allowance, task: GpuTask, stage: TorchStage, min_rows: int = 0) -> Variants:
    """In fp32 the gemms are true fp32, as for every engine; JAX's default is TF32.

    min_rows  default: COMPILED_ROWS
    """
    _check_rows("jax", task, min_rows or COMPILED_ROWS)
    jax = load_jax()
    compute_dtype, io_dtype = numpy_dtype(COMPUTE[task.precision]), numpy_dtype(task.io)
    exact = jax.lax.Precision.HIGHEST if task.precision == "fp32" else jax.lax.Precision.DEFAULT
    forward, weights = framework("jax_network").jax_function(jax, fold_norms(task.net), COMPUTE[task.precision], exact)
    are_ids = [not x.is_floating_point() for x in task.inputs]

    def converted(xs: Any, weights: Any) -> Any:
        rows = [x if is_id else x.astype(compute_dtype) for x, is_id in zip(xs, are_ids, strict=True)]
        return forward(rows, weights).astype(io_dtype)

    # Zero-copy; ids in 32 bits, because JAX has no 64-bit ints by default.
    from_dlpack = importlib.import_module("jax.dlpack").from_dlpack
    xs = [from_dlpack(x.int() if is_id else x) for x, is_id in zip(task.inputs, are_ids, strict=True)]
    run = jax.jit(converted)
    with allowance.spend("jax"):
        run(xs, weights).block_until_ready()  # compiles
    return {"": Forward(lambda: run(xs, weights), captures=False, wait=lambda y: y.block_until_ready())}


def make_network_peers(
    min_rows: int, compile_s: float = NETWORKS_COMPILE_S, jax_s: float = NETWORKS_JAX_S
) -> dict[str, Build]:
    """As make_peers, for networks that are not dense; torch.compile and JAX need `min_rows` rows.

    torch.compile uses cuDNN's convolutions: tuning its own takes minutes per network.

    compile_s, jax_s  time budgets for compilation
    """
    compiled = functools.partial(torch_compiled, Allowance(compile_s), mode="default", min_rows=min_rows)
    return {
        "torch eager": torch_eager,
        "torch graph": torch_graph,
        "torch.compile": compiled,
        "jax": functools.partial(jax_jit, Allowance(jax_s), min_rows=min_rows),
    }


def make_peers() -> dict[str, Build]:
    """Engine -> its builder, for one benchmark: they share a time allowance."""
    return {
        "torch eager": torch_eager,
        "torch graph": torch_graph,
        "torch.compile": functools.partial(torch_compiled, Allowance(COMPILE_S)),
        "triton": TritonPeer(),
        "jax": functools.partial(jax_jit, Allowance(JAX_S)),
    }
