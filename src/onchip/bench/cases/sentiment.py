"""sentiment: 16 tokens per sentence, by folded embedding tables and by convolutions; peers do both.

Convolving a sentence takes 2 Gflop: on a CPU the convolutions are timed on few sentences, and the time is scaled. The
time excludes building the tables; the setting has their build time and the break-even number of sentences.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onchip.bench.cases.inference import Task, build_variants
from onchip.bench.cases.sentiment_gpu import gpu_sentences
from onchip.bench.cases.sentiment_rows import IDS, exact_truth, rounded_table_truth
from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.cpu import (
    Build,
    Forward,
    Subject,
    load_torch,
    onnxruntime_session,
    subject_of,
    torch_eager,
    torch_forward,
)
from onchip.bench.peers.sentiment import Weights, bags
from onchip.bench.report.results import Row, best_peer
from onchip.kernels import reference
from onchip.measure.pace import Pace
from onchip.network.graph import Network
from onchip.network.layers import Conv1d, Linear
from onchip.network.recipe import Array
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import plan
from onchip.workloads import sentiment

ROWS = (2_048,)
DIRECT_ROWS, CHUNKS = 64, (16,)  # sentences of the convolutions, and a peer's chunk sizes
VERIFIED = 64  # with fewer, chance decides whether an engine has twice the naive error
PACE = Pace(rounds=4, min_runs=1)  # a run with convolutions takes a second or more
FOLDED_CHUNKS = (512,)  # chunk sizes of a peer with tables

FP16, DIRECT = f"{ONCHIP}, fp16 tables", f"{ONCHIP}, not folded"
OURS: dict[str, dict[str, Any]] = {ONCHIP: {}, FP16: {"tables": "fp16"}, DIRECT: {"without": ("fold",)}}


def cases(options: Options, **sizes: Any) -> list[Case]:
    """`sizes` are for tests: those of sentiment.network."""
    net = reference.with_arrays(sentiment.network(**sizes))
    if options.device != "cpu":
        return gpu_sentences(net, options)
    built = {name: functools.cache(functools.partial(_build, net, options, form)) for name, form in OURS.items()}
    peers: dict[str, Callable[[], Mapping[str, Forward]]] = {}
    if options.peers:
        subject, engines = subject_of(net), {**FOLDED, **PEERS}
        peers = {
            name: functools.cache(functools.partial(build_variants, v, subject, options)) for name, v in engines.items()
        }
    result = []
    for N in options.rows or ROWS:
        for kind, draw in IDS.items():
            result += _cases(net, f"{N} sentences, {kind}", functools.partial(draw, net, N), N, built, peers, options)
    return result


def _cases(
    net: Network,
    case: str,
    ids: Callable[[], Array],
    N: int,
    built: Mapping[str, Callable[[], Built]],
    peers: Mapping[str, Callable[[], Mapping[str, Forward]]],
    options: Options,
) -> list[Case]:
    few, verified, x = min(N, DIRECT_ROWS), min(N, VERIFIED), functools.cache(ids)
    truth = functools.cache(lambda: exact_truth(net, x()[:verified]))
    whole = Task(N, x, net.output, truth, verified, "random weights")
    rounded = Task(
        N, x, net.output, lambda: rounded_table_truth(truth(), net, x()[:verified], "fp16"), verified, "random weights"
    )
    sample = Task(few, lambda: x()[:few], net.output, truth, verified, "random weights")
    scaled = "" if few == N else f"timed on {few} sentences, scaled"

    plans = {name: plan(net, options.device, Job(batch=sentiment.SENTENCES, **form)) for name, form in OURS.items()}
    floors = {name: functools.partial(_floor_ms, p, N) for name, p in plans.items()}
    with_tables = [name for name in (ONCHIP, FP16) if plans[name].fold.startswith("folded")]

    def ours(name: str) -> Ready:
        task = {ONCHIP: whole, FP16: rounded, DIRECT: sample}[name]
        return task.ours(lambda: built[name]().engine, plans[name].fold, scaled if task is sample else "")

    engines: dict[str, Callable[[], Ready]] = {name: functools.partial(ours, name) for name in OURS}
    for name, build in peers.items():
        if name in FOLDED:
            engines[name] = functools.partial(whole.peer, name, build, FOLDED_CHUNKS)
        else:
            engines[name] = functools.partial(sample.peer, name, build, CHUNKS, scaled)
    return [
        Case("sentiment", case, name, prepare, work=N, unit="sentences/s", threads=options.threads, pace=PACE,
             is_quick=name not in (ONCHIP, FP16, *FOLDED),  # tables take a minute to build
             parts=1 if name in (ONCHIP, FP16, *FOLDED) else few / N, floor_ms=floors.get(name, floors[ONCHIP]),
             remark=functools.partial(break_even, name, built[name], N) if name in with_tables else None)
        for name, prepare in engines.items()
    ]  # fmt: skip


def _floor_ms(built_plan: Plan, N: int) -> float:
    """With the current rates of this CPU."""
    return replace(built_plan, device=this_cpu()).floor_at(N) / 1e3


# -- onchip ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Built:
    engine: Engine
    seconds: float  # build time


def _build(net: Network, options: Options, form: Mapping[str, Any]) -> Built:
    start = time.perf_counter()
    engine = compile(net, options.device, threads=options.threads, batch_hint=sentiment.SENTENCES, **form)
    return Built(engine, time.perf_counter() - start)


def break_even(name: str, built: Callable[[], Built], N: int, rows: Sequence[Row]) -> str:
    """The break-even number of sentences: against onchip's convolutions, and the best peer without tables."""
    own_row = next(row for row in rows if row.engine == name)
    without_tables = [row for row in rows if row.engine not in FOLDED]
    direct = next((row for row in rows if row.engine == DIRECT), None)
    others = [row for row in (direct, best_peer(without_tables, own_row)) if row]
    notes = [f"built in {built().seconds:.1f} s"]
    for other in others:
        if own_row.median_ms is not None and other.median_ms is not None:
            saved_s = (other.median_ms - own_row.median_ms) / N / 1e3
            pays = f"pays off above {built().seconds / saved_s:,.0f} sentences" if saved_s > 0 else "never pays off"
            notes.append(f"{pays} compared with {other.engine}")
    return ", ".join(notes)


