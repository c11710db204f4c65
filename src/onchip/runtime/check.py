"""Compare every device and precision with the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onchip.errors import DeviceError, InputError, OnchipError, PlanError
from onchip.kernels import reference
from onchip.kernels.fp8_tables import in_fp8, scales, table_peaks
from onchip.network.graph import Network
from onchip.network.recipe import Array, Weight, materialise
from onchip.network.types import DTYPE_BYTES, numpy_dtype
from onchip.plan.kernel import PRECISIONS, TABLES, Job
from onchip.plan.rewrites import rewrite
from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda
from onchip.runtime.engine import Engine, compile
from onchip.runtime.io.row_sources import random_inputs

FACTOR, ULPS = 2, 4  # allowed: FACTOR times the naive error and ULPS units in the last place
BATCHES = (1, 2, 7)  # a row must be bit-identical in batches of these sizes
MAX_NUMBERS = 1 << 25  # elements of the largest value: the reference keeps every value, in float64
MAX_FLOP = 1 << 37  # over all rows: a few seconds in float64
MAX_BATCHED_ROWS = 1000  # batches of 1 over more rows only take longer

FOLDED_ROWS = 1 << 40  # a batch for which folded tables always pay

MEASURE = "max |y - truth| / max |truth|"

# The naive run: NumPy, one operation at a time, rounding to this type after each. NumPy has no tf32 (float32
# with a 10-bit mantissa), so its baseline is the float32 run and the larger ulp is the allowance.
NAIVE_DTYPE = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
DTYPE_ULP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}
ULP = {"fp32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}


@dataclass(frozen=True)
class CheckRow:
    """One device in one precision. Errors are MEASURE."""

    device: str
    precision: str
    kernels: tuple[str, ...]
    error: float | None  # None where there is no engine
    naive_error: float
    naive_dtype: str
    unequal_batch: int | None  # the first batch size at which a row's bits differ
    reason: str  # why there is no engine

    @property
    def allowed(self) -> float:
        return FACTOR * self.naive_error + ULPS * max(ULP[self.precision], DTYPE_ULP.get(self.naive_dtype, 0.0))

    @property
    def ratio(self) -> float | None:
        """Relative to the naive error; None if there is no engine or the naive run is exact."""
        return self.error / self.naive_error if self.error is not None and 0 < self.naive_error < math.inf else None

    @property
    def verdict(self) -> str:
        if self.error is None:
            return "not available"
        return "ok" if self.error <= self.allowed and self.unequal_batch is None else "FAIL"


@dataclass(frozen=True)
class CheckReport:
    network: str
    rows: int
    seed: int
    checks: tuple[CheckRow, ...]
    no_cuda: str | None  # why there is no GPU to check

    @property
    def passed(self) -> bool:
        verdicts = {row.verdict for row in self.checks}
        return "ok" in verdicts and "FAIL" not in verdicts  # not passed if nothing could be checked


def check_network(
    net: Network, rows: int | None = None, seed: int = 0, on_progress: Callable[[float, str], None] | None = None,
    tables: str = "fp32",
) -> CheckReport:  # fmt: skip
    """Compare every engine that this machine can run with the reference, on random rows.

    rows         default 1000; fewer for very long rows or a large network
    on_progress  called before each comparison with the fraction done and the next device and precision
    tables       storage type of folded tables. Below fp32, embeddings are folded as for a very large batch, and the
                 naive run uses tables rounded once
    """
    Job(tables=tables)  # refuse an unknown type before minutes of work
    if rows is None:
        longest = max(t.row_size for t in (*net.inputs.values(), *net.types.values()))
        flop = sum(net.row_flop(node) for node in net.nodes)
        rows = max(1, min(MAX_BATCHED_ROWS, MAX_NUMBERS // max(1, longest), MAX_FLOP // max(1, flop)))
    if rows < 1:
        raise InputError("bad number of rows", got=str(rows), expected="at least 1", hint="--rows 1000")
    if seed < 0:
        raise InputError("bad seed", got=str(seed), expected="at least 0")
    _ = net.output  # exactly one output is compared: fail before any work
    x = tuple(source.read(0, rows) for source in random_inputs(net, rows, seed))
    net = reference.with_arrays(net)
    few, few_x = reference.with_used_tokens(net, x)
    truth = reference.forward(few, few_x, "float64")
    gpus = [f"cuda:{i}" for i in range(len(cuda_devices()))]
    rounded = few if tables == "fp32" else with_rounded_tables(few, tables)
    by_dtype = {dtype: _naive(rounded, few_x, truth, dtype) for dtype in sorted(set(NAIVE_DTYPE.values()))}
    naive = {precision: by_dtype[dtype] for precision, dtype in NAIVE_DTYPE.items()}
    pairs = [(device, precision) for device in ("cpu", *gpus) for precision in PRECISIONS]
    batch, checks = 1024 if tables == "fp32" else FOLDED_ROWS, []
    for i, (device, precision) in enumerate(pairs):
        if on_progress is not None:
            on_progress(i / len(pairs), f"{device} {precision}")
        checks.append(_check_one(net, x, truth, Job(precision, batch, tables=tables), device, *naive[precision]))
    return CheckReport(net.name, rows, seed, tuple(checks), None if gpus else why_no_cuda())


def with_rounded_tables(net: Network, tables: str) -> Network:
    """The network with its embeddings folded in float32 and the tables rounded to `tables`.

    A slice of a vocabulary rounds like the whole: fp8 scales are powers of two.
    """
    folded, _ = rewrite(net)
    rounded: dict[str, Weight] = {}
    for node in folded.nodes:
        if node.layer.has_tables:
            T = materialise(node.weights["weight"], folded.weights)
            peaks = table_peaks(T) if tables == "fp8" else None
            short = T.astype(numpy_dtype(TABLES[tables])) if peaks is None else in_fp8(T, peaks)
            rounded[node.weights["weight"]] = short.astype(np.float32) * (1 if peaks is None else scales(peaks))
    return folded.replace(weights={**folded.weights, **rounded})


def _naive(net: Network, x: tuple[Array, ...], truth: Array, dtype: str) -> tuple[float, str]:
    """The error of the naive run and its dtype: the network's where that is narrower."""
    dtypes = [t.dtype for t in net.types.values() if "float" in t.dtype]
    narrowest = min([dtype, *dtypes], key=lambda name: DTYPE_BYTES[name])
    return scaled_error(reference.forward(net, x, narrowest), truth), narrowest


