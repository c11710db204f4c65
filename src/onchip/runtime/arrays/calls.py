"""Calls of an engine with arrays on its GPU: check them and launch on the caller's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onchip.errors import InputError, ShapeError
from onchip.network.types import TensorType
from onchip.runtime.arrays.adapters import ArrayAdapter, ArrayView, Torch, kind_of
from onchip.runtime.arrays.overlap import check_apart, is_apart
from onchip.runtime.backend import Run
from onchip.runtime.cuda.bound_plan import MAX_CALLS, MAX_GRAPHS, BoundPlan, BoundRows
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.plan_graph import PlanGraph

ALIGN_BYTES = 16  # the alignment that every kernel may assume


def device_run(x: Any, bound: BoundPlan) -> Run | None:
    """A function that runs a network on arrays of x's type; None if x is not a GPU array."""
    kind = kind_of(x, bound.gpu)
    if kind is None:
        return None
    calls = DeviceCalls(kind, bound)
    net = bound.plan.network
    is_simple = len(net.inputs) == len(net.outputs) == 1 and net.outputs[0] not in net.inputs
    return torch_run(kind, bound, calls) if isinstance(kind, Torch) and is_simple else calls


class DeviceCalls:
    """Arrays of any kind, networks with any number of inputs and outputs."""

    def __init__(self, kind: ArrayAdapter, bound: BoundPlan) -> None:
        self._kind, self._bound = kind, bound
        net = bound.plan.network
        self._inputs = dict(net.inputs)
        self._outputs = [(name, net.types[name]) for name in net.outputs]

    def __call__(self, rows: Sequence[Any], out: Any = None) -> Any:
        kind = self._kind
        if len(rows) != len(self._inputs):
            expected = ", ".join(f"{name}: {row_type}" for name, row_type in self._inputs.items())
            raise InputError("wrong number of inputs", got=str(len(rows)), expected=expected)
        stream = kind.stream(rows[0])  # first, to reject host rows: they may be of different kinds
        for x in rows[1:]:
            self._check_kind(x, "an input")
        inputs: dict[str, ArrayView] = {}
        for x, (name, row_type) in zip(rows, self._inputs.items(), strict=True):
            inputs[name] = self._check(kind.describe(x, stream), row_type, "input")
        B = next(iter(inputs.values())).shape[0]
        if any(view.shape[0] != B for view in inputs.values()):
            got = ", ".join(f"{name}: {view.shape[0]} rows" for name, view in inputs.items())
            raise ShapeError("the inputs have different numbers of rows", got=got, expected="equal numbers")
        outs = self._make_outs(B, stream) if out is None else out if isinstance(out, tuple) else (out,)
        outputs = self._check_outs(outs, B, stream)
        check_apart(outputs, inputs.values(), ArrayView.overlaps)
        if B:
            with self._bound.gpu:
                self._run(inputs, outputs, B, stream)
                kind.launched([view.owner for view in (*inputs.values(), *outputs)], out is not None)
        results = outs if out is not None else tuple(kind.export(y) for y in outs)
        return results if len(results) > 1 else results[0]

    # -- before the launch -----------------------------------------------------------------------------------

    def _check_kind(self, x: Any, what: str) -> None:
        if not self._kind.owns(x):
            got = f"{what} that is {type(x).__module__}.{type(x).__name__}"
            hint = "all inputs and outputs on the GPU, or all NumPy"
            raise InputError("arrays of different kinds", got=got, expected=self._kind.name, hint=hint)

    def _check(self, view: ArrayView, row_type: TensorType, what: str) -> ArrayView:
        return check_view(view, row_type, what, self._bound.gpu.index)

    def _make_outs(self, B: int, stream: int) -> tuple[Any, ...]:
        try:
            return tuple(self._kind.empty(row_type, B, stream) for _, row_type in self._outputs)
        except Exception as error:
            if "OutOfMemory" not in type(error).__name__:  # torch's and CuPy's own
                raise
            nbytes = sum(row_type.row_bytes for _, row_type in self._outputs) * B
            raise self._bound.gpu.out_of_memory(nbytes, self._bound.row_bytes) from error

    def _check_outs(self, outs: tuple[Any, ...], B: int, stream: int) -> list[ArrayView]:
        if len(outs) != len(self._outputs):
            raise ShapeError("wrong number of outputs", got=f"{len(outs)} arrays", expected=f"{len(self._outputs)}")
        checked = []
        for y, (_, row_type) in zip(outs, self._outputs, strict=True):
            self._check_kind(y, "an out")
            view = self._check(self._kind.describe(y, stream), row_type, "out")
            if view.shape[0] != B:
                expected = f"{row_type.dtype}{[B, *row_type.row_shape]}"
                raise ShapeError("out has the wrong shape", got=str(view), expected=expected)
            if not view.is_writable:
                raise InputError("out cannot be written to", got=self._kind.name, hint="y = engine(x), without out")
            checked.append(view)
        return checked

    # -- the launch ------------------------------------------------------------------------------------------

    def _run(self, inputs: Mapping[str, ArrayView], outputs: Sequence[ArrayView], B: int, stream: int) -> None:
        bound = self._bound
        gpu = bound.gpu
        targets: dict[str, ArrayView] = {}  # where each value is computed
        for (name, _), view in zip(self._outputs, outputs, strict=True):
            if name not in inputs:
                targets.setdefault(name, view)
        # Kernels read 16 bytes at a time. An unaligned slice is copied once, to or from aligned memory.
        aligned = {
            name: gpu.allocate(view.nbytes, stream, bound.row_bytes)
            for name, view in (*inputs.items(), *targets.items())
            if view.pointer % ALIGN_BYTES
        }
        for name in aligned.keys() & inputs.keys():
            gpu.copy(aligned[name].pointer, inputs[name].pointer, inputs[name].nbytes, stream)
        if targets:
            pointers = {name: view.pointer for name, view in (*inputs.items(), *targets.items())}
            bound.enqueue(pointers | {name: buffer.pointer for name, buffer in aligned.items()}, B, stream)
        for (name, _), view in zip(self._outputs, outputs, strict=True):
            source = inputs.get(name) or targets[name]
            pointer = aligned[name].pointer if name in aligned else source.pointer
            if pointer != view.pointer:  # computed elsewhere, an input that is also an output, or a repeated output
                gpu.copy(view.pointer, pointer, view.nbytes, stream)


