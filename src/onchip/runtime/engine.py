"""compile: a network becomes an engine, a function from arrays to arrays on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from onchip.errors import DeviceError, InputError, PlanError, ShapeError
from onchip.plan.device import KNOWN, Device
from onchip.plan.kernel import Job, Kernel
from onchip.plan.planner import Plan, make_plan
from onchip.runtime.cpu import CpuBackend, check_threads, this_cpu
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.spec.types import TensorType, numpy_dtype


class Backend(Protocol):
    def prepare(self, plan: Plan) -> Any: ...
    def run(self, state: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None: ...


class Engine:
    """A compiled network. Call it with (B, ...) rows; a row's result never depends on its batch."""

    def __init__(self, plan: Plan, backend: Backend, chosen: str) -> None:
        self.plan = plan
        self.chosen = chosen  # the device and, for "auto", why
        self._backend = backend
        self._state = backend.prepare(plan)

    @property
    def input(self) -> TensorType:
        return self.plan.network.input

    @property
    def output(self) -> TensorType:
        return self.plan.network.output

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """Run the network.

        x    (B, ...) of the network's input type, row-major (others are copied once)
        out  (B, ...) of the output type, overwritten; made if not given
        """
        x = check_rows(x, self.input)
        B = len(x)
        shape, dtype = (B, *self.output.row_shape), self.output.dtype
        if out is None:
            out = np.empty(shape, numpy_dtype(dtype))
        else:
            _check_out(out, shape, dtype)
        net = self.plan.network
        if not self.plan.groups:  # a network without a layer hands its input on
            out[...] = x
        elif B:
            self._backend.run(self._state, {next(iter(net.inputs)): x}, {net.outputs[0]: out}, B)
        return out

    def __repr__(self) -> str:
        return f"Engine({self.plan.network.name}, {self.chosen}, {self.plan.job.precision})"


def check_rows(x: Any, expected: TensorType) -> Array:
    """x as a contiguous array if it is rows of `expected`; ShapeError if it is not."""
    if not isinstance(x, np.ndarray):
        raise ShapeError(
            "input is not an array", got=type(x).__name__, expected=f"NumPy {expected}", hint="np.asarray(x)"
        )
    if x.ndim != len(expected.shape) or x.shape[1:] != expected.row_shape:
        hint = f"x.reshape(-1, {', '.join(map(str, expected.row_shape))})" if expected.row_shape else ""
        raise ShapeError("input has another shape", got=str(list(x.shape)), expected=str(expected), hint=hint)
    if x.dtype.newbyteorder("=") != numpy_dtype(expected.dtype):
        raise ShapeError(
            "input has another dtype", got=x.dtype.name, expected=expected.dtype, hint=f"x.astype(np.{expected.dtype})"
        )
    return np.ascontiguousarray(x, numpy_dtype(expected.dtype))  # native byte order


def _check_out(out: Array, shape: tuple[int, ...], dtype: str) -> None:
    fits = isinstance(out, np.ndarray) and out.shape == shape and out.dtype == numpy_dtype(dtype)
    if not (fits and out.flags.c_contiguous and out.flags.writeable):
        got = f"{getattr(out, 'dtype', type(out).__name__)}{list(getattr(out, 'shape', []))}"
        raise ShapeError("out does not fit", got=got, expected=f"{dtype}{list(shape)}, row-major and writable")


# -- choosing a device -------------------------------------------------------------------------------------


def find_device(name: str, threads: int | None = None) -> tuple[Device, Backend, str]:
    """A device that is here, by name ("auto", "cpu", "cuda", "cuda:1"), and the reason for "auto"'s choice."""
    if not isinstance(name, str):
        raise DeviceError("not a device", got=repr(name), expected="auto, cpu, cuda or cuda:N", hint="device='auto'")
    kind, _, index = name.partition(":")
    if name == "cpu" or (name == "auto" and threads is not None):
        reason = "" if name == "cpu" else f" (auto: threads={threads} asks for it)"
        return this_cpu(), CpuBackend(check_threads(threads)), f"cpu{reason}"
    if name != "auto" and kind != "cuda":
        raise DeviceError("unknown device", got=name, expected="auto, cpu, cuda or cuda:N", hint="onchip devices")
    if threads is not None:
        got = f"threads={threads} and device '{name}'"
        raise InputError("threads are the CPU's", got=got, expected="threads with device 'cpu'", hint="--device cpu")

    from onchip.runtime.cuda import CudaBackend, cuda_devices, why_no_cuda

    found = cuda_devices()
    if found:
        number = _device_number(index, len(found))
        return (
            found[number],
            CudaBackend(number),
            f"cuda:{number}" + (" (auto: a GPU is here)" if name == "auto" else ""),
        )
    if name == "auto":
        return this_cpu(), CpuBackend(check_threads(None)), f"cpu (auto: {why_no_cuda()})"
    raise DeviceError(
        f"device '{name}' is not available", got=why_no_cuda(), expected="an NVIDIA GPU with its driver",
        hint="--device cpu, or pip install 'onchip[cuda]' on a machine with a GPU",
    )  # fmt: skip


def _device_number(text: str, count: int) -> int:
    if not text:
        return 0
    if not text.isdigit() or int(text) >= count:
        raise DeviceError("no such GPU", got=f"cuda:{text}", expected=f"cuda:0 to cuda:{count - 1}")
    return int(text)


def kernels_for(device: Device) -> Sequence[Kernel]:
    """Every kernel of a device's kind, in the order in which the planner asks."""
    if device.kind == "cuda":
        from onchip.kernels.cuda import KERNELS as CUDA_KERNELS

        return CUDA_KERNELS
    from onchip.kernels.cpu import KERNELS as CPU_KERNELS

    return CPU_KERNELS


def plan(net: Network, device: str | Device = "auto", job: Job | None = None) -> Plan:
    """What would run, on a device that is here or one that is only known ("h200", "a100", "rtx4060")."""
    if isinstance(device, str):
        device = KNOWN[device] if device in KNOWN else find_device(device)[0]
    return make_plan(net, device, kernels_for(device), job)


def place(net: Network, device: str, job: Job, threads: int | None) -> tuple[Plan, Backend, str]:
    """Find the device and plan for it. "auto" takes the CPU where the GPU has no kernel for the job, and says so."""
    _ = net.input, net.output  # an engine has one of each: say so before any work
    found, backend, chosen = find_device(device, threads)
    try:
        return make_plan(net, found, kernels_for(found), job), backend, chosen
    except PlanError as refused:
        if device != "auto" or found.kind == "cpu":
            raise
        found, backend, _ = find_device("cpu", threads)
        return make_plan(net, found, kernels_for(found), job), backend, f"cpu (auto: {refused.what})"


def compile(
    net: Network,
    device: str = "auto",
    precision: str = "fp32",
    threads: int | None = None,
    batch_hint: int = 1024,
) -> Engine:
    """Plan the network for a device and make it ready to run.

    The plan, and with it the bits of every result, is fixed here: `batch_hint` is the number of rows it is
    priced for, and the engine then runs any number.
    """
    if not isinstance(net, Network):
        raise InputError("not a network", got=type(net).__name__, expected="Network", hint="onchip.load(...)")
    return Engine(*place(net, device, Job(precision, batch_hint), threads))
