"""Random networks from a seed, and the judge that holds an engine's results against the float64 reference.

`python tests/random_networks.py SEED [--device cpu] [--precision fp32]` prints a network and its verdict.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from onchip.errors import PlanError
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.layers import (
    ELU,
    GELU,
    SELU,
    Abs,
    Add,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Clip,
    Concat,
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    Cos,
    CumSum,
    Div,
    Embedding,
    Erf,
    Exp,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    HardSigmoid,
    HardSwish,
    Identity,
    LeakyReLU,
    Linear,
    Log,
    LogSoftmax,
    MatMul,
    Max,
    MaxPool1d,
    MaxPool2d,
    Min,
    Mish,
    Mod,
    Mul,
    Permute,
    Reciprocal,
    ReLU,
    Reshape,
    SequenceMax,
    Sigmoid,
    SiLU,
    Sin,
    Softmax,
    Softplus,
    Softsign,
    Sqrt,
    Sub,
    Tanh,
    ToInts,
    TokenConv,
    ToPixels,
    TransposedConvolution,
)  # fmt: skip
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.types import numpy_dtype
from onchip.plan.plan import Plan
from onchip.runtime.check import DTYPE_ULP, NAIVE_DTYPE, CheckRow, scaled_error, unequal_batch
from onchip.runtime.engine import Engine, compile, id_limits
from random_growth import VOCABULARY, Growing
from random_layers import MAKERS, try_one

MAX_LAYERS = 14

# What real networks are made of and the fused kernels look for, by the kind of input: a random walk over the kinds
# would rarely meet it. Each step goes behind the newest value that fits; a tuple is a choice.
ACTIVATIONS = (
    ReLU, Tanh, Sigmoid, SiLU, GELU, LeakyReLU, Clip, ELU, SELU, HardSigmoid, HardSwish, Mish, Softplus, Softsign,
)  # fmt: skip
FUNCTIONS = (Exp, Log, Sqrt, Reciprocal, Sin, Cos, Erf, Abs)
REDUCTIONS = (GlobalMax, GlobalMean, GlobalMin, GlobalSum, GlobalNorm)
TURN, FLAT, MAX_OVER_TIME = Permute((0, 2, 1)), Reshape(), GlobalMax()
MOTIFS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "vector": (
        (Linear, ACTIVATIONS, Linear, ACTIVATIONS, Linear, (Softmax, LogSoftmax)),
        (Linear, BatchNorm1d, ACTIVATIONS, Linear),
        (Linear, (Reshape, Permute, Identity), Linear, Linear),
        (Linear, Reshape, ConvTranspose2d, BatchNorm2d, ACTIVATIONS),
        ((Linear, Cast), CumSum),
        (Cast, Linear, Cast),
        (Linear, FUNCTIONS, (Add, Mul, Sub, Div), ACTIVATIONS),
    ),
    "signal": (
        (Conv1d, ACTIVATIONS, (MaxPool1d, AvgPool1d), Conv1d),
        (Conv1d, BatchNorm1d, Conv1d, Add, ACTIVATIONS),
        (ConvTranspose1d, BatchNorm1d, ACTIVATIONS),
        (TURN, Linear, ACTIVATIONS, Linear),
        (Conv1d, REDUCTIONS, Linear, Softmax),
        (Linear, MatMul, Softmax, MatMul, Linear),
    ),
    "image": (
        (Conv2d, BatchNorm2d, ACTIVATIONS, (MaxPool2d, AvgPool2d)),
        (Conv2d, ACTIVATIONS, Conv2d, (Add, Mul, Concat), ACTIVATIONS),
        (Conv2d, Conv2d, (*REDUCTIONS, FLAT), Linear, ACTIVATIONS),
        (ConvTranspose2d, BatchNorm2d, ACTIVATIONS, ConvTranspose2d, Tanh, ToPixels),
        (Conv2d, Sigmoid, Mul),
        ((Sub, Max, Min), Div, Conv2d),
    ),
    "tokens": (
        (Embedding, TURN, Conv1d, ACTIVATIONS, MAX_OVER_TIME),
        (Embedding, TURN, Conv1d, Conv1d, MAX_OVER_TIME, Linear),
        (Embedding, (FLAT, Identity), Linear, ACTIVATIONS),
        (TokenConv, ACTIVATIONS, MAX_OVER_TIME, TokenConv, ACTIVATIONS, MAX_OVER_TIME, Concat, Linear),
        (Embedding, (GlobalMean, CumSum), Linear, ACTIVATIONS),
        (TokenConv, ACTIVATIONS, SequenceMax, TokenConv, SequenceMax, ACTIVATIONS, Concat, Linear),
        (Embedding, TURN, Conv1d, ACTIVATIONS, SequenceMax),
    ),
}


# -- networks --------------------------------------------------------------------------------------------------


def random_network(seed: int) -> Network:
    """One to some 14 layers of every kind; the same on every machine."""
    rng = np.random.default_rng(seed)

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    theme = pick(tuple(MOTIFS))
    grow = Growing(pick, rank={"image": 3, "signal": 2}.get(theme, 1), takes_ids=theme == "tokens")
    wanted = pick(range(1, MAX_LAYERS - 1))
    while len(grow.nodes) < wanted:
        if pick((True, False, False)):
            for step in pick(MOTIFS[pick((theme, theme, pick(tuple(MOTIFS))))]):
                if len(grow.nodes) < MAX_LAYERS:
                    try_one(grow, pick(step) if isinstance(step, tuple) else step, newest=True)
        else:
            try_one(grow, pick(tuple(MAKERS)))
    return grow.finish(f"random{seed}")


# -- the judge -------------------------------------------------------------------------------------------------

ROWS, BATCHED_ROWS = 160, 28  # rows that errors are taken over; of these, the last ones in batches of 1, 2 and 7
MANY_ROWS, DRAWS = 2000, 3
FEW_ROWS = 8  # that differ: fewer are no yardstick
# Kernels that multiply fp32 as parts.
IN_PARTS = (
    "mlp_tensor_core", "gemm_sm90", "gemm_mma", "conv_implicit_gemm", "conv_gather", "conv_sm90", "conv_first_layer",
    "conv_last_layer", "matmul_mma", "attention", "recurrent_mma",
)  # fmt: skip
NAN_ROWS, INF_ROWS, ZERO_ROWS = 4, 4, 4  # the last of them


def random_inputs(net: Network, seed: int, rows: int = ROWS, draw: int = 0) -> tuple[np.ndarray, ...]:
    """Rows for every input; the last ones with NaNs, infinities and zeros of both signs among their floats."""
    rng = np.random.default_rng((seed, 1 + draw))
    made, limits, divisors = [], id_limits(net), _divisors(net)
    for name, given in net.inputs.items():
        shape, dtype = (rows, *given.row_shape), numpy_dtype(given.dtype)
        if "float" in given.dtype:
            x = rng.standard_normal(shape)
            flat = x.reshape(rows, -1)
            special = np.repeat([np.nan, np.inf, 0.0], (NAN_ROWS, INF_ROWS, ZERO_ROWS))
            special *= rng.choice((-1.0, 1.0), len(special))
            for row, value in zip(flat[-len(special) :], special, strict=True):
                row[rng.integers(max(1, row.size)) :][:1] = value
            made.append(x.astype(dtype))
        else:
            if given.dtype in ID_DTYPES:
                low, high = 0, min(VOCABULARY, limits.get(name, VOCABULARY))
            else:
                low, high = (0, 2) if given.dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
            x = rng.integers(low, high, shape).astype(dtype)
            if name in divisors:
                x[x == 0] = 1  # a division of ints by 0 is an error
            made.append(x)
    return tuple(made)


def _divisors(net: Network) -> set[str]:
    """Values that others are divided by, and those that a divisor is another view of."""
    found = {node.inputs[-1] for node in net.nodes if isinstance(node.layer, Div | Mod)}
    for node in reversed(net.nodes):
        if node.name in found and len(node.inputs) == 1:
            found.add(node.inputs[0])
    return found


def verify(net: Network, seed: int, device: str = "cpu", precision: str = "fp32") -> str:
    """What is wrong with the engine's results for random rows, and how to see it again; "" if nothing is.

    PlanError if the device's kernels do not take the network.
    """
    # An embedding is folded only for many rows.
    engine = compile(net, device, precision, batch_hint=(1024, 10**9, 1)[seed % 3])
    wrong = faults(net, engine, seed)
    if not wrong:
        return ""
    again = f"python tests/random_networks.py {seed} --device {device} --precision {precision}"
    return "\n".join([f"random network {seed} is wrong on {device} in {precision}; to see it again: {again}", *wrong])


def faults(net: Network, engine: Engine, seed: int, batches: Sequence[int] = ()) -> list[str]:
    """What is wrong with an engine's results for random rows; in batches of these sizes too, of the same rows."""
    x = random_inputs(net, seed)
    wrong = _unequal_bits(net, engine, x, batches)
    if _errors(net, engine, x):
        # Few numbers, or few that do not cancel, are a poor yardstick, and of sums that do cancel one in a million is
        # far off: what is wrong is so among many, whichever they are.
        draws = [_errors(net, engine, random_inputs(net, seed, MANY_ROWS, draw)) for draw in range(DRAWS)]
        wrong += draws[0] if all(draws) else []
    return wrong


