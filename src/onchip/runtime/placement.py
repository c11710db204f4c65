"""Where a network runs: the devices of this machine, and the choice of the faster one."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.errors import DeviceError, InputError, PlanError
from onchip.network.graph import Network
from onchip.network.names import did_you_mean
from onchip.network.reading import is_count
from onchip.plan.device import KNOWN, Device
from onchip.plan.host_call import call_us, compare, min_us
from onchip.plan.kernel import Job, Kernel
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.backend import Backend
from onchip.runtime.cpu.backend import PRECISION as CPU_PRECISION
from onchip.runtime.cpu.backend import CpuBackend, this_cpu


def find_device(name: str, threads: int | None = None) -> tuple[Device, Backend, str]:
    """A device of this machine by name ("auto", "cpu", "cuda", "cuda:1"), its backend, and its name with the reason.

    Without a network, "auto" is the GPU if there is one; `place` decides per network.
    """
    name = device_name(name)
    found = _find_gpus(name, threads)
    if found:
        at = _device_number(name.partition(":")[2], len(found))
        return found[at], _backend(f"cuda:{at}"), f"cuda:{at}" + (" (auto: a GPU is here)" if name == "auto" else "")
    return this_cpu(), _backend("cpu", threads), _cpu_chosen(name, threads)


def may_use_gpu(device: str, threads: int | None) -> bool:
    """Whether `place` can choose a GPU."""
    return bool(_find_gpus(device_name(device), threads))


def device_name(name: str) -> str:
    """The normalised name of a device to run on: lower case, "gpu" as "cuda". DeviceError for any other name."""
    kind, colon, number = str(name).lower().partition(":")
    kind = "cuda" if kind == "gpu" else kind
    if kind == "cuda" or (kind in ("auto", "cpu") and not colon):
        return kind + colon + number
    if kind in KNOWN:
        got, hint = f"{name}, which can be planned for", f"onchip plan MODEL --device {kind}, or --device cuda there"
        raise DeviceError("no device to run on", got=got, expected="auto, cpu, cuda or cuda:N", hint=hint)
    hint = did_you_mean(kind, ("auto", "cpu", "cuda", *KNOWN)) or "onchip devices"
    expected = f"auto, cpu, cuda or cuda:N; to plan for also {', '.join(KNOWN)}"
    raise DeviceError("unknown device", got=str(name), expected=expected, hint=hint)


def _find_gpus(name: str, threads: int | None) -> list[Device]:
    """The GPUs of this machine; empty for "cpu", or if "auto" finds none. DeviceError for "cuda" without one."""
    if name == "cpu" or (name == "auto" and threads is not None):
        return []
    if threads is not None:
        got = f"threads={threads} and device '{name}'"
        raise InputError("threads are the CPU's", got=got, expected="threads with device 'cpu'", hint="--device cpu")

    from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda

    found = cuda_devices()
    if not found and name != "auto":
        raise DeviceError(
            f"device '{name}' is not available", got=why_no_cuda(), expected="an NVIDIA GPU with its driver",
            hint="--device cpu, or pip install 'onchip[cuda]' on a machine with a GPU",
        )  # fmt: skip
    return found


def _cpu_chosen(name: str, threads: int | None) -> str:
    """The CPU as the choice, with the reason if "auto" was requested and no GPU was considered."""
    if name == "cpu":
        return "cpu"
    if threads is not None:
        return f"cpu (auto: threads={threads} asks for it)"
    from onchip.runtime.cuda.devices import why_no_cuda

    return f"cpu (auto: {why_no_cuda()})"


def _backend(name: str, threads: int | None = None) -> Backend:
    """The backend of "cpu" or "cuda:N". A GPU's allocates memory there, so only the chosen device gets one."""
    if name == "cpu":
        return CpuBackend(threads)
    from onchip.runtime.cuda.backend import CudaBackend

    return CudaBackend(int(name.partition(":")[2]))


def _device_number(text: str, count: int) -> int:
    if not text:
        return 0
    if not is_count(text) or int(text) >= count:
        raise DeviceError("no such GPU", got=f"cuda:{text}", expected=f"cuda:0 to cuda:{count - 1}")
    return int(text)


def kernels_for(device: Device) -> Sequence[Kernel]:
    """Every kernel for this kind of device, in the order in which the planner queries them."""
    if device.kind == "cuda":
        from onchip.kernels.cuda import KERNELS as CUDA_KERNELS

        return CUDA_KERNELS
    from onchip.kernels.cpu import KERNELS as CPU_KERNELS

    return CPU_KERNELS


def plan(net: Network, device: str | Device = "auto", job: Job | None = None) -> Plan:
    """The plan for a device of this machine, or for a known one ("h200", "a100", ...: `onchip devices`).

    For a known device, layers that its kernels do not support yet are in the plan with their floor.
    """
    return plan_and_reason(net, device, job)[0]


def plan_and_reason(net: Network, device: str | Device = "auto", job: Job | None = None) -> tuple[Plan, str]:
    """The plan, and its device with, for "auto", the reason."""
    if isinstance(device, Device):
        return make_plan(net, device, kernels_for(device), job), device.name
    if (name := str(device).lower()) in KNOWN:
        return make_plan(net, KNOWN[name], kernels_for(KNOWN[name]), job, whole=False), name
    return _choose(net, device, job or Job(), None, None)


def place(
    net: Network, device: str, job: Job, threads: int | None, call_rows: int | None = None
) -> tuple[Plan, Backend, str]:
    """Plan for the device and create its backend. "auto" is the device with the lower estimate for a call on host rows.

    call_rows  most rows of the job in one call; None: all of them
    """
    plan, chosen = _choose(net, device, job, threads, call_rows)
    return plan, _backend(chosen.partition(" ")[0], threads), chosen


def _choose(net: Network, device: str, job: Job, threads: int | None, call_rows: int | None) -> tuple[Plan, str]:
    device = device_name(device)
    found = _find_gpus(device, threads)
    if not found:
        return _plan_here(net, job), _cpu_chosen(device, threads)
    at = _device_number(device.partition(":")[2], len(found))
    gpu, name = found[at], f"cuda:{at}"
    is_auto, cpu_can = device == "auto", job.precision == CPU_PRECISION
    try:
        there = make_plan(net, gpu, kernels_for(gpu), job)
    except PlanError as refused:
        if not (is_auto and cpu_can):
            raise
        return _plan_here(net, job), f"cpu (auto: {refused.what})"
    if not is_auto:
        return there, name
    if not cpu_can:
        return there, f"{name} (auto: the CPU does not compute in {job.precision})"
    # Not counted: computing the weights and loading the code. An engine is called many times, and only the weights have
    # an estimate.
    B, cpu = min(call_rows or job.batch, job.batch), this_cpu()
    there_us, least = call_us(there, B), min_us(net, job, cpu, B)
    if least > there_us:
        return there, compare(name, there_us, least, B, is_least=True)
    try:
        here = make_plan(net, cpu, kernels_for(cpu), job)
    except PlanError as refused:
        return there, f"{name} (auto: on the CPU, {refused.what})"
    here_us = call_us(here, B)
    return here if here_us <= there_us else there, compare(name, there_us, here_us, B)


def _plan_here(net: Network, job: Job) -> Plan:
    cpu = this_cpu()
    return make_plan(net, cpu, kernels_for(cpu), job)
