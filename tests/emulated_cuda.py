"""A GPU whose kernels run on the host: the fake driver of fake_cuda.py, and the .cu files, compiled by g++ on top of
emulated_cuda.h. It shows what they compute, whether threads wait for each other and keep to their own memory, not how a
chip orders memory. With EMULATED_RACES=1 in the environment it also tells of races (emulated_races.h), three times as
slowly."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest

import onchip.kernels.cuda
from fake_cuda import FakeDriver, Launched, fake_gpu
from onchip.kernels.cuda.common.program import Program
from onchip.runtime.cuda import gpu as gpu_module
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.nvrtc import read_sources

HEADER = Path(__file__).parent / "emulated_cuda.h"
# -U: glibc would take a jump from one fiber's stack to another's for an error. Unique symbols would be one for all
# libraries: shared memory of a kernel that is compiled twice, with other options.
COMPILE = [
    "g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-w", "-U_FORTIFY_SOURCE", "-fPIC",
]  # fmt: skip
FIND_RACES = ["-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]
SANITIZED = FIND_RACES if os.environ.get("EMULATED_RACES") else []
needs_gxx = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="no g++ on Linux: CUDA kernels cannot run on the host",
)

# PTX -> the function of emulated_cuda.h that does the same
_TWINS = {
    "st.relaxed.gpu.global.b128": "ptx_store_b128",
    "ld.relaxed.gpu.global.b128": "ptx_load_b128",
    "st.relaxed.gpu.b128": "ptx_store_tagged",
    "ld.relaxed.gpu.b128": "ptx_load_b128",
    "st.relaxed.gpu.global.b32": "ptx_store_word",
    "st.relaxed.gpu.global.v4.b32": "ptx_store_four",
    "ld.relaxed.gpu.global.v4.b32": "ptx_load_four",
    "%globaltimer": "ptx_time",
    "%clock": "ptx_clock",
    "cp.async.cg.shared.global": "ptx_copy_async",
    "cp.async.ca.shared.global": "ptx_copy_async_narrow",
    "cp.async.wait_all": "ptx_wait_for_copies",
    "cp.async.commit_group": "ptx_close_copies",
    "cp.async.wait_group": "ptx_wait_for_groups",
    "ldmatrix.sync.aligned.m8n8.x4.trans": "ptx_load_transposed",
    "ldmatrix.sync.aligned.m8n8.x4": "ptx_load_matrices",
    "griddepcontrol": "",  # kernels do not overlap here
    "prefetch.global.L2": "",
    "cvt.f32.f16": "ptx_from_f16",
    "cvt.rn.f16x2.f32": "ptx_pack_f16",
    "cvt.rn.bf16x2.f32": "ptx_pack_bf16",
    "cvt.rna.tf32.f32": "ptx_round_tf32",
    "cvt.rn.f16.f64": "ptx_f16_of_double",
    "cvt.rn.f16x2.e4m3x2": "ptx_from_e4m3",
    "cvt.rn.satfinite.e4m3x2.f32": "ptx_pack_e4m3",
    "add.f16x2": "ptx_add_f16",
    "ex2.approx.ftz.f32": "ptx_exp2",
    "rcp.approx.ftz.f32": "ptx_inverse",
    "tanh.approx.f32": "ptx_tanh",
    "max.NaN.f32": "ptx_at_least",
    "max.NaN.f16x2": "ptx_larger_f16",
    "max.NaN.bf16x2": "ptx_larger_bf16",
    "min.NaN.f32": "ptx_at_most",
    "min.bf16x2": "ptx_widen_bytes",
}
_ASM = re.compile(r'asm(?: volatile)?\("([^"]*)"\s*:([^:;]*):([^:;]*)(?::\s*"memory")?\);')
# The memory that a launch asks for.
_SHARED = re.compile(r"^( *)extern __shared__ (\w+) (\w+)\[\];", re.MULTILINE)


def _call_twin(found: re.Match[str]) -> str:
    """asm volatile("mov %0, %1;" : "=l"(a) : "l"(b) : "memory"); becomes twin((a), (b));

    What has no twin fails when it is run.
    """
    text, *operands = found.groups()
    twin = next((twin for ptx, twin in _TWINS.items() if ptx in text), "ptx_unknown")
    given = ", ".join(filter(None, (re.sub(r'"[^"]*"', "", each).strip() for each in operands)))
    return f"{twin}({given});" if twin else ";"


def _declare(found: re.Match[str]) -> str:
    """Shared memory. What a function declares ends where the launch's does; what a file does is as much as there is."""
    indent, kind, name = found.groups()
    if not indent:
        return f"alignas(16) static {kind} {name}[(228 << 10) / sizeof({kind})];"
    return f"{indent}{kind}* const {name} = ({kind}*)emulated::dynamic_shared(SHARED_ALIGNMENT);"


def _for_host(source: str) -> str:
    return _SHARED.sub(_declare, _ASM.sub(_call_twin, source))


