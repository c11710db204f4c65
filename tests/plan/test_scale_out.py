"""Predictions for several devices: divided work gets shorter, the rest stays, and the bottleneck is named."""

import dataclasses

import pytest

from onchip.errors import InputError
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.scale_out import START_S, choose_ranks, predict, table
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.placement import plan
from onchip.workloads import faces, sentiment

ROWS = 1_000_000
FACES = plan(faces.network(), H200, Job("fp16", ROWS))


def test_more_devices_share_the_rows():
    one, eight, more = predict(FACES, ROWS), predict(FACES, ROWS, 1, 8), predict(FACES, ROWS, 16, 8)
    assert one.start_s == 0.0
    assert eight.start_s == START_S
    assert one.kernels_s == pytest.approx(FACES.estimate_at(ROWS) * 1e-6)
    assert 6 < one.kernels_s / eight.kernels_s <= 8
    assert one.bus_s == pytest.approx(8 * eight.bus_s, rel=1e-3)
    assert one.files_s == eight.files_s == pytest.approx(16 * more.files_s)  # per machine, for any number of GPUs
    assert one.seconds == one.weights_s + max(one.kernels_s, one.bus_s, one.files_s)


def test_the_largest_part_is_named():
    assert predict(FACES, ROWS).bottleneck == "the file system"
    assert predict(FACES, 10, 1, 8).bottleneck == "starting ranks"
    assert predict(FACES, 10).bottleneck == "weights"
    slow = dataclasses.replace(FACES, device=dataclasses.replace(H200, bus_bandwidth=1e8))
    assert predict(slow, ROWS, 1, 8).bottleneck == "the bus"


def test_a_cpu_has_no_bus():
    here = plan(faces.network(), this_cpu(), Job("fp32", 64))
    found = predict(here, 64)
    assert (found.bus_s, found.bottleneck) == (0.0, "kernels")


def test_ranks_on_a_cpu_share_its_cores():
    """The predictions in docs/cluster.md: work is divided among the available cores, startup is not."""
    two = dataclasses.replace(this_cpu(), units=2)
    here = plan(faces.network(), two, Job("fp32", 512))
    ranks = [predict(here, 512, 1, count, threads=1) for count in (1, 2, 4)]
    assert [each.kernels_s / ranks[1].kernels_s for each in ranks] == [2.0, 1.0, 1.0]
    assert [each.weights_s / ranks[1].weights_s for each in ranks] == [2.0, 1.0, 1.0]  # computed by all ranks together
    assert [each.start_s for each in ranks] == [0.0, START_S, START_S]
    assert predict(here, 512, 1, 4).kernels_s == predict(here, 512).kernels_s == ranks[1].kernels_s
    assert predict(here, 512, 4, 1).kernels_s == pytest.approx(ranks[1].kernels_s / 4, rel=0.1)


def test_machines_share_the_making_of_tables_where_that_is_sooner():
    here = plan(sentiment.network(), this_cpu(), Job("fp32", 1 << 20))
    one, four = predict(here, 1 << 20), predict(here, 1 << 20, 4)
    assert one.weights_s / 4 < four.weights_s < one.weights_s / 4 + 0.5  # 0.2 s for two GB
    assert (one.making.split(",")[0], four.making.split(",")[0]) == (
        "derived weights are computed once per machine", "all ranks compute derived weights in slices",
    )  # fmt: skip
    there = plan(sentiment.network(), H200, Job("fp32", 1 << 20))
    assert predict(there, 1 << 20, 4).weights_s >= predict(there, 1 << 20).weights_s  # every GPU its own


def test_small_jobs_take_fewer_ranks():
    assert choose_ranks(FACES, 10, 8)[0] == 1
    slow = dataclasses.replace(FACES, device=dataclasses.replace(H200, bus_bandwidth=1e7))
    count, why = choose_ranks(slow, ROWS, 8)
    assert count == 8
    assert "as 1 rank: the bus takes most of it" in why
    assert choose_ranks(FACES, ROWS, 1)[0] == 1


def test_a_prediction_says_that_it_is_one():
    text = table([predict(FACES, ROWS), predict(FACES, ROWS, 64, 8)])
    assert text.splitlines()[2].split()[:2] == ["64", "512"]
    assert text.splitlines()[-1].startswith("A prediction. ")
    assert "Assumed" in text
    assert text.endswith("With 512 devices, every GPU computes its own derived weights.")


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1 << 20, 1)])
def test_numbers_that_cannot_be(sizes):
    with pytest.raises(InputError, match="bad number"):
        predict(FACES, ROWS, *sizes)
