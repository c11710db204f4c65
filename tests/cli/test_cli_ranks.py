"""Real MPI ranks on this machine: the bits of one process, and faults that end in a message and can be resumed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.formats.load import save
from onchip.runtime.distributed.supervise import find_mpiexec
from rank_faults import JOB, run_with
from real_ranks import ENV, needs_mpi
from small_reports import small_faces, small_sentiment


@pytest.fixture
def long_job(tmp_path):
    """m.onnx and x.npy: many small chunks, so that faults occur between them."""
    save(random_mlp(20, 16, 3), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rows(200_000, 20))
    return ["run", "m.onnx", "x.npy", "--device", "cpu", "--batch", "100"]


def same_files(tmp_path, *names):
    first = (tmp_path / names[0]).read_bytes()
    return all((tmp_path / name).read_bytes() == first for name in names[1:])


@needs_mpi
def test_mpiexec_gives_the_bits_of_one_process(cli, tmp_path):
    """Text networks with lengths, pictures as text, and random rows, in three ranks."""
    ids = np.random.default_rng(0).integers(1, 40, (90, 16)).astype(np.int32)
    ids[::3, 9:] = 0
    ids.tofile(tmp_path / "ids.bin")
    save(small_sentiment(lengths=True), tmp_path / "words.onnx")
    save(small_faces(), tmp_path / "faces.onnx")
    (tmp_path / "z.txt").write_text("70\n" + "\n".join(" ".join(map(str, z)) for z in rows(70, 100)))
    jobs = {
        "words.npy": ["words.onnx", "ids.bin", "--padding", "0", "--batch", "4"],
        "faces.txt": ["faces.onnx", "z.txt", "--batch", "9"],
        "decode.bin": ["decode", "--count", "1000", "--seed", "3", "--batch", "50"],
    }
    commands = []
    for name, job in jobs.items():
        ran = cli("run", *job, "--device", "cpu", "-o", name)
        assert ran.code == 0, ran.err
        commands.append(json.dumps(["run", *job, "--device", "cpu", "-o", f"three-{name}"]))
    program = Path(__file__).parents[1] / "rank_jobs.py"
    ran = subprocess.run(
        [find_mpiexec(), "-n", "3", sys.executable, program, *commands],
        env=ENV, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("3 ranks on 1 machine") == len(jobs)  # only rank 0 prints
    for name in jobs:
        assert same_files(tmp_path, name, f"three-{name}")
    assert not list(tmp_path.glob("*.partial"))


@needs_mpi
def test_ranks_gives_the_bits_of_one_process(cli, spawn, tmp_path):
    """Four ranks, a text network, and rows that only rank 0 has read, from text."""
    save(small_sentiment(), tmp_path / "words.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (90, 16))
    np.savetxt(tmp_path / "ids.csv", ids, fmt="%d", delimiter=",")
    job = ["run", "words.onnx", "ids.csv", "--device", "cpu", "--batch", "4"]
    assert cli(*job, "-o", "one.npy").code == 0
    process = spawn(*job, "-o", "four.npy", "--ranks", 4, "-v")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "device: cpu; 4 ranks on 1 machine" in err
    assert same_files(tmp_path, "one.npy", "four.npy")


def killed_midway(spawn, tmp_path, job, victim):
    """Run two ranks and kill the process `victim(launcher's id, ids of the ranks)` while they run; again if the job was
    done by then. Returns the launcher's exit code and outputs when all processes have ended."""
    manifest, output = tmp_path / "y.npy.manifest", tmp_path / "y.npy"
    while True:
        process, ranks = spawn(*job, "-o", output.name, "--ranks", 2), {}
        while process.poll() is None and (not manifest.exists() or manifest.read_bytes().count(b"\n") < 3):
            time.sleep(0.01)
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                if f"onchip-ranks-{process.pid}-" in text and (
                    found := re.search(r"(?:PMI|OMPI_COMM_WORLD)_RANK=(\d)", text)
                ):
                    ranks[int(found[1])] = int(folder.name)
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(victim(process.pid, ranks), signal.SIGKILL)
        out, err = process.communicate()
        while any(map(is_running, ranks.values())):
            time.sleep(0.01)
        if not output.exists():
            assert len(ranks) == 2
            return process.returncode, out, err
        output.unlink()


