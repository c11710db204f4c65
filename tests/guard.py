"""Whether a commit changes what runs: compares machine code, results and plans of two trees.

python tests/guard.py against HEAD~1 [--renames FILE]       records that commit, then this tree, and compares
python tests/guard.py record OUT.json                       records this tree
python tests/guard.py compare OLD.json NEW.json [--renames FILE]

A record holds, without a GPU:
  code       a digest of the machine code of each CUDA kernel instance (names of kernels are not part of it)
  results    a digest of the outputs of random networks on the CPU
  trainings  a digest of the losses and weights of random trainings on the CPU
  plans      groups, costs and launches of networks, and of training MLPs, on a CPU and on an H200

Moved files, renamed kernels and new comments leave all of it as it is. Renames: a JSON object, old -> new, of the names
in plans and instances; whole words are replaced. Prose (why a kernel was chosen or refused) is not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NETWORKS, TRAININGS = 200, 50
KERNEL_PACKAGES = ("onchip.kernels.cuda", "onchip.ladders")
CODE = (b".text.", b".nv.constant", b".nv.global", b".nv.shared.")  # sections of a cubin
BATCHES = (1, 7, 1024)
TRAINED, TRAINED_BATCHES = ((784, 320, 160, 10), (784, 128, 10), (20, 33, 5)), (16, 64, 256, 4096)  # MLPs
Record = dict[str, Any]


# -- recording -----------------------------------------------------------------------------------------------------


def record() -> Record:
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        tasks = kernel_tasks()
        made = {
            "code": dict(pool.map(code_of, tasks, chunksize=4)),
            "results": dict(pool.map(result_of, range(NETWORKS), chunksize=4)),
            "trainings": dict(pool.map(training_of, range(TRAININGS), chunksize=2)),
            "plans": {},
        }
        for plans in pool.map(plans_of, range(processes), [processes] * processes):
            made["plans"] |= plans
    return made


def kernel_tasks() -> list[Any]:
    from onchip.runtime.cuda.kernel_check import every_task

    return every_task(KERNEL_PACKAGES)


def code_of(task: Any) -> tuple[str, str]:
    """The instance's name, and a digest of its code; empty where the chip is too small for it."""
    from onchip.errors import PlanError
    from onchip.runtime.cuda.kernel_check import DEVICES
    from onchip.runtime.cuda.nvrtc import compile_program

    name = f"{task.module}: {task.instance.name}, {task.arch}"
    try:
        program = task.instance.launch(DEVICES[task.arch]).program
    except PlanError:
        return name, ""
    return name, code_digest(compile_program(program, task.arch).cubin)


def code_digest(cubin: bytes) -> str:
    """Of the sections with code and constants, whatever the kernel is called."""
    found = sorted(content for name, content in sections(cubin) if name.startswith(CODE))
    return digest(*found)


def sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of each section of an ELF file; the size in place of content that it does not hold."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * entry_size) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        no_bits = kind in (8, 0x7000000A)  # SHT_NOBITS, and NVIDIA's own of shared memory
        yield cubin[start : cubin.index(b"\0", start)], str(size).encode() if no_bits else cubin[offset : offset + size]


def result_of(seed: int) -> tuple[str, str]:
    from onchip.runtime.engine import compile
    from random_networks import random_inputs, random_network

    net = random_network(seed)
    outputs = compile(net, "cpu", batch_hint=(1, 64, 4096)[seed % 3])(*random_inputs(net, seed))
    return f"random network {seed}", array_digest(*(outputs if isinstance(outputs, tuple) else (outputs,)))


def training_of(seed: int) -> tuple[str, str]:
    from onchip.train.loop import fit
    from random_training import random_training

    training = random_training(seed)
    options = dataclasses.asdict(training.options)
    result = fit(training.net, training.x, training.y, sample_weight=training.sample_weight, device="cpu", **options)
    weights = [result.network.weights[name] for name in sorted(result.network.weights)]
    return f"random training {seed}", array_digest(result.losses, *weights)


def plans_of(part: int, parts: int) -> dict[str, Any]:
    """Of every parts-th network from `part` on."""
    from every_network import every_network
    from onchip.errors import PlanError
    from onchip.plan.device import H200
    from onchip.plan.kernel import Job
    from onchip.plan.planner import make_plan
    from onchip.runtime.placement import kernels_for
    from random_networks import random_network
    from takers import CPU

    networks = {name: tested.net for name, tested in every_network().items()}
    networks |= {f"random network {seed}": random_network(seed) for seed in range(NETWORKS)}
    found = {}
    for name, net in list(networks.items())[part::parts]:
        for device, precision in ((CPU, "fp32"), (H200, "fp32"), (H200, "fp16")):
            for batch in BATCHES:
                try:
                    plan = make_plan(net, device, kernels_for(device), Job(precision, batch))
                    shown: Any = [show_group(group.claim, batch) for group in plan.groups]
                except PlanError as refused:
                    shown = type(refused).__name__
                found[f"{name}, {device.kind}, {precision}, {batch} rows"] = shown
    return found if part else found | training_plans()


