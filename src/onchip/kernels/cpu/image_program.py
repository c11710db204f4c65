"""From layers to operations on images: where every value lies, and what is done in which order.

A run of layers becomes a table of operations (image_ops.py) on values that lie with their channels last
(image_values.py). Layers that only say how numbers are seen cost nothing: a phase of an Interleave is written to its
place, a Flatten is the order of a Linear's columns, a Reshape behind a Linear the order of its rows, and an activation
joins the operation before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from onchip.kernels.chain import given_ids
from onchip.kernels.cpu import image_table as ops
from onchip.kernels.cpu.activation import ACTIVATIONS, NORMALISERS
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.image_values import Operation, Program, Rim, Sizes, Store, Value, View
from onchip.kernels.cpu.tile import aligned_zeros, pack, packed_size, padded
from onchip.spec.layers import (
    Add,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Concat,
    Convolution,
    Elementwise,
    Embedding,
    GlobalMax,
    GlobalMean,
    Interleave,
    Linear,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    Mul,
    Permute,
    Reshape,
    Softmax,
    ToPixels,
)  # fmt: skip
from onchip.spec.layers.conv import geometry
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Recipe

TAP_CHANNELS = 64  # with as many channels a tap is a product worth its own call; with fewer, a whole window is one
DOT_OUTPUTS = min(4, 2 * LANES // 5)  # so few outputs would leave most lanes of a vector empty
# Operations that write C numbers a pixel; the others write whole vectors.
_EXACT = (
    ops.DOT, ops.MAX_POOL, ops.AVG_POOL, ops.GLOBAL_MAX, ops.GLOBAL_MEAN, ops.ADD, ops.MUL, ops.SCALE, ops.COPY,
    ops.PAIRS_OUT,
)  # fmt: skip


class UnsupportedError(Exception):
    """A layer, or the way it is used, has no operation; the run ends before it."""


def image_sizes(row_shape: tuple[int, ...]) -> Sizes:
    """C, H, W of a row (C,), (C, L) or (C, H, W)."""
    if not 1 <= len(row_shape) <= 3 or 0 in row_shape:
        raise UnsupportedError(f"rows of shape {row_shape}")
    C, *rest = row_shape
    return (C, *((1, 1) if not rest else (1, rest[0]) if len(rest) == 1 else (rest[0], rest[1])))


def lower(net: Network, nodes: Sequence[Node]) -> Program:
    """The operations of a run of nodes that reads one value and whose last value alone is read outside."""
    return _Lowering(net, nodes).run()


class _Lowering:
    def __init__(self, net: Network, nodes: Sequence[Node]) -> None:
        self.net, self.nodes = net, nodes
        self.by_name = {node.name: node for node in nodes}
        self.read_by: dict[str, list[Node]] = {}
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                self.read_by.setdefault(value, []).append(node)
        outside = dict.fromkeys(v for node in nodes for v in node.inputs if v not in self.by_name)
        if len(outside) != 1:
            raise UnsupportedError(f"reads {len(outside)} values")
        self.source = next(iter(outside))
        self.operations: list[Operation] = []
        self.stores: list[Store] = []
        self.values: dict[str, Value] = {}
        self.recipes: dict[str, Recipe] = {}
        self.layer = ""  # that is being lowered
        self.paired: dict[tuple[View, int, int, int], Store] = {}  # what was made ready for products in pairs
        self.phases = {
            value: (node, i)
            for node in nodes
            if isinstance(node.layer, Interleave)
            for i, value in enumerate(node.inputs)
        }
        self.rims = self._find_rims()
        convolutions = [node for node in nodes if isinstance(node.layer, Convolution)]
        self.in_vectors = {self._home(node.inputs[0]) for node in convolutions if self._way(node) == ops.DOT}

    # -- what is known before -------------------------------------------------------------------------------

    def _readers(self, value: str) -> list[Node]:
        return self.read_by.get(value, [])

    def _joins(self, node: Node) -> bool:
        """An activation that is done by the operation that makes what it reads: nobody else sees that memory."""
        value = node.inputs[0]
        while value != self.source and len(self._readers(value)) == 1:
            before = self.by_name[value]
            if not isinstance(before.layer, Reshape | Permute):  # those only say how the same numbers are seen
                return isinstance(node.layer, ACTIVATIONS)
            value = before.inputs[0]
        return False

    def _home(self, value: str) -> str:
        """The value in whose memory another one lies."""
        while value in self.by_name:
            node = self.by_name[value]
            before = self.by_name.get(node.inputs[0])
            seen = isinstance(node.layer, Permute) and before is not None and isinstance(before.layer, Embedding)
            if not (seen or isinstance(node.layer, Reshape) or self._joins(node)):
                break
            value = node.inputs[0]
        return self.phases[value][0].name if value in self.phases else value

    def _writers(self, name: str) -> list[Node]:
        """The nodes that write a value: its own, or the phases of an Interleave."""
        node = self.by_name.get(name)
        if node is None:
            return []
        return [self.by_name[value] for value in node.inputs] if isinstance(node.layer, Interleave) else [node]

    def _way(self, node: Node) -> int:
        """How a convolution is done."""
        N, C, *kernel = self.net.weights[node.weights["weight"]].shape
        _, _, dilation = geometry(node.layer)
        made_by = self.by_name.get(self._home(node.inputs[0]))
        in_vectors = made_by is not None and not isinstance(made_by.layer, Linear | Embedding)
        if in_vectors and N <= DOT_OUTPUTS and C >= LANES and set(dilation) == {1}:
            return ops.DOT
        one_by_one = math.prod(kernel) == 1
        return ops.TAPS if C >= TAP_CHANNELS or one_by_one or dilation[-1] > 1 else ops.WINDOWS

    def _find_rims(self) -> dict[str, Rim]:
        """The rims that convolutions want around what they read. A Linear writes without a gap: no rim there."""
        rims: dict[str, Rim] = {}
        for node in self.nodes:
            if isinstance(node.layer, Convolution) and self._way(node) != ops.TAPS:
                home = self._home(node.inputs[0])
                if not (home in self.by_name and isinstance(self.by_name[home].layer, Linear)):
                    rims[home] = _around(rims.get(home, (0, 0, 0, 0)), _pads(node))
        return rims

    # -- values ---------------------------------------------------------------------------------------------

    def _new(self, name: str, sizes: Sizes, exact: bool) -> View:
        """Memory for a node's value: its own, or its place in an Interleave."""
        if name in self.phases:
            weave, i = self.phases[name]
            assert isinstance(weave.layer, Interleave)
            if weave.name not in self.values:
                whole = image_sizes(self.net.types[weave.name].row_shape)
                self.values[weave.name] = Value(self._own(weave.name, whole), None)
            phase, stride = weave.layer.phases()[i], weave.layer.stride
            start = (0, phase[0]) if len(phase) == 1 else (phase[0], phase[1])
            step = (1, stride[0]) if len(stride) == 1 else (stride[0], stride[1])
            return View(self.values[weave.name].view.store, sizes, start, step)
        return self._own(name, sizes, exact)

    def _own(self, name: str, sizes: Sizes, exact: bool = False) -> View:
        """Memory of its own. exact: whoever writes it writes C numbers a pixel, not whole vectors."""
        writers = self._writers(name)
        exact = exact or (bool(writers) and all(self._is_dot(node) for node in writers))
        pixel = sizes[0] if exact and name not in self.in_vectors else padded(sizes[0])
        store = Store(*sizes, pixel, self.rims.get(name, (0, 0, 0, 0)))
        self.stores.append(store)
        return View(store, sizes)

    def _is_dot(self, node: Node) -> bool:
        return isinstance(node.layer, Convolution) and self._way(node) == ops.DOT

    def _rimmed(self, x: View, wanted: Rim) -> View:
        """x with a rim: itself, or a copy."""
        if all(have >= want for have, want in zip(x.store.rim, wanted, strict=True)) and x.step == (1, 1):
            return x
        store = Store(*x.sizes, x.sizes[0], wanted)
        self.stores.append(store)
        self._emit(ops.COPY, x, View(store, x.sizes))
        return View(store, x.sizes)

    def _emit(self, code: int, x: View | None, y: View | None, **more: object) -> Operation:
        self.operations.append(Operation(code, x, y, layer=self.layer, **more))  # type: ignore[arg-type]
        return self.operations[-1]

    def _read(self, name: str) -> Value:
        if name == self.source and name not in self.values:
            given = self.net.types[name]
            if given.dtype != "float32":
                raise UnsupportedError(f"computes on float32, got {given}")
            sizes = image_sizes(given.row_shape)
            view = self._own(name, sizes, exact=True)
            self._emit(ops.LOAD, None, view, fields={ops.C: sizes[0], ops.H: sizes[1], ops.W: sizes[2]})
            self.values[name] = Value(view, None)
        return self.values[name]

    def _image(self, name: str) -> View:
        value = self._read(name)
        if value.flat and value.view.sizes[1:] != (1, 1):
            raise UnsupportedError("a flattened image is read by something else than Linear")
        return value.view

    def _make(self, node: Node, code: int, x: View | None, **more: object) -> Operation:
        """The operation that makes a node's value."""
        y = self._new(node.name, image_sizes(self.net.types[node.name].row_shape), code in _EXACT)
        op = self._emit(code, x, y, **more)
        self.values[node.name] = Value(y, op)
        return op

    def _weigh(self, op: Operation, w: Recipe, b: Recipe) -> None:
        i = self.operations.index(op)
        self.recipes[f"w{i}"], self.recipes[f"b{i}"] = w, b

    # -- layers ---------------------------------------------------------------------------------------------

    def run(self) -> Program:
        for node in self.nodes:
            for name in node.weights.values():
                if self.net.weight_type(name).dtype != "float32":
                    raise UnsupportedError(f"computes on float32, and {name} is {self.net.weight_type(name).dtype}")
            self.layer = self._home(node.name)
            handler = next((f for kinds, f in _HANDLERS if isinstance(node.layer, kinds)), None)
            if handler is None:
                raise UnsupportedError(f"no operation for {node.layer.kind}")
            handler(self, node)
        last = self.nodes[-1]
        if self.operations[-1].code not in (ops.STORE_ROWS, ops.STORE_PIXELS):
            self._emit(ops.STORE, self._read(last.name).view, None)
        return Program(tuple(self.operations), tuple(self.stores), self.recipes, self.source)

    def convolution(self, node: Node) -> None:
        x = self._image(node.inputs[0])
        shape = self.net.weights[node.weights["weight"]].shape
        if node.layer.attributes()["groups"] != 1:
            raise UnsupportedError("groups of channels")
        N, C = shape[:2]
        KH, KW = (1, shape[2]) if len(shape) == 3 else shape[2:]
        code = self._way(node)
        if code == ops.TAPS and self._goes_in_pairs(node, KW):
            self._pairs(node, x, KH, KW)
            return
        if code != ops.TAPS:
            x = self._rimmed(x, _pads(node))
        op = self._make(node, code, x, fields={ops.KH: KH, ops.KW: KW, **_geometry(node)})
        across = C if code == ops.TAPS else x.store.pixel
        K = KH * KW * across

        def columns(W: Array) -> Array:
            """(N, C, KH, KW) -> a row of N for each term, taps first, zeros where x is padded, packed for the tile."""
            terms = np.zeros((KH, KW, across, N), np.float32)
            terms[:, :, :C] = W.reshape(N, C, KH, KW).transpose(2, 3, 1, 0)
            return pack(terms.reshape(K, N), aligned_zeros(packed_size(K, N)))

        def lanes(W: Array) -> Array:
            """(N, C, KH, KW) -> (N, KH, KW, pixel of x)."""
            flat = aligned_zeros(N * K)
            flat.reshape(N, KH, KW, across)[..., :C] = W.reshape(N, C, KH, KW).transpose(0, 2, 3, 1)
            return flat

        if code == ops.DOT:
            w = self._recipe("dot_lanes", node, (N * K,), lanes)
        else:
            w = self._recipe("pack_taps", node, (packed_size(K, N),), columns)
        self._weigh(op, w, self._bias(node, N, lambda b: b))

    def _goes_in_pairs(self, node: Node, KW: int) -> bool:
        stride, _, dilation = geometry(node.layer)
        N, _, WO = image_sizes(self.net.types[node.name].row_shape)
        return KW in (2, 3) and stride[-1] == dilation[-1] == 1 and WO > 1 and N >= LANES

    def _pairs(self, node: Node, x: View, KH: int, KW: int) -> None:
        """A convolution of two or three taps along a row, for two neighbouring outputs at a time (Winograd).

        With three taps g0, g1, g2 on d0 .. d3, four products do for six:
            m0 = g0 (d0 - d2)                   m1 = (g0 + g1 + g2) / 2 (d1 + d2)
            m2 = (g0 - g1 + g2) / 2 (d2 - d1)   m3 = g2 (d1 - d3)
            y0 = m0 + m1 + m2   y1 = m1 - m2 - m3
        With two taps on d0 .. d2, three for four:
            m0 = g0 (d0 - d1)   m1 = (g0 + g1) d1   m2 = g1 (d1 - d2)        y0 = m0 + m1   y1 = m1 - m2
        Each product is one over the channels and the kernel's rows: a convolution of KH x 1 taps.
        """
        (C, H, _), (N, HO, WO) = x.sizes, image_sizes(self.net.types[node.name].row_shape)
        planes, pairs = KW + 1, -(-WO // 2)
        numbers = _geometry(node)
        key = (x, KW, numbers[ops.PX], pairs)
        if key not in self.paired:  # phases of a transposed convolution share it
            given = self._own("", (planes * padded(C), H, pairs))
            self._emit(ops.PAIRS_IN, x, View(given.store, (C, H, pairs)), fields={ops.KW: KW, ops.PX: numbers[ops.PX]})
            self.paired[key] = given.store
        made = self._own("", (planes * padded(N), HO, pairs)).store
        for i in range(planes):
            part = View(self.paired[key], (C, H, pairs), channel=i * padded(C))
            fields = numbers | {ops.KH: KH, ops.KW: 1, ops.PX: 0}
            op = self._emit(ops.TAPS, part, View(made, (N, HO, pairs), channel=i * padded(N)), fields=fields)
            w = self._recipe("pack_pairs", node, (packed_size(KH * C, N),), _paired_weights(i, KH, KW))
            self._weigh(op, w, self._bias(node if i == 1 else None, N, lambda b: b))  # m1 is in both outputs
        self._make(node, ops.PAIRS_OUT, View(made, (N, HO, pairs)), fields={ops.KW: KW})

    def linear(self, node: Node) -> None:
        """From a vector or a flattened image, to a vector or, if a Reshape follows, to an image."""
        value = self._read(node.inputs[0])
        if len(self.net.types[node.name].shape) != 2:
            raise UnsupportedError("Linear over several vectors a row")
        x = value.view
        C, H, W = x.sizes
        if x.store.rim != (0, 0, 0, 0) or x.step != (1, 1):
            raise UnsupportedError("Linear over an image with a rim")
        pixel = x.store.pixel
        N, HO, WO = self._seen_as(node)
        wide = padded(N)
        K, columns = H * W * pixel, HO * WO * wide

        def order(w: Array) -> Array:
            """(D_out, D_in) with both axes in the order in which the images lie, zeros for the padding."""
            turned = np.zeros((H, W, pixel, HO, WO, wide), np.float32)
            turned[:, :, :C, :, :, :N] = w.reshape(N, HO, WO, C, H, W).transpose(4, 5, 3, 1, 2, 0)
            return pack(turned.reshape(K, columns), aligned_zeros(packed_size(K, columns)))

        def order_bias(b: Array) -> Array:
            turned = np.zeros((HO, WO, wide), np.float32)
            turned[..., :N] = b.reshape(N, HO, WO).transpose(1, 2, 0)
            return turned.reshape(-1)

        y = self._own(node.name, (N, HO, WO))
        op = self._emit(ops.DENSE, x, y, fields={ops.KH: K, ops.KW: columns})
        self.values[node.name] = Value(y, op, flat=(HO, WO) != (1, 1))
        self._weigh(
            op,
            self._recipe("pack_order", node, (packed_size(K, columns),), order),
            self._bias(node, columns, order_bias),
        )

    def _seen_as(self, node: Node) -> Sizes:
        """The image that a Linear's output becomes, through activations, by a Reshape."""
        value = node.name
        while len(readers := self._readers(value)) == 1 and isinstance(readers[0].layer, (*ACTIVATIONS, Reshape)):
            value = readers[0].name
            if isinstance(readers[0].layer, Reshape):
                return image_sizes(self.net.types[value].row_shape)
        return image_sizes(self.net.types[node.name].row_shape)

    def reshape(self, node: Node) -> None:
        value = self._read(node.inputs[0])
        sizes = self.net.types[node.name].row_shape
        if math.prod(sizes) != math.prod(value.view.sizes):
            raise UnsupportedError("a Reshape of padded rows")
        if image_sizes(sizes) == value.view.sizes:
            self.values[node.name] = Value(value.view, value.maker)
        elif len(sizes) == 1:
            self.values[node.name] = Value(value.view, value.maker, flat=True)
        else:
            raise UnsupportedError("a Reshape that moves channels")

    def activation(self, node: Node) -> None:
        assert isinstance(node.layer, Elementwise)
        if self._joins(node):
            value = self._read(node.inputs[0])
            if value.maker is None or value.maker.activation is not None:
                value.maker = self._emit(ops.ACTIVATE, value.view, value.view)
            value.maker.activation = node.layer
            self.values[node.name] = Value(value.view, None, value.flat)
            return
        op = self._make(node, ops.COPY, self._image(node.inputs[0]))
        op.activation = node.layer
        self.values[node.name].maker = None

    def interleave(self, node: Node) -> None:
        if len(set(node.inputs)) < len(node.inputs) or node.name not in self.values:
            raise UnsupportedError("phases that are no convolutions, or one of them twice")
        store = self.values[node.name].view.store
        for value in node.inputs:
            made = self.values.get(value)
            if made is None or made.maker is None or made.view.store is not store or len(self._readers(value)) != 1:
                raise UnsupportedError("phases that are no convolutions, or that others read, too")

    def pool(self, node: Node) -> None:
        layer = node.layer
        x = self._image(node.inputs[0])
        kernel: tuple[int, ...] = layer.attributes()["kernel"]
        KH, KW = (1, kernel[0]) if len(kernel) == 1 else kernel
        code = ops.MAX_POOL if isinstance(layer, MaxPool1d | MaxPool2d) else ops.AVG_POOL
        fields = {ops.KH: KH, ops.KW: KW, **_geometry(node)}
        if isinstance(layer, AvgPool1d | AvgPool2d) and layer.count_pads:
            _, pads, _ = geometry(layer)
            tall, wide = (0, sum(pads)) if len(pads) == 2 else (pads[0] + pads[2], pads[1] + pads[3])
            fields |= {ops.OTHER: 1, ops.O_PIXEL: x.sizes[1] + tall, ops.O_ROW: x.sizes[2] + wide}
        self._make(node, code, x, fields=fields)

    def global_pool(self, node: Node) -> None:
        x = self._image(node.inputs[0])
        assert isinstance(node.layer, GlobalMax | GlobalMean)
        rank = len(self.net.types[node.inputs[0]].shape)
        if {axis % rank for axis in node.layer.axes} != set(range(2, rank)) or rank == 2:
            raise UnsupportedError("a reduction over other axes than the pixels")
        self._make(node, ops.GLOBAL_MAX if isinstance(node.layer, GlobalMax) else ops.GLOBAL_MEAN, x)

    def combine(self, node: Node) -> None:
        """Two values of one shape, or one of them a number a channel."""
        if node.weights or len(node.inputs) != 2:
            raise UnsupportedError(f"{node.layer.kind} of other than two values")
        views = [self._image(value) for value in node.inputs]
        sizes = image_sizes(self.net.types[node.name].row_shape)
        views.sort(key=lambda view: view.sizes != sizes)  # whole ones first
        x, other = views
        if x.sizes != sizes or other.sizes not in (sizes, (sizes[0], 1, 1)):
            raise UnsupportedError(f"{node.layer.kind} of these shapes")
        op = self._make(node, ops.ADD if isinstance(node.layer, Add) else ops.MUL, x, other=other)
        if other.sizes != sizes:
            op.fields |= {ops.O_PIXEL: 0, ops.O_ROW: 0}

    def batch_norm(self, node: Node) -> None:
        C = self.net.types[node.name].row_shape[0]
        roles, eps = tuple(node.weights), node.layer.attributes()["eps"]

        def factors(*arrays: Array) -> tuple[Array, Array]:
            wide = {role: array.astype(np.float64) for role, array in zip(roles, arrays, strict=True)}
            s = wide.get("weight", 1.0) / np.sqrt(wide["var"] + eps)
            return s, wide.get("bias", 0.0) - wide["mean"] * s

        op = self._make(node, ops.SCALE, self._image(node.inputs[0]))
        names = tuple(node.weights.values())
        w = Recipe("norm_factor", names, (C,), "float32", C, lambda *a: factors(*a)[0].astype(np.float32))
        b = Recipe("norm_shift", names, (C,), "float32", C, lambda *a: factors(*a)[1].astype(np.float32))
        self._weigh(op, w, b)

    def concat(self, node: Node) -> None:
        assert isinstance(node.layer, Concat)
        if node.layer.axis % len(self.net.types[node.name].shape) != 1:
            raise UnsupportedError("a Concat of other than channels")
        whole = self._own(node.name, image_sizes(self.net.types[node.name].row_shape), exact=True)
        channel = 0
        for value in node.inputs:
            x = self._image(value)
            self._emit(ops.COPY, x, View(whole.store, x.sizes, channel=channel))
            channel += x.sizes[0]
        self.values[node.name] = Value(whole, None)

    def normalise(self, node: Node) -> None:
        value = self._read(node.inputs[0])
        if len(self.net.types[node.name].shape) != 2 or value.view.sizes[1:] != (1, 1):
            raise UnsupportedError("a softmax over an image")
        self._make(node, ops.COPY, value.view)
        view = self.values[node.name].view
        self._emit(ops.NORMALISE, view, view, fields={ops.KH: NORMALISERS[node.layer.kind]})
        self.values[node.name] = Value(view, None)

    def embedding(self, node: Node) -> None:
        """Ids to vectors, side by side: (S, E) is an image of one row whose channels are last already."""
        if node.inputs[0] != self.source or len(self.net.types[self.source].shape) != 2:
            raise UnsupportedError("an Embedding in the middle")
        if given_ids(self.net, self.source) is None:
            raise UnsupportedError("ids are computed, and nobody could check them before the launch")
        behind = self._readers(node.name)
        if len(behind) != 1 or behind[0].layer != Permute((0, 2, 1)):
            raise UnsupportedError("an Embedding whose channels stay last")
        S, E = self.net.types[node.name].row_shape
        y = self._own(node.name, (E, 1, S), exact=True)
        op = self._emit(ops.LOOK_UP, None, y, fields={ops.C: E, ops.H: 1, ops.W: S})
        shape = self.net.weights[node.weights["weight"]].shape
        table = Recipe("as_is", (node.weights["weight"],), shape, "float32", 0, _native)
        self._weigh(op, table, Recipe("none", (), (0,), "float32", 0, lambda: np.zeros(0, np.float32)))
        self.values[node.name] = Value(y, None)

    def permute(self, node: Node) -> None:
        """Behind an Embedding it says what is there already; at the end, channels stay last."""
        before = self.by_name.get(node.inputs[0])
        if before is not None and isinstance(before.layer, Embedding):
            self.values[node.name] = self.values[before.name]
            return
        rank = len(self.net.types[node.name].shape)
        last = self.nodes[-1]
        at_end = node is last or (isinstance(last.layer, ToPixels) and self._readers(node.name) == [last])
        if node.layer != Permute((0, *range(2, rank), 1)) or not at_end:
            raise UnsupportedError("a Permute in the middle")
        self._emit(ops.STORE_ROWS, self._image(node.inputs[0]), None)

    def to_pixels(self, node: Node) -> None:
        if node is not self.nodes[-1] or not self.operations or self.operations[-1].code != ops.STORE_ROWS:
            raise UnsupportedError("ToPixels not behind a Permute that puts channels last, at the end")
        self.operations[-1].code = ops.STORE_PIXELS

    # -- weights --------------------------------------------------------------------------------------------

    def _recipe(self, op: str, node: Node, shape: tuple[int, ...], make: Callable[[Array], Array]) -> Recipe:
        return Recipe(op, (node.weights["weight"],), shape, "float32", 0, make)

    def _bias(self, node: Node | None, width: int, order: Callable[[Array], Array]) -> Recipe:
        """The bias padded to whole vectors, zero where there is none."""

        def bias(*given: Array) -> Array:
            flat = aligned_zeros(padded(width))
            if given:
                ordered = order(given[0])
                flat[: len(ordered)] = ordered
            return flat

        name = None if node is None else node.weights.get("bias")
        return Recipe("pad_bias", (name,) if name else (), (padded(width),), "float32", 0, bias)


def _paired_weights(i: int, KH: int, KW: int) -> Callable[[Array], Array]:
    def paired(W: Array) -> Array:
        """(N, C, KH, KW) -> what product i multiplies by, packed (KH * C, N); see _Lowering._pairs."""
        g = np.moveaxis(W.reshape(*W.shape[:2], KH, KW).astype(np.float64), -1, 0)
        if KW == 3:
            made = (g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2])[i]
        else:
            made = (g[0], g[0] + g[1], g[1])[i]
        N, C, _ = made.shape
        flat = aligned_zeros(packed_size(KH * C, N))
        return pack(made.transpose(2, 1, 0).reshape(KH * C, N).astype(np.float32), flat)

    return paired