# -- peers -------------------------------------------------------------------------------------------------


def torch_folded(what: Subject, threads: int) -> Forward:
    """The same tables, computed by torch, and its embedding_bag.

    Gathers and sums took two to three times as long, in chunks or not; compiled they took even longer, plus two minutes
    to compile.
    """
    torch = load_torch(threads)
    weights = Weights.of(what.net, torch)
    return torch_forward(torch, functools.partial(bags, torch, weights, weights.taps()))


def torch_im2col(what: Subject, threads: int) -> Forward:
    """Each convolution as one gemm over a copy of all windows of the embedding (im2col)."""
    torch = load_torch(threads)
    functional = torch.nn.functional

    def weights(kind: type[Conv1d | Linear]) -> list[tuple[Any, Any]]:
        nodes = [node for node in what.net.nodes if isinstance(node.layer, kind)]
        return [tuple(torch.tensor(what.net.weights[node.weights[role]]) for role in ("weight", "bias"))
                for node in nodes]  # fmt: skip

    table = torch.tensor(what.net.weights["emb.weight"])
    convs = [(W.shape[2], W.permute(0, 2, 1).reshape(len(W), -1), b) for W, b in weights(Conv1d)]
    linears = weights(Linear)

    def module(ids: Any) -> Any:
        embedded = functional.embedding(ids, table)
        B, S, E = embedded.shape
        found = []
        for K, W, b in convs:
            windows = embedded.as_strided((B, S - K + 1, K * E), (S * E, E, 1)).reshape(-1, K * E)
            found.append(functional.linear(windows, W, b).view(B, S - K + 1, -1).amax(1).relu_())
        y = torch.cat(found, 1)
        for W, b in linears[:-1]:
            y = functional.linear(y, W, b).relu_()
        return functional.linear(y, *linears[-1])

    return torch_forward(torch, module)


FOLDED: dict[str, dict[str, Build]] = {"torch, folded": {"embedding_bag": torch_folded}}
PEERS: dict[str, dict[str, Build]] = {
    "torch eager": {"Conv1d": torch_eager},
    "torch, windows": {"im2col and gemm": torch_im2col},
    "onnxruntime": {"": onnxruntime_session},
}
