"""sentiment on a GPU: 16,384 sentences by folded tables and by convolutions, with ids on the GPU, on the host and in a
file; and the time to build the tables.
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
FILE_FACTOR = 64  # times as many sentences in a file, which is processed in chunks
JAX_S = 20.0  # seconds for JAX


def gpu_sentences(net: Network, options: Options) -> list[Case]:
    """By tables in every precision and in 8 bits, by convolutions in bf16, with ids on the GPU; with ids in pinned and
    in pageable host memory and in a file; and building the tables.
    """
    peers, truths, break_even, result = SentimentPeers(net), Truths(), BreakEven(), list[Case]()
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
            result += _noted(cases, break_even, "folded") if precision == DIRECT_PRECISION else cases
            if precision == HOST_PRECISION:  # while the peer's tables are in memory
                truth = functools.partial(truths, net)
                host = functools.partial(
                    HostJob, net=net, inputs=random, precision=precision, truth=truth, verified=VERIFIED
                )
                from_host = [
                    host(f"{many}, from the host", B=N), host(f"{many}, from NumPy arrays", B=N, is_pinned=False),
                ]  # fmt: skip
                result += host_cases("sentiment", from_host, options, {FOLDED: peers.from_host}, "sentences/s")
                file = host(f"{FILE_FACTOR * N} sentences, from a file", B=FILE_FACTOR * N, is_pinned=False)
                result += file_cases("sentiment", file, options, "sentences/s")
        fp8_job = functools.partial(
            job, precision=HOST_PRECISION, compiled={"tables": "fp8"}, truth=functools.partial(_of_fp8_tables, truths)
        )
        fp8_jobs = [
            fp8_job(f"{many}, {kind} ids, fp8 tables", inputs=ids) for kind, ids in (("random", random), ("Zipf", zipf))
        ]
        result += cases_of(fp8_jobs, peers={})
        direct = job(f"{many}, not folded", inputs=random, precision=DIRECT_PRECISION, compiled={"without": ("fold",)})
        result += _noted(cases_of([direct], peers=convolved), break_even, "direct")
    for precision in TABLE_PRECISIONS:
        remark = break_even.remark if precision == DIRECT_PRECISION else None
        result += table_cases(net, precision, peers, truths, options, remark)
    return result


def _of_fp8_tables(truths: Truths, net: Network, rows: Rows, dtype: str) -> Truth:
    (x,) = as_inputs(rows)
    return rounded_table_truth(truths(net, rows, dtype), net, x, "fp8", dtype)


def _noted(cases: list[Case], break_even: BreakEven, form: str) -> list[Case]:
    """The same cases; each records onchip's time per sentence."""
    return [replace(case, remark=functools.partial(break_even.record, form)) for case in cases]
