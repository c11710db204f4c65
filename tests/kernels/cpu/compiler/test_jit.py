"""The disk cache of CPU kernels: entries are used if intact and the user's own, else compiled again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from numba.core.serialize import dumps

from onchip.cache import read_entry, write_entry
from onchip.kernels.cpu.compiler import jit
from onchip.kernels.cpu.compiler.jit import compiled, floats_at
from onchip.kernels.cpu.compiler.machine_code import _target_machine
from onchip.kernels.cpu.compiler.numba_cache import compile_linked
from onchip.kernels.cpu.conv.operation import _TUPLES, Call, _tuple_type
from onchip.kernels.vectors import VECTOR_BYTES

SRC = Path(__file__).parents[4] / "src"

RUN = """\
import numpy as np, onchip
onchip.compile(onchip.mlp(2, 2, output='Tanh'), 'cpu')  # tanh is a separate function
net = onchip.mlp(2, 2, output='ReLU', bias=False).replace(weights={'fc1.weight': np.eye(2, dtype=np.float32)})
print(onchip.compile(net, 'cpu')(np.array([[-1.0, 2.0]], np.float32))[0].tolist())
"""


def run_python(code: str, cache: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(SRC), "ONCHIP_CACHE": str(cache)}
    env |= {name: str(value) for name, value in variables.items()}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def assert_ran(done: subprocess.CompletedProcess[str], *messages: str) -> None:
    """It ran and printed these messages, one per line."""
    assert (done.returncode, done.stdout) == (0, "[0.0, 2.0]\n"), done.stderr
    assert done.stderr.count("\n") == len(messages), done.stderr
    assert all(text in line for text, line in zip(messages, done.stderr.splitlines(), strict=True)), done.stderr


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A cache with everything that RUN needs."""
    folder = tmp_path_factory.mktemp("warm") / "cache"
    messages = "onchip: first run on this machine", "kernels for this machine, once; about "
    assert_ran(run_python(RUN, folder, ONCHIP_QUIET=""), *messages)
    return folder


@pytest.fixture
def cache(warm, tmp_path) -> Path:
    return shutil.copytree(warm, tmp_path / "cache")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path) -> None:
    """An empty cache, also when tests run again on this machine."""
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)  # looked up once per process


def files(cache: Path) -> list[Path]:
    """The entries; the lock file is empty."""
    return sorted(path for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def smallest_kernel(cache: Path) -> Path:
    """An entry that compiles quickly."""
    return min(files(cache / "numba"), key=lambda path: path.stat().st_size)


def test_a_warm_cache_compiles_and_writes_nothing(cache):
    before = {path: path.stat().st_mtime_ns for path in files(cache)}
    assert len(before) > 5
    no_compiler = "import numba.core.compiler as c\ndef fail(*_, **__): raise AssertionError\nc.compile_extra = fail\n"
    assert_ran(run_python(no_compiler + RUN, cache, ONCHIP_QUIET=""))
    assert {path: path.stat().st_mtime_ns for path in files(cache)} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache / "numba").iterdir()} == {0o600}


def test_cached_code_needs_no_numba(cache):
    done = run_python(RUN + "import sys; print('numba' in sys.modules)", cache)
    assert done.stdout == "[0.0, 2.0]\nFalse\n", done.stderr


def test_damaged_entries_are_compiled_and_written_again(cache):
    for i, path in enumerate(files(cache)):
        whole = path.read_bytes()
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
        path.write_bytes((b"", whole[:half], flipped)[i % 3])
    assert_ran(run_python(RUN, cache))
    for path in files(cache):
        assert read_entry(path.parent, path.name) is not None


PLANTED = 42  # exit status of a program that ran planted code


def planted(entry: Path) -> bytes:
    """Machine code under an entry's symbol that exits the program."""
    name = json.loads(read_entry(entry.parent, entry.name).partition(b"\n")[0])[0]
    source = f'declare void @_exit(i32)\ndefine void @"{name}"() {{\n call void @_exit(i32 {PLANTED})\n ret void\n}}'
    machine = _target_machine()
    return json.dumps([name]).encode() + b"\n" + machine.emit_object(llvm.parse_assembly(source))


def plant(cache: Path) -> None:
    """Replace every entry by such code, with valid digests."""
    for path in files(cache / "numba"):
        write_entry(path.parent, path.name, planted(path))


def test_planted_code_would_run(cache):
    plant(cache)
    assert run_python(RUN, cache).returncode == PLANTED


@pytest.mark.parametrize("is_open", ["the folder", "its parent"])
def test_code_in_a_folder_that_others_can_write_is_not_run(cache, warm, is_open):
    plant(cache)
    (cache if is_open == "the folder" else cache.parent).chmod(0o777)
    home = warm.parent / "home"  # warm, to save time
    if not home.exists():
        shutil.copytree(warm, home / "onchip")
    done = run_python(RUN, cache, XDG_CACHE_HOME=home)
    assert_ran(done, f"cache: using {home / 'onchip'} instead of {cache}: others can write to")


def test_code_in_a_file_that_others_can_write_is_not_run_but_replaced(cache):
    """The folder may have been writable by others before it became private."""
    path = smallest_kernel(cache)
    bad = planted(path)
    write_entry(path.parent, path.name, bad)
    path.chmod(0o666)
    assert_ran(run_python(RUN, cache))
    assert read_entry(path.parent, path.name) not in (None, bad)


