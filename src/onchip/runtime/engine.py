"""compile: a network becomes an engine, a function from arrays to arrays on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import DeviceError, InputError, ShapeError
from onchip.kernels.chain import given_ids
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import given_weights, plan_from_json, plan_to_json
from onchip.runtime.arrays import dlpack
from onchip.runtime.backend import Backend
from onchip.runtime.cpu import CpuBackend
from onchip.runtime.overlap import check_apart
from onchip.runtime.placement import find_device, kernels_for, place
from onchip.spec.io import IO, with_io
from onchip.spec.layers import Embedding, TokenConv
from onchip.spec.layers.embedding import ID_DTYPES
from onchip.spec.names import known_name
from onchip.spec.network import Network, check_network
from onchip.spec.recipe import Array
from onchip.spec.text import escaped
from onchip.spec.tokens import check_token_ids
from onchip.spec.types import TensorType, numpy_dtype

if TYPE_CHECKING:
    from onchip.runtime.arrays.calls import Run
    from onchip.runtime.ranks import Ranks


class _Wanted:
    """An input or output of a network, and what is asked about it in every call."""

    def __init__(self, name: str, given: TensorType) -> None:
        self.name, self.type = name, given
        self.row_shape, self.dtype = given.row_shape, numpy_dtype(given.dtype)

    def fits(self, x: Any) -> bool:
        """Whether x is an array of such rows as it stands."""
        if type(x) is not np.ndarray or x.dtype is not self.dtype:
            return False
        return x.ndim > 0 and x.shape[1:] == self.row_shape and x.flags.c_contiguous


class Engine:
    """A compiled network. Call it with (B, ...) rows; a row's result never depends on its batch.

    It can be copied and pickled: the plan and the weights travel. The copy gives the same bits, or it is an error to
    load it: on another kind of device, or by an onchip whose kernels do not take what the plan says. To load a
    pickle is to run whatever it says, so load none that you do not trust; a network alone is better saved as a file.
    """

    def __init__(self, plan: Plan, backend: Backend, chosen: str, debug: bool = False) -> None:
        self.plan = plan
        self.chosen = chosen  # the device and, for "auto", why
        self._backend, self._debug = backend, debug
        net = plan.network
        self._inputs = [_Wanted(name, given) for name, given in net.inputs.items()]
        self._outputs = [_Wanted(name, net.types[name]) for name in net.outputs]
        self._id_limits = id_limits(net)
        # Outputs that may be read as ids on the way: nobody else may write to them before they are.
        self._ids_made = {name for name in net.outputs if net.types[name].dtype in ID_DTYPES and net.readers(name)}
        # Nothing is handed on and nothing asked for twice: every output is made by the backend, where it is wanted.
        are_apart = len({*net.inputs, *net.outputs}) == len(net.inputs) + len(net.outputs)
        self._is_plain = are_apart and not self._ids_made
        self._bound = backend.bind(plan, debug)
        self._quick_call = self._bound.quick_call() if self._is_plain else None
        self._runs: dict[type, Run | None] = {np.ndarray: None}  # by the type of the first input; None: the host's

    @property
    def input(self) -> TensorType:
        return self.plan.network.input

    @property
    def output(self) -> TensorType:
        return self.plan.network.output

    def __call__(self, *rows: Any, out: Any = None) -> Any:
        """Run the network: an array for each of its inputs, in their order, to an array or a tuple of its outputs.

        rows  (B, ...) of the input's type, row-major (others are copied once)
        out   (B, ...) of the output type, overwritten; made if not given; a tuple for several outputs

        NumPy in, NumPy out: returns when the results are there. An engine on a GPU also takes arrays that lie there
        (torch, CuPy, JAX, `__cuda_array_interface__`, `__dlpack__`; row-major): it launches on the caller's stream and
        returns at once, and what it makes is of the same kind. Keep the engine while such work runs in a graph. An
        array that does not begin at a multiple of 16 bytes is copied once, on the GPU. No gradient passes through.
        Ids that lie there are looked at by the kernels: one that is in no table is an InputError of the next call, or
        of `wait`.
        """
        quick_call = self._quick_call
        if quick_call is not None:
            quick = quick_call(rows, out)
            if quick is not None:
                return quick
        if rows:
            kind = type(rows[0])
            run = self._runs[kind] if kind in self._runs else self._find_run(rows[0])
            if run is not None:
                return run(rows, out)
        if len(rows) != len(self._inputs):
            expected = ", ".join(f"{wanted.name}: {wanted.type}" for wanted in self._inputs)
            raise InputError("wrong number of inputs", got=str(len(rows)), expected=expected)
        inputs: dict[str, Array] = {}
        for x, wanted in zip(rows, self._inputs, strict=True):
            inputs[wanted.name] = x if wanted.fits(x) else check_rows(x, wanted.type)
        B = len(rows[0])
        if len(inputs) > 1 and any(len(x) != B for x in inputs.values()):
            got = ", ".join(f"{name}: {len(x)} rows" for name, x in inputs.items())
            raise ShapeError("the inputs have different numbers of rows", got=got, expected="one number")
        if out is None:
            made = tuple([np.empty((B, *wanted.row_shape), wanted.dtype) for wanted in self._outputs])
        else:
            made = self._check_outs(out, inputs.values(), B)
        if not self._bound.checks_ids:
            for name, limit in self._id_limits.items():
                # Our own copy: the kernels look up what was checked, whatever other threads write to the caller's.
                inputs[name] = inputs[name].copy()
                check_token_ids(inputs[name], limit, name=name)
        if B and self._is_plain:
            self._bound.run(inputs, dict(zip(self.plan.network.outputs, made, strict=True)), B)
        elif B:
            self._run(inputs, made, B)
        return made if len(made) > 1 else made[0]

    def warm_up(self) -> None:
        """Run one row of zeros: afterwards every kernel is compiled and loaded."""
        with np.errstate(all="ignore"):  # zeros mean nothing, nor does what comes of them
            for number in (0, 1):  # a network that looks up ids less one takes no 0
                with contextlib.suppress(InputError):
                    self(*(np.full((1, *wanted.row_shape), number, wanted.dtype) for wanted in self._inputs))
                    return

    def wait(self) -> None:
        """Return when all that was called with arrays of a GPU is done; InputError for an id that is in no table."""
        self._bound.wait()

    def _find_run(self, x: Any) -> Run | None:
        """How arrays like x are run where they lie."""
        run = None if isinstance(x, np.ndarray) else self._bound.run_like(x)
        if run is None and _lies_on_gpu(x):
            got, hint = f"{type(x).__module__}.{type(x).__name__} on a GPU", "onchip.compile(net, device='cuda')"
            raise InputError("the rows lie on a GPU", got=got, expected=f"NumPy rows, for {self.chosen}", hint=hint)
        if run is not None:  # an array that is none of the device's may come again from there
            self._runs[type(x)] = run
        return run

    def check_ids(self, *rows: Array, first_row: int = 0) -> None:
        """InputError if an id of an input is in no table; `first_row` is what the message calls the first row."""
        for x, wanted in zip(rows, self._inputs, strict=True):
            if wanted.name in self._id_limits:
                check_token_ids(x, self._id_limits[wanted.name], first_row, wanted.name)

    def _check_outs(self, out: Array | tuple[Array, ...], inputs: Iterable[Array], B: int) -> tuple[Array, ...]:
        given_out = out if isinstance(out, tuple) else (out,)
        if len(given_out) != len(self._outputs):
            raise ShapeError("out does not fit", got=f"{len(given_out)} arrays", expected=f"{len(self._outputs)}")
        for array, wanted in zip(given_out, self._outputs, strict=True):
            if not isinstance(array, np.ndarray):
                got = f"an out that is {type(array).__module__}.{type(array).__name__}, for NumPy inputs"
                hint = "all inputs and outputs on the GPU, or all NumPy"
                raise InputError("arrays of different kinds", got=got, expected="NumPy", hint=hint)
            _check_out(array, (B, *wanted.row_shape), wanted.type.dtype)
        check_apart(given_out, inputs, np.may_share_memory)
        return given_out

    def _run(self, inputs: dict[str, Array], made: tuple[Array, ...], B: int) -> None:
        net = self.plan.network
        outputs: dict[str, Array] = {}
        for name, array in zip(net.outputs, made, strict=True):
            if name not in inputs:
                outputs.setdefault(name, np.empty_like(array) if name in self._ids_made else array)
        if outputs:
            self._bound.run(inputs, outputs, B)
        for name, array in zip(net.outputs, made, strict=True):
            source = inputs[name] if name in inputs else outputs[name]
            if source is not array:  # an input handed on, an output that is asked for twice, or ids
                array[...] = source

    def __reduce__(self) -> tuple[object, ...]:
        weights = given_weights(self.plan.network)
        return bind_plan, (plan_to_json(self.plan), weights, self._backend.asked, self.chosen, self._debug)

    def __repr__(self) -> str:
        return f"Engine({self.plan.network.name}, {self.chosen}, {self.plan.job.precision})"

    def _repr_html_(self) -> str:
        return f"<p>{escaped(repr(self))}</p>{self.plan._repr_html_()}"


def id_limits(net: Network) -> dict[str, int]:
    """How many rows the smallest table has that an input's ids look into, for each input that holds ids.

    Ids that are computed on the way are checked by the kernel that looks them up.
    """
    limits: dict[str, int] = {}
    for node in net.nodes:
        if isinstance(node.layer, Embedding | TokenConv):
            V = net.weights[node.weights["weight"]].shape[0]
            for name in given_ids(net, node.inputs[0]) or ():
                limits[name] = min(V, limits.get(name, V))
    return limits


def _lies_on_gpu(x: Any) -> bool:
    """Whether x is an array of a GPU, of whatever library."""
    ask = getattr(type(x), "__dlpack_device__", None)  # torch has the other one too, but not for every tensor
    if ask is not None:
        return int(ask(x)[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(type(x), "__cuda_array_interface__")


def check_rows(x: Any, expected: TensorType) -> Array:
    """x as a contiguous array if it is rows of `expected`; ShapeError if it is not."""
    dtype = numpy_dtype(expected.dtype)
    if not isinstance(x, np.ndarray):
        raise ShapeError(
            "input is not an array", got=type(x).__name__, expected=f"NumPy {expected}", hint="np.asarray(x)"
        )
    if x.ndim != len(expected.shape) or x.shape[1:] != expected.row_shape:
        raise ShapeError(
            "input has another shape", got=str(list(x.shape)), expected=str(expected), hint=_shape_hint(x, expected)
        )
    if x.dtype.newbyteorder("=") != dtype:
        raise ShapeError(
            "input has another dtype", got=x.dtype.name, expected=expected.dtype, hint=f"x.astype(np.{expected.dtype})"
        )
    return np.ascontiguousarray(x, dtype)  # native byte order


def _shape_hint(x: Array, expected: TensorType) -> str:
    """How x becomes such rows without a number leaving its row; "" if it cannot."""
    if x.shape == expected.row_shape:
        return "x[None]: a single row is a batch of one"
    if x.ndim and int(np.prod(x.shape[1:])) == expected.row_size:
        return f"x.reshape(len(x), {', '.join(map(str, expected.row_shape))})"
    return ""


def _check_out(out: Array, shape: tuple[int, ...], dtype: str) -> None:
    fits = isinstance(out, np.ndarray) and out.shape == shape and out.dtype == numpy_dtype(dtype)
    if not (fits and out.flags.c_contiguous and out.flags.writeable):
        got = f"{getattr(out, 'dtype', type(out).__name__)}{list(getattr(out, 'shape', []))}"
        raise ShapeError("out does not fit", got=got, expected=f"{dtype}{list(shape)}, row-major and writable")


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
    """Plan the network for a device and make it ready to run; onchip.compile says what the options mean."""
    check_network(net)
    job = Job(precision, batch_hint, without=tuple(without), tables=tables)
    engine = Engine(*place(apply_io(net, io), device, job, threads), debug=debug)
    if engine.plan.device.kind == "cpu":  # a GPU's kernels are compiled by now
        engine.warm_up()
    return engine


def bind_plan(
    plan: str, weights: Mapping[str, Array], asked: tuple[str, int | None], chosen: str, debug: bool
) -> Engine:
    """The engine of a plan that was made elsewhere (JSON), on a device like the one that it was made for.

    weights  given_weights of the plan's network
    asked    the device's name and the number of threads, as for find_device
    """
    return Engine(*read_plan(plan, weights, asked), chosen, debug)


def read_plan(
    plan: str, weights: Mapping[str, Array], asked: tuple[str, int | None], ranks: Ranks | None = None
) -> tuple[Plan, Backend]:
    """A plan (JSON) and the device to bind it on, as for bind_plan; DeviceError if it was made for another kind.

    ranks  that will bind it, too
    """
    here, backend, _ = find_device(*asked)
    made = plan_from_json(plan, weights, kernels_for(here))
    if (here.kind, here.arch) != (made.device.kind, made.device.arch):
        got, expected = (f"{found.name}, {found.arch}" for found in (here, made.device))
        if ranks is not None and ranks.size > 1:
            hint = "ranks on machines of one kind, as by mpiexec --host or sbatch --constraint"
            raise DeviceError("another kind of device than rank 0's", got=got, expected=expected, hint=hint)
        hint = "onchip.save the network there, onchip.compile it here"
        raise DeviceError("the engine was made for another kind of device", got=got, expected=expected, hint=hint)
    return made, CpuBackend(asked[1], ranks) if here.kind == "cpu" else backend


def apply_io(net: Network, io: str) -> Network:
    """The network with float inputs and outputs of another type in memory, by its name in IO; as it is for ""."""
    if not io:
        return net
    return with_io(net, IO[known_name(io, IO, "io", "fp16")])
