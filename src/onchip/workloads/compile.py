"""The public compile: accepts whatever load accepts and returns an engine."""

from __future__ import annotations

import inspect
from typing import Any

from onchip.runtime import engine
from onchip.runtime.engine import Engine
from onchip.workloads import load


def compile(model: Any, example: Any = None, *by_position: Any, **options: Any) -> Engine:
    """Load a model, plan it for a device and prepare it to run.

    The plan is fixed here, and with it the bits of every result. `batch_hint` is the total number of rows per call that
    the planner optimises for; the engine runs any number.

    model    a Network, or what `onchip.load` accepts: a file, the name of a workload, a torch module
    example  for a torch module, as in `onchip.load`. A string here is the device: compile(net, "cuda")
    device   "cpu", "cuda", "cuda:1"; "auto": the device estimated faster for batch_hint rows in host memory (`chosen`
             gives the reason). Use "cuda" if inputs are GPU arrays
    without  rewrites to disable, for comparison: "fold", "merge", "windows", "phases", "early"
    tables   "fp16", "bf16" or "fp8" stores the tables of a folded embedding in fewer bits. Sums stay float32; fp8
             tables on a GPU are summed in float16. fp8 is e4m3 with one scale per channel: see its error with
             `onchip check --tables fp8`
    io       "fp32", "fp16" or "bf16": dtype of float inputs and outputs in memory; default: the network's own
    debug    on a GPU: wait after each launch, and name the kernel that failed. A fault breaks the GPU for the whole
             process, so this holds for all that the process compiles, scans or trains from then on
    """
    if isinstance(example, str):  # an example is never a string
        example, by_position = None, (example, *by_position)
    loading = {name: options.pop(name) for name in _LOADING if name in options}
    return engine.compile(load(model, example, **loading), *by_position, **options)


_LOADING = inspect.signature(load).parameters
_MODEL, _EXAMPLE, *_MORE = _LOADING.values()
_OPTIONS = list(inspect.signature(engine.compile).parameters.values())[1:]  # without the network
compile.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for help() and docs/api.md
    [_MODEL, _EXAMPLE, *_OPTIONS, *(one.replace(kind=one.KEYWORD_ONLY) for one in _MORE)], return_annotation="Engine"
)
