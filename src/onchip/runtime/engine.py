"""compile: turn a network into an engine, a function from arrays to arrays on one device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import DeviceError, InputError, ShapeError
from onchip.kernels.chain import ids_input
from onchip.network.graph import Network, check_network, check_no_step
from onchip.network.io import IO, with_io
from onchip.network.layers import Embedding, TokenConv
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.meaning import Meaning
from onchip.network.names import did_you_mean, known_name
from onchip.network.recipe import Array
from onchip.network.text import escaped
from onchip.network.tokens import check_token_ids
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.runtime.arrays import dlpack
from onchip.runtime.arrays.overlap import check_apart
from onchip.runtime.backend import Backend, Bound, Run
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.io.host_rows import HostRowsError, array_tensor, convert_rows, is_tensor, tensor_array
from onchip.runtime.placement import find_device, kernels_for, place
from onchip.runtime.recording import recorded

if TYPE_CHECKING:
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.runtime.spans import Recorder


ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
ON_NEW: list[Callable[[Engine], None]] = []  # called with each new engine


class _ArraySpec:
    """An input or output of a network, with the facts that every call checks."""

    def __init__(self, name: str, tensor_type: TensorType) -> None:
        self.name, self.type = name, tensor_type
        self.row_shape, self.dtype = tensor_type.row_shape, numpy_dtype(tensor_type.dtype)

    def fits(self, x: Any) -> bool:
        """Whether x is an array of this type that needs no conversion."""
        if type(x) is not np.ndarray or x.dtype is not self.dtype:
            return False
        return x.ndim > 0 and x.shape[1:] == self.row_shape and x.flags.c_contiguous


@dataclass(frozen=True)
class EngineMemory:
    """The memory that an engine needs on its device; `at(B)` is that of a call with B rows, host arrays included."""

    weight_bytes: int  # as the kernels store them
    row_bytes: int  # inputs, outputs, and values between kernels

    def at(self, B: int) -> int:
        return self.weight_bytes + B * self.row_bytes


class Engine:
    """A compiled network. Call it with (B, ...) rows; a row's result never depends on its batch.

    It can be copied and pickled, with its plan and weights. The copy computes the same bits; loading it raises an error
    on another kind of device, or if this version's kernels do not accept the plan. Loading a pickle runs arbitrary
    code, so only load pickles that you trust; prefer saving the network to a file.
    """

    def __init__(self, plan: Plan, backend: Backend, chosen: str) -> None:
        check_no_step(plan.network)
        self.plan = plan
        self.chosen = chosen  # the device and, for "auto", the reason
        self._backend = backend
        net = plan.network
        self._inputs = [_ArraySpec(name, tensor_type) for name, tensor_type in net.inputs.items()]
        self._outputs = [_ArraySpec(name, net.types[name]) for name in net.outputs]
        self._id_limits = id_limits(net)
        # Outputs that the network also reads as ids: no other thread may write to them before that.
        self._computed_ids = {name for name in net.outputs if net.types[name].dtype in ID_DTYPES and net.readers(name)}
        are_distinct = len({*net.inputs, *net.outputs}) == len(net.inputs) + len(net.outputs)
        self._is_direct = are_distinct and not self._computed_ids  # the backend writes each output to its destination
        self._plain_bound = backend.bind(plan)
        self._recorder: Recorder | None = None
        self.record(None)
        ENGINES.add(self)
        for notify in ON_NEW:
            notify(self)

    def record(self, recorder: Recorder | None) -> None:
        """Record later calls in `recorder`, which takes longer; None: no more. Calls in flight end as they began,
        and may be left out."""
        if self._recorder is not None:
            self._recorder.finish()
        self._recorder = recorder
        self._bound: Bound = self._plain_bound if recorder is None else recorded(self._plain_bound, recorder)
        self._quick_call = self._bound.quick_call() if self._is_direct else None
        self._runs: dict[type, Run | None] = {np.ndarray: None}  # by the type of the first input; None: host arrays

    @property
    def input(self) -> TensorType:
        return self.plan.network.input

    @property
    def output(self) -> TensorType:
        return self.plan.network.output

    def __call__(self, /, *rows: Any, out: Any = None, **named: Any) -> Any:
        """Run the network: one array per input, by position or name; returns one array, or a tuple of several outputs.

        rows   (B, ...) of the input's type, row-major (others are copied once)
        out    (B, ...) of the output type, overwritten; allocated if not given; a tuple for several outputs
        named  inputs by name: engine(tokens, mask=mask)

        NumPy in, NumPy out: the call returns when the results are complete. torch CPU tensors return CPU tensors;
        nested lists and data frames return NumPy. Rows of another numeric dtype are converted, with one message; a
        value out of the dtype's range is an error.

        An engine on a GPU also accepts GPU arrays (torch, CuPy, JAX, `__cuda_array_interface__`, `__dlpack__`;
        row-major). It launches on the caller's stream, returns at once, and returns arrays of the same kind. Keep the
        engine alive while a captured graph uses it. An array that is not 16-byte aligned is copied once, on the GPU.
        No gradient passes through. The kernels check ids in GPU arrays: an id outside its table raises an InputError
        in the next call, or in `wait`.
        """
        if named:
            rows = self._in_order(rows, named)
        quick_call = self._quick_call
        if quick_call is not None:
            quick = quick_call(rows, out)
            if quick is not None:
                return quick
        if rows:
            kind = type(rows[0])
            run = self._runs[kind] if kind in self._runs else self._find_run(rows[0])
            if run is not None:
                try:
                    return run(rows, out)
                except HostRowsError:
                    if any(is_tensor(x) and x.device.type != "cpu" for x in rows):
                        raise
        if len(rows) != len(self._inputs):
            raise InputError("wrong number of inputs", got=str(len(rows)), expected=self._input_types())
        inputs: dict[str, Array] = {}
        tensors = False
        for x, spec in zip(rows, self._inputs, strict=True):
            if spec.fits(x):
                inputs[spec.name] = x
            else:
                inputs[spec.name], tensors = self._convert(x, spec), tensors or is_tensor(x)
        B = len(inputs[self._inputs[0].name])
        if len(inputs) > 1 and any(len(x) != B for x in inputs.values()):
            got = ", ".join(f"{name}: {len(x)} rows" for name, x in inputs.items())
            raise ShapeError("the inputs have different numbers of rows", got=got, expected="equal numbers")
        if out is None:
            outputs = tuple([np.empty((B, *spec.row_shape), spec.dtype) for spec in self._outputs])
        else:
            outputs = self._check_outs(out, inputs.values(), B, tensors)
        if not self._bound.checks_ids:
            for name, limit in self._id_limits.items():
                # A private copy: other threads may write to the caller's after the check.
                inputs[name] = inputs[name].copy()
                check_token_ids(inputs[name], limit, name=name)
        if B and self._is_direct:
            self._bound.run(inputs, dict(zip(self.plan.network.outputs, outputs, strict=True)), B)
        elif B:
            self._run(inputs, outputs, B)
        if out is not None:
            return out[0] if isinstance(out, tuple) and len(out) == 1 else out
        results = tuple([array_tensor(y) for y in outputs]) if tensors else outputs
        return results if len(results) > 1 else results[0]

    def _in_order(self, rows: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The inputs in the network's order: by position first, then by name, like Python arguments."""
        names = [spec.name for spec in self._inputs]
        net, expected = self.plan.network.name, self._input_types()
        for name in named:
            if name not in names:
                hint = did_you_mean(name, names) or f"engine({', '.join(f'{known}=...' for known in names)})"
                raise InputError(f"'{net}' has no such input", got=name, expected=expected, hint=hint)
            if name in names[: len(rows)]:
                got = f"argument {names.index(name)} and {name}=..."
                raise InputError(f"two values of the input '{name}'", got=got, expected="one", hint="leave one out")
        rest = names[len(rows) :]
        if missing := [name for name in rest if name not in named]:
            got, hint = ", ".join([*names[: len(rows)], *named]), f"{missing[0]}=..."
            raise InputError(f"no rows for the input '{missing[0]}'", got=got, expected=expected, hint=hint)
        return (*rows, *(named[name] for name in rest))

    def _input_types(self) -> str:
        return ", ".join(f"{spec.name}: {spec.type}" for spec in self._inputs)

    def _convert(self, x: Any, spec: _ArraySpec) -> Array:
        net = self.plan.network
        meaning = net.meaning if len(self._inputs) == 1 else Meaning()
        return convert_rows(x, spec.name, spec.type, net.name, meaning)

    @property
    def memory(self) -> EngineMemory:
        """Bytes of memory on the device: of the weights, and per row of a call."""
        net = self.plan.network
        ends = sum(net.types[name].row_bytes for name in (*net.inputs, *net.outputs))
        return EngineMemory(self.plan.weight_bytes, ends + self.plan.between_bytes)

    def warm_up(self) -> None:
        """Run one row of zeros, so that every kernel is compiled and loaded. It is not recorded."""
        recorder = self._recorder
        self.record(None)
        self._warm_up()
        if recorder is not None:
            self.record(recorder)

    def _warm_up(self) -> None:
        with np.errstate(all="ignore"):  # the result of zeros is not used
            for value in (0, 1):  # a network that looks up ids minus one rejects 0
                with contextlib.suppress(InputError):
                    self(*(np.full((1, *spec.row_shape), value, spec.dtype) for spec in self._inputs))
                    return

    def wait(self) -> None:
        """Return when all calls with GPU arrays are done; raise InputError for an id outside its table."""
        self._bound.wait()

    def _find_run(self, x: Any) -> Run | None:
        """The function that runs arrays of x's type in place."""
        run = None if isinstance(x, np.ndarray) else self._bound.run_like(x)
        if run is None and _is_on_gpu(x):
            got, hint = f"{type(x).__module__}.{type(x).__name__} on a GPU", "onchip.compile(net, device='cuda')"
            raise InputError("the rows are on a GPU", got=got, expected=f"NumPy rows, for {self.chosen}", hint=hint)
        if run is not None:  # cache only successes: a later array of this type may be on the device
            self._runs[type(x)] = run
        return run

    def check_ids(self, *rows: Array, first_row: int = 0) -> None:
        """Raise InputError if an id is outside its table; messages count rows from `first_row`."""
        for x, spec in zip(rows, self._inputs, strict=True):
            if spec.name in self._id_limits:
                check_token_ids(x, self._id_limits[spec.name], first_row, spec.name)

    def _check_outs(self, out: Any, inputs: Iterable[Array], B: int, tensors: bool) -> tuple[Array, ...]:
        """`out` as NumPy arrays: views of CPU tensors where an input is one."""
        outs = out if isinstance(out, tuple) else (out,)
        if len(outs) != len(self._outputs):
            raise ShapeError("wrong number of outputs", got=f"{len(outs)} arrays", expected=f"{len(self._outputs)}")
        arrays: list[Array] = []
        for y, spec in zip(outs, self._outputs, strict=True):
            if not (is_tensor(y) if tensors else isinstance(y, np.ndarray)):
                kind = "torch tensors" if tensors else "NumPy"
                got = f"an out that is {type(y).__module__}.{type(y).__name__}, for inputs that are {kind}"
                hint = "all inputs and outputs on the GPU, or all NumPy, or all torch CPU tensors"
                raise InputError("arrays of different kinds", got=got, expected=kind, hint=hint)
            arrays.append(tensor_array(y, "out") if tensors else y)
            _check_out(arrays[-1], (B, *spec.row_shape), spec.type.dtype)
        check_apart(arrays, inputs, np.may_share_memory)
        return tuple(arrays)

    def _run(self, inputs: dict[str, Array], arrays: tuple[Array, ...], B: int) -> None:
        net = self.plan.network
        outputs: dict[str, Array] = {}
        for name, array in zip(net.outputs, arrays, strict=True):
            if name not in inputs:
                outputs.setdefault(name, np.empty_like(array) if name in self._computed_ids else array)
        if outputs:
            self._bound.run(inputs, outputs, B)
        for name, array in zip(net.outputs, arrays, strict=True):
            source = inputs[name] if name in inputs else outputs[name]
            if source is not array:  # an input that is also an output, a repeated output, or ids
                array[...] = source

    def __reduce__(self) -> tuple[object, ...]:
        weights = array_weights(self.plan.network)
        return bind_plan, (plan_to_json(self.plan), weights, self._backend.requested, self.chosen)

    def __repr__(self) -> str:
        return f"Engine({self.plan.network.name}, {self.chosen}, {self.plan.job.precision})"

    def _repr_html_(self) -> str:
        return f"<p>{escaped(repr(self))}</p>{self.plan._repr_html_()}"


