"""The peers on the CPU, each at the best setting we know for it, with as many threads as ours gets.

A peer is built once for a network and some rows, and hands back a function `rows(a, b)` that runs rows a to b.
Peers go layer by layer, so many rows at once fall out of the cache; calls of some thousand rows are often
faster. `fastest_pieces` tries and keeps the fastest: the setting stands in the result file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onchip.bench.frame import UnavailableError
from onchip.kernels import reference
from onchip.ladders.measure import blas_limiter
from onchip.spec.layers import Layer, Linear, LogSoftmax, ReLU, Reshape, Sigmoid, Softmax, Tanh
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, materialise

Rows = Callable[[int, int], Array]  # rows a..b of x -> rows a..b of y
PIECES = (1_024, 4_096, 16_384)
_TRIALS = 3


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed", hint="pip install 'onchip[peers]'")


def why(error: BaseException) -> str:
    """The first line of whatever a framework had to say."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


# -- inference ---------------------------------------------------------------------------------------------


def torch_eager(net: Network, x: Array, threads: int) -> Rows:
    torch = load_torch(threads)
    module, rows = torch_module(net).eval(), torch.from_numpy(x)

    def run(a: int, b: int) -> Array:
        with torch.inference_mode():
            y: Array = module(rows[a:b]).numpy()
        return y

    return run


def torch_compiled(net: Network, x: Array, threads: int) -> Rows:
    """Static shapes and frozen weights, which lets it pack them once; max-autotune took seconds and lost here."""
    torch = load_torch(threads)
    torch._dynamo.reset()  # shapes of earlier cases count against a limit on graphs
    module, rows = torch_module(net).eval(), torch.from_numpy(x)
    compiled = torch.compile(module, dynamic=False, fullgraph=True, options={"freezing": True})

    def run(a: int, b: int) -> Array:
        with torch.inference_mode():
            y: Array = compiled(rows[a:b]).numpy()
        return y

    with explained("torch.compile"):
        run(0, len(x))
    return run


def onnxruntime_session(net: Network, x: Array, threads: int) -> Rows:
    need("onnxruntime")
    import onnxruntime

    from onchip.spec.onnx_writer import write_onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder, explained("onnxruntime"):
        path = Path(folder) / "model.onnx"
        write_onnx(net, path)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(a: int, b: int) -> Array:
        y: Array = session.run(None, {name: x[a:b]})[0]
        return y

    return run


def numpy_layers(net: Network, x: Array, threads: int) -> Rows:
    """One operation after another into arrays that are kept; ReLU in place."""
    limited = blas_limiter(threads)
    made: dict[str, Array] = {}
    steps = [(node.layer, _weights(net, node, made)) for node in chain(net)]
    kept: dict[tuple[int, int], Array] = {}

    def product(i: int, values: Array, w: dict[str, Array]) -> Array:
        shape = (*values.shape[:-1], len(w["weight"]))
        out = kept.get((i, len(values)))
        if out is None:
            out = kept[i, len(values)] = np.empty(shape, np.float32)
        np.matmul(values, w["weight"].T, out=out)
        if "bias" in w:
            np.add(out, w["bias"], out=out)
        return out

    def run(a: int, b: int) -> Array:
        values = x[a:b]
        with limited():
            for i, (layer, w) in enumerate(steps):
                if isinstance(layer, Linear):
                    values = product(i, values, w)
                elif isinstance(layer, ReLU) and i > 0:
                    np.maximum(values, np.float32(0), out=values)
                else:
                    values = reference.FORWARD[type(layer)](layer, (values,), w)
        return values

    return run


INFERENCE: dict[str, Callable[[Network, Array, int], Rows]] = {
    "torch eager": torch_eager,
    "torch.compile": torch_compiled,
    "onnxruntime": onnxruntime_session,
    "numpy": numpy_layers,
}


def fastest_pieces(rows: Rows, B: int, out: Array) -> tuple[Callable[[], Array], str]:
    """Run all B rows in calls of the size that turns out fastest, and say which that was."""

    def in_pieces(size: int) -> Callable[[], Array]:
        if size == B:
            return lambda: rows(0, B)

        def run() -> Array:
            for a in range(0, B, size):
                out[a : a + size] = rows(a, min(B, a + size))
            return out

        return run

    # Equal pieces where that is possible: a rest of another shape is another graph for torch.compile.
    sizes = dict.fromkeys([B, *(math.ceil(B / math.ceil(B / piece)) for piece in PIECES if piece < B)])
    runs = {size: in_pieces(size) for size in sizes}
    best = min(runs, key=lambda size: _trial_seconds(runs[size]))
    return runs[best], "one call" if best == B else f"{best} rows a call"


def _trial_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


# -- torch -------------------------------------------------------------------------------------------------


def load_torch(threads: int) -> Any:
    need("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

    torch.set_num_threads(threads)
    return torch


def torch_module(net: Network) -> Any:
    """The network as a torch.nn.Sequential with the same weights."""
    import torch

    made: dict[str, Array] = {}
    modules = []
    for i, node in enumerate(chain(net)):
        layer = node.layer
        if isinstance(layer, Linear):
            weights = {role: torch.tensor(np.array(w)) for role, w in _weights(net, node, made).items()}
            D_out, D_in = weights["weight"].shape
            linear = torch.nn.Linear(D_in, D_out, bias="bias" in weights)
            linear.load_state_dict(weights)
            modules.append(linear)
        else:
            modules.append(_torch_activation(torch, layer, in_place=i > 0))
    return torch.nn.Sequential(*modules)


def _torch_activation(torch: Any, layer: Layer, in_place: bool) -> Any:
    if isinstance(layer, ReLU):
        return torch.nn.ReLU(inplace=in_place)  # never on x itself
    if isinstance(layer, Reshape):
        return torch.nn.Unflatten(1, layer.row_shape) if len(layer.row_shape) > 1 else torch.nn.Flatten()
    if isinstance(layer, Softmax | LogSoftmax):
        return getattr(torch.nn, layer.kind)(dim=layer.axis)
    if isinstance(layer, Sigmoid | Tanh):
        return getattr(torch.nn, layer.kind)()
    raise UnavailableError(f"no torch module for {layer}")


def chain(net: Network) -> Sequence[Node]:
    """The nodes, if each reads the one before."""
    before = next(iter(net.inputs))
    for node in net.nodes:
        if node.inputs != (before,):
            raise UnavailableError(f"network '{net.name}' is no chain of layers")
        before = node.name
    return net.nodes


def _weights(net: Network, node: Node, made: dict[str, Array]) -> dict[str, Array]:
    return {role: materialise(name, net.weights, made) for role, name in node.weights.items()}


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """A framework that fails while it is set up is unavailable, and says why; its warnings are its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if isinstance(error, UnavailableError):
            raise
        raise UnavailableError(f"{what} does not work here: {why(error)}") from None
