"""Large weights, computed in parallel once per machine: the same bits for any threads, ranks and machines."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from onchip.errors import KernelError
from onchip.network.recipe import materialise
from onchip.plan.scale_out import pays_to_exchange
from onchip.runtime.cpu import weights as cpu_weights
from onchip.runtime.cpu.weights import computing_rank, large_weights, make_weights
from onchip.runtime.distributed.ranks import OneRank, rank_threads
from rank_weights import digest, text_plan
from real_ranks import ENV, find_mpiexec, needs_mpi
from thread_ranks import ThreadRanks

PLAN = text_plan()


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(cpu_weights, "LARGE_US", 0.0)


def make_on(ranks, plan=PLAN):
    """The result of every rank, or the error that it raised."""
    found = {}

    def make(rank):
        try:
            found[rank.rank] = make_weights(plan, 1 + rank.rank % 2, rank)
        except KernelError as error:
            found[rank.rank] = error

    threads = [threading.Thread(target=make, args=(rank,)) for rank in ranks.all]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(ranks.all))]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_slices(threads):
    made, wanted = make_weights(PLAN, threads, OneRank()), large_weights(PLAN)
    assert any(recipe.op.endswith("token_tables") and recipe.shape[0] == 3000 for recipe in wanted)
    for recipe in wanted:
        assert made[recipe].tobytes() == materialise(recipe, PLAN.network.weights).tobytes()


@pytest.mark.parametrize(("size", "machines", "exchanges"), [(3, 1, False), (4, 2, True), (4, 2, False)])
def test_ranks_make_them_once_a_machine(monkeypatch, size, machines, exchanges):
    rows = []

    def evaluate_rows(recipe, sources, start, stop):
        rows.append(stop - start)
        return real(recipe, sources, start, stop)

    real = cpu_weights.evaluate_rows
    monkeypatch.setattr(cpu_weights, "evaluate_rows", evaluate_rows)
    monkeypatch.setattr(cpu_weights, "pays_to_exchange", lambda *cost: exchanges)
    alone = digest(make_weights(PLAN, 1, OneRank()))
    once = sum(rows)
    rows.clear()
    assert [digest(made) for made in make_on(ThreadRanks(size, machines))] == [alone] * size
    assert sum(rows) == once * (1 if exchanges else machines)


def test_what_one_rank_cannot_make_all_raise(monkeypatch):
    def evaluate(recipe, sources):
        if threading.current_thread().name.startswith("onchip-weights") and recipe.op.endswith("token_table"):
            raise KernelError("a table does not fit into bf16")
        return real(recipe, sources)

    real = cpu_weights.evaluate
    monkeypatch.setattr(cpu_weights, "evaluate", evaluate)
    assert {str(error) for error in make_on(ThreadRanks(3))} == {"a table does not fit into bf16"}


def test_ranks_that_cannot_share_memory_make_their_own(monkeypatch, capsys):
    ranks = ThreadRanks(2)
    for rank in ranks.all:
        monkeypatch.setattr(rank, "share", lambda nbytes: None)
    alone = digest(make_weights(PLAN, 1, OneRank()))
    assert [digest(made) for made in make_on(ranks)] == [alone] * 2
    assert "computed on every rank" in capsys.readouterr().err


@needs_mpi
def test_real_ranks_share_memory():
    """Four ranks, on two emulated machines: shared, exchanged, and an error that all raise."""
    program = Path(__file__).parents[2] / "rank_weights.py"
    ran = subprocess.run(
        [find_mpiexec(), "-n", "4", sys.executable, program], env=ENV, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    alone = digest(make_weights(PLAN, 1, OneRank()))
    expected = [f"{rank} {rank // 2} 2 {alone} out of luck (rank 2" for rank in range(4)]
    assert sorted(ran.stdout.splitlines()) == expected, ran.stderr


def test_whether_machines_exchange_follows_the_price():
    assert pays_to_exchange(150e6, 2 << 30, 2)  # sentiment's tables on two cores: minutes of work, 0.2 s to send
    assert not pays_to_exchange(1e5, 2 << 30, 2)  # by a GPU's worth of cores


def test_who_makes_them_is_said(monkeypatch):
    assert computing_rank(PLAN, ThreadRanks(2).all[0]) == "once per machine, by its 2 ranks"
    monkeypatch.setattr(cpu_weights, "pays_to_exchange", lambda *cost: True)
    assert computing_rank(PLAN, ThreadRanks(4, 2).all[0]) == "in slices on 2 machines, then exchanged"


def test_ranks_share_the_cores_they_have(monkeypatch):
    ranks = ThreadRanks(2).all
    monkeypatch.setattr("onchip.runtime.distributed.ranks.available_cores", lambda: {0, 1, 2, 3})
    ranks[0].local_cores = 4  # all may use the same
    assert rank_threads(None, ranks[0]) == 2
    ranks[0].local_cores = 8  # each is bound to four separate cores
    assert rank_threads(None, ranks[0]) == 4
    assert rank_threads(3, ranks[0]) == 3
