"""sentiment's tables on a GPU: the time to build them, the time to a first result, and their break-even point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from onchip.bench.cases.gpu_inference import NAIVE, verified_rows
from onchip.bench.cases.inference import PEER_SLACK
from onchip.bench.cases.sentiment_rows import VERIFIED, Truths, random_ids
from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.options import Options
from onchip.bench.peers.cpu import explained
from onchip.bench.peers.sentiment import SentimentPeers, looked_up
from onchip.bench.report.results import Row
from onchip.bench.stage import TorchStage, make_stage
from onchip.measure.pace import Pace
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array, Recipe, in_order
from onchip.plan.build_cost import recipe_rates_of
from onchip.plan.plan import Plan
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.weights import make_weights
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import kernels_for
from onchip.workloads import sentiment

PRECISIONS = ("bf16", "fp32")
TABLES, FIRST = "tables, from weights on the GPU", "first result, from weights of the host"
PACE = Pace(rounds=3, block_s=0.0, warm_up_s=0, pause_s=0, min_runs=1, max_runs=1)


class BreakEven:
    """The number of sentences above which tables pay off, computed from the rows of three jobs."""

    def __init__(self) -> None:
        self._row_ms: dict[str, float] = {}

    def record(self, form: str, rows: Sequence[Row]) -> str:
        """Record the time per sentence of `form`, "folded" or "direct"; returns an empty remark."""
        row = _onchip_row(rows)
        if row is not None and row.rate:
            self._row_ms[form] = 1e3 / row.rate
        return ""

    def remark(self, rows: Sequence[Row]) -> str:
        """The remark of the job that builds the tables."""
        row = _onchip_row(rows)
        if row is None or row.median_ms is None or len(self._row_ms) < 2:
            return ""
        saved_ms = self._row_ms["direct"] - self._row_ms["folded"]
        if saved_ms <= 0:
            return "as measured, they never pay off"
        return f"as measured, they pay off above {row.median_ms / saved_ms:,.0f} sentences"


def _onchip_row(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.engine == ONCHIP), None)


def table_cases(
    net: Network, precision: str, peers: SentimentPeers, truths: Truths, options: Options,
    remark: Callable[[Sequence[Row]], str] | None = None,
) -> list[Case]:  # fmt: skip
    """Two cases: build the tables from weights on the GPU; first result from host weights, kernels already compiled.

    remark  computes the note of onchip's TABLES result
    """
    ids = random_ids(net, sentiment.SENTENCES)[verified_rows(sentiment.SENTENCES, VERIFIED)]  # with a float64 reference
    index = int(options.device.partition(":")[2] or 0)

    def verify(y: Array, slack: float = 1.0) -> Verdict:
        verdict = truths(net, ids, NAIVE[precision]).verify(y)
        return Verdict(verdict.error, slack * verdict.allowed)

    def build() -> Engine:
        return compile(net, options.device, precision, batch_hint=sentiment.SENTENCES)

    def onchip_tables() -> Ready:
        engine = build()
        return Ready(builder(engine.plan, index), lambda: verify(engine(ids)), engine.plan.fold)

    def onchip_first() -> Ready:
        engine = build()
        return Ready(lambda: build()(ids), lambda: verify(engine(ids)), engine.plan.fold)

    def torch(is_first: bool) -> Ready:
        stage = make_stage(index)
        if not isinstance(stage, TorchStage):
            raise UnavailableError("torch for CUDA is not installed")
        with explained("torch"):
            weights, tables = peers.fold(precision, stage)

        def result(folded: tuple[Any, Any] = (weights, tables)) -> Array:
            return stage.fetch(looked_up(stage.torch, *folded, stage.put(ids, "int32")))

        def build_tables() -> None:
            weights.taps()
            stage.synchronise()

        run = (lambda: result(peers.fold(precision, stage))) if is_first else build_tables
        return Ready(run, lambda: verify(result(), PEER_SLACK))

    cases = []
    for case, onchip, row_remark in ((TABLES, onchip_tables, remark), (FIRST, onchip_first, None)):
        engines: dict[str, Callable[[], Ready]] = {ONCHIP: onchip}
        if options.peers:
            engines["torch"] = functools.partial(torch, case == FIRST)
        cases += [
            Case("sentiment", case, name, prepare, work=1, unit="builds/s", precision=precision, pace=PACE,
                 remark=row_remark if name == ONCHIP else None)
            for name, prepare in engines.items()
        ]  # fmt: skip
    return cases


def builder(plan: Plan, index: int) -> Callable[[], object]:
    """A function that builds the tables of a plan from weights on the GPU, and waits for them."""
    gpu, net = Gpu.get(index), plan.network
    lookups = [group for group in plan.groups if any(net.by_name[n].layer.has_tables for n in group.claim.nodes)]
    recipes: list[Recipe] = [recipe for group in lookups for recipe in group.claim.recipes.values()]
    kernels = recipe_rates_of(kernels_for(gpu.device), gpu.device)
    uploaded: dict[str | Recipe, Buffer] = {
        name: gpu.upload(weight)
        for name in in_order(recipes, net.weights)
        if isinstance(name, str) and not isinstance(weight := net.weights[name], Recipe)
    }
    return lambda: make_weights(gpu, recipes, net.weights, kernels, uploaded)
