"""The rungs over several ranks: as threads of one process, and as MPI ranks."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from onchip.errors import InputError, PlanError
from onchip.ladders import find_ladder, ranks
from onchip.ladders.decode import LADDER
from onchip.ladders.frame import climb
from onchip.ladders.ranks import RANK_RUNGS, begin, end, follow
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth
from onchip.workloads import decode
from real_ranks import needs_mpi
from thread_ranks import ThreadRanks

RUNGS = {rung.name: rung for rung in RANK_RUNGS}
QUICK = Pace(rounds=1, block_s=0.001, warm_up_s=0.001, pause_s=0, min_runs=1, max_runs=2)


@pytest.fixture
def group(monkeypatch):
    """A function that starts ranks, which follow rank 0: the caller."""
    followers = []

    def start(size, B):
        first, *others = ThreadRanks(size).all
        ranks.rank_engine(decode.network(), "cpu", 1, B, first)(decode.inputs(1))  # compiled once, not by all at a time
        monkeypatch.setattr(ranks, "find_ranks", lambda: first)
        followers[:] = [threading.Thread(target=follow, args=("decode", 1, rank), daemon=True) for rank in others]
        for follower in followers:
            follower.start()
        begin(first, "cpu", B)
        started.append(first)

    started = []
    yield start
    for first in started:
        end(first)
    for follower in followers:
        follower.join()


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(("size", "B"), [(2, 1), (2, 129), (3, 20_000)])
def test_every_rung_is_right(name, size, B, group):
    group(size, B)
    net, x = decode.network(), decode.inputs(B)
    run = RUNGS[name]().prepare(net, x, 1)
    y = run().copy()
    assert Truth(net, x).verify(y).is_right
    assert y.tobytes() == run().tobytes()  # whichever rank ran a part
    assert run.facts["ranks"] == size
    if name == "scatter-gather":
        assert run.facts["parts"] == size
    elif B == 20_000:
        assert run.facts["parts"] > size


def test_they_are_climbed_together(group):
    group(2, 500)
    climbed = climb(dataclasses.replace(LADDER, rungs=LADDER.over_ranks), rows=500, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(RUNGS)
    assert [step.facts["ranks"] for step in climbed.steps] == [2, 2]


def test_one_rank_is_not_enough():
    with pytest.raises(PlanError, match="several ranks"):
        RUNGS["scatter-gather"]().prepare(decode.network(), decode.inputs(3), 1)


def test_ranks_that_never_begin_end(group):
    pair = ThreadRanks(2)
    follower = threading.Thread(target=follow, args=("decode", 1, pair.all[1]), daemon=True)
    follower.start()
    end(pair.all[0])  # rank 0 failed before it began
    follower.join()


def test_rows_of_a_gpus_ladder_are_on_the_host():
    x = find_ladder("decode", "cuda").inputs(7)
    np.testing.assert_array_equal(x.host, decode.inputs(7))


@needs_mpi
def test_ranks_of_mpi(spawn, tmp_path):
    process = spawn("ladder", "decode", "--device", "cpu", "--rows", 3000, "--ranks", 2, "--json", "--out", tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    document = json.loads(out)
    assert [row["engine"] for row in document["rows"]] == [f"ladder:{name}" for name in RUNGS]
    assert all(row["checked"] and row["extra"]["ranks"] == 2 for row in document["rows"])
    (path,) = tmp_path.rglob("ladder-decode-3000-ranks-2.json")
    assert json.loads(path.read_text()) == document


@needs_mpi
def test_a_ladder_without_rungs_for_ranks(spawn):
    process = spawn("ladder", "backprop", "--device", "cpu", "--ranks", 2)
    _, err = process.communicate()
    assert process.returncode == InputError.exit_code
    assert "ladder backprop has no rungs for ranks" in err