def judge_many(seeds: Sequence[int], device: str, precision: str) -> list[str]:
    """Verdicts that are not "", of the networks that the device takes: in processes, as compiling is most of it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        verdicts = pool.map(_judge_one, [(seed, device, precision) for seed in seeds], chunksize=4)
        return [verdict for verdict in verdicts if verdict]


def _judge_one(task: tuple[int, str, str]) -> str:
    seed, device, precision = task
    try:
        return verify(random_network(seed), seed, device, precision)
    except PlanError:
        return ""


def _as_tuple(outputs: Any) -> tuple[np.ndarray, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _unequal_bits(net: Network, engine: Engine, x: tuple[np.ndarray, ...], batches: Sequence[int]) -> list[str]:
    """Where the bits of a row depend on the batch, its place there, or the threads."""

    def run(*rows: np.ndarray) -> np.ndarray:
        return _bits(_as_tuple(engine(*rows)))

    wrong, whole = [], run(*x)
    if (size := unequal_batch(run, tuple(rows[-BATCHED_ROWS:] for rows in x), whole[-BATCHED_ROWS:])) is not None:
        wrong.append(f"a row has other bits in a batch of {size}")
    if not np.array_equal(run(*(rows[::-1] for rows in x)), whole[::-1]):
        wrong.append("a row has other bits at another place of the batch")
    for B in batches:
        again = np.arange(B) % len(whole)
        if not np.array_equal(run(*(rows[again] for rows in x)), whole[again]):
            wrong.append(f"a row has other bits in a batch of {B}")
    if engine.plan.device.kind == "cpu":
        single = compile(net, "cpu", threads=1, batch_hint=engine.plan.job.batch)
        if not np.array_equal(_bits(_as_tuple(single(*x))), whole):
            wrong.append("a row has other bits with one thread")
    return wrong


def _bits(outputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """(B, bytes): all outputs of a row side by side. NaNs count as one: which sign a sum of two keeps is the chip's."""
    flat = [np.ascontiguousarray(y).reshape(len(y), math.prod(y.shape[1:])) for y in outputs]
    one_nan = [np.where(y == y, y, np.full_like(y, np.nan)) if "float" in y.dtype.name else y for y in flat]
    return np.concatenate([y.view(np.uint8) for y in one_nan], axis=1)


