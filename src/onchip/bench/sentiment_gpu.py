"""sentiment on a GPU: 16,384 sentences by tables that lie ready, and by convolutions; from the host; and the tables."""

from __future__ import annotations

import functools
from collections.abc import Callable

from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.gpu_host import HostJob, host_cases
from onchip.bench.gpu_inference import NAIVE, GpuJob, gpu_cases, judged_rows
from onchip.bench.gpu_peers import Allowance, Build, jax_jit
from onchip.bench.inference import PEER_SLACK
from onchip.bench.options import Options
from onchip.bench.peers import explained
from onchip.bench.sentiment_peers import SentimentPeers, looked_up
from onchip.bench.sentiment_rows import exact_truth, naive, random_ids, zipf_ids
from onchip.bench.stage import TorchStage, make_stage
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth, Verdict
from onchip.runtime.engine import Engine, compile
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.workloads import sentiment

PRECISIONS, HOST_PRECISION, ZIPF = ("fp16", "bf16", "fp32"), "fp16", 1.2
FOLDED = "torch.compile, folded"
JUDGED = 8  # sentences
JAX_S = 20.0  # of JAX
READY_PACE = Pace(rounds=3, block_s=0.0, warm_up_s=0, pause_s=0, min_runs=1, max_runs=1)


class Truths:
    """Of sentences, kept: most jobs judge the same ones, and float64 takes a second for four."""

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, Truth]] = {}

    def __call__(self, net: Network, x: Array, dtype: str) -> Truth:
        of_rows = self._known.setdefault(x.tobytes(), {})
        if dtype not in of_rows:
            known = next(iter(of_rows.values()), None)
            of_rows[dtype] = exact_truth(net, x, dtype) if known is None else known.measured_by(naive(net, x, dtype))
        return of_rows[dtype]


def gpu_sentences(net: Network, options: Options) -> list[Case]:
    """By tables in every precision, by convolutions in bf16, with ids on the GPU; from the host; until all is ready."""
    peers, truths, made = SentimentPeers(net), Truths(), list[Case]()
    cases_of = functools.partial(gpu_cases, "sentiment", options=options, unit="sentences/s")
    folded: dict[str, Build] = {FOLDED: peers.compiled, "torch embedding_bag": peers.bags}
    jax = functools.partial(jax_jit, Allowance(JAX_S), least_rows=1)
    convolved: dict[str, Build] = {"torch, one product": peers.windows, "jax": jax}
    for N in options.rows or (sentiment.SENTENCES,):
        random, zipf = functools.partial(random_ids, net), functools.partial(zipf_ids, net, a=ZIPF)
        job = functools.partial(GpuJob, net=net, B=N, io="fp32", judged=JUDGED, truth=truths)
        many = f"{N} sentences"
        for precision in PRECISIONS:
            jobs = [
                job(f"{many}, random ids", inputs=random, precision=precision),
                job(f"{many}, Zipf ids", inputs=zipf, precision=precision),
            ]
            made += cases_of(jobs, peers=folded)
            if precision == HOST_PRECISION:  # while the peer's tables are there
                known = functools.partial(truths, net)
                host = HostJob(f"{many}, from the host", net, N, random, precision, known, JUDGED)
                made += host_cases("sentiment", [host], options, {FOLDED: peers.from_host}, "sentences/s")
        direct = job(f"{many}, not folded", inputs=random, precision="bf16", compiled={"without": ("fold",)})
        made += cases_of([direct], peers=convolved)
    for precision in ("fp16", "fp32"):
        made += ready_cases(net, precision, peers, truths, options)
    return made


def ready_cases(net: Network, precision: str, peers: SentimentPeers, truths: Truths, options: Options) -> list[Case]:
    """From weights of the host to an engine whose tables lie on the GPU; its kernels are compiled before."""
    ids = random_ids(net, sentiment.SENTENCES)[judged_rows(sentiment.SENTENCES, JUDGED)]  # whose truth is known

    def judge(y: Array, slack: float = 1.0) -> Verdict:
        verdict = truths(net, ids, NAIVE[precision]).judge(y)
        return Verdict(verdict.error, slack * verdict.allowed)

    def build() -> Engine:
        return compile(net, options.device, precision, batch_hint=sentiment.SENTENCES)

    def ours() -> Ready:
        engine = build()
        return Ready(build, lambda: judge(engine(ids)), engine.plan.fold)

    def torch() -> Ready:
        stage = make_stage(int(options.device.partition(":")[2] or 0))
        if not isinstance(stage, TorchStage):
            raise UnavailableError("torch for CUDA is not installed")
        with explained("torch"):
            weights, tables = peers.fold(precision, stage)

        def check() -> Verdict:
            y = looked_up(stage.torch, weights, tables, stage.put(ids, "int32"))
            return judge(stage.fetch(y), PEER_SLACK)

        def run() -> None:
            peers.fold(precision, stage)
            stage.synchronise()

        return Ready(run, check)

    engines: dict[str, Callable[[], Ready]] = {ONCHIP: ours}
    if options.peers:
        engines["torch"] = torch
    return [
        Case("sentiment", "ready, from weights of the host", name, prepare, work=1, unit="builds/s",
             precision=precision, pace=READY_PACE)
        for name, prepare in engines.items()
    ]  # fmt: skip
