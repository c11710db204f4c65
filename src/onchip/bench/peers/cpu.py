"""The peers on the CPU, each at its best known setting, with as many threads as onchip.

A peer is built once per network and returns a function from rows to rows, NumPy in, NumPy out, like onchip's.
Peers run layer by layer, so large batches fall out of the cache; calls of some thousand rows are often faster.
`fastest` tries several chunk sizes; the chosen one is in the result file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onchip.bench.frame import UnavailableError, first_line
from onchip.bench.peers.framework import framework
from onchip.measure.pace import blas_limiter
from onchip.network.graph import Network, Node
from onchip.network.layers import Elementwise, Identity, Linear, LogSoftmax, ReLU, Reshape, Softmax
from onchip.network.recipe import Array, Evaluated, materialise

Forward = Callable[..., Array]  # x (B, ...), one per input -> y (B, ...)
CHUNKS = (1_024, 4_096, 16_384)
TRIALS, TRIALS_S = 3, 1.0


@dataclass(frozen=True, eq=False)
class Subject:
    """A network in the forms that peers accept."""

    net: Network
    module: Callable[[], Any]  # a torch.nn.Module in eval mode; not modified
    write_onnx: Callable[[Path], None]


Build = Callable[[Subject, int], Forward]  # (subject, threads) -> a function that runs it


def subject_of(net: Network) -> Subject:
    from onchip.formats.onnx.writer import write_onnx

    return Subject(
        net,
        functools.cache(lambda: framework("torch_network").torch_module(net).eval()),
        functools.partial(write_onnx, net),
    )


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed", hint="pip install 'onchip[peers]'")


def load_torch(threads: int) -> Any:
    need("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

    torch.set_num_threads(threads)
    return torch


# -- inference ---------------------------------------------------------------------------------------------


def torch_eager(what: Subject, threads: int) -> Forward:
    torch = load_torch(threads)
    return torch_forward(torch, what.module())


def torch_channels_last(what: Subject, threads: int) -> Forward:
    """Images in NHWC (channels_last): the input is converted, and the layers keep the format."""
    torch = load_torch(threads)
    nhwc = torch.channels_last
    module = copy.deepcopy(what.module()).to(memory_format=nhwc)
    if len(what.net.input.shape) != 4:
        return torch_forward(torch, module)
    return torch_forward(torch, lambda x: module(x.contiguous(memory_format=nhwc)))


def torch_compiled(what: Subject, threads: int) -> Forward:
    """Static shapes and frozen weights, so that weights are packed once; max-autotune took seconds and was slower."""
    torch = load_torch(threads)
    torch._dynamo.reset()  # graphs of earlier networks count against a limit
    torch._dynamo.config.allow_rnn = True  # else it rejects networks with an LSTM
    return torch_forward(torch, torch.compile(what.module(), dynamic=False, fullgraph=True, options={"freezing": True}))


def torch_forward(torch: Any, module: Callable[..., Any]) -> Forward:
    def run(*x: Array) -> Array:
        with torch.inference_mode():
            y: Array = module(*map(torch.from_numpy, x)).numpy()
        return y

    return run


def onnxruntime_session(what: Subject, threads: int) -> Forward:
    need("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        what.write_onnx(path)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    first, *others = (node.name for node in session.get_inputs())

    def run(x: Array, *more: Array) -> Array:
        feed = {first: x}
        if others:
            feed.update(zip(others, more, strict=True))
        y: Array = session.run(None, feed)[0]
        return y

    return run


def numpy_layers(what: Subject, threads: int) -> Forward:
    """One operation after another into preallocated arrays; ReLU in place. Chains only: convolutions take too long."""
    limited = blas_limiter(threads)
    materialised: Evaluated = {}
    steps = [
        (node.layer, {role: materialise(name, what.net.weights, materialised) for role, name in node.weights.items()})
        for node in linear_chain(what.net)
    ]
    buffers: dict[tuple[int, int], Array] = {}

    def linear(i: int, values: Array, w: dict[str, Array]) -> Array:
        shape = (*values.shape[:-1], len(w["weight"]))
        out = buffers.get((i, len(values)))
        if out is None:
            out = buffers[i, len(values)] = np.empty(shape, np.float32)
        np.matmul(values, w["weight"].T, out=out)
        if "bias" in w:
            np.add(out, w["bias"], out=out)
        return out

    def run(x: Array) -> Array:
        values = x
        with limited():
            for i, (layer, w) in enumerate(steps):
                if isinstance(layer, Linear):
                    values = linear(i, values, w)
                elif isinstance(layer, ReLU) and i > 0:
                    np.maximum(values, np.float32(0), out=values)
                else:
                    values = layer.forward((values,), w)
        return values

    return run


def linear_chain(net: Network) -> Sequence[Node]:
    """The nodes, if each reads the previous one and is a Linear, elementwise or row-wise layer."""
    previous = next(iter(net.inputs))
    for node in net.nodes:
        if node.inputs != (previous,):
            raise UnavailableError(f"network '{net.name}' is not a chain of layers")
        if not isinstance(node.layer, Linear | Elementwise | Softmax | LogSoftmax | Reshape | Identity):
            raise UnavailableError(f"NumPy takes too long for {node.layer.kind}")
        previous = node.name
    return net.nodes


# Engine -> its variants: the fastest is measured, and its name is part of the setting.
INFERENCE: dict[str, dict[str, Build]] = {
    "torch eager": {"": torch_eager},
    "torch.compile": {"": torch_compiled},
    "onnxruntime": {"": onnxruntime_session},
    "numpy": {"": numpy_layers},
}


def fastest(
    variants: Mapping[str, Forward], x: Sequence[Array], out: Array, chunks: Sequence[int] = CHUNKS
) -> tuple[Callable[[], Array], str]:
    """Run all of x with the fastest variant and chunk size; also returns their names.

    x  one array per input
    """
    B = len(x[0])

    def in_chunks(forward: Forward, size: int) -> Callable[[], Array]:
        if size == B:
            return lambda: forward(*x)

        def run() -> Array:
            for i in range(0, B, size):
                out[i : i + size] = forward(*(rows[i : i + size] for rows in x))
            return out

        return run

    # Equal chunks if possible: a remainder of another shape is another graph for torch.compile.
    sizes = dict.fromkeys([B, *(math.ceil(B / math.ceil(B / chunk)) for chunk in chunks if chunk < B)])
    runs = {(name, size): in_chunks(forward, size) for name, forward in variants.items() for size in sizes}
    name, size = min(runs, key=lambda key: trial_seconds(runs[key]))
    calls = "one call" if size == B else f"{size} rows per call"
    return runs[name, size], ", ".join(filter(None, [name, calls]))


def trial_seconds(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < TRIALS and sum(times) < TRIALS_S:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """A framework that fails during set-up is unavailable, with the reason; its warnings are suppressed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if isinstance(error, UnavailableError):
            raise
        raise UnavailableError(f"{what} does not work here: {first_line(error)}") from None
