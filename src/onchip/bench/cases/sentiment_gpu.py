"""sentiment on a GPU: 16,384 sentences by folded tables and by convolutions; from the host and from a file; and
building the tables.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from onchip.bench.cases.gpu_host import HostJob, file_cases, host_cases
from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.sentiment_rows import VERIFIED, Truths, random_ids, rounded_table_truth, zipf_ids
from onchip.bench.cases.sentiment_tables import PRECISIONS as TABLE_PRECISIONS
from onchip.bench.cases.sentiment_tables import BreakEven, table_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.gpu import Allowance, Build, jax_jit
from onchip.bench.peers.sentiment import SentimentPeers
from onchip.measure.truth import Rows, Truth, as_inputs
from onchip.network.graph import Network
from onchip.workloads import sentiment

PRECISIONS, HOST_PRECISION, DIRECT_PRECISION, ZIPF = ("fp16", "bf16", "fp32"), "fp16", "bf16", 1.2
FOLDED = "torch.compile, folded"
FILE_PARTS = 64  # times as many sentences: a file is processed in chunks
JAX_S = 20.0  # seconds for JAX


def gpu_sentences(net: Network, options: Options) -> list[Case]:
    """By tables in every precision and in 8 bits, by convolutions in bf16, with ids on the GPU; with ids in pinned and
    in pageable host memory and in a file; and building the tables.
    """
    peers, truths, pays, made = SentimentPeers(net), Truths(), BreakEven(), list[Case]()
    cases_of = functools.partial(gpu_cases, "sentiment", options=options, unit="sentences/s")
    folded: dict[str, Build] = {FOLDED: peers.compiled, "torch embedding_bag": peers.bags}
    jax = functools.partial(jax_jit, Allowance(JAX_S), min_rows=1)
    convolved: dict[str, Build] = {"torch, one product": peers.windows, "jax": jax}
    for N in options.rows or (sentiment.SENTENCES,):
        random, zipf = functools.partial(random_ids, net), functools.partial(zipf_ids, net, a=ZIPF)
        job = functools.partial(GpuJob, net=net, B=N, io="fp32", verified=VERIFIED, truth=truths)
        many = f"{N} sentences"
        for precision in PRECISIONS:
            jobs = [
                job(f"{many}, random ids", inputs=random, precision=precision),
                job(f"{many}, Zipf ids", inputs=zipf, precision=precision),
            ]
            cases = cases_of(jobs, peers=folded)
            made += _noted(cases, pays, "folded") if precision == DIRECT_PRECISION else cases
            if precision == HOST_PRECISION:  # while the peer's tables are in memory
                known = functools.partial(truths, net)
                host = functools.partial(
                    HostJob, net=net, inputs=random, precision=precision, truth=known, verified=VERIFIED
                )
                from_host = [
                    host(f"{many}, from the host", B=N), host(f"{many}, from NumPy arrays", B=N, is_locked=False),
                ]  # fmt: skip
                made += host_cases("sentiment", from_host, options, {FOLDED: peers.from_host}, "sentences/s")
                file = host(f"{FILE_PARTS * N} sentences, from a file", B=FILE_PARTS * N, is_locked=False)
                made += file_cases("sentiment", file, options, "sentences/s")
        short = functools.partial(
            job, precision=HOST_PRECISION, compiled={"tables": "fp8"}, truth=functools.partial(_of_fp8_tables, truths)
        )
        in_8_bits = [
            short(f"{many}, {kind} ids, fp8 tables", inputs=ids) for kind, ids in (("random", random), ("Zipf", zipf))
        ]
        made += cases_of(in_8_bits, peers={})
        direct = job(f"{many}, not folded", inputs=random, precision=DIRECT_PRECISION, compiled={"without": ("fold",)})
        made += _noted(cases_of([direct], peers=convolved), pays, "direct")
    for precision in TABLE_PRECISIONS:
        tell = pays.tell if precision == DIRECT_PRECISION else None
        made += table_cases(net, precision, peers, truths, options, tell)
    return made


def _of_fp8_tables(truths: Truths, net: Network, rows: Rows, dtype: str) -> Truth:
    (x,) = as_inputs(rows)
    return rounded_table_truth(truths(net, rows, dtype), net, x, "fp8", dtype)


def _noted(cases: list[Case], pays: BreakEven, form: str) -> list[Case]:
    """The same cases; each notes onchip's time per sentence."""
    return [replace(case, remark=functools.partial(pays.note, form)) for case in cases]
