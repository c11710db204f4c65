"""Scratch of conv_fused: values share it, groups of images reuse it, and no value is overwritten while live."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import rows
from image_networks import NETWORKS, chain, conv
from onchip.kernels import cpu
from onchip.kernels.cpu.conv.program import lower
from onchip.kernels.cpu.memory import first_fit_offsets
from onchip.network.layers import Conv2d, GlobalMean, Linear, ReLU
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.engine import compile
from python_calls import python_calls

SRC = Path(__file__).parents[4] / "src"


def fused(net, **options):
    engine = compile(net, device="cpu", without=("windows",), **options)
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"], str(engine.plan)
    return engine


def deep():
    """Large images first, many weights at the end."""
    widths, layers = (3, 16, 16, 32, 32, 64, 64), []
    for i, (C, N) in enumerate(itertools.pairwise(widths)):
        stride = (2, 2) if i in (2, 4) else (1, 1)
        layers += [(Conv2d(stride, (1, 1, 1, 1)), conv(N, C, 3, 3)), ReLU()]
    return chain((3, 24, 24), *layers, GlobalMean((2, 3)), (Linear(), conv(5, 64)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 50)), max_size=12))
def test_values_with_overlapping_lifetimes_do_not_overlap(values):
    uses = {i: (first, first + more) for i, (first, more, _) in enumerate(values)}
    sizes = {i: size for i, (_, _, size) in enumerate(values)}
    places = first_fit_offsets(uses, sizes)
    assert list(places) == list(uses)
    for a, b in itertools.combinations(uses, 2):
        if uses[a][0] <= uses[b][1] and uses[b][0] <= uses[a][1]:
            assert places[a] + sizes[a] <= places[b] or places[b] + sizes[b] <= places[a]


def test_values_go_to_the_first_free_offset():
    uses = {"a": (0, 1), "b": (1, 3), "c": (2, 3), "d": (3, 4)}
    sizes = {"a": 128, "b": 64, "c": 64, "d": 128}
    assert first_fit_offsets(uses, sizes) == {"a": 0, "b": 128, "c": 0, "d": 192}


def test_adjacent_gaps_are_merged():
    uses = {"a": (0, 1), "b": (0, 2), "c": (0, 1), "d": (0, 9), "e": (3, 4), "f": (3, 4)}
    sizes = {"a": 8, "b": 8, "c": 8, "d": 8, "e": 24, "f": 8}
    assert first_fit_offsets(uses, sizes) == {"a": 0, "b": 8, "c": 16, "d": 24, "e": 0, "f": 32}


def test_the_work_is_linear_in_the_number_of_values():
    def calls(count):
        uses, sizes = {i: (i, count) for i in range(count)}, dict.fromkeys(range(count), 64)
        return python_calls(lambda: first_fit_offsets(uses, sizes))

    assert calls(2000) < 2.5 * calls(1000)


def test_a_chain_of_equal_sizes_needs_two_buffers():
    net = chain((16, 8, 8), *[(Conv2d(), conv(16, 16, 1, 1))] * 9)
    program = lower(net, net.nodes)
    one = program.stores[0].size
    assert program.scratch(1, 1 << 20).floats == 2 * one
    assert program.scratch(16, 1 << 20).floats == 2 * 16 * one


def test_segments_are_contiguous_and_groups_fit():
    net = deep()
    program = lower(net, net.nodes)
    scratch = program.scratch(16, 256 << 10)
    segments = scratch.segments
    assert [segment.first for segment in segments] == [0, *(segment.last + 1 for segment in segments[:-1])]
    assert segments[-1].last == len(program.operations) - 1
    groups = [segment.group for segment in segments]
    assert groups[0] < groups[-1] == 16, groups  # few large images, then many small ones to amortise the weights
    assert scratch.live_out
    assert scratch.floats < sum(store.size for store in program.stores) * 16 // 3


@pytest.mark.parametrize("cache", [2 << 10, 32 << 10])  # bytes: less than one image, and a few images
@pytest.mark.parametrize("name", [*NETWORKS, "deep"])
def test_groups_that_reuse_memory_have_the_same_bits(name, cache, monkeypatch):
    """Borders and pads stay zero, and nothing of an earlier group shows: not even a NaN."""
    monkeypatch.setattr(cpu, "KERNELS", tuple(kernel for kernel in cpu.KERNELS if kernel.name != "plain"))
    net = NETWORKS.get(name) or deep()
    x = rows(37, *net.input.row_shape)
    whole = fused(net)(x)
    monkeypatch.setattr("onchip.runtime.cpu.backend.l2_bytes", lambda: cache)
    for threads in (1, core_count()):
        engine = fused(net, threads=threads)
        engine(np.full_like(x, np.nan))
        for B in (1, 5, 37):
            assert np.array_equal(engine(x[:B]), whole[:B])


def test_threads_share_one_group_after_the_other():
    """A simulated machine with four threads: three images, with groups of one in the first layers."""
    code = (
        "import numpy as np, onchip\n"
        "from onchip.kernels.cpu.conv import fused; from onchip.runtime.cpu import backend as cpu\n"
        "from test_scratch import deep\n"
        "cpu.core_count, cpu.l2_bytes, fused.SHARED_FLOP = lambda: 4, lambda: 96 << 10, -1\n"
        "net = deep()\n"
        "x = np.random.default_rng(1).standard_normal((3, 3, 24, 24), dtype=np.float32)\n"
        "one, four = onchip.compile(net, 'cpu', threads=1), onchip.compile(net, 'cpu', threads=4)\n"
        "facts = four.plan.groups[0].claim.facts\n"
        "assert facts.images > 3 and facts.scratch.segments[0].group == 1 < facts.scratch.segments[-1].group\n"
        "print(all(np.array_equal(four(x[:B]), one(x[:B])) for B in (1, 2, 3)))\n"
    )
    here, tests = Path(__file__).parent, Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{SRC}:{here}:{tests}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True", done.stderr
