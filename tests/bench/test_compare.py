"""onchip bench --compare: what changed between two result files, beyond noise."""

import json

import numpy as np
import pytest

from onchip.bench.report.compare import FASTER, GONE, NEW, SAME, SLOWER, WRONG, bootstrap_speedup, compare_results
from onchip.bench.report.results import Results, Row, write_results
from onchip.errors import InputError

MACHINE = {"device": "cpu-x86_64-2", "name": "a CPU", "cores": 2}


def samples(ms, seed, spread=0.01, count=30):
    return tuple(ms * (1 + spread * np.random.default_rng(seed).standard_normal(count)))


def row(case, ms, seed=0, engine="onchip", **changes):
    times = samples(ms, seed, **changes) if ms is not None else ()
    middle = float(np.median(times)) if times else None
    return Row(
        "decode", case, engine, "fp32", middle, middle, middle, 1.0, "rows/s", None, 0.0, ms is not None, times, 2
    )


def results(*rows, machine=MACHINE):
    return Results(machine, {}, "abc", "onchip bench decode", "today", rows)


def verdicts(old, new):
    return {(change.case, change.engine): change.verdict for change in compare_results(old, new)}


def test_each_verdict():
    old = results(row("a", 1.0), row("b", 1.0), row("c", 1.0), row("d", 1.0), row("e", 1.0))
    new = results(row("a", 1.2, 1), row("b", 0.8, 1), row("c", 1.003, 1), row("d", None), row("f", 1.0))
    assert verdicts(old, new) == {
        ("a", "onchip"): SLOWER, ("b", "onchip"): FASTER, ("c", "onchip"): SAME, ("d", "onchip"): WRONG,
        ("f", "onchip"): NEW, ("e", "onchip"): GONE,
    }  # fmt: skip
    assert [change.is_regression for change in compare_results(old, new)] == [True, False, False, True, False, False]


def test_noise_is_no_change():
    """10 % in the median of samples that spread by 50 % is noise; in quiet ones it is a change."""
    noisy = results(row("a", 1.0, 0, spread=0.5)), results(row("a", 1.1, 1, spread=0.5))
    quiet = results(row("a", 1.0, 0)), results(row("a", 1.1, 1))
    assert verdicts(*noisy) == {("a", "onchip"): SAME}
    assert verdicts(*quiet) == {("a", "onchip"): SLOWER}


def test_a_slower_peer_is_no_regression():
    (change,) = compare_results(
        results(row("a", 1.0, engine="torch eager")), results(row("a", 2.0, engine="torch eager"))
    )
    assert (change.verdict, change.is_regression) == (SLOWER, False)


def test_the_interval_holds_the_speedup_and_repeats():
    old, new = samples(2.0, 0), samples(1.0, 1)
    low, high = bootstrap_speedup(old, new)
    assert 1.95 < low < np.median(old) / np.median(new) < high < 2.05
    assert bootstrap_speedup(old, new) == (low, high)
    assert bootstrap_speedup((2.0,), (1.0,)) == (2.0, 2.0)


def test_of_one_machine():
    with pytest.raises(InputError, match="different machines"):
        compare_results(results(), results(machine=MACHINE | {"name": "another"}))


def test_command(cli, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    peers = [row("a", 1.0, engine="torch eager"), row("a", 0.5, engine="torch eager")]
    write_results(results(row("a", 1.0), row("b", 1.0), peers[0]), old)
    write_results(results(row("a", 1.5, 1), row("b", 1.0, 1), peers[1]), new)
    ran = cli("bench", "--compare", old, new)
    assert ran.code == 1
    assert "slower" in ran.out
    assert len(ran.out.splitlines()) == 2
    assert "1 case within noise; peers 2.0" in ran.err
    assert cli("bench", "--compare", new, old).code == 0
    found = json.loads(cli("bench", "--compare", old, new, "--json").out)
    assert [change["verdict"] for change in found["changes"]] == [SLOWER, SAME, FASTER]


def test_bad_files(cli, tmp_path):
    (tmp_path / "old.json").write_text("[]")
    ran = cli("bench", "--compare", tmp_path / "old.json", tmp_path / "old.json")
    assert ran.code == 2
    assert "is not a result file" in ran.err
