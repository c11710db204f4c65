"""--resume with a manifest or rows that changed: an error, or the bits of a complete run; nothing else."""

import copy
import dataclasses
import json
import random

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import OutputError
from onchip.formats.load import save
from onchip.runtime.io import output
from onchip.runtime.io.slices import make_line, parse_line

JOB = ["run", "m.onnx", "x.npy", "--device", "cpu", "--batch", "100"]
ROWS, CHUNKS, DONE = 700, 7, 4


@pytest.fixture
def left(cli, tmp_path, monkeypatch):
    """The files of a run that failed after some chunks; `whole.npy` has the complete output."""
    save(random_mlp(20, 16, 3), tmp_path / "m.onnx")
    x = rows(ROWS, 20)
    x[[120, 130]] = np.nan
    np.save(tmp_path / "x.npy", x)
    ran = cli(*JOB, "-o", "whole.npy")
    assert ran.code == 0, ran.err
    assert "2 rows contain NaN or Inf, the first is row 120" in ran.err
    record = output.PartialOutput.record

    def fail(self, told):
        if told.chunk == DONE:
            raise OutputError("the disk is full")
        record(self, told)

    with monkeypatch.context() as patched:
        patched.setattr(output.PartialOutput, "record", fail)
        assert cli(*JOB, "-o", "y.npy").code == 2
    return {path: path.read_bytes() for path in tmp_path.glob("y.npy.*")}


@pytest.fixture
def resume(cli, tmp_path, left):
    """resume({suffix: bytes}): resume after replacing these files; returns exit code and messages."""
    whole = (tmp_path / "whole.npy").read_bytes()

    def call(changed, *more):
        (tmp_path / "y.npy").unlink(missing_ok=True)
        for path, data in left.items():
            path.write_bytes(changed.get(path.suffix, data))
        ran = cli(*JOB, "-o", "y.npy", "--resume", *more)
        assert ran.code in (0, 2), ran.err
        assert (tmp_path / "y.npy").exists() == (ran.code == 0), ran.err
        if ran.code == 0:
            assert (tmp_path / "y.npy").read_bytes() == whole, ran.err
            assert "2 rows contain NaN or Inf, the first is row 120" in ran.err
            assert ran.err.startswith(("resumed: ", "nothing to resume: "))
        else:
            assert ran.err.count("\n  ") >= 2, ran.err  # got, expected, try
        return ran

    return call


def test_the_remaining_chunks_are_resumed(resume):
    ran = resume({})
    assert ran.code == 0
    assert f"resumed: {DONE} of {CHUNKS} chunks are done" in ran.err


def test_any_flipped_bit(resume, left):
    draw = random.Random(37)
    files = {path.suffix: data for path, data in left.items()}
    codes = []
    for suffix, times in ((".manifest", 60), (".partial", 30)):
        data = files[suffix]
        for _ in range(times):
            at, bit = draw.randrange(len(data)), draw.randrange(8)
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            codes.append(resume({suffix: changed}).code)
    assert set(codes) == {0, 2}


@pytest.mark.parametrize("suffix", [".manifest", ".partial"])
def test_any_length(resume, left, suffix):
    draw = random.Random(5)
    (data,) = (data for path, data in left.items() if path.suffix == suffix)
    for _ in range(6):
        resume({suffix: data[: draw.randrange(len(data))]})
    resume({suffix: b""})
    assert resume({suffix: data + b"more" * 5000}).code == 0


def forge(manifest, change):
    """The manifest with another first line and its correct digest."""
    first, rest = manifest.split(b"\n", 1)
    head = parse_line(first)
    change(head)
    return make_line(head) + rest


def set_in(*path):
    *names, last, value = path

    def change(head):
        for name in names:
            head = head[name]
        head[last] = value

    return change


