"""compile, as users call it: what load accepts becomes an engine."""

from __future__ import annotations

import inspect
from typing import Any

from onchip.runtime import engine
from onchip.runtime.engine import Engine
from onchip.workloads import load


def compile(model: Any, example: Any = None, *by_position: Any, **options: Any) -> Engine:
    """Load a model, plan it for a device and make it ready to run.

    The plan, and with it the bits of every result, is fixed here: `batch_hint` is the number of rows, all together,
    that it is priced for, and the engine then runs any number.

    model    a Network, or what `onchip.load` accepts: a file, the name of a workload, a torch module
    example  of a torch module, as for `onchip.load`. A string here is the device: compile(net, "cuda")
    device   "cpu", "cuda", "cuda:1"; "auto": the one that should do a call with batch_hint rows of the host sooner
             (`chosen` says why). Who calls with arrays of a GPU asks for "cuda"
    without  rewrites to leave out, to compare: "fold", "merge", "windows", "phases", "early"
    tables   "fp16", "bf16" or "fp8" keeps the tables of a folded embedding in fewer bits; sums stay float32, those of
             fp8 tables on a GPU float16. fp8: e4m3 and a factor a channel; `onchip check --tables fp8` shows its error
    io       "fp32", "fp16" or "bf16": what float inputs and outputs are in memory; else what the network says
    debug    on a GPU: wait after every launch, and name the kernel that failed
    """
    if isinstance(example, str):  # no example is one
        example, by_position = None, (example, *by_position)
    loading = {name: options.pop(name) for name in _LOADING if name in options}
    return engine.compile(load(model, example, **loading), *by_position, **options)


_LOADING = inspect.signature(load).parameters
_MODEL, _EXAMPLE, *_MORE = _LOADING.values()
_OPTIONS = list(inspect.signature(engine.compile).parameters.values())[1:]  # after the network
compile.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what help() and the API's page show
    [_MODEL, _EXAMPLE, *_OPTIONS, *(one.replace(kind=one.KEYWORD_ONLY) for one in _MORE)], return_annotation="Engine"
)