def _native(table: Array) -> Array:
    return np.ascontiguousarray(table, np.float32)


def _pads(node: Node) -> Rim:
    _, pads, _ = geometry(node.layer)
    return (pads[0], pads[1], pads[2], pads[3]) if len(pads) == 4 else (0, pads[0], 0, pads[1])


def _around(a: Rim, b: Rim) -> Rim:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


def _geometry(node: Node) -> dict[int, int]:
    stride, pads, dilation = geometry(node.layer)
    if len(stride) == 1:
        stride, pads, dilation = (1, *stride), (0, pads[0]), (1, *dilation)
    numbers = (*stride, *dilation, *pads[:2])
    return dict(zip((ops.SY, ops.SX, ops.DY, ops.DX, ops.PY, ops.PX), numbers, strict=True))


_HANDLERS: tuple[tuple[tuple[type, ...], Callable[[_Lowering, Node], None]], ...] = (
    ((Convolution,), _Lowering.convolution),
    ((Linear,), _Lowering.linear),
    ((Reshape,), _Lowering.reshape),
    (ACTIVATIONS, _Lowering.activation),
    ((Interleave,), _Lowering.interleave),
    ((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), _Lowering.pool),
    ((GlobalMax, GlobalMean), _Lowering.global_pool),
    ((Add, Mul), _Lowering.combine),
    ((BatchNorm1d, BatchNorm2d), _Lowering.batch_norm),
    ((Concat,), _Lowering.concat),
    ((Softmax, LogSoftmax), _Lowering.normalise),
    ((Embedding,), _Lowering.embedding),
    ((Permute,), _Lowering.permute),
    ((ToPixels,), _Lowering.to_pixels),
)
SUPPORTED = tuple(kind for kinds, _ in _HANDLERS for kind in kinds)
