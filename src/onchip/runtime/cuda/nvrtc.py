"""Compile CUDA C++ to a cubin without GPU or toolkit: NVRTC, with an on-disk cache."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onchip.cache import print_compiling, private_folder, read_entry, write_entry
from onchip.errors import DeviceError, KernelError, OutputError
from onchip.files import atomic_write
from onchip.kernels.cuda.common.layers import HEADER, layers_header
from onchip.kernels.cuda.common.program import Program

_FORMAT = "onchip cubin 2"  # of a cache entry; a new value invalidates every old entry
_KERNELS = Path(__file__).parents[2] / "kernels" / "cuda"
_FACTS = ("entry", "registers", "spill_bytes", "is_serialised")  # fields of a Binary that are stored with the cubin


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, ready to load, with the compiler's resource usage."""

    cubin: bytes = field(repr=False)
    entry: str  # the kernel's mangled name in the cubin
    registers: int  # per thread
    spill_bytes: int  # per thread, spilled to local memory
    is_serialised: bool  # ptxas serialised wgmma instructions that should overlap: slow, but not an error
    is_cached: bool  # found on disk, not compiled now


def compile_program(program: Program, arch: str) -> Binary:
    """The cubin of `program` for `arch` ("sm_90a"): from the cache, else compiled and cached.

    The key hashes the source, every header it includes from its own folder, the options, the architecture and
    NVRTC's version. An entry with a wrong digest, or that other users can write, is recompiled. Needs no GPU.
    """
    # Queried even for a cache hit: NVRTC loads in 7 ms, and a hard-coded version would become wrong.
    version = nvrtc_version()
    sources = read_sources(program.source, program.name_expression)
    # --no-cache: NVRTC's own cache, active where there is a driver, returns binaries without the ptxas log.
    options = (f"--gpu-architecture={arch}", "--std=c++17", "--no-cache", "--ptxas-options=-v", *program.options)
    key = hashlib.sha256(
        json.dumps([_FORMAT, version, options, program.name_expression, list(sources.items())]).encode()
    ).hexdigest()
    folder = private_folder("cubin")
    cached = read_entry(folder, key)
    if cached is not None and (found := _unpack_entry(cached)) is not None:
        return found
    print_compiling()
    binary = _compile(program, sources, options, arch, key)
    write_entry(folder, key, _pack_entry(binary))
    return binary


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; DeviceError if it is not installed."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()  # this loads the library
    except Exception as error:  # ImportError, or an error of these bindings for a missing library
        raise DeviceError(
            "cannot compile for CUDA: NVRTC is not installed",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="the packages cuda-bindings and nvidia-cuda-nvrtc",
            hint="pip install 'onchip[cuda]'",
        ) from None
    return major, minor


def read_sources(path: Path, name_expression: str = "") -> dict[str, str]:
    """The file and every header that it includes with quotes, directly or not: name -> text.

    A header is looked up in the file's folder, in the two above it, then in kernels/cuda: kernels include shared
    headers by their path there, such as "mma/wgmma.cuh". One of them is generated, for this name expression.
    """
    texts: dict[str, str] = {}
    pending = [path.name]
    folders = (*path.parents[:3], _KERNELS)
    while pending:
        name = pending.pop()
        if name == HEADER:
            texts[name] = layers_header(name_expression)
            continue
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name in texts or file is None:
            continue  # NVRTC reports a header that does not exist
        texts[name] = file.read_text(encoding="utf-8")
        pending += re.findall(r'^\s*#\s*include\s*"([^"]+)"', texts[name], re.MULTILINE)
    return texts


def _compile(program: Program, sources: dict[str, str], options: tuple[str, ...], arch: str, key: str) -> Binary:
    from cuda.bindings import nvrtc

    main = program.source.name
    headers = {name.encode(): text.encode() for name, text in sources.items() if name != main}
    texts, names = list(headers.values()), list(headers)
    created = nvrtc.nvrtcCreateProgram(sources[main].encode(), main.encode(), len(headers), texts, names)
    handle = _check(created)
    try:
        name = program.name_expression.encode()
        _check(nvrtc.nvrtcAddNameExpression(handle, name))
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        log = _read(handle, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0 \n")
        if int(result) != 0:
            raise KernelError(
                f"{main} does not compile for {arch}",
                got=f"{log.decode(errors='replace')}\nfrom {program.name_expression}",
                hint=f"the source is saved at {_save_source(program, sources[main], options, key)}",
            )
        cubin = _read(handle, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        entry = _check(nvrtc.nvrtcGetLoweredName(handle, name)).decode()
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Binary(cubin, entry, *_read_resources(log.decode(errors="replace"), entry), is_cached=False)


def _read(handle: Any, size_of: Any, get: Any) -> bytes:
    buffer = bytes(_check(size_of(handle)))
    _check(get(handle, buffer))
    return buffer


def _check(answer: tuple[Any, ...]) -> Any:
    """The value that follows NVRTC's result code; KernelError if that is not success."""
    result, *values = answer
    if int(result) != 0:
        raise KernelError("NVRTC failed", got=str(result))
    return values[0] if values else None


def _read_resources(log: str, entry: str) -> tuple[int, int, bool]:
    """Registers and spilled bytes per thread, from the ptxas -v log of this entry; whether it serialised wgmma."""
    section = next((part for part in log.split("Compiling entry function '") if part.startswith(f"{entry}'")), "")
    registers = re.search(r"Used (\d+) registers", section)
    if registers is None:
        raise KernelError("cannot read the compiler's log", got=log, expected="a line 'Used .. registers'")
    spill_bytes = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", section))
    # "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to .. in the function ..":
    # it precedes the entry's section, and may name a function that the entry calls.
    is_serialised = re.search(r"\(C751\d\).*serialized", log) is not None
    return int(registers[1]), spill_bytes, is_serialised


# -- the cache -----------------------------------------------------------------------------------------------


def _pack_entry(binary: Binary) -> bytes:
    """A line of JSON, then the cubin."""
    return json.dumps({name: getattr(binary, name) for name in _FACTS}).encode() + b"\n" + binary.cubin


def _unpack_entry(content: bytes) -> Binary | None:
    try:
        head, cubin = content.split(b"\n", 1)
        facts = json.loads(head)
        return Binary(cubin, is_cached=True, **{name: facts[name] for name in _FACTS})
    except (ValueError, KeyError, TypeError):
        return None


def _save_source(program: Program, text: str, options: tuple[str, ...], key: str) -> Path:
    """Save a source that did not compile, with its kernel name and options at the end; returns the path."""
    folder = private_folder("failed")
    if folder is None:
        return program.source
    saved = folder / f"{program.source.stem}-{key[:16]}.cu"
    requested = f"\n// kernel:  {program.name_expression}\n// options: {' '.join(options)} -I {program.source.parent}\n"
    try:
        with atomic_write(saved) as file:
            file.write((text + requested).encode())
    except (OutputError, OSError):
        return program.source
    return saved
