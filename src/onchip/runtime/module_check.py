"""Compare a loaded torch module with the network that was read from it, on rows like the example.

torch's exporter silently replaces some operators by others that compute something else. The network runs in its float64
reference. The module runs in float64 where it can, and in its own dtypes where it cannot or where the two differ, since
constants in the graph are rounded to those.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.torch.module import TorchModule
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.runtime.check import DTYPE_ULP, ULP
from onchip.runtime.engine import id_limits

# Allowed: FACTOR times the error of a naive run and ULPS units in the last place. Wider than an engine's, because
# torch has its own reduction order.
FACTOR, ULPS = 8, 16
NOISE = (1, 10, 3)  # of successive rows, relative to the size of the example's values
MIN_ROWS, MAX_ROWS = 2, 64
MAX_WORK = 1 << 30  # beyond MIN_ROWS rows: flop, plus VALUE_WORK per element; about a tenth of a second
VALUE_WORK = 16
NEARBY = 1e-3  # relative shift of an input, to leave a step or a tie that rounding decides


def check_module(net: Network, source: TorchModule) -> None:
    """Raise InputError if the network does not compute what its module computes; names the first layer that differs.

    It costs one run of each, over two rows of a large network and up to 64 of a small one. A module that cannot run
    on noisy rows, because it derives ids from floats, runs on the example, shifted slightly or not at all.
    """
    rng = np.random.default_rng(0)
    work = sum(map(net.row_flop, net.nodes)) + VALUE_WORK * sum(value.row_size for value in net.types.values())
    rows = min(MAX_ROWS, max(MIN_ROWS, MAX_WORK // max(1, work)))
    example = tuple(x[:rows] for x in source.inputs)
    for inputs in (_with_noise(net, source, rows, rng), _perturbed(example, rng), example):
        try:
            found = _difference(net, source, inputs)
        except InputError:  # raised by the module's forward, or an id outside its table
            continue
        if found:
            nearby = _perturbed(inputs, rng)
            with contextlib.suppress(InputError):
                found = _difference(net, source, nearby) and found
        if found:
            layer = _first_that_differs(net, source, inputs)
            raise InputError(
                f"module {source.name}: the imported network computes something else", got=f"{layer}: {found}",
                expected="the module's outputs, up to rounding",
                hint="use other torch operators: its ONNX exporter does not export this one correctly",
            )  # fmt: skip
        return


def _with_noise(net: Network, source: TorchModule, rows: int, rng: np.random.Generator) -> tuple[Any, ...]:
    """The example's rows with noise; of more than four rows, two have none. Ids are drawn from their table, other
    ints from the example.
    """
    torch, limits, inputs = sys.modules["torch"], id_limits(net), []
    noise = np.resize(NOISE, rows)
    noise[: MIN_ROWS if rows > 2 * MIN_ROWS else 0] = 0
    for name, x in zip(source.names, source.inputs, strict=True):
        rows_of_x = x[np.arange(rows) % len(x)]
        if x.is_floating_point():
            drawn = noise.reshape(-1, *[1] * (x.ndim - 1)) * rng.standard_normal(rows_of_x.shape)
            inputs.append(_shifted(rows_of_x, drawn, _size(x)))
            continue
        shape = (np.count_nonzero(noise), *x.shape[1:])
        drawn = rng.integers(0, limits[name], shape) if name in limits else rng.choice(_array(x).ravel(), shape)
        inputs.append(torch.cat([rows_of_x[noise == 0], torch.as_tensor(drawn, device=x.device).to(x.dtype)]))
    return tuple(inputs)


def _perturbed(inputs: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    """The same rows, slightly shifted, so that no value stays next to a step or a tie."""
    return tuple(
        _shifted(x, NEARBY * rng.standard_normal(x.shape), _size(x)) if x.is_floating_point() else x for x in inputs
    )


def _shifted(x: Any, noise: Array, size: float) -> Any:
    return (x.double() + size * x.new_tensor(noise).double()).to(x.dtype)


def _size(x: Any) -> float:
    """The root mean square of the finite values; 1 if that is zero, as for an example of zeros."""
    values = _array(x)
    values = values[np.isfinite(values)]
    return float(np.sqrt(np.square(values).sum() / max(1, values.size))) or 1.0


def _array(x: Any) -> Array:
    array: Array = (x.double() if x.is_floating_point() else x).detach().cpu().numpy()
    return array


def _difference(net: Network, source: TorchModule, inputs: tuple[Any, ...]) -> str:
    """How the module's outputs differ from the network's; "" if only by rounding."""
    few, xs = _read_by(net, source, inputs)
    truth = _outputs(few, xs, "float64")
    exact = [np.zeros(len(xs[0]))] * len(truth)
    with contextlib.suppress(InputError):  # not every module can run in float64
        if not _mismatch(source.run(inputs, in_double=True), truth, exact, ULP["fp32"]):
            return ""
    dtypes = [t.dtype for t in net.types.values() if "float" in t.dtype]
    narrowest = min(["float32", *dtypes], key=lambda name: DTYPE_BYTES[name])
    naive = [_errors(y, true) for y, true in zip(_outputs(few, xs, narrowest), truth, strict=True)]
    return _mismatch(source.run(inputs), truth, naive, DTYPE_ULP.get(narrowest, ULP["fp32"]))


def _read_by(net: Network, source: TorchModule, inputs: tuple[Any, ...]) -> tuple[Network, tuple[Array, ...]]:
    """The network restricted to the tokens used, and its inputs. Inputs that the module leaves unused are dropped."""
    by_name = dict(zip(source.names, inputs, strict=True))
    return reference.with_used_tokens(net, tuple(_array(by_name[name]) for name in net.inputs))


def _outputs(net: Network, xs: tuple[Array, ...], dtype: str) -> list[Array]:
    values = reference.forward_all(net, xs, dtype)
    return [values[name] for name in net.outputs]


def _mismatch(outputs: tuple[Any, ...], truth: list[Array], naive: list[Array], ulp: float) -> str:
    """The first output of the module that differs by more than rounding explains; "" if none does."""
    if len(outputs) != len(truth):
        return f"{len(truth)} outputs, the module has {len(outputs)}"
    for i, (y, true, by_rounding) in enumerate(zip(map(_array, outputs), truth, naive, strict=True)):
        if y.shape != true.shape:
            return f"output {i} is {list(true.shape)}, the module's is {list(y.shape)}"
        errors = _errors(y, true)
        # Over all rows: in a single row, a naive sum may be exact by chance.
        by_rounding = np.maximum(by_rounding, by_rounding[np.isfinite(by_rounding)].max(initial=0.0))
        allowed = FACTOR * by_rounding + ULPS * ulp
        if (errors > allowed).any():
            row = int(np.argmax(errors > allowed))
            return f"output {i} has relative error {errors[row]:.2g}, rounding explains {allowed[row]:.2g}"
    return ""


def _errors(got: Array, truth: Array) -> Array:
    """Per row: the root mean square of the difference, relative to that of the truth.

    A mean, because rounding moves a few of many elements across a step. The same NaN or infinity in both counts as no
    difference; in only one of them, as infinite.
    """
    got, truth = (array.astype(np.float64).reshape(len(array), -1) for array in (got, truth))
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(got - truth)
        squares[(got == truth) | (np.isnan(got) & np.isnan(truth))] = 0
        squares[np.isnan(squares)] = np.inf
        scale = np.sum(np.square(np.where(np.isfinite(truth), truth, 0)), axis=1)
        error: Array = np.sqrt(squares.sum(axis=1) / np.where(scale == 0, max(1, truth.shape[1]), scale))
    return error


def _first_that_differs(net: Network, source: TorchModule, inputs: tuple[Any, ...]) -> str:
    """The first layer whose values the module does not compute, and that no later correct layer reads."""
    few, xs = _read_by(net, source, inputs)
    values = reference.forward_all(few, xs)
    computed: dict[int, list[Array]] = {}
    arrays, in_double = _computed(source, inputs)
    for array in (*xs, *arrays):
        computed.setdefault(array.size, []).append(array)
    allowed = ULPS * ULP["fp32"] if in_double else NEARBY
    correct: set[str] = set()
    for node in reversed(few.nodes):
        y = values[node.name]
        rows = (array.reshape(y.shape) for array in computed.get(y.size, ()))
        if node.name in correct or any((_errors(row, y) <= allowed).all() for row in rows):
            correct |= {node.name, *node.inputs}
    node = next((node for node in few.nodes if node.name not in correct), few.by_name[few.outputs[0]])
    return f"layer '{node.name}' ({node.layer.kind}) is the first that differs"


def _computed(source: TorchModule, inputs: tuple[Any, ...]) -> tuple[list[Array], bool]:
    """Every tensor that operators compute while the module runs, and whether it ran in float64."""
    torch = sys.modules["torch"]
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[Array] = []

    class Keep(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(results):
                if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
                    found.append(_array(leaf).copy())  # a later operator may write into it
            return results

    for in_double in (True, False):
        found.clear()
        with contextlib.suppress(InputError), Keep():
            source.run(inputs, in_double)
            break
    return found, in_double