def _errors(net: Network, engine: Engine, x: tuple[np.ndarray, ...]) -> list[str]:
    """What is wrong with the outputs' dtypes and numbers."""
    wrong = []
    truth, rewritten = (reference.forward_all(version, x) for version in (net, engine.plan.network))
    for name, got in zip(net.outputs, _as_tuple(engine(*x)), strict=True):
        if got.dtype != numpy_dtype(net.types[name].dtype):
            wrong.append(f"output '{name}' is {got.dtype}, expected {net.types[name].dtype}")
        said = ~_unsaid(net, name, truth)
        rows, true = tuple(values[said] for values in x), {value: y[said] for value, y in truth.items()}
        wrong += _errors_of(net, name, got[said], rows, true, rewritten[name][said], engine.plan)
    return wrong


def _errors_of(
    net: Network, name: str, got: np.ndarray, x: tuple[np.ndarray, ...], truth: dict[str, np.ndarray],
    rewritten: np.ndarray, plan: Plan,
) -> list[str]:  # fmt: skip
    """What is wrong with one output, held against the naive run in the narrowest type of what it is made of."""
    exact, above, precision = truth[name], _above(net, name), plan.job.precision
    layers = [net.by_name[value].layer for value in above if value in net.by_name]
    has_steps = any(isinstance(layer, ToPixels) for layer in layers)
    if "float" not in net.types[name].dtype and not has_steps:
        return [] if np.array_equal(got, exact) else [f"output '{name}': other ints"]
    dtypes = [NAIVE_DTYPE[precision], *(net.types[value].dtype for value in above if "float" in net.types[value].dtype)]
    naive_dtype = max(dtypes, key=lambda dtype: DTYPE_ULP.get(dtype, 0.0))
    naive = reference.forward_all(net, x, naive_dtype)[name]
    # Sums of infinities depend on their order, which rewrites change, and convolutions make pairs of windows.
    through_infinity = np.any([_rows(np.isinf(truth[value])) for value in above], axis=0)
    may_differ = _rows(~np.isclose(rewritten, exact, rtol=0.01, atol=0.01, equal_nan=True))
    has_convolutions = any(isinstance(layer, Convolution | TransposedConvolution) for layer in layers)
    # fp32 as parts of tf32 makes NaNs of infinities (mlp/tensor_core.cu, mma/wgmma_tile.cuh).
    in_parts = precision == "fp32" and any(group.claim.kernel in IN_PARTS for group in plan.groups)
    # conv/last_layer/mma.cu and conv/last_layer/sm90.cu: a NaN reaches all places of a cell whose window has it.
    through_nan = np.any([_rows(np.isnan(truth[value])) for value in above], axis=0)
    in_cells = any(group.claim.kernel in ("conv_last_layer", "conv_last_layer_sm90") for group in plan.groups)
    verified = ~(_pattern_differs(naive, exact) | (through_infinity & (may_differ | has_convolutions | in_parts)))
    verified &= ~(through_nan & in_cells)
    got, exact, naive = (y[verified] for y in (got, exact, naive))
    baseline = scaled_error(naive, exact)
    is_few = len(np.unique(exact.reshape(len(exact), -1), axis=0)) < FEW_ROWS
    if is_few:
        # Rows that are all alike are one draw of an error; runs with weights a rounding apart are some more.
        # And even those say little of another order of sums: twice as much is allowed.
        nudged = (reference.forward_all(_nudged(net, i), x, naive_dtype)[name][verified] for i in range(FEW_ROWS))
        baseline = 2 * max(baseline, *(scaled_error(y, exact) for y in nudged))
    if precision == "tf32":  # no NumPy computes so: a float32 run of what tf32 keeps of weights and rows
        for draw in range(FEW_ROWS if is_few else 1):
            kept = net.replace(weights={role: _tf32(w, draw) for role, w in net.weights.items()})
            rounded = reference.forward_all(kept, tuple(map(_tf32, x)), naive_dtype)[name][verified]
            baseline = max(baseline, (2 if is_few else 1) * scaled_error(rounded, exact))
    row = CheckRow("", precision, (), scaled_error(got, exact), baseline, naive_dtype, None, "")
    one_step = 1 / max(1.0, float(exact.max(initial=0))) if has_steps else 0.0
    if row.error <= row.allowed + one_step:
        return []
    return [
        f"output '{name}': error {row.error:.3g}, allowed {row.allowed:.3g}: naive {naive_dtype} {row.naive_error:.3g}"
    ]