def test_a_full_disk_does_not_fail_a_run(cache, tmp_path):
    """A file size limit fails writes as a full disk does; only the output is small enough."""
    max(files(cache / "numba"), key=lambda path: path.stat().st_size).unlink()
    code = (
        "import resource, sys\n"
        "sys.dont_write_bytecode = True\n"  # it would be cut off in the cache that tests share
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from onchip.cli.main import main\n"
        "sys.exit(main(['run', 'decode', 'x.npy', '-o', 'y.npy', '--device', 'cpu']))\n"
    )
    np.save(tmp_path / "x.npy", np.ones((7, 72), np.float32))
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{code}", cache)
    assert done.returncode == 0, done.stderr
    (messages,) = (line for line in done.stderr.splitlines() if line.startswith("cache: "))
    assert messages.startswith(f"cache: nothing is cached in {cache}: File too large; ")
    assert np.load(tmp_path / "y.npy").shape[0] == 7
    assert {path.suffix for path in files(cache)} == {""}  # no temporary file is left


def test_an_edit_to_a_helper_in_another_file_is_seen(cache, tmp_path):
    (tmp_path / "caller.py").write_text(
        "from helper import twice\nfrom onchip.kernels.cpu.compiler.jit import compiled\n"
        "@compiled()\ndef call(x):\n    return twice(x) + 1\n"
    )
    for factor in (2, 3):
        (tmp_path / "helper.py").write_text(
            "from onchip.kernels.cpu.compiler.jit import compiled\n"
            f"@compiled(inline=True)\ndef twice(x):\n    return {factor} * x\n"
        )
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import caller; print(caller.call(5))"
        done = run_python(code, cache)
        assert done.stdout == f"{factor * 5 + 1}\n", done.stderr


def test_closures_over_other_values_are_other_entries():
    def make(n):
        @compiled()
        def add(x):
            return x + n

        return add

    assert [make(n)(10) for n in (1, 2)] == [11, 12]


@pytest.mark.usefixtures("empty_cache")
def test_loops_are_compiled_for_whole_vectors():
    """By default LLVM halves 512-bit vectors."""

    @compiled()
    def double(x):
        for n in range(len(x)):
            x[n] = x[n] + x[n]

    double(np.ones(9, np.float32))
    (made,) = double._called.inspect_llvm().values()
    assert f'"prefer-vector-width"="{VECTOR_BYTES * 8}"' in made
    assert f"<{VECTOR_BYTES // 4} x float>" in made


def test_so_are_those_of_linked_functions():
    """LLVM inlines a short one into its wrapper, whose attributes count then."""

    def double(where: int, count: int) -> None:
        x = floats_at(where, count)
        for n in range(count):
            x[n] = x[n] + x[n]

    made = compile_linked(double, (numba.int64,) * 2, numba.void)
    _, _, wrapper = str(made.owner._library._final_module).partition(f"@{made.name}(")
    assert f"<{VECTOR_BYTES // 4} x float>" in wrapper


def test_code_from_the_disk_finds_the_classes_of_its_arguments(tmp_path):
    """conv_fused passes these tuples to functions that another process may have compiled."""
    kept = tmp_path / "kinds"
    kept.write_bytes(dumps([*map(_tuple_type, (Call, *_TUPLES.values()))]))
    code = (
        "import pathlib, pickle; from onchip.kernels.cpu.conv.operation import _TUPLES, _tuple_type, Call\n"
        f"kept = pickle.loads(pathlib.Path({str(kept)!r}).read_bytes())\n"
        "print(kept == [*map(_tuple_type, (Call, *_TUPLES.values()))])\n"
    )
    done = run_python(code, tmp_path / "cache")
    assert done.stdout == "True\n", done.stderr


def test_planning_compiles_nothing_and_activations_are_compiled_one_by_one():
    code = (
        "import numpy as np\n"
        "from onchip.kernels.cpu.compiler import jit\nfrom onchip.kernels.cpu.microkernels import activation\n"
        "from onchip.runtime.engine import compile\nfrom onchip.runtime.placement import plan\n"
        "from onchip.network.build import mlp\n"
        "net = mlp(3, 4, 2, activation='Tanh')\n"
        "plan(net, 'cpu')\n"
        "print(sum(made.address is not None for made in jit._BY_SYMBOL.values()))\n"
        "x = np.array([[1, -2, 3]], np.float32)\n"
        "hidden = np.tanh(x @ net.weights['fc1.weight'].T + net.weights['fc1.bias'])\n"
        "truth = hidden @ net.weights['fc2.weight'].T + net.weights['fc2.bias']\n"
        "print(np.abs(compile(net, 'cpu', threads=1)(x) - truth).max() < 1e-6)\n"
        "from onchip.kernels.pointwise import TANH\n"
        "print([kind for kind, address in enumerate(activation._ADDRESSES) if address] == [TANH])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "True", "True"]


@pytest.mark.usefixtures("empty_cache")
def test_a_function_is_inlined_once_for_all_literals_and_python_calls_another_version():
    @compiled()
    def inner(x, n):
        x[n] += 1

    @compiled()
    def outer(x, n):
        inner(x, 0)
        inner(x, n)

    x = np.zeros(3, np.float32)
    outer(x, 2)
    assert x.tolist() == [1, 0, 1]
    assert len(inner.dispatcher.signatures) == 1
    inner(x, 1)
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(TypeError):
        inner.dispatcher(x, 1)  # it is only inlined into `outer`


def test_linked_code_has_no_reference_counts(cache):
    """Reference counts are atomic operations, costly in short loops."""
    entries = [read_entry(path.parent, path.name) for path in files(cache / "numba")]
    assert len(entries) > 5
    assert not [entry for entry in entries if b"NRT_" in entry]
