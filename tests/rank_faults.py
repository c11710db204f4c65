"""Ranks in which something fails, on purpose.

In a rank:  rank_faults.py '{"kind": "kill", "rank": 1, "chunk": 7}' run ...   runs `onchip run ...` with a fault in one
rank, when it has run so many chunks: kill, stop (SIGSTOP: the whole process), hang (the engine's thread), full (disk).
Chunk 0: when it sends what it has recorded.

By hand:    python tests/rank_faults.py 20      so many faults at random, each resumed, and compared with one process.
"""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from onchip.cli.main import main
from onchip.runtime.distributed.launchers import launched_as
from onchip.runtime.distributed.recording import Recording
from onchip.runtime.io import slices

JOB = ["run", "decode", "--count", "20000", "--seed", "1", "--batch", "100", "--device", "cpu", "--deadline", "10"]
NO_FAULT = {"kind": "", "rank": -1, "chunk": -1}


def strike(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(600)
    else:  # no byte more: what is there stays
        sys.dont_write_bytecode = True  # it would be cut off in the cache that tests share
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


def plant(kind, rank, chunk):
    """Let the fault happen in that rank when it writes its chunk of that number; the others wait for it a little."""
    write, count, is_here = slices.SliceFile.write, 0, launched_as()[0] == rank

    def write_until(file, start, rows):
        nonlocal count
        count += 1
        if not is_here:
            time.sleep(0.02)
        elif count == chunk:
            strike(kind)
        return write(file, start, rows)

    if kind and chunk == 0 and is_here:
        Recording.recorded = lambda recording: strike(kind)
    elif kind:
        slices.SliceFile.write = write_until


def run_with(fault, count, job, folder, env):
    """`onchip JOB` as so many ranks with that fault; gives the finished process and the seconds it took."""
    from onchip.runtime.distributed.supervise import find_mpiexec

    begin = time.monotonic()
    command = [find_mpiexec(), "-n", str(count), sys.executable, __file__, json.dumps(fault), *job]
    ran = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    return ran, time.monotonic() - begin


def try_faults(times):
    """As many faults at random moments, each in a job that is then resumed; prints a line each."""
    from real_ranks import ENV

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        assert main([*JOB, "-o", "whole.npy"]) == 0
        for i in range(times):
            count, kind = draw.choice((2, 3, 4)), ("kill", "stop", "hang", "full")[i % 4]
            fault = {"kind": kind, "rank": draw.randrange(count), "chunk": draw.randrange(1, 20)}
            ran, seconds = run_with(fault, count, [*JOB, "-o", "y.npy"], folder, ENV)
            assert ran.returncode, (fault, ran.stderr)
            assert not (folder / "y.npy").exists(), fault
            again, _ = run_with(NO_FAULT, count, [*JOB, "-o", "y.npy", "--resume"], folder, ENV)
            assert again.returncode == 0, again.stderr
            assert (folder / "y.npy").read_bytes() == (folder / "whole.npy").read_bytes(), fault
            (folder / "y.npy").unlink()
            said = [line for line in ran.stderr.splitlines() if re.search(r"hangs|cannot write|KILLED", line)]
            told = f"{i + 1}: {kind} in rank {fault['rank']} of {count} at its chunk {fault['chunk']}: {seconds:.1f} s"
            print(f"{told}, exit code {ran.returncode}, {said[:1]}; resumed, same bits", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        try_faults(int(sys.argv[1]))
    else:
        plant(**json.loads(sys.argv[1]))
        sys.exit(main(sys.argv[2:]))
