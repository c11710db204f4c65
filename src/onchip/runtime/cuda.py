"""The CUDA backend: which GPUs are here, and a plan run on one of them. NumPy in, NumPy out."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from onchip.errors import DeviceError, KernelError, ShapeError
from onchip.kernels.cuda.program import Launch
from onchip.plan.device import KNOWN, Device
from onchip.plan.planner import Group, Plan
from onchip.runtime.nvrtc import compile_program
from onchip.spec.recipe import Array, materialise
from onchip.spec.types import BATCH

# What we compile for: fp32 lanes a multiprocessor, and how much faster than fp32 its tensor cores do bf16
# (white papers of A100, GA102, AD102, H100, B200, GB202); tf32 takes twice bf16's time, fp8 half.
_CHIPS = {(8, 0): (64, 16.0), (8, 6): (128, 2.0), (8, 9): (128, 2.0),
          (9, 0): (128, 14.8), (10, 0): (128, 28.0), (12, 0): (128, 2.0)}  # fmt: skip


def cuda_devices() -> list[Device]:
    """The GPUs of this machine, in the driver's order; empty where there are none. Never raises."""
    return _probe()[0]


def why_no_cuda() -> str:
    """Why `cuda_devices()` is empty, in a sentence; "" where it is not."""
    return _probe()[1]


def _probe() -> tuple[list[Device], str]:
    try:
        from cuda.bindings import driver
    except Exception:  # a broken install raises more than ImportError
        return [], "the package cuda-bindings is not installed: pip install 'onchip[cuda]'"
    try:
        (result,) = driver.cuInit(0)
    except Exception:  # the bindings raise their own error for a missing libcuda, each version another one
        return [], "there is no NVIDIA driver on this machine"
    try:
        if result != driver.CUresult.CUDA_SUCCESS:
            no_gpu = result == driver.CUresult.CUDA_ERROR_NO_DEVICE
            return [], "the NVIDIA driver sees no GPU" if no_gpu else f"the NVIDIA driver does not start: {result.name}"
        # An older driver does not load what NVRTC 13 makes.
        if (version := _call(driver.cuDriverGetVersion)) < 13000:
            return [], f"the NVIDIA driver is for CUDA {version // 1000}: update it to one for CUDA 13"
        devices = [_describe(driver, index) for index in range(_call(driver.cuDeviceGetCount))]
    except Exception as error:
        return [], f"the NVIDIA driver answers with an error: {error}"
    return devices, "" if devices else "the NVIDIA driver sees no GPU"


