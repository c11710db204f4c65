import dataclasses
import json
import os
from pathlib import Path

import pytest

from onchip.bench.report import machine
from onchip.bench.report.results import (
    ACCURACY,
    Results,
    Row,
    best_peer,
    job_title,
    make_row,
    make_tables,
    read_results,
    result_path,
    short_commit,
    show,
    show_floor,
    show_rate,
    to_json,
    write_results,
)
from onchip.errors import FormatError, InputError, OutputError
from onchip.measure.truth import Verdict
from onchip.plan.device import H200, RTX_4060_LAPTOP
from onchip.runtime.cpu.backend import this_cpu

ROW = Row("decode", "12800 rows", "onchip", "fp32", 2.0, 1.9, 2.2, 6.4e6, "rows/s", 1.0, 1e-6, True, (2.0, 1.9), 2, "")
WRONG = dataclasses.replace(ROW, engine="bad", median_ms=None, p20_ms=None, p80_ms=None, rate=None, checked=False,
                            error=float("inf"), samples_ms=())  # fmt: skip
PEER = dataclasses.replace(ROW, engine="torch eager", median_ms=5.0)
RESULTS = Results({"name": "a chip", "cores": 2, "launch_us": 3.0}, {"python": "3"}, "abc+dirty", "onchip bench decode",
                  "2026-01-01", (ROW, PEER, WRONG), {"frob": "not here"})  # fmt: skip

# The order of a row in every committed file.
ROW_KEYS = ["workload", "case", "engine", "precision", "median_ms", "p20_ms", "p80_ms", "rate", "unit", "floor_ms",
            "error", "checked", "samples_ms", "threads", "setting", "scores", "score_std", "extra",
            "kernels"]  # fmt: skip


def test_the_file_has_the_documented_keys(tmp_path):
    path = result_path(tmp_path, "cpu-x-2", "decode")
    write_results(RESULTS, path)
    assert path == tmp_path / "cpu-x-2" / "decode.json"
    document = json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert list(document) == ["machine", "versions", "commit", "command", "date", "rows", "skipped"]
    assert [list(row) for row in document["rows"]] == [ROW_KEYS] * 3
    assert document["rows"][2]["median_ms"] is None
    assert document["rows"][2]["error"] is None
    assert document["rows"][2]["checked"] is False


def test_written_and_read_is_the_same(tmp_path):
    path = tmp_path / "a.json"
    write_results(RESULTS, path)
    assert read_results(path) == dataclasses.replace(RESULTS, rows=(ROW, PEER, dataclasses.replace(WRONG, error=None)))
    scored = dataclasses.replace(RESULTS, rows=(dataclasses.replace(ROW, scores=(97.5, 98.0), score_std=0.35),))
    write_results(scored, path)
    assert read_results(path) == scored
    assert '"scores": [97.5, 98.0],' in path.read_text()
    kernels = ({"kernel": "relu_each", "launches": 2}, {"kernel": "mat_mul<64>", "launches": 1})
    row = dataclasses.replace(ROW, extra={"registers": 64, "occupancy": 0.5}, kernels=kernels)
    known = dataclasses.replace(RESULTS, rows=(row,))
    write_results(known, path)
    assert read_results(path) == known


def test_extra_properties_are_in_the_row():
    row = make_row("decode", "1 row", "ladder:a", None, Verdict(0.0, 1e-6), work=1, extra={"registers": 64})
    assert row.extra == {"registers": 64}
    assert make_row("decode", "1 row", "ladder:a", None, Verdict(0.0, 1e-6), work=1).extra == {}


