"""CUDA driver calls: return the value, or raise an OnchipError that says what failed and what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from onchip.errors import DeviceError, KernelError

NEEDED_VERSION = 13000  # an older driver does not load NVRTC 13's output

OUT_OF_MEMORY = 2
# A kernel fault: the context is lost, and every later call of the process returns the same code.
_FAULTS = {
    214: "uncorrectable memory error", 700: "illegal address", 702: "timeout", 710: "failed assertion",
    714: "stack error", 715: "illegal instruction", 716: "misaligned address", 717: "wrong address space",
    718: "invalid program counter", 719: "launch failure",
}  # fmt: skip

first_fault: list[str] = []  # of this process; empty: none


def call(function: Any, *arguments: Any, doing: str = "") -> Any:
    """Call a function of cuda.bindings.driver and return its value."""
    result, *values = function(*arguments)
    if result:
        fail(int(result), doing or f"calling {function.__name__}")
    return values[0] if values else None


def fail(code: int, doing: str, kernel: str = "") -> NoReturn:
    """Raise the error for a driver result code. `kernel`: the kernel that faulted, if known."""
    got = describe_code(code)
    if code == OUT_OF_MEMORY:
        raise DeviceError(f"out of GPU memory while {doing}", got=got, hint="fewer rows at a time")
    if code not in _FAULTS:
        raise KernelError(f"CUDA failed while {doing}", got=got)
    if first_fault:
        what = "the CUDA context is lost: an earlier kernel failed"
        raise KernelError(what, got=first_fault[0], hint="restart the program")
    # Launches are asynchronous, so a fault shows in some later call.
    hint = "--debug (debug=True) waits after each launch and names the kernel"
    if kernel:
        hint = "run it under compute-sanitizer, which reports the thread and the address"
    what = f"kernel {kernel or 'unknown'} failed on the GPU: {_FAULTS[code]}"
    first_fault.append(f"{what} ({got}), seen while {doing}")
    raise KernelError(what, got=f"{got}, seen while {doing}", hint=hint)


def describe_code(code: int) -> str:
    """ "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"."""
    try:
        from cuda.bindings import driver

        result = driver.CUresult(code)
        return f"{result.name}: {driver.cuGetErrorString(result)[1].decode()}"
    except Exception:  # a code that these bindings do not know: formatting must not hide the error
        return f"CUDA error {code}"


def version_text(version: int) -> str:
    """ "13.0" for the driver's 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"