def _describe(driver: Any, index: int) -> Device:
    handle = _call(driver.cuDeviceGet, index)

    def ask(attribute: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(_call(driver.cuDeviceGetAttribute, key, handle))

    name = _call(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode(errors="replace")
    chip = (ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR"))
    here = {
        "name": name,
        "units": ask("MULTIPROCESSOR_COUNT"),
        "fast_bytes": ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "memory_bytes": int(_call(driver.cuDeviceTotalMem, handle)),
    }
    for known in KNOWN.values():
        if known.kind == "cuda" and known.units == here["units"] and _is_called(name, known.name):
            return replace(known, **here)
    # A cubin runs on its own major version from its minor version on: take the nearest below.
    built = max((c for c in _CHIPS if c[0] == chip[0] and c[1] <= chip[1]), default=chip)
    lanes, ratio = _CHIPS.get(built, (64, 1.0))
    fp32 = 2.0 * lanes * here["units"] * ask("CLOCK_RATE") * 1e3
    # Two transfers a clock. Virtual GPUs may not tell: then a plain figure, so that a floor is still a number.
    bandwidth = 2.0 * ask("MEMORY_CLOCK_RATE") * 1e3 * ask("GLOBAL_MEMORY_BUS_WIDTH") / 8 or 256e9
    return Device(
        kind="cuda", arch=f"sm_{built[0]}{built[1]}{'a' if built[0] == 9 else ''}",
        flops={"fp32": fp32, "tf32": ratio / 2 * fp32, "bf16": ratio * fp32, "fp16": ratio * fp32}
        | ({"fp8": 2 * ratio * fp32} if built >= (8, 9) else {}),
        bandwidth=bandwidth, launch_us=5.0, **here,
        source="estimated from clocks, multiprocessors and bus width as the driver tells them; launch time assumed",
    )  # fmt: skip


def _is_called(name: str, known: str) -> bool:
    """Is "NVIDIA A100-SXM4-80GB" an "NVIDIA A100 80GB SXM"? Same words in any order; 'GPU' says nothing."""
    given = [word for word in re.split(r"[\s-]+", name) if word != "GPU"]
    wanted = known.split()
    return len(given) == len(wanted) and all(any(g.startswith(w) for g in given) for w in wanted)


@dataclass(frozen=True, eq=False)
class _Loaded:
    """One group, compiled and loaded, its weights on the device."""

    group: Group
    launch: Launch
    function: Any
    weights: tuple[Any, ...]  # device pointers, in the order of the claim's recipes


@dataclass(frozen=True, eq=False)
class PlanState:
    """A plan made ready by a backend; its device memory is freed with it."""

    plan: Plan
    loaded: tuple[_Loaded, ...]


class CudaBackend:
    """Runs plans on one GPU, in its primary context, on a stream of its own."""

    def __init__(self, device_index: int = 0) -> None:
        devices, why = _probe()
        if not 0 <= device_index < len(devices):
            here = ", ".join(f"cuda:{i} {device.name}" for i, device in enumerate(devices))
            raise DeviceError(f"there is no device cuda:{device_index}", got=why or here, hint="device='cpu' or 'auto'")
        from cuda.bindings import driver

        self.device = devices[device_index]
        self._driver = driver
        self._context = _call(driver.cuDevicePrimaryCtxRetain, _call(driver.cuDeviceGet, device_index))
        self._enter()
        self._stream = _call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def prepare(self, plan: Plan) -> PlanState:
        """Compile each group for this GPU and upload the weights that its recipes make."""
        if plan.device.arch != self.device.arch:
            raise DeviceError("the plan is for another device", got=plan.device.arch, expected=self.device.arch)
        self._enter()
        kept, made = _Kept(self._driver, self._context), dict[str, Array]()
        try:
            loaded = []
            for group in plan.groups:
                launch = cast(Launch, group.claim.facts)
                weights = [
                    recipe.evaluate(*(materialise(source, plan.network.weights, made) for source in recipe.sources))
                    for recipe in group.claim.recipes.values()
                ]
                pointers = tuple(kept.upload(array, self._stream) for array in weights)
                loaded.append(_Loaded(group, launch, kept.load(launch, self.device.arch), pointers))
                _call(self._driver.cuStreamSynchronize, self._stream)  # the arrays may go now
        except BaseException:
            kept.release()
            raise
        state = PlanState(plan, tuple(loaded))
        weakref.finalize(state, kept.release)
        return state

    def run(self, state: PlanState, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """Run the network on B rows; returns when the outputs are complete.

        inputs   name -> (B, ...) of the network's input types, row-major
        outputs  name -> (B, ...) of the network's output types, row-major, overwritten
        """
        net, driver = state.plan.network, self._driver
        for name, array in (*inputs.items(), *outputs.items()):
            given, got = net.types[name], f"{array.dtype}[{', '.join(map(str, array.shape))}]"
            if got != str(given).replace(BATCH, str(B), 1) or not array.flags.c_contiguous:
                raise ShapeError(f"'{name}' does not fit", got=got, expected=f"{given} with B = {B}, row-major")
        if B == 0:
            return
        self._enter()
        kept = _Kept(driver, self._context)
        try:
            values = {name: kept.upload(array, self._stream) for name, array in inputs.items()}
            for loaded in state.loaded:
                values |= {name: kept.allocate(net.types[name].row_bytes * B) for name in loaded.group.outputs}
                self._launch(loaded, values, B)
            for name, array in outputs.items():
                _call(driver.cuMemcpyDtoHAsync, array.ctypes.data, values[name], array.nbytes, self._stream)
            _call(driver.cuStreamSynchronize, self._stream, doing=f"running {state.plan.network.name}")
        finally:
            kept.release()

    def _enter(self) -> None:
        """Make the context this thread's: the caller may be another thread than the one before."""
        _call(self._driver.cuCtxSetCurrent, self._context)

    def _launch(self, loaded: _Loaded, values: Mapping[str, Any], B: int) -> None:
        group = loaded.group
        pointers = [*(values[n] for n in group.inputs), *loaded.weights, *(values[n] for n in group.outputs)]
        # The driver wants an array of addresses, one for each argument; it copies them before it returns.
        arguments = [*(ctypes.c_uint64(int(p)) for p in pointers), ctypes.c_int64(loaded.launch.count(B))]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config = loaded.launch.launch_config(B)
        _call(
            self._driver.cuLaunchKernel, loaded.function, *config.grid, *config.block, config.shared_bytes,
            self._stream, ctypes.addressof(addresses), 0, doing=f"launching {group.claim.label}",
        )  # fmt: skip


class _Kept:
    """Device memory and modules that are given back together."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context = driver, context
        self._pointers: list[Any] = []
        self._modules: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        self._pointers.append(_call(self._driver.cuMemAlloc, max(nbytes, 1), doing=f"allocating {nbytes:,} B"))
        return self._pointers[-1]

    def upload(self, array: Array, stream: Any) -> Any:
        pointer = self.allocate(array.nbytes)
        _call(self._driver.cuMemcpyHtoDAsync, pointer, array.ctypes.data, array.nbytes, stream)
        return pointer

    def load(self, launch: Launch, arch: str) -> Any:
        """The function, compiled and allowed the shared memory it asks for."""
        driver, doing = self._driver, f"loading {launch.program.name_expression}"
        binary = compile_program(launch.program, arch)
        self._modules.append(_call(driver.cuModuleLoadData, binary.cubin, doing=doing))
        function = _call(driver.cuModuleGetFunction, self._modules[-1], binary.entry.encode(), doing=doing)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, function, limit, launch.launch_config(1).shared_bytes, doing=doing)
        return function

    def release(self) -> None:
        # No check: after a failed kernel every call fails, and the first error is the one to tell.
        self._driver.cuCtxSetCurrent(self._context)
        for pointer in self._pointers:
            self._driver.cuMemFree(pointer)
        for module in self._modules:
            self._driver.cuModuleUnload(module)


def _call(function: Any, *arguments: Any, doing: str = "") -> Any:
    """Call the driver; returns its value. An error becomes a DeviceError (no memory) or a KernelError."""
    from cuda.bindings import driver

    result, *values = function(*arguments)
    if result == driver.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    doing = doing or f"calling {function.__name__}"
    text = driver.cuGetErrorString(result)[1]
    got = f"{result.name}: {text.decode() if text else 'no text'}"
    if result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise DeviceError(f"out of GPU memory while {doing}", got=got, hint="fewer rows at a time")
    raise KernelError(f"CUDA failed while {doing}", got=got)
