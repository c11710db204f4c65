"""Stream host rows through a GPU: in chunks, through pinned memory, with copies and kernels overlapped.

A chunk uses one of five slots: it is copied into the slot's pinned memory, from there to the GPU, processed, and copied
back the same way. Each slot has its own stream, so one slot's copy in, another's kernel and a third's copy out overlap.
The next batch reuses the slots.

The host copies are the bottleneck: one core moves some 10 GB/s, the bus 55. So several threads copy slices of them, and
the next chunks' copies are queued before waiting for this one's, so that no thread idles. For a batch of some MB a
chunk is one slice, and the caller's thread copies the first one before another thread is awake. A batch of one chunk
overlaps with no other: its slices are short, and each goes to the GPU as soon as it is copied. 1 MB of ids: 100 us on
one core, then 19 on the bus; 50 and 10 in two slices on two cores.

Rejected: pinning the caller's array (cuMemHostRegister) takes longer than copying it, so it only pays for arrays that
are reused (callers can pin those: they are then read in place); with pageable memory, cuMemcpyHtoDAsync stages on one
thread of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.network.recipe import Array
from onchip.plan.host_call import OFTEN_BYTES
from onchip.runtime.cuda.chunks import AHEAD, MIN_CHUNK_BYTES, OFFERED_BYTES, SLOTS, Cut, place_in_slot
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.pinned import PinnedArrays, PinnedBuffer
from onchip.runtime.cuda.shared_work import Work, offer
from onchip.runtime.cuda.status import Ticket
from onchip.runtime.cuda.timed_copies import TO_GPU, TO_HOST, HostCopies

MIN_SLOT_BYTES = 128 << 10
# Up to this size, a chunk's kernels access mapped host memory: no copies, each of which waits some us for the previous
# operation. Above it, copies are better: a value that a kernel reads twice would cross the bus twice.
MAPPED_BYTES = MIN_CHUNK_BYTES
SMALL_BYTES = 8 << 20  # a batch up to this size is one such chunk, copied by the caller's thread
# OFTEN_BYTES is the limit instead of SMALL_BYTES if kernels read mapped values more than once.
MAX_LAYOUTS = 64  # of small batches, cached

# enqueue(pointers of inputs, pointers of outputs, rows, stream): puts the network's work on the stream; the ticket
# reports the errors that its kernels found
Enqueue = Callable[[Sequence[int], Sequence[int], int, int], Ticket | None]
_DOING = {TO_GPU: "copying to the GPU", TO_HOST: "copying from the GPU"}
HostCopy = Callable[[Array, Array], None]  # copy(target, source)


class _Slot:
    """A stream with pinned host memory and, for larger batches, GPU memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.stream = gpu.new_stream()
        self._gpu = gpu
        self._pinned: PinnedBuffer | None = None  # on the host
        self._buffer: Buffer | None = None
        self._copies: list[Work] = []  # in flight, into or out of pinned memory
        self.ticket: Ticket | None = None  # of the kernels in flight

    def holds(self, nbytes: int) -> bool:
        """Whether the pinned memory has at least this size, so that `reserve` does not reallocate it."""
        return self._pinned is not None and len(self._pinned.bytes) >= nbytes

    def reserve(self, nbytes: int, row_bytes: int = 0) -> None:
        """Allocate at least this much pinned memory and, if row_bytes (bytes per row in total) is given, GPU memory.

        The slot must be idle.
        """
        size = max(MIN_SLOT_BYTES, 1 << (nbytes - 1).bit_length())  # powers of two, as reallocating is slow
        if not self.holds(nbytes):
            self._pinned = None
            self._pinned = PinnedBuffer(self._gpu, size)
        if row_bytes and (self._buffer is None or self._buffer.nbytes < nbytes):
            self._buffer = None
            self._buffer = self._gpu.reserve(size, row_bytes)

    @property
    def pinned(self) -> int:
        """The address of the pinned memory."""
        assert self._pinned is not None
        return self._pinned.pointer

    @property
    def on_gpu(self) -> int:
        assert self._buffer is not None
        return self._buffer.pointer

    def bytes_at(self, offset: int, nbytes: int) -> Array:
        assert self._pinned is not None
        return self._pinned.bytes[offset : offset + nbytes]

    def start_copy(self, copy: HostCopy, target: Array, source: Array) -> Work | None:
        """Queue a copy for another thread; copy few bytes immediately."""
        if len(source) < OFFERED_BYTES:
            copy(target, source)
            return None
        work = Work(copy, target, source)
        self._copies.append(work)
        offer(work)
        return work

    def finish_copies(self) -> None:
        for work in self._copies:
            work.wait()
        self._copies.clear()

    def wait(self, first_row: int) -> None:
        """Return when the kernels are done; raise the errors they found in the chunk that begins with this row."""
        self._gpu.synchronise(self.stream)
        if self.ticket is not None:
            self.ticket.check(first_row)

    def abandon(self) -> None:
        """Return when the slot is idle, discarding its rows."""
        for work in self._copies:
            work.drop()
        self._copies.clear()
        self._gpu.driver.cuStreamSynchronize(self.stream)