def _nudged(net: Network, seed: int) -> Network:
    """The network with some weights one rounding of float32 away."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, weight in net.weights.items():
        assert isinstance(weight, np.ndarray)
        is_float = "float" in weight.dtype.name
        weights[name] = np.nextafter(weight, weight * rng.choice([0, 1, 2], weight.shape)) if is_float else weight
    return net.replace(weights={name: w.astype(net.weights[name].dtype) for name, w in weights.items()})


def _tf32(array: np.ndarray, draw: int = 0) -> np.ndarray:
    """Rounded to 10 digits behind the first, with a `draw` up or down as chance has it; other dtypes as they are."""
    if array.dtype != np.float32:
        return array
    bits = np.where(np.isfinite(array), array, 0).view(np.uint32)
    up = np.random.default_rng(draw).integers(0, 0x2000, bits.shape, np.uint32) if draw else np.uint32(0x1000)
    rounded = ((bits + up) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def _above(net: Network, name: str) -> list[str]:
    """A value and all that it is made of."""
    needed = {name: None}
    for node in reversed(net.nodes):
        if node.name in needed:
            needed.update(dict.fromkeys(node.inputs))
    return list(needed)


def _unsaid(net: Network, name: str, truth: dict[str, np.ndarray]) -> np.ndarray:
    """Which rows of a value are made of ints of floats that no such int is near: chips differ there (ToInts)."""
    unsaid = np.zeros(len(truth[name]), bool)
    for node in (net.by_name[value] for value in _above(net, name) if value in net.by_name):
        if isinstance(node.layer, ToInts) and node.layer.dtype != "bool" and truth[node.inputs[0]].dtype.kind == "f":
            whole, near = np.trunc(truth[node.inputs[0]]), np.iinfo(numpy_dtype(node.layer.dtype))
            unsaid |= _rows(~((whole >= near.min) & (whole <= near.max)))
    return unsaid


def _rows(found: np.ndarray) -> np.ndarray:
    return found.reshape(len(found), -1).any(axis=1)


def _pattern_differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For each row: whether NaNs and infinities stand in other places."""
    same = (np.isnan(a) == np.isnan(b)) & (np.isposinf(a) == np.isposinf(b)) & (np.isneginf(a) == np.isneginf(b))
    return _rows(~same)


def main() -> None:
    parser = argparse.ArgumentParser(description="A random network and the verdict on its engine.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    net = random_network(args.seed)
    print(net)
    wrong = verify(net, args.seed, args.device, args.precision)
    print(wrong or "right")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
