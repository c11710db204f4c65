"""Where a network runs: the devices of this machine, and the choice of the faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onchip.errors import DeviceError, InputError, PlanError
from onchip.network.graph import Network
from onchip.network.names import did_you_mean
from onchip.network.reading import is_count
from onchip.plan.device import KNOWN, Device
from onchip.plan.host_call import call_us, compare, min_us
from onchip.plan.kernel import Job, Kernel, StepKernel
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.backend import Backend
from onchip.runtime.cpu.backend import PRECISION as CPU_PRECISION
from onchip.runtime.cpu.backend import CpuBackend, this_cpu

KernelsFor = Callable[[Device], Sequence[Kernel]]


def find_device(name: str, threads: int | None = None) -> tuple[Device, Backend, str]:
    """A device of this machine by name ("auto", "cpu", "cuda", "cuda:1"), its backend, and its name (why, if "auto").

    Without a network, "auto" is the GPU if there is one; `place` decides per network.
    """
    name = device_name(name)
    found = _find_gpus(name, threads)
    if found:
        i = _device_index(name.partition(":")[2], len(found))
        return found[i], _backend(f"cuda:{i}"), f"cuda:{i}" + (" (auto: a GPU is available)" if name == "auto" else "")
    return this_cpu(), _backend("cpu", threads), _cpu_and_reason(name, threads)


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
        got, hint = f"{name}, only for planning", f"onchip plan MODEL --device {kind}, or --device cuda on that GPU"
        raise DeviceError("no device to run on", got=got, expected="auto, cpu, cuda or cuda:N", hint=hint)
    hint = did_you_mean(kind, ("auto", "cpu", "cuda", *KNOWN)) or "onchip devices"
    expected = f"auto, cpu, cuda or cuda:N; for planning also {', '.join(KNOWN)}"
    raise DeviceError("unknown device", got=str(name), expected=expected, hint=hint)


def _find_gpus(name: str, threads: int | None) -> list[Device]:
    """The GPUs of this machine; empty for "cpu", or if "auto" finds none. DeviceError for "cuda" without one."""
    if name == "cpu" or (name == "auto" and threads is not None):
        return []
    if threads is not None:
        got = f"threads={threads} and device '{name}'"
        raise InputError("only a CPU has threads", got=got, expected="threads with device 'cpu'", hint="--device cpu")

    from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda

    found = cuda_devices()
    if not found and name != "auto":
        raise DeviceError(
            f"device '{name}' is not available", got=why_no_cuda(), expected="an NVIDIA GPU with its driver",
            hint="--device cpu, or pip install 'onchip[cuda]' on a machine with a GPU",
        )  # fmt: skip
    return found


def _cpu_and_reason(name: str, threads: int | None) -> str:
    """The name of the CPU and, if "auto" was requested, why no GPU was chosen."""
    if name == "cpu":
        return "cpu"
    if threads is not None:
        return f"cpu (auto: threads={threads} selects it)"
    from onchip.runtime.cuda.devices import why_no_cuda

    return f"cpu (auto: {why_no_cuda()})"


def _backend(name: str, threads: int | None = None) -> Backend:
    """The backend of "cpu" or "cuda:N". A CudaBackend allocates GPU memory: create one for the chosen device only."""
    if name == "cpu":
        return CpuBackend(threads)
    from onchip.runtime.cuda.backend import CudaBackend

    return CudaBackend(int(name.partition(":")[2]))


def _device_index(text: str, count: int) -> int:
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


def training_kernels_for(device: Device) -> Sequence[Kernel]:
    """Those that run whole training steps."""
    return [kernel for kernel in kernels_for(device) if isinstance(kernel, StepKernel)]


def plan(net: Network, device: str | Device = "auto", job: Job | None = None) -> Plan:
    """The plan for a device of this machine, or for a known one ("h200", "a100", ...: `onchip devices`).

    A plan for a known device also lists layers without a kernel, with their floor.
    """
    return plan_and_reason(net, device, job)[0]


def plan_and_reason(net: Network, device: str | Device = "auto", job: Job | None = None) -> tuple[Plan, str]:
    """The plan and the name of its device; for "auto", also why it was chosen."""
    if isinstance(device, Device):
        return make_plan(net, device, kernels_for(device), job), device.name
    if (name := str(device).lower()) in KNOWN:
        return make_plan(net, KNOWN[name], kernels_for(KNOWN[name]), job, whole=False), name
    return _choose(net, device, job or Job(), None, None, kernels_for)


def place(
    net: Network, device: str, job: Job, threads: int | None, call_rows: int | None = None,
    kernels_for: KernelsFor = kernels_for,
) -> tuple[Plan, Backend, str]:  # fmt: skip
    """Plan for a device and create its backend. "auto": the device with the lowest estimate for a call on host rows.

    call_rows    the most rows per call; None: all rows of the job
    kernels_for  the kernels of a device that may be planned
    """
    plan, chosen = _choose(net, device, job, threads, call_rows, kernels_for)
    return plan, _backend(chosen.partition(" ")[0], threads), chosen


def _choose(
    net: Network, device: str, job: Job, threads: int | None, call_rows: int | None, kernels_for: KernelsFor
) -> tuple[Plan, str]:
    device = device_name(device)
    found = _find_gpus(device, threads)
    if not found:
        return _plan_on_cpu(net, job, kernels_for), _cpu_and_reason(device, threads)
    index = _device_index(device.partition(":")[2], len(found))
    gpu, name = found[index], f"cuda:{index}"
    is_auto, cpu_supports = device == "auto", job.precision == CPU_PRECISION
    try:
        gpu_plan = make_plan(net, gpu, kernels_for(gpu), job)
    except PlanError as refusal:
        if not (is_auto and cpu_supports):
            raise
        return _plan_on_cpu(net, job, kernels_for), f"cpu (auto: {refusal.what})"
    if not is_auto:
        return gpu_plan, name
    if not cpu_supports:
        return gpu_plan, f"{name} (auto: the CPU does not compute in {job.precision})"
    # Excludes computing the weights and loading code: an engine is called many times.
    B, cpu = min(call_rows or job.batch, job.batch), this_cpu()
    gpu_us, min_cpu_us = call_us(gpu_plan, B), min_us(net, job, cpu, B)
    if min_cpu_us > gpu_us:
        return gpu_plan, compare(name, gpu_us, min_cpu_us, B, is_least=True)
    try:
        cpu_plan = make_plan(net, cpu, kernels_for(cpu), job)
    except PlanError as refusal:
        return gpu_plan, f"{name} (auto: on the CPU, {refusal.what})"
    cpu_us = call_us(cpu_plan, B)
    return cpu_plan if cpu_us <= gpu_us else gpu_plan, compare(name, gpu_us, cpu_us, B)


def _plan_on_cpu(net: Network, job: Job, kernels_for: KernelsFor) -> Plan:
    cpu = this_cpu()
    return make_plan(net, cpu, kernels_for(cpu), job)