def check_view(view: ArrayView, row_type: TensorType, what: str, here: int) -> ArrayView:
    """The array, if it holds rows of this type on GPU `here`."""
    if view.device_index != here:
        got, hint = f"cuda:{view.device_index}", f"onchip.compile(net, device='cuda:{view.device_index}')"
        raise InputError(f"{what} is on another device", got=got, expected=f"cuda:{here}", hint=hint)
    if view.dtype != row_type.dtype:
        hint = "convert it, or compile with io=" if "float" in view.dtype else ""
        raise ShapeError(f"{what} has the wrong dtype", got=view.dtype, expected=row_type.dtype, hint=hint)
    if len(view.shape) != len(row_type.shape) or view.shape[1:] != row_type.row_shape:
        raise ShapeError(f"{what} has the wrong shape", got=str(list(view.shape)), expected=str(row_type))
    if not view.is_row_major:
        raise ShapeError(
            f"{what} is not row-major", got=f"a view of {view}", expected="contiguous rows",
            hint="x.contiguous(), or numpy's ascontiguousarray of its library",
        )  # fmt: skip
    return view


# -- torch, one input, one output ------------------------------------------------------------------------------


Key = tuple[int, int, int]  # addresses of x and y, and the stream


class _Known(threading.local):
    """This thread's launches: x's shape -> (y's shape, graphs by the addresses of x and y, the launch)."""

    def __init__(self) -> None:
        self.shapes: dict[Any, tuple[tuple[int, ...], dict[Key, Graph], _OneLaunch | _Launches]] = {}


class _OneLaunch:
    """The launch for B rows and its graphs: launching a graph takes a quarter less time than launching a kernel."""

    def __init__(self, bound: BoundPlan, refuses_graphs: Callable[[], bool], rows: BoundRows, B: int) -> None:
        self.graphs: dict[Key, Graph] = {}
        self._bound, self._B, self._refuses_graphs, self._fits = bound, B, refuses_graphs, _Fits(bound, B)
        (launches,) = (launches for _, launches in rows.steps)
        assert launches.pointers is not None
        self._pointers, (self._call,) = launches.pointers, launches.calls
        self._by_addresses: dict[tuple[int, int], Graph] = {}  # a graph may run on any stream
        self._last = (0, 0)

    def __call__(self, key: Key) -> bool:
        """Launch with x and y at these addresses; False if they are misaligned or overlap. A pair of addresses that is
        used twice in a row gets a graph; later calls launch that instead."""
        x_at, y_at, stream = key
        if not self._fits(x_at, y_at):
            return False
        addresses = x_at, y_at
        if (addresses != self._last and addresses not in self._by_addresses) or self._refuses_graphs():
            self._last = addresses
            self._pointers[0].value, self._pointers[1].value = addresses
            self._call.launch(stream)
            return True
        if addresses not in self._by_addresses:
            if len(self._by_addresses) >= MAX_GRAPHS:
                self._forget(next(iter(self._by_addresses)))  # the oldest
            self._by_addresses[addresses] = self._bound.graph(self._B, self._fits.named(x_at, y_at), stream).graph
        if len(self.graphs) >= 4 * MAX_GRAPHS:
            self.graphs.clear()  # many streams: restored from _by_addresses when used again
        self.graphs[key] = self._by_addresses[addresses]
        self.graphs[key].launch(stream)
        return True

    def _forget(self, addresses: tuple[int, int]) -> None:
        del self._by_addresses[addresses]
        for key in [key for key in self.graphs if key[:2] == addresses]:
            del self.graphs[key]