def test_samples_are_on_one_line():
    text = to_json(RESULTS.to_dict())
    assert '"samples_ms": [2.0, 1.9],' in text
    assert '"samples_ms": [],' in text
    assert json.loads(text)["rows"][0]["samples_ms"] == [2.0, 1.9]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_results(RESULTS, path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_results(dataclasses.replace(RESULTS, commit="new"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_results(RESULTS, tmp_path / "file" / "cpu" / "a.json")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", '{"rows": 3}', "[" * 100_000, json.dumps(RESULTS.to_dict() | {"rows": [{"case": 1}]})],
)
def test_garbage_is_a_format_error(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="not a result file"):
        read_results(path)


@pytest.mark.parametrize("name", ["median_ms", "score_std"])
def test_a_value_that_is_not_a_number(tmp_path, name):
    path = tmp_path / "a.json"
    row = {**dataclasses.asdict(ROW), name: "fast"}
    path.write_text(json.dumps({**RESULTS.to_dict(), "rows": [row]}))
    with pytest.raises(FormatError):
        read_results(path)


def test_best_peer_is_of_the_same_job_and_file():
    others = [
        dataclasses.replace(PEER, engine="report", median_ms=0.1),
        dataclasses.replace(PEER, engine="ladder:numpy", median_ms=0.1),
        dataclasses.replace(PEER, engine="onchip, fp16 tables", median_ms=0.1),
        dataclasses.replace(PEER, precision="fp16", median_ms=0.1),
        dataclasses.replace(PEER, case="1 row", median_ms=0.1),
        dataclasses.replace(PEER, engine="numpy", median_ms=7.0),
    ]
    assert best_peer([ROW, *others, PEER, WRONG], ROW) == PEER
    assert best_peer([ROW, WRONG], ROW) is None


def test_shown_values():
    assert show_floor(ROW, 3.0) == "50%"
    assert show_floor(dataclasses.replace(ROW, floor_ms=0.004), 3.0) == "launch"
    assert show_rate(ROW) == "6.4 M"
    accuracy = dataclasses.replace(ROW, unit=ACCURACY, rate=97.912)
    assert show_rate(accuracy) == "97.91"
    assert show_rate(dataclasses.replace(accuracy, score_std=0.0719)) == "97.91 ± 0.07"


def test_tables(capsys):
    two = dataclasses.replace(RESULTS, rows=(*RESULTS.rows, dataclasses.replace(ROW, case="7 rows")))
    show(make_tables(two))
    text = capsys.readouterr().out
    assert "1.900-2.200" in text
    assert "2.50x" in text
    assert "wrong: no time" in text
    assert "decode, 12800 rows" in text
    assert "decode, 7 rows" in text
    assert "skipped frob: not here" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_precisions_of_a_case_are_separate_jobs(capsys):
    half = dataclasses.replace(ROW, precision="fp16", median_ms=0.5)
    half_peer = dataclasses.replace(PEER, precision="fp16", median_ms=2.0)
    assert [job_title(row) for row in (ROW, half)] == ["decode, 12800 rows", "decode, 12800 rows, fp16"]
    gpu = {"name": "NVIDIA H200", "device": "h200", "cores": 16, "launch_us": 5.0}
    show(make_tables(dataclasses.replace(RESULTS, machine=gpu, rows=(ROW, PEER, half, half_peer))))
    text = capsys.readouterr().out
    assert text.startswith("NVIDIA H200, onchip abc")
    assert "4.00x" in text
    assert "2.50x" in text
    assert text.count("decode, 12800 rows, fp16\n") + text.count("decode, 12800 rows, fp16 ") == 2


def test_the_summary_has_a_line_per_onchip_engine(capsys):
    half = dataclasses.replace(ROW, engine="onchip, fp16 tables", median_ms=1.0)
    without_peer = dataclasses.replace(ROW, case="7 rows")
    show(make_tables(dataclasses.replace(RESULTS, rows=(ROW, half, PEER, WRONG, without_peer))))
    _, summary = capsys.readouterr().out.split("against the best peer")
    lines = [" ".join(line.split()) for line in summary.splitlines() if line.strip().startswith("decode")]
    assert lines == [
        "decode, 12800 rows 2.000 5.000 2.50x torch eager",
        "decode, 12800 rows, fp16 tables 1.000 5.000 5.00x torch eager",
        "decode, 7 rows 2.000 - - -",
    ]
    show(make_tables(dataclasses.replace(RESULTS, rows=(ROW, without_peer))))
    assert "against the best peer" not in capsys.readouterr().out


# -- the origin of a result --------------------------------------------------------------------------------


def test_slugs():
    assert machine.device_slug(H200) == "h200"
    assert machine.device_slug(RTX_4060_LAPTOP) == "geforce-rtx-4060-laptop"


def test_versions_and_machine():
    assert set(machine.versions(this_cpu())) == {"python", "onchip", *machine.PACKAGES}
    assert machine.versions(this_cpu())["numpy"]
    pytest.importorskip("cuda.bindings")
    on_gpu = machine.versions(H200)
    assert set(on_gpu) == {"python", "onchip", *machine.PACKAGES, "cuda driver", "nvrtc", "nvidia driver"}
    assert on_gpu["nvrtc"].startswith("13.")
    described = machine.describe_machine(H200)
    assert described["name"] == "NVIDIA H200"
    assert json.dumps(described)
    assert "ceilings" not in described
    assert machine.describe_machine(H200, {"copy_bytes_per_s": 4e12})["ceilings"] == {"copy_bytes_per_s": 4e12}


def test_commit_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "git", lambda *_: None)
    assert machine.commit().endswith("(installed)")
    monkeypatch.setattr(machine, "git", lambda *_: str(tmp_path))  # another repository
    assert machine.commit().endswith("(installed)")


def _checkout(monkeypatch, head, changed=""):
    top = str(Path(machine.__file__).parents[4])
    answers = {"--show-toplevel": top, "HEAD": head, ":!benchmarks/results": changed}
    monkeypatch.setattr(machine, "git", lambda folder, *arguments: answers[arguments[-1]])


def test_a_copy_without_git_gets_its_commit_by_an_option(monkeypatch):
    monkeypatch.setattr(machine, "git", lambda *_: None)
    assert machine.commit("a1" * 20) == "a1" * 20
    for bad in ("", "a1", "a1" * 19, "A1" * 20, "a1" * 20 + "+dirty", "a1" * 20 + "\n"):
        with pytest.raises(InputError, match="bad commit") as refused:
            machine.commit(bad)
        assert refused.value.exit_code == 2


def test_a_checkouts_commit_is_gits(monkeypatch):
    _checkout(monkeypatch, "a1" * 20)
    assert machine.commit() == machine.commit("a1" * 20) == "a1" * 20
    with pytest.raises(InputError, match="differs from this checkout") as refused:
        machine.commit("b2" * 20)
    assert refused.value.exit_code == 2
    _checkout(monkeypatch, "a1" * 20, changed=" M src/onchip/files.py")
    assert machine.commit() == "a1" * 20 + "+dirty"
    with pytest.raises(InputError, match="differs from this checkout"):
        machine.commit("a1" * 20)  # files differ


def test_short_commits():
    assert short_commit("a1" * 20) == "a1a1a1a"
    assert short_commit("a1" * 20 + "+dirty") == "a1a1a1a+dirty"
    assert short_commit("0.1.0 (installed)") == "0.1.0 (installed)"


@pytest.mark.parametrize("out", ["--out|/a b/c|--rows|7", "--out=/a b/c|--rows|7", "--rows|7|--out|y", "--rows|7",
                                 "--commit|a1|--rows|7", "--rows|7|--commit=a1|--out=y"])  # fmt: skip
def test_a_command_omits_its_output_folder(monkeypatch, out):
    monkeypatch.setattr("sys.argv", ["/x/onchip", "bench", *out.split("|")])
    assert machine.command_line() == "onchip bench --rows 7"
