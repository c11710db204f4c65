"""The origin of a result: machine, versions, commit, command."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onchip
from onchip.errors import InputError
from onchip.plan.device import Device
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.cuda.driver import version_text

PACKAGES = ("numpy", "numba", "llvmlite", "scipy", "torch", "onnxruntime", "triton", "jax", "cupy")
SHA = re.compile("[0-9a-f]{40}")
DIRTY, PARTIAL = "+dirty", "+partial"  # suffixes of a commit: uncommitted changes; an unfinished run
_OMITTED = ("--out", "--commit")  # options that do not change what the command measures
_WHEELS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x")}  # other distribution names of a package


def describe_machine(device: Device, ceilings: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The device with its rates, the peak rates of its floors, and the system.

    ceilings  rates measured along with the engines
    """
    facts = {
        "device": device_slug(device),
        "name": device.name,
        "arch": device.arch,
        "cores": core_count(),
        "memory_bytes": device.memory_bytes,
        "fast_bytes": device.fast_bytes,
        "os": f"{platform.system()} {platform.release()}",
        "flops": dict(device.flops),
        "bandwidth": device.bandwidth,
        "launch_us": device.launch_us,
        "peak": {
            "flops": dict(device.peak.flops),
            "bandwidth": device.peak.bandwidth,
            "cache_bandwidth": device.peak.cache_bandwidth,
            "cache_bytes": device.cache_bytes,
            "launch_us": device.peak.launch_us,
        },
        "rates": device.source,
    }
    return {**facts, "ceilings": dict(ceilings)} if ceilings else facts


def device_slug(device: Device) -> str:
    """The folder of a device's results: "cpu-x86_64-2", "h200"."""
    if device.kind == "cpu":
        return f"cpu-{platform.machine().lower()}-{core_count()}"
    name = device.name.removeprefix("NVIDIA ").lower().split()
    return "-".join(name) or device.kind


def versions(device: Device) -> dict[str, str | None]:
    """Versions of Python, onchip and every measured package (None: not installed); on a GPU also driver and NVRTC."""
    found: dict[str, str | None] = {"python": platform.python_version(), "onchip": onchip.__version__}
    for package in PACKAGES:
        found[package] = None
        for name in (package, *_WHEELS.get(package, ())):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
    return {**found, **_cuda_versions()} if device.kind == "cuda" else found


def _cuda_versions() -> dict[str, str | None]:
    from cuda.bindings import driver, nvrtc

    try:
        cuda = version_text(int(driver.cuDriverGetVersion()[1]))
    except Exception:  # no driver: the bindings' exception depends on their version
        cuda = None
    _, major, minor = nvrtc.nvrtcVersion()
    return {"cuda driver": cuda, "nvrtc": f"{major}.{minor}", "nvidia driver": _nvidia_driver()}


def _nvidia_driver() -> str | None:
    """ "580.65.06", from the kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def commit(requested: str | None = None) -> str:
    """The commit of the running checkout, "+dirty" if files differ; else the requested one, or the version.

    requested  the commit of a source tree without .git; it must match that of a checkout
    """
    if requested is not None and not SHA.fullmatch(requested):
        raise InputError("bad commit", got=repr(requested), expected="40 hexadecimal digits", hint="git rev-parse HEAD")
    found = _checkout_commit()
    if found is None:
        return requested or f"{onchip.__version__} (installed)"
    if requested not in (None, found):
        raise InputError(
            "--commit differs from this checkout's commit", got=requested, expected=found,
            hint="no --commit: it is for a copy of the tree without .git",
        )  # fmt: skip
    return found


def _checkout_commit() -> str | None:
    """HEAD of the checkout, or None; benchmarks/results never makes it dirty, or one result would mark the next."""
    package = Path(onchip.__file__).resolve().parent
    top = git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "onchip" != package:
        return None
    head = git(package, "rev-parse", "HEAD")
    if head is None:
        return "no commit yet"
    changed = git(Path(top), "--no-optional-locks", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return head + (DIRTY if changed else "")


def git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def command_line() -> str:
    """The command as typed, without --out and --commit."""
    shown, arguments = ["onchip"], iter(sys.argv[1:])
    for option in arguments:
        if option in _OMITTED:
            next(arguments, "")
        elif not option.startswith(tuple(f"{name}=" for name in _OMITTED)):
            shown.append(option)
    return shlex.join(shown)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