FORGED = {
    "no cuts": set_in("cuts", []),
    "cuts that begin late": set_in("cuts", [100, 200]),
    "cuts back and forth": set_in("cuts", [0, 300, 200]),
    "a cut twice": set_in("cuts", [0, 0, 300]),
    "a cut after the end": set_in("cuts", [0, ROWS]),
    "half a cut": set_in("cuts", [0, 100.5]),
    "cuts that are none": set_in("cuts", {"0": 100}),
    "a true cut": set_in("cuts", [False, 100]),
    "another version": set_in("version", 1),
    "the version of older plans": set_in("version", 5),
    "no token": set_in("token", None),
    "another network": set_in("job", "network", "0" * 64),
    "no job": set_in("job", None),
    "no plan": set_in("plan", None),
    "an empty plan": set_in("plan", {}),
    "an old plan": set_in("plan", '{"version": 2}'),
    "another plan": set_in("plan", "sha256", "0" * 64),
    "no digest": set_in("plan", "sha256", None),
    "a strange kind": set_in("plan", "kind", ["cpu"]),
    "another kind": set_in("plan", "device", "kind", "cuda"),
    "another architecture": set_in("plan", "device", "arch", "sm_90a"),
    "no device": set_in("plan", "device", None),
    "no rate": set_in("plan", "device", "bandwidth", 0.0),
    "a rate that is none": set_in("plan", "device", "bandwidth", float("nan")),
    "a rate beyond all": set_in("plan", "device", "flops", "fp32", 10**400),
    "no peak": set_in("plan", "device", "peak", {}),
    "text for a number": set_in("plan", "device", "units", "2"),
    "no core": set_in("plan", "device", "units", 0),
    "a name that is none": set_in("plan", "device", "name", 3),
    "more than a device": set_in("plan", "device", "more", 3),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_first_line_is_refused(resume, left, case):
    (manifest,) = (data for path, data in left.items() if path.suffix == ".manifest")
    ran = resume({".manifest": forge(manifest, FORGED[case])})
    assert ran.code == 2
    assert "--resume" in ran.err
    assert {path: path.read_bytes() for path in left} == left | {
        path: forge(manifest, FORGED[case]) for path in left if path.suffix == ".manifest"
    }


def test_a_forged_chunk_is_run_again(resume, left):
    (manifest,) = (data for path, data in left.items() if path.suffix == ".manifest")
    head, *lines, _ = manifest.split(b"\n")
    told = parse_line(lines[1])
    assert (told["chunk"], told["bad_rows"], told["first_bad_row"]) == (1, 2, 120)
    for name, values in {
        "chunk": (-1, CHUNKS, 2, "1", None, True, 1.0), "digest": ("0" * 64, None, 3), "bad_rows": (-1, 101, 0, "2"),
        "first_bad_row": (99, 199, 700, None, "120"), "more": (1,),
    }.items():  # fmt: skip
        for value in values:
            changed = copy.copy(told) | {name: value}
            made = b"\n".join([head, lines[0], make_line(changed)[:-1], *lines[2:], b""])
            ran = resume({".manifest": made})
            assert ran.code == 0
            assert f"resumed: {DONE - 1} of {CHUNKS} chunks" in ran.err


def test_the_plan_is_that_of_the_rates_of_that_day(resume, left, monkeypatch):
    """The measured rates have changed: the plan is repeated with the old ones."""
    from onchip.runtime import placement
    from onchip.runtime.cpu import backend as cpu

    here = cpu.this_cpu()
    slower = cpu.Device(**{**vars(here), "flops": {"fp32": here.flops["fp32"] / 7}, "bandwidth": here.bandwidth * 3})
    monkeypatch.setattr(placement, "this_cpu", lambda: slower)
    assert "resumed: 4 of 7" in resume({}).err


@pytest.mark.parametrize("what", ["activation", "weights", "scale"])
def test_another_network_of_the_same_shapes_is_not_resumed(cli, tmp_path, left, what):
    net = random_mlp(20, 16, 3)
    if what == "activation":
        net = random_mlp(20, 16, 3, activation="Tanh")
    elif what == "weights":
        net = random_mlp(20, 16, 3, seed=1)
    else:
        net = dataclasses.replace(net, meaning=dataclasses.replace(net.meaning, scale=255.0))
    save(net, tmp_path / "m.onnx")
    ran = cli(*JOB, "-o", "y.npy", "--resume")
    assert ran.code == 2
    assert "belongs to another job\n  got:      network: " in ran.err
    assert {path: path.read_bytes() for path in left} == left


def test_json_of_a_manifest_is_one_line_each(left):
    (manifest,) = (data for path, data in left.items() if path.suffix == ".manifest")
    for line in manifest.splitlines():
        assert json.loads(line.split(b" ", 1)[1]) == parse_line(line)