def training_plans() -> dict[str, Any]:
    """Of steps of MLPs."""
    from onchip.errors import PlanError
    from onchip.network.build import mlp
    from onchip.network.training import TrainingStep
    from onchip.plan.device import H200
    from onchip.plan.gradient.step import training_step
    from onchip.plan.kernel import Job
    from onchip.plan.planner import make_plan
    from onchip.runtime.placement import training_kernels_for
    from takers import CPU

    steps = [
        TrainingStep("cross_entropy", optimiser, clip_norm=clip, is_weighted=clip > 0, byte_scale=scale)
        for optimiser in ("sgd", "adam") for clip in (0.0, 1.0) for scale in (0.0, 1 / 255)
    ]  # fmt: skip
    found = {}
    for widths, batch, how in itertools.product(TRAINED, TRAINED_BATCHES, steps):
        for device, precision in ((CPU, "fp32"), (H200, "fp32"), (H200, "bf16")):
            try:
                step = training_step(mlp(*widths), how)
                (group,) = make_plan(step, device, training_kernels_for(device), Job(precision, batch)).groups
                shown: Any = show_group(group.claim, batch)
            except PlanError as refused:
                shown = type(refused).__name__
            found[f"{widths}, {device.kind}, {precision}, {batch} rows, {how}"] = shown
    return found


def show_group(claim: Any, batch: int) -> list[Any]:
    """Kernel, label, layers, cost, and the launches of a GPU with a digest of their arguments."""
    steps = None
    if hasattr(claim.facts, "at") and not claim.is_view:
        steps = claim.facts.at(batch)
    elif hasattr(claim.facts, "steps"):  # of a training
        steps = claim.facts.steps(2)
    launches = []
    for launch in steps.launches if steps is not None else ():
        config = launch.config
        launches.append([
            launch.program.name_expression, config.grid, config.block, config.shared_bytes, config.cluster,
            len(launch.arguments), digest(repr(launch.arguments).encode()),
        ])  # fmt: skip
    return [claim.kernel, claim.label, list(claim.nodes), dataclasses.astuple(claim.cost), launches]


def array_digest(*arrays: Any) -> str:
    import numpy as np

    whole = [np.ascontiguousarray(array) for array in arrays]
    return digest(*(part for array in whole for part in (f"{array.dtype}{array.shape}".encode(), array.tobytes())))


def digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:32]


# -- comparing -----------------------------------------------------------------------------------------------------


def compare(old: Record, new: Record, renames: Mapping[str, str]) -> list[str]:
    """What differs, a line each."""
    differences = compare_code(old["code"], new["code"])
    for section in ("results", "trainings"):
        differences += compare_named(section, old[section], new[section])
    return differences + compare_named("plans", json.loads(renamed(json.dumps(old["plans"]), renames)), new["plans"])


def compare_code(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """By their code, not by their names: the same digests, each as often."""
    by_digest: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, record in enumerate((old, new)):
        for name, code in record.items():
            by_digest[code][side].append(name)
    differences = []
    for before, after in by_digest.values():
        if len(before) != len(after):
            differences.append(f"code: {len(before)} instances before ({few(before)}), {len(after)} now ({few(after)})")
    return differences


def compare_named(section: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    differences = [f"{section}: {name} is gone" for name in old if name not in new]
    differences += [f"{section}: {name} is new" for name in new if name not in old]
    for name in old:
        if name in new and old[name] != new[name]:
            differences.append(f"{section}: {name} differs: {shorten(old[name])} -> {shorten(new[name])}")
    return differences


def renamed(text: str, renames: Mapping[str, str]) -> str:
    if not renames:
        return text
    words = "|".join(map(re.escape, sorted(renames, key=len, reverse=True)))
    return re.sub(rf"(?<![A-Za-z0-9_])({words})(?![A-Za-z0-9_])", lambda found: renames[found[1]], text)


def few(names: list[str], most: int = 3) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shorten(value: Any, most: int = 200) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."


# -- commands ------------------------------------------------------------------------------------------------------


def record_commit(commit: str, target: Path) -> None:
    """In a worktree of its own, by its own copy of this script."""
    with tempfile.TemporaryDirectory(prefix="guard-") as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            command = [sys.executable, str(tree / "tests" / "guard.py"), "record", str(target)]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree / 'tests'}"})
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def kept_record(commit: str) -> Record:
    """A commit's record, recorded once."""
    from onchip.cache import cache_dir

    path = cache_dir() / "guard" / f"{git('rev-parse', commit).strip()}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        record_commit(commit, partial)
        partial.replace(path)
    found: Record = json.loads(path.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("out", type=Path)
    comparing, against = commands.add_parser("compare"), commands.add_parser("against")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    against.add_argument("commit")
    for each in (comparing, against):
        each.add_argument("--renames", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        given.out.write_text(json.dumps(json.loads(json.dumps(record()))))
        return 0
    renames = json.loads(given.renames.read_text()) if given.renames else {}
    if given.command == "compare":
        old, new = (json.loads(path.read_text()) for path in (given.old, given.new))
    else:
        old, new = kept_record(given.commit), json.loads(json.dumps(record()))
    differences = compare(old, new, renames)
    print("\n".join(differences[:100]))
    counts = ", ".join(f"{len(new[section])} {section}" for section in new)
    print(f"{len(differences)} differences; {counts}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.exit(main())