@needs_mpi
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found by /proc")
def test_a_rank_that_dies_ends_the_job_which_is_resumed(cli, spawn, tmp_path, long_job):
    code, out, err = killed_midway(spawn, tmp_path, long_job, lambda launcher, ranks: ranks[1])
    assert (code, out) == (1, "")
    assert "rank 1 on " in err
    assert " died" in err
    assert "--resume" in err
    ran = cli(*long_job, "-o", "y.npy", "--resume", "--json")
    assert ran.code == 0, ran.err
    assert re.search(r"resumed: \d+ of 2,000 chunks are done", ran.err)
    assert 0 < json.loads(ran.out)["resumed_rows"] < 200_000
    assert cli(*long_job, "-o", "whole.npy").code == 0
    assert same_files(tmp_path, "whole.npy", "y.npy")


@needs_mpi
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found by /proc")
def test_ranks_end_with_the_process_that_started_them(cli, spawn, tmp_path, long_job):
    killed_midway(spawn, tmp_path, [*long_job, "--deadline", "600"], lambda launcher, ranks: launcher)
    ran = cli(*long_job, "-o", "y.npy", "--resume", "--json")
    assert ran.code == 0, ran.err
    assert 0 < json.loads(ran.out)["resumed_rows"] <= 200_000
    assert cli(*long_job, "-o", "whole.npy").code == 0
    assert same_files(tmp_path, "whole.npy", "y.npy")


