"""The inner loops of scans, in vector registers: along a row in blocks of 16 numbers, or down 16 columns.

Idea      A block's own running totals take four steps, with what stands 1, 2, 4 and 8 places before; then all of them
          meet what came before the block. Only that is a chain from block to block: one operation for 16 numbers.
Floats    Sums and products of float32 are made in float64 and rounded once, where they are written: the vector units
          have time for it while memory is waited for.
Same bits A block is 16 numbers and its order is the same, whatever the width of the machine's vectors.
Products  A product of floats may leave their range where left-to-right multiplication would not: 16 numbers make inf,
          and a 0 that came before makes NaN of it. As long as all running totals lie in SAFE no way to bracket them
          can: the product of any numbers in a row is a quotient of two of those. Else the caller is told.
NaN       The larger of two numbers is the first of equals, and a NaN if either is one: max and min are associative to
          the bit.
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
STRIP = 4 * BLOCK  # columns side by side
STREAM_ALIGNMENT = 16  # bytes; NumPy's arrays have it
_CHAINS = 4  # blocks that are added up side by side
_LINE_BYTES = 64
SAFE = (2.0**-500, 2.0**500)  # sizes: the quotient of two such is neither subnormal nor infinite in float64
_MASK = ir.VectorType(ir.IntType(1), BLOCK)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scan_row(
    typing_context: Any, x: Any, y: Any, first: Any, count: Any, carry: Any, exclusive: Any, reverse: Any,
    stream: Any, ahead: Any, op: Any,
) -> Any:  # fmt: skip
    """Running totals of x[first : first + count] after `carry`, to the same places of y; whether they are sound.

    x, y     pointers to numbers of one dtype; y may be x
    reverse  from the last number to the first
    stream   past the caches: all blocks of y must lie at multiples of STREAM_ALIGNMENT
    ahead    fetch what stands so many numbers after each
    op       a literal: which of OPS
    """
    if not isinstance(op, types.IntegerLiteral):
        return None  # asks Numba to come again with literals
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
    """Running totals down `columns` columns, STRIP or at most BLOCK of them; whether they are sound.

    first  x[first] is the first number
    step   numbers from one row to the next; backwards if negative
    carry  pointer to what came before, a total a column; that of the first is carry[column]
    ends   such a pointer, to what the columns end with; may be carry
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
    """The totals of such columns, to totals[column] and on."""
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
    """The code of one op for one dtype."""

    def __init__(self, context: Any, b: Any, op: Any, x: Any, total: Any) -> None:
        self.b, how = b, ScanOp(OPS[op.literal_value])
        self.op, self.item_bytes, self.is_float = how.op, np.dtype(str(x.dtype)).itemsize, str(total)[0] == "f"
        self.total_bytes = np.dtype(str(total)).itemsize
        self.numbers, self.totals = (ir.VectorType(context.get_value_type(kind), BLOCK) for kind in (x.dtype, total))
        # -0.0 + x is x for every x; 0.0 + -0.0 is not.
        identity = -0.0 if self.op == "sum" and self.is_float else how.identity(str(total)).item()
        self.identities = ir.Constant(self.totals, [identity] * BLOCK)
        self.no_numbers = ir.Constant(self.numbers, [identity] * BLOCK)

    def choose(self, flags: list[Any], variant: Callable[..., Callable[[], Any]]) -> Any:
        """Code for every choice of the flags, of which one will run; what it says, True if nothing."""
        b, choice = self.b, INT(0)
        said = cgutils.alloca_once_value(b, cgutils.true_bit)

        def case(body: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                answer = body()
                if answer is not None:
                    b.store(answer, said)

            return run

        for flag in flags:
            choice = b.add(b.mul(choice, INT(2)), b.zext(flag, INT))
        places = range(len(flags) - 1, -1, -1)
        cases = {i: case(variant(*(bool(i >> place & 1) for place in places))) for i in range(1 << len(flags))}
        emit.switch(b, choice, cases)
        return b.load(said)

    # -- numbers in memory ---------------------------------------------------------------------------------

    def bytes_of(self, count: Any) -> Any:
        return self.b.mul(count, INT(self.item_bytes))

    def at(self, numbers: Any, first: Any) -> Any:
        return self.b.add(self.b.ptrtoint(numbers, INT), self.bytes_of(first))

    def total_at(self, totals: Any, first: Any) -> Any:
        return self.b.add(self.b.ptrtoint(totals, INT), self.b.mul(first, INT(self.total_bytes)))

    def mask(self, count: Any, is_low: bool) -> Any:
        """So many lanes, from the lowest or from the highest on."""
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
            v = emit.load(b, address, self.numbers, align=self.item_bytes)
        else:
            v = self._masked("load", self.numbers, address, self.item_bytes, mask, self.no_numbers)
        return v if self.numbers == self.totals else b.fpext(v, self.totals)

    def store(self, v: Any, address: Any, mask: Any = None, stream: bool = False) -> None:
        b = self.b
        if self.numbers != self.totals:
            v = b.fptrunc(v, self.numbers)
        if mask is not None:
            self._masked("store", v, address, self.item_bytes, mask)
        elif not stream:
            b.store(v, b.inttoptr(address, self.numbers.as_pointer()), align=self.item_bytes)
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

    def moved(self, v: Any, places: int) -> Any:
        """Every number so many places on; identities come in."""
        return self.shuffle(v, [i - places if 0 <= i - places < BLOCK else BLOCK for i in range(BLOCK)])

    def splat(self, number: Any) -> Any:
        return self.shuffle(self.b.insert_element(self.identities, number, INT32(0)), [0] * BLOCK)

    # -- products that may have left the range of floats -----------------------------------------------------

    def sizes(self, v: Any) -> list[Any]:
        """The least and the largest size, of every lane of a vector; nothing where there is nothing to watch."""
        if not (self.is_float and self.op == "product"):
            return []
        kind = ir.FunctionType(self.totals, [self.totals])
        size = self.b.call(cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fabs.v{BLOCK}f64"), [v])
        return [size, size]

    def widened(self, sizes: list[Any], v: Any) -> list[Any]:
        """With those of v. A NaN changes neither: it came from x, and all that follows is NaN either way."""
        if not sizes:
            return []
        b, (size, _) = self.b, self.sizes(v)
        return [
            b.select(b.fcmp_ordered(sign, size, so_far), size, so_far) for sign, so_far in zip("<>", sizes, strict=True)
        ]

    def is_sound(self, sizes: list[Any]) -> Any:
        """Whether everything was in SAFE; None where there is nothing to watch."""
        if not sizes:
            return None
        b, flags = self.b, ir.IntType(BLOCK)
        least, most = (ir.Constant(self.totals, [limit] * BLOCK) for limit in SAFE)
        good = b.and_(b.fcmp_ordered(">=", sizes[0], least), b.fcmp_ordered("<=", sizes[1], most))
        return b.icmp_signed("==", b.bitcast(good, flags), flags(-1))

    # -- along a row ---------------------------------------------------------------------------------------

    def scan_row(
        self, x: Any, y: Any, count: Any, carry: Any, ahead: Any, exclusive: bool, reverse: bool, stream: bool
    ) -> Any:
        """Whole blocks, then what is left: in reverse from the end, and the rest lies before them."""
        b, onwards = self.b, -1 if reverse else 1
        rest = b.and_(count, INT(BLOCK - 1))
        whole = b.sub(count, rest)

        def block(at: Any, carry: Any, sizes: list[Any], mask: Any, stream: bool) -> list[Any]:
            v = self.load(b.add(x, at), mask)
            for places in (1, 2, 4, 8):
                v = self.combine(self.moved(v, onwards * places), v)
            own = self.moved(v, onwards) if exclusive else v
            made = self.combine(self.splat(carry), own)
            self.store(made, b.add(y, at), mask, stream)
            end = self.combine(carry, b.extract_element(v, INT32(0 if reverse else BLOCK - 1)))
            return [end, *self.widened(sizes, made)]

        def next_block(i: Any, values: list[Any]) -> list[Any]:
            at = self.bytes_of(b.sub(b.sub(count, INT(BLOCK)), i) if reverse else i)
            self.fetch(b.add(b.add(x, at), ahead))
            return block(at, values[0], values[1:], None, stream)

        def last_block(i: Any, values: list[Any]) -> list[Any]:
            at = b.sub(rest, INT(BLOCK)) if reverse else whole
            return block(self.bytes_of(at), values[0], values[1:], self.mask(rest, is_low=not reverse), False)

        values = emit.loop(b, INT(0), whole, BLOCK, [carry, *self.sizes(self.splat(carry))], next_block)
        carry, *sizes = emit.loop(b, INT(0), rest, BLOCK, values, last_block)
        return self.is_sound(self.widened(sizes, self.splat(carry)))

    def total_row(self, x: Any, count: Any) -> Any:
        """In chains over the blocks, then over the chains, then over the lanes; products of floats in their order."""
        b = self.b
        if self.is_float and self.op == "product":
            return self.product_of_row(x, count)
        whole = b.and_(count, INT(-BLOCK))
        bulk = b.and_(count, INT(-BLOCK * _CHAINS))

        def block(i: Any, mask: Any = None) -> Any:
            return self.load(b.add(x, self.bytes_of(i)), mask)

        def several(i: Any, totals: list[Any]) -> list[Any]:
            return [self.combine(total, block(b.add(i, INT(c * BLOCK)))) for c, total in enumerate(totals)]

        def one(i: Any, totals: list[Any]) -> list[Any]:
            return [self.combine(totals[0], block(i)), *totals[1:]]

        totals = emit.loop(b, INT(0), bulk, BLOCK * _CHAINS, [self.identities] * _CHAINS, several)
        totals = emit.loop(b, bulk, whole, BLOCK, totals, one)
        rest = self.mask(b.sub(count, whole), is_low=True)
        totals = [self.combine(totals[0], block(whole, rest)), *totals[1:]]
        while len(totals) > 1:
            totals = [self.combine(totals[c], totals[c + 1]) for c in range(0, len(totals), 2)]
        (v,) = totals
        for places in (8, 4, 2, 1):
            v = self.combine(v, self.moved(v, -places))
        return b.extract_element(v, INT32(0))

    def product_of_row(self, x: Any, count: Any) -> Any:
        """Only of numbers side by side: others may leave the range of floats although no running total does."""
        b = self.b
        bulk = b.and_(count, INT(-BLOCK * _CHAINS))

        def paired(v: Any, w: Any, lanes: int, run: int) -> Any:
            """Of runs of lanes, the first times the second, the third times the fourth..; of v and w in turns."""
            order = [i + j for j in range(0, lanes, 2 * run) for i in (*range(run), *range(BLOCK, BLOCK + run))]
            order = order if v is not w else [i for i in order if i < BLOCK]
            kind = ir.VectorType(INT32, len(order))
            return b.fmul(*(b.shuffle_vector(v, w, ir.Constant(kind, [i + at for i in order])) for at in (0, run)))

        def several(i: Any, totals: list[Any], left: Any = None) -> list[Any]:
            v = []
            for c in range(_CHAINS):
                mask = None if left is None else self.mask(b.sub(left, INT(c * BLOCK)), is_low=True)
                v.append(self.load(b.add(x, self.bytes_of(b.add(i, INT(c * BLOCK)))), mask))
            v = [paired(v[0], v[1], BLOCK, 1), paired(v[2], v[3], BLOCK, 1)]
            one = paired(v[0], v[1], BLOCK, 2)  # four numbers of every block, then the next four
            for lanes, run in ((BLOCK, _CHAINS), (BLOCK // 2, _CHAINS), (4, 1), (2, 1)):
                one = paired(one, one, lanes, run)
            return [b.fmul(totals[0], b.extract_element(one, INT32(0)))]

        one = ir.Constant(self.totals.element, 1.0)
        totals = emit.loop(b, INT(0), bulk, BLOCK * _CHAINS, [one], several)
        return several(bulk, totals, b.sub(count, bulk))[0]

    # -- down columns --------------------------------------------------------------------------------------

    def masks(self, columns: Any, is_wide: bool) -> list[Any]:
        """One for every vector of a strip; None: all of it."""
        return [None] * (STRIP // BLOCK) if is_wide else [self.mask(columns, is_low=True)]

    def scan_strip(
        self, x: Any, y: Any, step: Any, count: Any, carry: Any, ends: Any, exclusive: bool, masks: list[Any]
    ) -> Any:
        b = self.b

        def row(i: Any, values: list[Any]) -> list[Any]:
            at = self.bytes_of(b.mul(i, step))
            made, sizes = [], values[len(masks) :]
            for v, (mask, before) in enumerate(zip(masks, values, strict=False)):
                here = b.add(at, INT(v * BLOCK * self.item_bytes))
                after = self.combine(before, self.load(b.add(x, here), mask))
                self.store(before if exclusive else after, b.add(y, here), mask)
                made.append(after)
                sizes = self.widened(sizes, after)
            return [*made, *sizes]

        places = [INT(v * BLOCK * self.total_bytes) for v in range(len(masks))]
        totals = [self.load_totals(b.add(carry, at), mask) for at, mask in zip(places, masks, strict=True)]
        sizes = self.sizes(totals[0])
        for total in totals[1:]:
            sizes = self.widened(sizes, total)
        values = emit.loop(b, INT(0), count, 1, [*totals, *sizes], row)
        totals, sizes = values[: len(masks)], values[len(masks) :]
        for total, at, mask in zip(totals, places, masks, strict=True):
            self.store_totals(total, b.add(ends, at), mask)
        return self.is_sound(sizes)

    def total_strip(self, x: Any, step: Any, count: Any, to: Any, masks: list[Any]) -> None:
        b = self.b

        def row(i: Any, totals: list[Any]) -> list[Any]:
            at = b.add(x, self.bytes_of(b.mul(i, step)))
            loaded = [self.load(b.add(at, INT(v * BLOCK * self.item_bytes)), mask) for v, mask in enumerate(masks)]
            return [self.combine(total, v) for total, v in zip(totals, loaded, strict=True)]

        totals = emit.loop(b, INT(0), count, 1, [self.identities] * len(masks), row)
        for v, (mask, total) in enumerate(zip(masks, totals, strict=True)):
            self.store_totals(total, b.add(to, INT(v * BLOCK * self.total_bytes)), mask)
