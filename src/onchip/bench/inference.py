"""Cases of inference: a network over rows that lie in memory, ours and the peers'."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers import INFERENCE, Rows, explained, fastest_pieces
from onchip.ladders.truth import Truth
from onchip.plan.kernel import Job
from onchip.runtime.engine import compile, plan
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.spec.types import numpy_dtype


def inference_cases(
    workload: str, case: str, net: Network, inputs: Callable[[], Array], B: int, options: Options, data: str = ""
) -> list[Case]:
    """onchip and, if asked for, every peer on the same B rows. `inputs` is called once, when the first is prepared."""
    floor_ms = plan(net, options.device, Job(batch=B)).floor_us / 1e3
    x = functools.cache(inputs)
    truth = functools.cache(lambda: Truth(net, x()))

    def ours() -> Ready:
        engine = compile(net, options.device, threads=options.threads, batch_hint=B)
        rows, out = x(), _output(net, B)
        return Ready(lambda: engine(rows, out=out), lambda: truth().judge(engine(rows)), data)

    def peer(name: str, build: Callable[[Network, Array, int], Rows]) -> Ready:
        rows = build(net, x(), options.threads)
        with explained(name):
            run, setting = fastest_pieces(rows, B, _output(net, B))
        return Ready(run, lambda: truth().judge(run()), ", ".join(filter(None, [data, setting])))

    engines: dict[str, Callable[[], Ready]] = {ONCHIP: ours}
    if options.peers:
        engines |= {name: functools.partial(peer, name, build) for name, build in INFERENCE.items()}
    return [
        Case(workload, case, name, prepare, work=B, floor_ms=floor_ms, threads=options.threads)
        for name, prepare in engines.items()
    ]


def _output(net: Network, B: int) -> Array:
    return np.empty((B, *net.output.row_shape), numpy_dtype(net.output.dtype))