class _Launches:
    """Several launches for B rows: one graph per stream, updated when x or y has moved."""

    def __init__(self, bound: BoundPlan, refuses_graphs: Callable[[], bool], rows: BoundRows, B: int) -> None:
        self.graphs: dict[Key, Graph] = {}
        self._bound, self._rows, self._B, self._refuses_graphs = bound, rows, B, refuses_graphs
        self._fits = _Fits(bound, B)
        self._by_stream: dict[int, tuple[PlanGraph, Key]] = {}

    def __call__(self, key: Key) -> bool:
        x_at, y_at, stream = key
        if not self._fits(x_at, y_at):
            return False
        bound, pointers = self._bound, self._fits.named(x_at, y_at)
        found = self._by_stream.get(stream)
        if self._refuses_graphs():
            bound.launch(self._rows, pointers, stream, self._status(stream))
            return True
        if found is not None:
            graph, old_key = found
            self.graphs.pop(old_key, None)
            graph.point(pointers)
        else:
            if len(self._by_stream) >= MAX_GRAPHS:
                self._by_stream.clear()
                self.graphs.clear()
            graph = bound.graph(self._B, pointers, stream, self._status(stream))
        self._by_stream[stream], self.graphs[key] = (graph, key), graph.graph
        graph.launch(stream)
        return True

    def _status(self, stream: int) -> int:
        found = self._bound.found
        return found.pointer(stream) if found is not None else 0


class _Fits:
    """Alignment and overlap checks for B rows of x and y."""

    def __init__(self, bound: BoundPlan, B: int) -> None:
        net = bound.plan.network
        (self._x,), (self._y,) = net.inputs, net.outputs
        self._x_bytes, self._y_bytes = net.input.row_bytes * B, net.output.row_bytes * B

    def __call__(self, x_at: int, y_at: int) -> bool:
        return not (x_at | y_at) % ALIGN_BYTES and is_apart(x_at, self._x_bytes, y_at, self._y_bytes)

    def named(self, x_at: int, y_at: int) -> dict[str, int]:
        return {self._x: x_at, self._y: y_at}


def torch_run(kind: Torch, bound: BoundPlan, slow_path: Run) -> Run:
    """The fast path from a torch tensor to a launch: a lookup, the checks on two tensors, and the launch.

    Anything unusual takes the slow path, which reports errors. A closure: a closed-over name is cheaper than an
    attribute, and all of this takes about as long as the launch itself.
    """
    net, known, tensor, empty = bound.plan.network, _Known(), kind.torch.Tensor, kind.torch.empty
    index, stream, refuses_graphs = bound.gpu.index, kind.raw_stream, kind.refuses_graphs
    device = kind.torch.device("cuda", index)
    x_dtype, y_dtype = (getattr(kind.torch, row_type.dtype) for row_type in (net.input, net.output))

    def run(rows: Sequence[Any], out: Any = None) -> Any:
        x = rows[0]
        found = known.shapes.get(x.shape)
        if found is None or len(rows) != 1:
            learn(rows)
            return slow_path(rows, out)
        y_shape, graphs, launch = found
        if out is None:
            try:
                out = empty(y_shape, dtype=y_dtype, device=device)
            except Exception:  # no memory, or a torch that sees no GPU: the slow path reports it
                return slow_path(rows, None)
        elif not isinstance(out, tensor):
            return slow_path(rows, out)
        if (
            x.dtype is not x_dtype or out.dtype is not y_dtype or out.shape != y_shape
            or x.get_device() != index or out.get_device() != index
            or not x.is_contiguous() or not out.is_contiguous()
        ):  # fmt: skip
            return slow_path(rows, out)
        handle = stream(index)
        key = (x.data_ptr(), out.data_ptr(), handle)
        graph = graphs.get(key)  # a cached graph implies that x and y are aligned and do not overlap
        if graph is not None and not refuses_graphs():
            graph.launch(handle)
        elif not launch(key):
            return slow_path(rows, out)
        return out

    def learn(rows: Sequence[Any]) -> None:
        """Prepare the launch for this shape, if it is one call."""
        shape = rows[0].shape
        if len(rows) != 1 or len(shape) < 1 or tuple(shape[1:]) != net.input.row_shape or not shape[0]:
            return
        if len(known.shapes) >= MAX_CALLS:
            known.shapes.clear()
        B = int(shape[0])
        bound_rows = bound.bind(B)
        if bound_rows.arena_bytes > bound.max_arena_bytes:
            return  # it runs in chunks
        is_one = len(bound_rows.steps) == 1 and bound_rows.steps[0][1].pointers is not None
        launch = (_OneLaunch if is_one else _Launches)(bound, refuses_graphs, bound_rows, B)
        known.shapes[shape] = ((B, *net.output.row_shape), launch.graphs, launch)

    if (found := bound.found) is None:
        return run

    def run_checked(rows: Sequence[Any], out: Any = None) -> Any:
        found.raise_found(stream(index))
        return run(rows, out)

    return run_checked