@dataclass(frozen=True, eq=False)
class _Layout:
    """A small batch in pinned memory: as typed, shaped arrays and as pointers."""

    inputs: list[Array]
    outputs: list[Array]
    x_pointers: list[int]
    y_pointers: list[int]


class Staging:
    """The slots of one GPU. One batch at a time uses them, as two would compete for the bus."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lock = threading.Lock()
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._cuts: dict[tuple[Any, ...], Cut] = {}  # of larger batches
        self._pinned = PinnedArrays(gpu)
        with gpu:
            self._small = _Slot(gpu)  # for small batches: its pinned memory holds their layouts
            self._slots = [_Slot(gpu) for _ in range(SLOTS)]

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], B: int, enqueue: Enqueue, is_read_often: bool = False,
        copies: HostCopies | None = None,
    ) -> None:  # fmt: skip
        """Run B > 0 rows; returns when the outputs are complete.

        inputs, outputs  (B, ...) each, row-major
        is_read_often    the kernels read elements more than once: they should not cross the bus each time
        copies           records the copies
        """
        key = (is_read_often, len(inputs), *[(array.shape, array.dtype) for array in (*inputs, *outputs)])
        with self._lock, self.gpu:
            try:
                cut = self._cuts.get(key)
                layout = None if cut else self._layouts.get(key) or self._make_layout(key, inputs, outputs, B)
                if layout is not None:
                    self._run_small(layout, inputs, outputs, B, enqueue, copies)
                else:
                    cut = cut or self._cut(key, inputs, outputs, B)
                    batch = _Batch(self.gpu, cut, inputs, outputs, B, self._pinned, is_read_often, copies)
                    self._run_chunks(batch, enqueue)
            except BaseException:
                for slot in (self._small, *self._slots):  # the next batch must find them idle
                    slot.abandon()
                raise

    # -- small batches, with cached layouts: copy in, launch, wait, copy out -------------------------------------

    def _make_layout(
        self, key: tuple[Any, ...], inputs: Sequence[Array], outputs: Sequence[Array], B: int
    ) -> _Layout | None:
        """The cached layout of a small batch; None for a larger one."""
        arrays = (*inputs, *outputs)
        *offsets, size = place_in_slot([array.nbytes // B for array in arrays], B)
        if size > (OFTEN_BYTES if key[0] else SMALL_BYTES):
            return None
        slot, n = self._small, len(inputs)
        if not slot.holds(size) or len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()  # before their memory is replaced
        slot.reserve(size)
        staged = [
            slot.bytes_at(offset, array.nbytes).view(array.dtype).reshape(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]
        pointers = [slot.pinned + offset for offset in offsets]
        layout = self._layouts[key] = _Layout(staged[:n], staged[n:], pointers[:n], pointers[n:])
        return layout

    def _run_small(
        self, layout: _Layout, inputs: Sequence[Array], outputs: Sequence[Array], B: int, enqueue: Enqueue,
        copies: HostCopies | None,
    ) -> None:  # fmt: skip
        copy_in, copy_out = _host_copies(copies)
        for target, source in zip(layout.inputs, inputs, strict=True):
            copy_in(target, source)
        self._small.ticket = enqueue(layout.x_pointers, layout.y_pointers, B, self._small.stream)
        self._small.wait(0)
        for target, source in zip(outputs, layout.outputs, strict=True):
            copy_out(target, source)

    # -- larger batches, in chunks -------------------------------------------------------------------------------

    def _cut(self, key: tuple[Any, ...], inputs: Sequence[Array], outputs: Sequence[Array], B: int) -> Cut:
        if len(self._cuts) >= MAX_LAYOUTS:
            self._cuts.clear()
        cut = self._cuts[key] = Cut.of([array.nbytes // B for array in (*inputs, *outputs)], B)
        return cut

    def _run_chunks(self, batch: _Batch, enqueue: Enqueue) -> None:
        if batch.count == 1:
            self._run_chunk(batch, enqueue, self._slots[0])
            return
        for number in range(batch.count + SLOTS - 1):
            if number < batch.count:
                batch.fill(number, self._slots[number % SLOTS])
            if 0 <= number - AHEAD < batch.count:
                batch.send(number - AHEAD, self._slots[(number - AHEAD) % SLOTS], enqueue)
            if number >= SLOTS - 1:  # the slot that is filled next
                batch.drain(number - SLOTS + 1, self._slots[(number + 1) % SLOTS])
        for slot in self._slots:
            slot.finish_copies()

    def _run_chunk(self, batch: _Batch, enqueue: Enqueue, slot: _Slot) -> None:
        """A batch of one chunk: some slices are on the bus while others are copied."""
        batch.fill(0, slot)
        batch.send(0, slot, enqueue)
        slot.finish_copies()
        batch.drain(0, slot)
        slot.finish_copies()


class _Batch:
    """A batch in chunks. The methods are the steps of one chunk, in this order, in one slot."""

    def __init__(
        self, gpu: Gpu, cut: Cut, inputs: Sequence[Array], outputs: Sequence[Array], B: int, pinned: PinnedArrays,
        is_read_often: bool, copies: HostCopies | None,
    ) -> None:  # fmt: skip
        self._gpu, self._cut, self._B, self._input_count = gpu, cut, B, len(inputs)
        arrays = (*inputs, *outputs)
        self._copies, (self._copy_in, self._copy_out) = copies, _host_copies(copies)
        self.count = cut.count
        self._pinned_at = [pinned.pointer(array) for array in arrays]  # address if pinned; 0: copy through the slot
        self._arrays = [array if at else _as_bytes(array) for array, at in zip(arrays, self._pinned_at, strict=True)]
        self._in_place = cut.size <= MAPPED_BYTES and not any(self._pinned_at) and not is_read_often
        self._works: dict[tuple[int, int], Work | None] = {}  # by array and begin of a slice: its copy, if queued

    def fill(self, number: int, slot: _Slot) -> None:
        """Start copying a chunk's inputs into the slot; outputs of its previous chunk may still be copied out."""
        slot.reserve(self._cut.size, 0 if self._in_place else sum(self._cut.row_bytes))
        for i, begin, end in self._copied(range(self._input_count)):
            rows = self._rows(i, number, begin, end)
            staged = slot.bytes_at(self._cut.offsets[i] + begin, len(rows))
            self._works[i, begin] = slot.start_copy(self._copy_in, staged, rows)

    def send(self, number: int, slot: _Slot, enqueue: Enqueue) -> None:
        """Enqueue a chunk's work on the slot's stream, after the host copies of its inputs and of previous outputs."""
        cut, n = self._cut, self._input_count
        start = number * cut.step
        rows = min(cut.step, self._B - start)
        staged = [slot.pinned + offset for offset in cut.offsets]
        if self.count > 1 or self._in_place:
            slot.finish_copies()
        if self._in_place:
            slot.ticket = enqueue(staged[:n], staged[n:], rows, slot.stream)
            return
        on_gpu = [slot.on_gpu + offset for offset in cut.offsets]
        on_host = [
            pinned + start * size if pinned else slot_address
            for size, pinned, slot_address in zip(cut.row_bytes, self._pinned_at, staged, strict=True)
        ]
        driver = self._gpu.driver
        for i in range(n):
            is_cut = self.count == 1 and not self._pinned_at[i]
            for begin, end in cut.slices[i] if is_cut else [(0, rows * cut.row_bytes[i])]:
                if is_cut and (work := self._works[i, begin]) is not None:
                    work.wait()
                copy = on_gpu[i] + begin, on_host[i] + begin, end - begin
                self._send_copy(TO_GPU, driver.cuMemcpyHtoDAsync, copy, slot.stream)
        slot.ticket = enqueue(on_gpu[:n], on_gpu[n:], rows, slot.stream)
        for i in range(n, len(on_gpu)):
            copy = on_host[i], on_gpu[i], rows * cut.row_bytes[i]
            self._send_copy(TO_HOST, driver.cuMemcpyDtoHAsync, copy, slot.stream)

    def _send_copy(self, name: str, function: Any, copy: tuple[int, int, int], stream: int) -> None:
        before = None if self._copies is None else self._copies.mark(stream)
        call(function, *copy, stream, doing=_DOING[name])
        if self._copies is not None and before is not None:
            self._copies.enqueued(name, copy[2], before, stream)

    def drain(self, number: int, slot: _Slot) -> None:
        """Wait for the GPU and start copying a chunk's outputs out of the slot."""
        slot.wait(number * self._cut.step)
        if self._copies is not None:
            self._copies.read(slot.stream)
        for i, begin, end in self._copied(range(self._input_count, len(self._arrays))):
            rows = self._rows(i, number, begin, end)
            slot.start_copy(self._copy_out, rows, slot.bytes_at(self._cut.offsets[i] + begin, len(rows)))

    def _copied(self, arrays: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """The slices of these arrays that the host copies: (array, begin, end)."""
        for i in arrays:
            if not self._pinned_at[i]:
                for begin, end in self._cut.slices[i]:
                    yield i, begin, end

    def _rows(self, i: int, number: int, begin: int, end: int) -> Array:
        """A slice of the caller's array; the last chunk may be shorter."""
        at = number * self._cut.step * self._cut.row_bytes[i]
        return self._arrays[i][at + begin : at + end]


_stagings: dict[int, Staging] = {}  # by GPU index
_stagings_lock = threading.Lock()


def staging_of(gpu: Gpu) -> Staging:
    """The slots of a GPU, created on first use."""
    with _stagings_lock:
        found = _stagings.get(gpu.index)
        if found is None or found.gpu is not gpu:
            found = _stagings[gpu.index] = Staging(gpu)
        return found


def _as_bytes(array: Array) -> Array:
    """The same memory as bytes: NumPy releases the GIL while it copies them, whatever the dtype."""
    return array.reshape(-1).view(np.uint8)


def _host_copies(copies: HostCopies | None) -> tuple[HostCopy, HostCopy]:
    """Copies into pinned memory and out of it."""
    return (_copy, _copy) if copies is None else (copies.copy_in, copies.copy_out)


def _copy(target: Array, source: Array) -> None:
    target[...] = source  # np.copyto takes 0.3 us longer