def _check_one(
    net: Network, x: tuple[Array, ...], truth: Array, job: Job, device: str, naive_error: float, naive_dtype: str
) -> CheckRow:
    precision = job.precision
    try:
        engine = compile(net, device, precision, batch_hint=job.batch, tables=job.tables)
    except (PlanError, DeviceError) as error:
        return CheckRow(device, precision, (), None, naive_error, naive_dtype, None, _reason(error))
    got = engine(*x)
    kernels = tuple(group.claim.label for group in engine.plan.groups)
    unequal = unequal_batch(engine, x, got)
    return CheckRow(device, precision, kernels, scaled_error(got, truth), naive_error, naive_dtype, unequal, "")


def _reason(error: OnchipError) -> str:
    # The device exists. It refuses the precision (then `expected` lists those it has) or refuses to run at all.
    refuses = isinstance(error, DeviceError) and error.expected
    return f"the device computes in {error.expected}" if refuses else error.what


def scaled_error(got: Array, truth: Array) -> float:
    """max |got - truth| / max |truth|. The same NaN or infinity in both counts as 0; in only one of them, as inf."""
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - truth)
    difference[(got == truth) | (np.isnan(got) & np.isnan(truth))] = 0
    difference[np.isnan(difference)] = np.inf
    finite = np.abs(truth[np.isfinite(truth)])
    scale = float(finite.max()) if finite.size else 0.0
    return float(difference.max(initial=0.0)) / (scale or 1.0)


def unequal_batch(engine: Engine, x: tuple[Array, ...], whole: Array) -> int | None:
    """The first size in BATCHES at which a row is not bit-identical to the same row of `whole`."""
    whole = whole[:MAX_BATCHED_ROWS]
    for size in BATCHES:
        for start in range(0, len(whole), size):
            got = engine(*(values[start : start + size] for values in x))
            if got.tobytes() != whole[start : start + size].tobytes():
                return size
    return None
