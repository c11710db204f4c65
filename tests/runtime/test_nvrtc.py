"""Compiling without a GPU, and a cache that is never trusted blindly."""

import os
import stat

import pytest

from onchip.errors import DeviceError, KernelError
from onchip.kernels.cuda.program import Program
from onchip.runtime import nvrtc
from onchip.runtime.nvrtc import compile_program, nvrtc_version

SOURCE = """\
template <int N>
__global__ void add(float* x) { x[threadIdx.x] += N; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubin"


@pytest.fixture
def program(tmp_path):
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    (tmp_path / "add.cu").write_text(SOURCE)
    return Program(tmp_path / "add.cu", "add<3>")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_with_no_gpu(program, arch):
    made = compile_program(program, arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert made.entry == "_Z3addILi3EEvPf"
    assert made.entry.encode() in made.cubin
    assert 0 < made.registers <= 16
    assert made.spill_bytes == 0


def test_spills_are_seen(program, tmp_path):
    lines = ["__global__ void greedy(float* x) {", "float a[64];"]
    lines += [f"a[{i}] = x[{i} * 99 + threadIdx.x];" for i in range(64)]
    lines += ["__syncthreads();", *(f"x[{i} * 7] = a[{i}] * a[{63 - i}];" for i in range(64)), "}"]
    (tmp_path / "greedy.cu").write_text("\n".join(lines))
    made = compile_program(Program(tmp_path / "greedy.cu", "greedy", ("--maxrregcount=24",)), "sm_80")
    assert made.registers <= 24
    assert made.spill_bytes > 0


def test_second_time_comes_from_the_cache(program, cache):
    first, second = compile_program(program, "sm_80"), compile_program(program, "sm_80")
    assert (first.is_cached, second.is_cached) == (False, True)
    assert (first.cubin, first.entry, first.registers) == (second.cubin, second.entry, second.registers)
    assert len(list(cache.iterdir())) == 1  # and no temporary file is left


def test_only_the_user_can_enter_the_cache(program, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    compile_program(program, "sm_80")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_key_knows_what_changes_the_binary(program, tmp_path):
    compile_program(program, "sm_80")
    assert not compile_program(program, "sm_86").is_cached
    assert not compile_program(Program(program.source, "add<4>"), "sm_80").is_cached
    assert not compile_program(Program(program.source, "add<3>", ("--use_fast_math",)), "sm_80").is_cached
    program.source.write_text(SOURCE + "\n")
    assert not compile_program(program, "sm_80").is_cached


def test_the_key_knows_the_compiler(program, monkeypatch):
    compile_program(program, "sm_80")
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 999))
    assert not compile_program(program, "sm_80").is_cached


def test_a_changed_header_of_a_header_is_compiled_anew(program, tmp_path):
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text("constexpr int one = 1;\n")
    (tmp_path / "use.cu").write_text('#include "a.cuh"\n__global__ void use(int* x) { *x = one; }\n')
    use = Program(tmp_path / "use.cu", "use")
    first = compile_program(use, "sm_80")
    assert compile_program(use, "sm_80").is_cached
    (tmp_path / "b.cuh").write_text("constexpr int one = 2;\n")
    second = compile_program(use, "sm_80")
    assert not second.is_cached
    assert first.cubin != second.cubin


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "rename"])
def test_a_corrupt_entry_is_compiled_anew(program, cache, damage):
    made = compile_program(program, "sm_80")
    (entry,) = cache.iterdir()
    content = bytearray(entry.read_bytes())
    if damage == "rename":  # a sound entry of another kernel under this one's name
        compile_program(Program(program.source, "add<4>"), "sm_80")
        (other,) = (file for file in cache.iterdir() if file != entry)
        os.replace(other, entry)
    else:
        content[-9] ^= 1
        entry.write_bytes({"flip": bytes(content), "cut": bytes(content[:100]), "empty": b""}[damage])
    again = compile_program(program, "sm_80")
    assert not again.is_cached
    assert again.cubin == made.cubin
    assert compile_program(program, "sm_80").is_cached


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_works_where_the_cache_cannot_be_written(program, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "locked" / "cache"))
    assert not compile_program(program, "sm_80").is_cached


def test_works_where_the_cache_is_a_file(program, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "file"))
    assert compile_program(program, "sm_80").cubin.startswith(b"\x7fELF")


def test_an_error_shows_the_log_and_the_kept_source(program, cache, tmp_path):
    (tmp_path / "bad.cu").write_text("__global__ void bad(float* x) {\n    *x = nowhere;\n}\n")
    with pytest.raises(KernelError, match=r'bad\.cu\(2\): error: identifier "nowhere" is undefined') as caught:
        compile_program(Program(tmp_path / "bad.cu", "bad", ("-DWHY=1",)), "sm_90a")
    assert "bad.cu does not compile for sm_90a" in str(caught.value)
    (kept,) = (cache.parent / "failed").iterdir()
    assert str(kept) in str(caught.value)
    text = kept.read_text()
    assert text.startswith("__global__ void bad(float* x) {\n")  # the log's line numbers are the file's
    assert "-DWHY=1" in text
    assert not any(cache.iterdir())


def test_an_unknown_architecture_is_told(program):
    with pytest.raises(KernelError, match="sm_42"):
        compile_program(program, "sm_42")


def test_without_nvrtc_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'onchip\[cuda\]'"):
        nvrtc_version()
