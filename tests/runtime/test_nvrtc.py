"""Compiling without a GPU, and a cache that is never trusted blindly."""

import hashlib
import os
import stat

import pytest

from onchip.errors import DeviceError, KernelError
from onchip.kernels.cuda.common.program import Program
from onchip.runtime.cuda import nvrtc
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version

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


PRODUCTS = r"""
template <bool IsTouched>
__global__ void products(float* y, unsigned long long a, unsigned long long b) {
    float d[4] = {y[0], y[1], y[2], y[3]};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int i = 0; i < 2; i++) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
        if (IsTouched) d[0] += y[i + threadIdx.x];  // of a product that is under way
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
"""


@pytest.mark.parametrize("is_touched", [False, True])
def test_serialised_products_are_seen_and_remembered(program, tmp_path, is_touched):
    (tmp_path / "products.cu").write_text(PRODUCTS)
    requested = Program(tmp_path / "products.cu", f"products<{str(is_touched).lower()}>")
    made, kept = (compile_program(requested, "sm_90a") for _ in range(2))
    assert (made.is_serialised, kept.is_serialised, kept.is_cached) == (is_touched, is_touched, True)


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
    if damage == "rename":  # a valid entry of another kernel under this one's name
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


@pytest.mark.parametrize("trick", ["link", "open to others", "folder"])
def test_an_entry_that_others_may_have_made_is_not_trusted(program, cache, tmp_path, trick):
    """The digest proves that an entry is complete, not who wrote it."""
    made = compile_program(program, "sm_80")
    (entry,) = cache.iterdir()
    if trick == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    elif trick == "open to others":
        entry.chmod(0o620)
    else:
        entry.unlink()
        entry.mkdir()
    again = compile_program(program, "sm_80")
    assert not again.is_cached
    assert again.cubin == made.cubin
    if trick != "folder":  # which nobody removes
        assert compile_program(program, "sm_80").is_cached
        assert stat.S_IMODE(entry.lstat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_an_entry_or_a_folder_of_somebody_else_is_not_used(program, cache):
    compile_program(program, "sm_80")
    (entry,) = cache.iterdir()
    os.chown(entry, 12345, 12345)
    assert not compile_program(program, "sm_80").is_cached
    assert compile_program(program, "sm_80").is_cached
    os.chown(cache, 12345, 12345)
    assert not compile_program(program, "sm_80").is_cached


def test_a_folder_that_is_a_link_is_not_used(program, cache, tmp_path):
    (tmp_path / "real").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "real")
    compile_program(program, "sm_80")
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("body", [b"no line at all", b"{}\ncubin", b"[1, 2]\ncubin", b"\xff\ncubin"])
def test_an_entry_with_a_sound_digest_and_no_sense_is_compiled_anew(program, cache, body):
    compile_program(program, "sm_80")
    (entry,) = cache.iterdir()
    entry.write_bytes(hashlib.sha256(entry.name.encode() + body).digest() + body)
    assert not compile_program(program, "sm_80").is_cached


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
    with pytest.raises(KernelError, match=r'bad\.cu\(2\): error: .*"nowhere"') as caught:
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