def is_running(pid):
    """Whether the process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_mpi
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("stop", 1, "rank 1 on .* hangs\n  got: +chunk \\d+, rows .* for 10 s"),
     ("full", 2, r"cannot write .*y\.npy\.partial.* \(rank 1 on .*\)\n  got: +File too large")],
)  # fmt: skip
def test_a_rank_that_hangs_or_cannot_write_ends_the_job_which_is_resumed(cli, tmp_path, kind, code, words):
    """Under mpiexec: a rank that is stopped while running, and one that cannot write any more."""
    job = [*JOB, "-o", "y.npy"]
    ran, _ = run_with({"kind": kind, "rank": 1, "chunk": 3}, 2, job, tmp_path, ENV)
    assert ran.returncode == code, ran.stderr
    assert re.search(words, ran.stderr), ran.stderr
    assert "MPI_Abort" not in ran.stderr
    assert not (tmp_path / "y.npy").exists()
    ran = cli(*job, "--resume", "--json")
    assert ran.code == 0, ran.err
    assert 0 < json.loads(ran.out)["resumed_rows"] < 20_000
    assert cli(*JOB, "-o", "whole.npy").code == 0
    assert same_files(tmp_path, "whole.npy", "y.npy")


@needs_mpi
def test_every_rank_is_on_the_timeline(spawn, tmp_path):
    names, count = {}, 10_000
    while len(names) < 2:  # a rank that is ready after the job is left out: then a longer one
        count *= 2
        job = ["run", "decode", "--count", count, "--seed", 1, "--batch", 100, "--device", "cpu"]
        process = spawn(*job, "-o", "y.npy", "--ranks", 2, "--trace", "t.json", "--profile")
        _, err = process.communicate()
        assert process.returncode == 0, err
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [re.sub(" on [^ ]+:", ":", names[pid]) for pid in (0, 1)] == [f"rank {i}: decode on cpu" for i in (0, 1)]
    assert {event["pid"] for event in events if event["name"].startswith("mlp_fused")} == {0, 1}
    assert len(re.findall(r"rank [01] on \S+ decode on cpu: [\d,]+ calls", err)) == 2


@needs_mpi
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_rank_that_dies_while_it_records_ends_the_job(cli, tmp_path, chunk):
    job = [*JOB, "-o", "y.npy"]
    ran, _ = run_with({"kind": "kill", "rank": 1, "chunk": chunk}, 2, [*job, "--trace", "t.json"], tmp_path, ENV)
    assert ran.returncode
    assert not (tmp_path / "t.json").exists()
    assert cli(*job, "--resume").code == 0
    assert cli(*JOB, "-o", "whole.npy").code == 0
    assert same_files(tmp_path, "whole.npy", "y.npy")


def test_misuse(cli, tmp_path):
    save(random_mlp(20, 16, 3), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rows(8, 20))
    for options, words in ((["--ranks", 0], "bad number of ranks"), (["--ranks", 1000], "bad number of ranks"),
                           (["--ranks", "²"], "bad number of ranks"), (["--ranks", "9" * 5000], "bad number of ranks"),
                           (["--ranks", "-2"], "bad number of ranks"), (["--resume"], "nothing to resume"),
                           (["--gpus", "²"], "bad --gpus"), (["--gpus", "9" * 18], "no such GPUs"),
                           (["--gpus", "0,²"], "bad --gpus"), (["--device", "cuda:²"], "device"),
                           (["--deadline", 0], "bad deadline"), (["--gpus", "a"], "bad --gpus")):  # fmt: skip
        ran = cli("run", "m.onnx", "x.npy", "--device", "cpu", *options)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err


def test_the_launcher_of_ranks_loads_little(tmp_path):
    """Ranks load NumPy and kernels themselves, so the launcher must not load them first."""
    code = (
        "import sys; from onchip.runtime.distributed import supervise; from onchip.cli.main import main\n"
        "supervise.run_ranks = lambda *_: print(*sorted({'numpy', 'numba'} & set(sys.modules)))\n"
        "main(['run', 'decode', '--count', '4', '--ranks', '2'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("\n", "")


@needs_mpi
@pytest.mark.parametrize("job", [["run", "decode", "--count", "4"], ["train", "digits"]])
def test_ranks_start_no_ranks(tmp_path, job):
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "onchip", *job, "--ranks", "2"]
    ran = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert (
        ran.stderr.count("--ranks under an MPI launcher\n  got:      --ranks 2 in 2 ranks") == 1
    )  # only rank 0 prints


@needs_mpi
@pytest.mark.parametrize("job", [["run", "decode", "--count", "4"], ["train", "digits", "--data", "sklearn"]])
def test_a_rank_of_another_version_is_refused(tmp_path, job):
    code = (
        "import sys, onchip; from onchip.runtime.distributed.launchers import launched_as\n"
        "if launched_as()[0] == 1: onchip.__version__ = '0.0.1'\n"
        "from onchip.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [find_mpiexec(), "-n", "3", sys.executable, "-c", code, *job, "--device", "cpu"]
    ran = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.search(r"rank 1 on \S+ runs another version of onchip\n  got: +onchip 0\.0\.1\n", ran.stderr)
    assert ran.stderr.count("runs another version of onchip") == 1  # only rank 0 prints


def test_a_rank_without_an_mpi_environment_starts_none(cli, monkeypatch):
    monkeypatch.setenv("ONCHIP_SUPERVISOR", "/none")
    ran = cli("run", "decode", "--count", 4, "--ranks", 2)
    assert (ran.code, ran.out) == (2, "")
    assert "this rank sees no others" in ran.err


GPU_JOBS = {
    "decode.npy": ["decode", "--count", 2_000_000, "--seed", 1, "--precision", "fp16", "--batch", 20_000],
    "faces.npy": ["faces", "--count", 300, "--seed", 1, "--batch", 64],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_JOBS)
def test_a_gpu_driven_twice_by_one_process(cli, tmp_path, name):
    assert cli("run", *GPU_JOBS[name], "--device", "cuda", "-o", name).code == 0
    ran = cli("run", *GPU_JOBS[name], "--gpus", "0,0", "-o", f"two-{name}", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["device"] == "cuda:0, cuda:0"
    assert same_files(tmp_path, name, f"two-{name}")


@pytest.mark.gpu
@needs_mpi
def test_four_ranks_share_a_gpu(cli, spawn, tmp_path):
    name = "decode.npy"
    assert cli("run", *GPU_JOBS[name], "--device", "cuda", "-o", name).code == 0
    process = spawn("run", *GPU_JOBS[name], "--device", "cuda", "-o", f"four-{name}", "--ranks", 4, "-v")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "device: cuda:0; 4 ranks on 1 machine" in err
    assert same_files(tmp_path, name, f"four-{name}")