def id_limits(net: Network) -> dict[str, int]:
    """For each input that holds ids: the row count of the smallest table that they index.

    Computed ids are checked by the kernel that looks them up.
    """
    limits: dict[str, int] = {}
    for node in net.nodes:
        if isinstance(node.layer, Embedding | TokenConv):
            V = net.weights[node.weights["weight"]].shape[0]
            for name in ids_input(net, node.inputs[0]) or ():
                limits[name] = min(V, limits.get(name, V))
    return limits


def _is_on_gpu(x: Any) -> bool:
    """Whether x is an array on a GPU, of any library."""
    if is_tensor(x):
        return bool(x.is_cuda)
    query = getattr(type(x), "__dlpack_device__", None)
    if query is not None:
        return int(query(x)[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(type(x), "__cuda_array_interface__")


def _check_out(out: Array, shape: tuple[int, ...], dtype: str) -> None:
    has_type = out.shape == shape and out.dtype == numpy_dtype(dtype)
    if not (has_type and out.flags.c_contiguous and out.flags.writeable):
        what = "out is not row-major and writable" if has_type else "out has the wrong shape or dtype"
        got, expected = f"{out.dtype}{list(out.shape)}", f"{dtype}{list(shape)}, row-major and writable"
        raise ShapeError(what, got=got, expected=expected)


def compile(
    net: Network,
    device: str = "auto",
    precision: str = "fp32",
    threads: int | None = None,
    batch_hint: int = 1024,
    without: Sequence[str] = (),
    tables: str = "fp32",
    io: str = "",
    debug: bool = False,
) -> Engine:
    """Plan the network for a device and prepare it to run; onchip.compile documents the options."""
    check_network(net)
    if debug:
        from onchip.runtime.cuda.checked_launches import check_every_launch  # imports what only a GPU needs

        check_every_launch()
    job = Job(precision, batch_hint, without=tuple(without), tables=tables)
    engine = Engine(*place(apply_io(net, io), device, job, threads))
    if engine.plan.device.kind == "cpu":  # the GPU's kernels are compiled at this point
        engine.warm_up()
    return engine


def bind_plan(plan: str, weights: Mapping[str, Array], requested: tuple[str, int | None], chosen: str) -> Engine:
    """The engine of a plan (JSON) from another process, on a device of the same kind.

    weights    array_weights of the plan's network
    requested  the device name and thread count, as for find_device
    """
    return Engine(*read_plan(plan, weights, requested), chosen)


def read_plan(
    plan: str, weights: Mapping[str, Array], requested: tuple[str, int | None], ranks: Ranks | None = None
) -> tuple[Plan, Backend]:
    """A plan (JSON) and the device to bind it on, as for bind_plan; DeviceError if it is for another kind.

    ranks  the ranks that also bind it
    """
    here, backend, _ = find_device(*requested)
    loaded = plan_from_json(plan, weights, kernels_for(here))
    if (here.kind, here.arch) != (loaded.device.kind, loaded.device.arch):
        got, expected = (f"{found.name}, {found.arch}" for found in (here, loaded.device))
        if ranks is not None and ranks.size > 1:
            hint = "select machines of one kind: mpiexec --host, sbatch --constraint"
            raise DeviceError("another kind of device than rank 0's", got=got, expected=expected, hint=hint)
        hint = "onchip.save the network on that machine, onchip.compile it on this one"
        raise DeviceError("the engine was compiled for another kind of device", got=got, expected=expected, hint=hint)
    return loaded, CpuBackend(requested[1], ranks) if here.kind == "cpu" else backend


def apply_io(net: Network, io: str) -> Network:
    """The network with its float inputs and outputs stored in another type, by its name in IO; unchanged for ""."""
    if not io:
        return net
    return with_io(net, IO[known_name(io, IO, "io", "fp16")])
