"""The inner loops of scans, in vector registers: along a row in blocks of 16 elements, or down 16 columns.

Idea      A block is scanned in four shuffle steps, by 1, 2, 4 and 8 lanes; then the carry is added to all lanes. Only
          the carry depends on the previous block: one operation per 16 elements.
Floats    float32 sums and products are computed in float64 and rounded once, at the store: memory is the bottleneck.
Same bits A block is 16 elements in one order, whatever the machine's vector width.
Products  A block's product may overflow where left-to-right multiplication would not: 16 elements give inf, and times
          an earlier 0 that is NaN. While all prefix products lie in SAFE no bracketing can overflow: the product of any
          range is a quotient of two of them. Otherwise the caller receives False.
NaN       max and min return the first of equals, and NaN if either is NaN: they are associative to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import INT, INT32
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.network.scan_op import OPS, ScanOp

BLOCK = 16
STRIP = 4 * BLOCK  # columns at a time
STREAM_ALIGNMENT = 16  # bytes; NumPy's arrays have it
_CHAINS = 4  # blocks accumulated independently
_LINE_BYTES = 64
SAFE = (2.0**-500, 2.0**500)  # magnitudes: a quotient of two is neither subnormal nor infinite in float64
_MASK = ir.VectorType(ir.IntType(1), BLOCK)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scan_row(
    typing_context: Any, x: Any, y: Any, first: Any, count: Any, carry: Any, exclusive: Any, reverse: Any,
    stream: Any, ahead: Any, op: Any,
) -> Any:  # fmt: skip
    """Scan x[first : first + count] after `carry` into the same range of y; return whether the results are safe.

    x, y     pointers to elements of one dtype; y may be x
    reverse  from the last element to the first
    stream   with non-temporal stores: all blocks of y must be aligned to STREAM_ALIGNMENT
    ahead    prefetch distance, in elements
    op       a literal: an index of OPS
    """
    if not isinstance(op, types.IntegerLiteral):
        return None  # Numba retries with literals
    total = _total_type(op, x)
    signature = types.boolean(x, y, types.int64, types.int64, total, *(types.boolean,) * 3, types.int64, op)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = _Emitter(context, b, op, x, total)
        x_at, y_at = (code.at(p, args[2]) for p in args[:2])
        count, carry, *flags, ahead = args[3:9]

        def variant(exclusive: bool, reverse: bool, stream: bool) -> Callable[[], Any]:
            return lambda: code.scan_row(x_at, y_at, count, carry, code.bytes_of(ahead), exclusive, reverse, stream)

        return code.choose(flags, variant)

    return signature, codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def total_row(typing_context: Any, x: Any, first: Any, count: Any, op: Any) -> Any:
    """The total of x[first : first + count]."""
    if not isinstance(op, types.IntegerLiteral):
        return None
    total = _total_type(op, x)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = _Emitter(context, b, op, x, total)
        return code.total_row(code.at(args[0], args[1]), args[2])

    return total(x, types.int64, types.int64, op), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scan_strip(
    typing_context: Any, x: Any, y: Any, first: Any, step: Any, count: Any, columns: Any, carry: Any, ends: Any,
    column: Any, exclusive: Any, op: Any,
) -> Any:  # fmt: skip
    """Scan down `columns` columns, STRIP or at most BLOCK of them; return whether the results are safe.

    first  x[first] is the first element
    step   elements from one row to the next; negative: backwards
    carry  pointer to the carry-in per column; that of the first is carry[column]
    ends   pointer to the carry-out per column; may be carry
    """
    if not isinstance(op, types.IntegerLiteral):
        return None
    signature = types.boolean(x, y, *(types.int64,) * 4, carry, ends, types.int64, types.boolean, op)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = _Emitter(context, b, op, x, carry.dtype)
        x_at, y_at = (code.at(p, args[2]) for p in args[:2])
        totals, ends = (code.total_at(p, args[8]) for p in args[6:8])
        step, count, columns, exclusive = args[3], args[4], args[5], args[9]

        def variant(exclusive: bool, is_wide: bool) -> Callable[[], Any]:
            def run() -> Any:
                return code.scan_strip(x_at, y_at, step, count, totals, ends, exclusive, code.masks(columns, is_wide))

            return run

        return code.choose([exclusive, b.icmp_signed("==", columns, INT(STRIP))], variant)

    return signature, codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def total_strip(
    typing_context: Any, x: Any, first: Any, step: Any, count: Any, columns: Any, totals: Any, column: Any, op: Any
) -> Any:
    """The totals of `columns` columns, to totals[column] onwards."""
    if not isinstance(op, types.IntegerLiteral):
        return None

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = _Emitter(context, b, op, x, totals.dtype)
        x_at, to, (step, count, columns) = code.at(args[0], args[1]), code.total_at(args[5], args[6]), args[2:5]

        def variant(is_wide: bool) -> Callable[[], Any]:
            return lambda: code.total_strip(x_at, step, count, to, code.masks(columns, is_wide))

        code.choose([b.icmp_signed("==", columns, INT(STRIP))], variant)
        return context.get_dummy_value()

    return types.void(x, *(types.int64,) * 4, totals, types.int64, op), codegen


def _total_type(op: Any, x: Any) -> Any:
    return getattr(types, ScanOp(OPS[op.literal_value]).total_dtype(str(x.dtype)))


class _Emitter:
    """Emits the code of one op for one dtype."""

    def __init__(self, context: Any, b: Any, op: Any, x: Any, total: Any) -> None:
        self.b, scan = b, ScanOp(OPS[op.literal_value])
        self.op, self.item_bytes, self.is_float = scan.op, np.dtype(str(x.dtype)).itemsize, str(total)[0] == "f"
        self.total_bytes = np.dtype(str(total)).itemsize
        self.elements, self.totals = (ir.VectorType(context.get_value_type(kind), BLOCK) for kind in (x.dtype, total))
        # -0.0 + x is x for every x; 0.0 + -0.0 is not.
        identity = -0.0 if self.op == "sum" and self.is_float else scan.identity(str(total)).item()
        self.identities = ir.Constant(self.totals, [identity] * BLOCK)
        self.element_identities = ir.Constant(self.elements, [identity] * BLOCK)

    def choose(self, flags: list[Any], variant: Callable[..., Callable[[], Any]]) -> Any:
        """Code for every combination of flags, of which one runs; returns its result, True if it has none."""
        b, choice = self.b, INT(0)
        result = cgutils.alloca_once_value(b, cgutils.true_bit)

        def case(body: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                value = body()
                if value is not None:
                    b.store(value, result)

            return run

        for flag in flags:
            choice = b.add(b.mul(choice, INT(2)), b.zext(flag, INT))
        bits = range(len(flags) - 1, -1, -1)
        cases = {i: case(variant(*(bool(i >> bit & 1) for bit in bits))) for i in range(1 << len(flags))}
        emit.switch(b, choice, cases)
        return b.load(result)

    # -- loads and stores ----------------------------------------------------------------------------------

    def bytes_of(self, count: Any) -> Any:
        return self.b.mul(count, INT(self.item_bytes))

    def at(self, elements: Any, first: Any) -> Any:
        return self.b.add(self.b.ptrtoint(elements, INT), self.bytes_of(first))

    def total_at(self, totals: Any, first: Any) -> Any:
        return self.b.add(self.b.ptrtoint(totals, INT), self.b.mul(first, INT(self.total_bytes)))

    def mask(self, count: Any, is_low: bool) -> Any:
        """A mask of the lowest or the highest `count` lanes."""
        b = self.b
        least = INT32(0) if is_low else b.trunc(b.sub(INT(BLOCK), count), INT32)
        most = b.trunc(count, INT32) if is_low else INT32(BLOCK)
        lanes = ir.Constant(ir.VectorType(INT32, BLOCK), list(range(BLOCK)))
        first = ir.Constant(lanes.type, ir.Undefined)
        order = ir.Constant(lanes.type, [0] * BLOCK)
        least, most = (b.shuffle_vector(b.insert_element(first, n, INT32(0)), first, order) for n in (least, most))
        return b.and_(b.icmp_signed(">=", lanes, least), b.icmp_signed("<", lanes, most))

    def load(self, address: Any, mask: Any = None) -> Any:
        """A block as totals; identities where the mask is not set."""
        b = self.b
        if mask is None:
            v = emit.load(b, address, self.elements, align=self.item_bytes)
        else:
            v = self._masked("load", self.elements, address, self.item_bytes, mask, self.element_identities)
        return v if self.elements == self.totals else b.fpext(v, self.totals)

    def store(self, v: Any, address: Any, mask: Any = None, stream: bool = False) -> None:
        b = self.b
        if self.elements != self.totals:
            v = b.fptrunc(v, self.elements)
        if mask is not None:
            self._masked("store", v, address, self.item_bytes, mask)
        elif not stream:
            b.store(v, b.inttoptr(address, self.elements.as_pointer()), align=self.item_bytes)
        else:
            past_caches = b.module.add_metadata([INT32(1)])
            step = STREAM_ALIGNMENT // self.item_bytes
            for lane in range(0, BLOCK, step):
                order = ir.Constant(ir.VectorType(INT32, step), list(range(lane, lane + step)))
                part = b.shuffle_vector(v, v, order)
                to = b.inttoptr(b.add(address, INT(lane * self.item_bytes)), part.type.as_pointer())
                b.store(part, to, align=STREAM_ALIGNMENT).set_metadata("nontemporal", past_caches)

    def load_totals(self, address: Any, mask: Any) -> Any:
        if mask is None:
            return emit.load(self.b, address, self.totals, align=self.total_bytes)
        return self._masked("load", self.totals, address, self.total_bytes, mask, self.identities)

    def store_totals(self, v: Any, address: Any, mask: Any) -> None:
        if mask is None:
            self.b.store(v, self.b.inttoptr(address, self.totals.as_pointer()), align=self.total_bytes)
        else:
            self._masked("store", v, address, self.total_bytes, mask)

    def _masked(self, what: str, v: Any, address: Any, align: int, mask: Any, other: Any = None) -> Any:
        """Load a vector of type v, or store the vector v."""
        b, vector = self.b, v if what == "load" else v.type
        pointer, element = b.inttoptr(address, vector.as_pointer()), vector.element
        kind = f"f{64 if isinstance(element, ir.DoubleType) else 32}" if self.is_float else f"i{element.width}"
        name = f"llvm.masked.{what}.v{BLOCK}{kind}.p0"
        if what == "load":
            type_ = ir.FunctionType(vector, [pointer.type, INT32, _MASK, vector])
            return b.call(cgutils.get_or_insert_function(b.module, type_, name), [pointer, INT32(align), mask, other])
        type_ = ir.FunctionType(ir.VoidType(), [vector, pointer.type, INT32, _MASK])
        return b.call(cgutils.get_or_insert_function(b.module, type_, name), [v, pointer, INT32(align), mask])

    def fetch(self, address: Any) -> None:
        b, pointer = self.b, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, *[INT32] * 3])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        for line in range(0, BLOCK * self.item_bytes, _LINE_BYTES):
            at = b.inttoptr(b.add(address, INT(line)), pointer)
            b.call(function, [at, INT32(0), INT32(2), INT32(1)])  # to read, to L2, data

    # -- vectors -------------------------------------------------------------------------------------------

    def combine(self, earlier: Any, later: Any) -> Any:
        b = self.b
        if self.op == "sum":
            return b.fadd(earlier, later) if self.is_float else b.add(earlier, later)
        if self.op == "product":
            return b.fmul(earlier, later) if self.is_float else b.mul(earlier, later)
        sign = ">=" if self.op == "max" else "<="
        if self.is_float:
            wins = b.or_(b.fcmp_ordered(sign, earlier, later), b.fcmp_unordered("uno", earlier, earlier))
        else:
            wins = b.icmp_signed(sign, earlier, later)
        return b.select(wins, earlier, later)

    def shuffle(self, v: Any, order: list[int]) -> Any:
        return self.b.shuffle_vector(v, self.identities, ir.Constant(ir.VectorType(INT32, BLOCK), order))

    def shifted(self, v: Any, lanes: int) -> Any:
        """Shift lanes up; identities shift in."""
        return self.shuffle(v, [i - lanes if 0 <= i - lanes < BLOCK else BLOCK for i in range(BLOCK)])

    def splat(self, value: Any) -> Any:
        return self.shuffle(self.b.insert_element(self.identities, value, INT32(0)), [0] * BLOCK)

    # -- products that may overflow ----------------------------------------------------------------------------

    def sizes(self, v: Any) -> list[Any]:
        """Per lane, the smallest and the largest magnitude so far; [] if the op cannot overflow."""
        if not (self.is_float and self.op == "product"):
            return []
        kind = ir.FunctionType(self.totals, [self.totals])
        size = self.b.call(cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fabs.v{BLOCK}f64"), [v])
        return [size, size]

    def updated(self, sizes: list[Any], v: Any) -> list[Any]:
        """`sizes`, updated by v. A NaN changes neither: it came from x, and later results are NaN either way."""
        if not sizes:
            return []
        b, (size, _) = self.b, self.sizes(v)
        return [
            b.select(b.fcmp_ordered(sign, size, so_far), size, so_far) for sign, so_far in zip("<>", sizes, strict=True)
        ]

    def is_safe(self, sizes: list[Any]) -> Any:
        """Whether all magnitudes were in SAFE; None if the op cannot overflow."""
        if not sizes:
            return None
        b, flags = self.b, ir.IntType(BLOCK)
        least, most = (ir.Constant(self.totals, [limit] * BLOCK) for limit in SAFE)
        in_range = b.and_(b.fcmp_ordered(">=", sizes[0], least), b.fcmp_ordered("<=", sizes[1], most))
        return b.icmp_signed("==", b.bitcast(in_range, flags), flags(-1))

    # -- along a row ---------------------------------------------------------------------------------------

    def scan_row(
        self, x: Any, y: Any, count: Any, carry: Any, ahead: Any, exclusive: bool, reverse: bool, stream: bool
    ) -> Any:
        """Whole blocks, then the rest; in reverse, blocks from the end and the rest before them."""
        b, direction = self.b, -1 if reverse else 1
        rest = b.and_(count, INT(BLOCK - 1))
        whole = b.sub(count, rest)

        def block(at: Any, carry: Any, sizes: list[Any], mask: Any, stream: bool) -> list[Any]:
            v = self.load(b.add(x, at), mask)
            for lanes in (1, 2, 4, 8):
                v = self.combine(self.shifted(v, direction * lanes), v)
            scanned = self.shifted(v, direction) if exclusive else v
            results = self.combine(self.splat(carry), scanned)
            self.store(results, b.add(y, at), mask, stream)
            end = self.combine(carry, b.extract_element(v, INT32(0 if reverse else BLOCK - 1)))
            return [end, *self.updated(sizes, results)]

        def next_block(i: Any, values: list[Any]) -> list[Any]:
            at = self.bytes_of(b.sub(b.sub(count, INT(BLOCK)), i) if reverse else i)
            self.fetch(b.add(b.add(x, at), ahead))
            return block(at, values[0], values[1:], None, stream)

        def last_block(i: Any, values: list[Any]) -> list[Any]:
            at = b.sub(rest, INT(BLOCK)) if reverse else whole
            return block(self.bytes_of(at), values[0], values[1:], self.mask(rest, is_low=not reverse), False)

        values = emit.loop(b, INT(0), whole, BLOCK, [carry, *self.sizes(self.splat(carry))], next_block)
        carry, *sizes = emit.loop(b, INT(0), rest, BLOCK, values, last_block)
        return self.is_safe(self.updated(sizes, self.splat(carry)))

    def total_row(self, x: Any, count: Any) -> Any:
        """In chains over the blocks, then over chains, then over lanes; products of floats in order."""
        b = self.b
        if self.is_float and self.op == "product":
            return self.product_of_row(x, count)
        whole = b.and_(count, INT(-BLOCK))
        bulk = b.and_(count, INT(-BLOCK * _CHAINS))

        def block(i: Any, mask: Any = None) -> Any:
            return self.load(b.add(x, self.bytes_of(i)), mask)

        def add_blocks(i: Any, totals: list[Any]) -> list[Any]:
            return [self.combine(total, block(b.add(i, INT(c * BLOCK)))) for c, total in enumerate(totals)]

        def add_block(i: Any, totals: list[Any]) -> list[Any]:
            return [self.combine(totals[0], block(i)), *totals[1:]]

        totals = emit.loop(b, INT(0), bulk, BLOCK * _CHAINS, [self.identities] * _CHAINS, add_blocks)
        totals = emit.loop(b, bulk, whole, BLOCK, totals, add_block)
        rest = self.mask(b.sub(count, whole), is_low=True)
        totals = [self.combine(totals[0], block(whole, rest)), *totals[1:]]
        while len(totals) > 1:
            totals = [self.combine(totals[c], totals[c + 1]) for c in range(0, len(totals), 2)]
        (v,) = totals
        for lanes in (8, 4, 2, 1):
            v = self.combine(v, self.shifted(v, -lanes))
        return b.extract_element(v, INT32(0))

    def product_of_row(self, x: Any, count: Any) -> Any:
        """Multiplies adjacent ranges only: other products may overflow although no prefix product does."""
        b = self.b
        bulk = b.and_(count, INT(-BLOCK * _CHAINS))

        def paired(v: Any, w: Any, lanes: int, run: int) -> Any:
            """Products of adjacent runs of lanes, those of v and of w interleaved."""
            order = [i + j for j in range(0, lanes, 2 * run) for i in (*range(run), *range(BLOCK, BLOCK + run))]
            order = order if v is not w else [i for i in order if i < BLOCK]
            kind = ir.VectorType(INT32, len(order))
            return b.fmul(*(b.shuffle_vector(v, w, ir.Constant(kind, [i + at for i in order])) for at in (0, run)))

        def multiply_blocks(i: Any, totals: list[Any], left: Any = None) -> list[Any]:
            v = []
            for c in range(_CHAINS):
                mask = None if left is None else self.mask(b.sub(left, INT(c * BLOCK)), is_low=True)
                v.append(self.load(b.add(x, self.bytes_of(b.add(i, INT(c * BLOCK)))), mask))
            v = [paired(v[0], v[1], BLOCK, 1), paired(v[2], v[3], BLOCK, 1)]
            one = paired(v[0], v[1], BLOCK, 2)  # four elements of every block, then the next four
            for lanes, run in ((BLOCK, _CHAINS), (BLOCK // 2, _CHAINS), (4, 1), (2, 1)):
                one = paired(one, one, lanes, run)
            return [b.fmul(totals[0], b.extract_element(one, INT32(0)))]

        one = ir.Constant(self.totals.element, 1.0)
        totals = emit.loop(b, INT(0), bulk, BLOCK * _CHAINS, [one], multiply_blocks)
        return multiply_blocks(bulk, totals, b.sub(count, bulk))[0]

    # -- down columns --------------------------------------------------------------------------------------

    def masks(self, columns: Any, is_wide: bool) -> list[Any]:
        """One per vector of a strip; None: unmasked."""
        return [None] * (STRIP // BLOCK) if is_wide else [self.mask(columns, is_low=True)]

    def scan_strip(
        self, x: Any, y: Any, step: Any, count: Any, carry: Any, ends: Any, exclusive: bool, masks: list[Any]
    ) -> Any:
        b = self.b

        def row(i: Any, values: list[Any]) -> list[Any]:
            at = self.bytes_of(b.mul(i, step))
            new_totals, sizes = [], values[len(masks) :]
            for v, (mask, before) in enumerate(zip(masks, values, strict=False)):
                offset = b.add(at, INT(v * BLOCK * self.item_bytes))
                after = self.combine(before, self.load(b.add(x, offset), mask))
                self.store(before if exclusive else after, b.add(y, offset), mask)
                new_totals.append(after)
                sizes = self.updated(sizes, after)
            return [*new_totals, *sizes]

        offsets = [INT(v * BLOCK * self.total_bytes) for v in range(len(masks))]
        totals = [self.load_totals(b.add(carry, at), mask) for at, mask in zip(offsets, masks, strict=True)]
        sizes = self.sizes(totals[0])
        for total in totals[1:]:
            sizes = self.updated(sizes, total)
        values = emit.loop(b, INT(0), count, 1, [*totals, *sizes], row)
        totals, sizes = values[: len(masks)], values[len(masks) :]
        for total, at, mask in zip(totals, offsets, masks, strict=True):
            self.store_totals(total, b.add(ends, at), mask)
        return self.is_safe(sizes)

    def total_strip(self, x: Any, step: Any, count: Any, to: Any, masks: list[Any]) -> None:
        b = self.b

        def row(i: Any, totals: list[Any]) -> list[Any]:
            at = b.add(x, self.bytes_of(b.mul(i, step)))
            loaded = [self.load(b.add(at, INT(v * BLOCK * self.item_bytes)), mask) for v, mask in enumerate(masks)]
            return [self.combine(total, v) for total, v in zip(totals, loaded, strict=True)]

        totals = emit.loop(b, INT(0), count, 1, [self.identities] * len(masks), row)
        for v, (mask, total) in enumerate(zip(masks, totals, strict=True)):
            self.store_totals(total, b.add(to, INT(v * BLOCK * self.total_bytes)), mask)