@functools.cache
def _compiled_header() -> Path:
    """A folder with the header as g++ has parsed it: that is half of what it does for a small kernel."""
    folder = Path(tempfile.mkdtemp(prefix="emulated-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = [*COMPILE, *SANITIZED, "-x", "c++-header", str(HEADER), "-o", str(folder / f"{HEADER.name}.gch")]
    subprocess.run(made, check=True)
    return folder


compiled: set[Path] = set()  # the .cu files that kernels came from


class Kernel:
    """A kernel, compiled for the host."""

    def __init__(self, program: Program) -> None:
        compiled.add(program.source)
        headers = read_sources(program.source, program.name_expression)
        main = _for_host(headers.pop(program.source.name))
        code = f'#include "{HEADER.name}"\n{main}\nexport_kernel({program.name_expression})\n'
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source.write_text(code)
            for name, text in headers.items():
                target = Path(folder, name)
                twin = HEADER.with_name(f"emulated_{target.name}")  # where every line would be another
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_for_host(twin.read_text() if twin.exists() else text))
            found_in = [f"-I{each}" for each in (folder, _compiled_header(), HEADER.parent)]
            command = [*COMPILE, *SANITIZED, *program.options, *found_in, str(source)]
            for made in ([*command, "-c", "-o", f"{source}.o"], ["g++", "-shared", f"{source}.o", "-o", str(library)]):
                completed = subprocess.run(made, capture_output=True, text=True)
                assert completed.returncode == 0, completed.stderr
            loaded = ctypes.PyDLL(str(library))  # one thread at a time: its fibers are static
        sizes = (ctypes.c_int * 32)()
        self.parameter_sizes = tuple(sizes[: int(loaded.parameter_sizes(sizes))])
        self._run = loaded.run
        self._run.restype = ctypes.c_char_p

    def run(
        self, blocks: int, threads: int, arguments: tuple[int | bytes, ...], down: int = 1, cluster: int = 1,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        """blocks  along x; as many for each of `down` along y"""
        held = [ctypes.c_uint64(a) if isinstance(a, int) else ctypes.create_string_buffer(a, len(a)) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        wrong = self._run(blocks, down, cluster, threads, shared_bytes, pointers)
        assert wrong is None, wrong.decode()


kernel_of = functools.cache(Kernel)  # g++ takes longer than the kernel


def copy_headers(folder: Path) -> None:
    """Every header of kernels/cuda, by its path there: for a kernel that a test writes."""
    root = Path(onchip.kernels.cuda.__file__).parent
    for header in root.rglob("*.cuh"):
        target = folder / header.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, target)


def guarded_bytes(nbytes: int) -> tuple[int, np.ndarray]:
    """The address of new memory of this size, and its owner. At most 15 bytes after the last one, a page begins that
    cannot be accessed."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [*place, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes, libc.mprotect.argtypes = place, [*place, ctypes.c_int]
    own = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = libc.mmap(None, own + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert begin != ctypes.c_void_p(-1).value
    assert libc.mprotect(begin + own, mmap.PAGESIZE, 0) == 0
    kept = np.ctypeslib.as_array((ctypes.c_uint8 * own).from_address(begin))
    kept[:] = 0xAB
    weakref.finalize(kept, libc.munmap, begin, own + mmap.PAGESIZE)
    return begin + own - -(-nbytes // 16) * 16, kept


class EmulatedDriver(FakeDriver):
    def __init__(self) -> None:
        super().__init__(lambda name: len(kernel_of(self.programs[name]).parameter_sizes))
        self.programs: dict[str, Program] = {}  # by name, as they are loaded
        self.run = self._run_kernel

    def _allocate(self, nbytes: int) -> int:
        pointer, kept = guarded_bytes(nbytes)
        self.memory[pointer] = kept
        return pointer

    def argument(self, kernel, number, address):
        size = kernel_of(self.programs[kernel]).parameter_sizes[number]
        return ctypes.string_at(address, size) if size > 8 else super().argument(kernel, number, address)

    def _run_kernel(self, launched: Launched) -> None:
        # ctypes ignores an exception raised in this callback; pytest reports it as an error of the test.
        assert (launched.grid[2], *launched.block[1:]) == (1, 1, 1)
        kernel = kernel_of(self.programs[launched.kernel])
        sizes = launched.grid[1], launched.cluster, launched.shared_bytes
        kernel.run(launched.grid[0], launched.block[0], launched.words, *sizes)


def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU that `Gpu.get` finds."""
    driver = EmulatedDriver()
    gpu = fake_gpu(monkeypatch, driver)
    compile_nothing = gpu_module.compile_program

    def compile_program(program, arch):
        name = " ".join((program.name_expression, *program.options))
        driver.programs[name] = program
        return dataclasses.replace(compile_nothing(program, arch), entry=name)

    monkeypatch.setattr(gpu_module, "compile_program", compile_program)
    return gpu
