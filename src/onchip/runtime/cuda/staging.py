"""Rows from the host's memory through a GPU and back: in chunks, through page-locked memory, copies under work.

A chunk goes through one of five slots: copied into the slot's page-locked memory, from there to the GPU, through the
kernels, and back the same way. A slot has a stream of its own, so one slot's copy in, another one's kernel and a
third one's copy out run at the same time. Slots are kept: the next batch finds them ready.

The host's copies are the narrowest part: one core moves some 10 GB/s, the bus 55. So they are cut into pieces that
several threads share, and those of the next chunks are offered before this one's are waited for: no thread pauses.
Of a batch of some MB a chunk is one piece, and the caller's thread begins with the first before any other is awake.
A batch of one chunk has nothing to run beside it: its pieces are short, and each goes to the GPU as soon as it is
copied. 1 MB of ids: 100 us by one core and 19 on the bus behind it; 50 and 10 in two pieces by two.

Not done: to page-lock the caller's own array (cuMemHostRegister) takes longer than to copy it, so it would pay only
for arrays that come again, which nobody promises (who knows can pin them: they are then read where they lie); to give
pageable memory to cuMemcpyHtoDAsync makes the driver stage it, by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.network.recipe import Array
from onchip.plan.host_call import OFTEN_BYTES
from onchip.runtime.cuda.chunks import AHEAD, LEAST_CHUNK_BYTES, OFFERED_BYTES, SLOTS, Cut, place_in_slot
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.pinned import LockedArrays, PinnedBuffer
from onchip.runtime.cuda.shared_work import Work, offer
from onchip.runtime.cuda.status import Ticket

LEAST_SLOT_BYTES = 128 << 10
# Up to here a chunk's kernel reads and writes the host's memory itself: one launch instead of a launch and two copies,
# each of which waits some us for the one before it. Above, a kernel that reads a value twice would pay twice.
MAPPED_BYTES = LEAST_CHUNK_BYTES
SMALL_BYTES = 8 << 20  # a batch up to here is one such chunk, copied by the caller's thread alone
# OFTEN_BYTES: and so much, where kernels read what lies there more than once
MOST_LAYOUTS = 64  # of small batches, kept

# enqueue(pointers of inputs, pointers of outputs, rows, stream): puts the network's work on the stream; the ticket is
# asked what its kernels found
Enqueue = Callable[[Sequence[int], Sequence[int], int, int], Ticket | None]


class _Slot:
    """A stream and, of the same size, page-locked memory on the host and memory on the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.stream = gpu.new_stream()
        self._gpu = gpu
        self._pinned: PinnedBuffer | None = None  # the host's memory
        self._buffer: Buffer | None = None
        self._copies: list[Work] = []  # into or out of the host's memory, now
        self.ticket: Ticket | None = None  # of the kernels that it is with

    def holds(self, nbytes: int) -> bool:
        """Whether that much lies on the host: then it stays where it is."""
        return self._pinned is not None and len(self._pinned.bytes) >= nbytes

    def ask(self, nbytes: int, row_bytes: int = 0) -> None:
        """Have at least this much on the host and, if it is told what a row takes in all, on the GPU too.

        Nothing of the slot may be in use.
        """
        size = max(LEAST_SLOT_BYTES, 1 << (nbytes - 1).bit_length())  # slow: in steps, seldom
        if not self.holds(nbytes):
            self._pinned = None
            self._pinned = PinnedBuffer(self._gpu, size)
        if row_bytes and (self._buffer is None or self._buffer.nbytes < nbytes):
            self._buffer = None
            self._buffer = self._gpu.reserve(size, row_bytes)

    @property
    def pinned(self) -> int:
        """Where the host's memory is."""
        assert self._pinned is not None
        return self._pinned.pointer

    @property
    def on_gpu(self) -> int:
        assert self._buffer is not None
        return self._buffer.pointer

    def bytes_at(self, offset: int, nbytes: int) -> Array:
        assert self._pinned is not None
        return self._pinned.bytes[offset : offset + nbytes]

    def start_copy(self, target: Array, source: Array) -> Work | None:
        """Let another thread do it, if there is one; a small one is done here and now."""
        if len(source) < OFFERED_BYTES:
            _copy(target, source)
            return None
        work = Work(_copy, target, source)
        self._copies.append(work)
        offer(work)
        return work

    def finish_copies(self) -> None:
        for work in self._copies:
            work.wait()
        self._copies.clear()

    def wait(self, first_row: int) -> None:
        """Return when the kernels are done; raise what they found in the chunk that begins with this row."""
        self._gpu.synchronise(self.stream)
        if self.ticket is not None:
            self.ticket.check(first_row)

    def abandon(self) -> None:
        """Return when nobody uses the slot, whatever became of its rows."""
        for work in self._copies:
            work.drop()
        self._copies.clear()
        self._gpu.driver.cuStreamSynchronize(self.stream)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where a small batch lies in page-locked memory: as arrays of its own types and shapes, and as pointers."""

    inputs: list[Array]
    outputs: list[Array]
    given: list[int]
    made: list[int]


class Staging:
    """The slots of one GPU. One batch at a time goes through them: the bus is what two would wait for."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lock = threading.Lock()
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._cuts: dict[tuple[Any, ...], Cut] = {}  # of larger batches
        self._locked = LockedArrays(gpu)
        with gpu:
            self._small = _Slot(gpu)  # where the layouts are
            self._slots = [_Slot(gpu) for _ in range(SLOTS)]

    def run(
        self, inputs: Sequence[Array], outputs: Sequence[Array], B: int, enqueue: Enqueue, is_read_often: bool = False
    ) -> None:
        """Run B > 0 rows; returns when the outputs are complete.

        inputs, outputs  (B, ...) each, row-major
        is_read_often    the kernels read a number of them more than once: it should not come over the bus each time
        """
        key = (is_read_often, len(inputs), *[(array.shape, array.dtype) for array in (*inputs, *outputs)])
        with self._lock, self.gpu:
            try:
                cut = self._cuts.get(key)
                layout = None if cut else self._layouts.get(key) or self._lay_out(key, inputs, outputs, B)
                if layout is not None:
                    self._run_small(layout, inputs, outputs, B, enqueue)
                else:
                    cut = cut or self._cut(key, inputs, outputs, B)
                    self._run_chunks(_Batch(self.gpu, cut, inputs, outputs, B, self._locked, is_read_often), enqueue)
            except BaseException:
                for slot in (self._small, *self._slots):  # nobody may use its memory when the next batch does
                    slot.abandon()
                raise

    # -- small batches: all is prepared; a copy, a launch, a wait and a copy -------------------------------------

    def _lay_out(
        self, key: tuple[Any, ...], inputs: Sequence[Array], outputs: Sequence[Array], B: int
    ) -> _Layout | None:
        """The layout of a small batch, kept; None for a larger one."""
        arrays = (*inputs, *outputs)
        *offsets, size = place_in_slot([array.nbytes // B for array in arrays], B)
        if size > (OFTEN_BYTES if key[0] else SMALL_BYTES):
            return None
        slot, n = self._small, len(inputs)
        if not slot.holds(size) or len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()  # first: where they are will not be ours
        slot.ask(size)
        staged = [
            slot.bytes_at(offset, array.nbytes).view(array.dtype).reshape(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]
        pointers = [slot.pinned + offset for offset in offsets]
        layout = self._layouts[key] = _Layout(staged[:n], staged[n:], pointers[:n], pointers[n:])
        return layout

    def _run_small(
        self, layout: _Layout, inputs: Sequence[Array], outputs: Sequence[Array], B: int, enqueue: Enqueue
    ) -> None:
        for target, source in zip(layout.inputs, inputs, strict=True):
            target[...] = source
        self._small.ticket = enqueue(layout.given, layout.made, B, self._small.stream)
        self._small.wait(0)
        for target, source in zip(outputs, layout.outputs, strict=True):
            target[...] = source

    # -- larger ones ---------------------------------------------------------------------------------------------

    def _cut(self, key: tuple[Any, ...], inputs: Sequence[Array], outputs: Sequence[Array], B: int) -> Cut:
        if len(self._cuts) >= MOST_LAYOUTS:
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
        """A batch of one chunk: pieces of it are on the bus while others are copied."""
        batch.fill(0, slot)
        batch.send(0, slot, enqueue)
        slot.finish_copies()
        batch.drain(0, slot)
        slot.finish_copies()


class _Batch:
    """A batch in chunks: what happens to one of them, in this order, each time in the same slot."""

    def __init__(
        self, gpu: Gpu, cut: Cut, inputs: Sequence[Array], outputs: Sequence[Array], B: int, locked: LockedArrays,
        is_read_often: bool,
    ) -> None:  # fmt: skip
        self._gpu, self._cut, self._B, self._given = gpu, cut, B, len(inputs)
        arrays = (*inputs, *outputs)
        self.count = cut.count
        self._locked = [locked.pointer(array) for array in arrays]  # where it begins; 0: it is to be copied
        self._arrays = [array if at else _as_bytes(array) for array, at in zip(arrays, self._locked, strict=True)]
        self._in_place = cut.size <= MAPPED_BYTES and not any(self._locked) and not is_read_often
        self._works: dict[tuple[int, int], Work | None] = {}  # by array and begin: a piece's copy, where it was offered

    def fill(self, number: int, slot: _Slot) -> None:
        """Start to copy a chunk's inputs to the slot; the outputs that it held before may still be copied from it."""
        slot.ask(self._cut.size, 0 if self._in_place else sum(self._cut.row_bytes))
        for i, begin, end in self._copied(range(self._given)):
            rows = self._rows(i, number, begin, end)
            self._works[i, begin] = slot.start_copy(slot.bytes_at(self._cut.offsets[i] + begin, len(rows)), rows)

    def send(self, number: int, slot: _Slot, enqueue: Enqueue) -> None:
        """Put the GPU's work for a chunk on the slot's stream, when the inputs are in and the last outputs out."""
        cut, n = self._cut, self._given
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
            locked + start * size if locked else at
            for size, locked, at in zip(cut.row_bytes, self._locked, staged, strict=True)
        ]
        driver = self._gpu.driver
        for i in range(n):
            is_cut = self.count == 1 and not self._locked[i]
            for begin, end in cut.pieces[i] if is_cut else [(0, rows * cut.row_bytes[i])]:
                if is_cut and (work := self._works[i, begin]) is not None:
                    work.wait()
                places = on_gpu[i] + begin, on_host[i] + begin, end - begin
                call(driver.cuMemcpyHtoDAsync, *places, slot.stream, doing="copying to the GPU")
        slot.ticket = enqueue(on_gpu[:n], on_gpu[n:], rows, slot.stream)
        for i in range(n, len(on_gpu)):
            places = on_host[i], on_gpu[i], rows * cut.row_bytes[i]
            call(driver.cuMemcpyDtoHAsync, *places, slot.stream, doing="copying from the GPU")

    def drain(self, number: int, slot: _Slot) -> None:
        """Wait for the GPU and start to copy a chunk's outputs from the slot."""
        slot.wait(number * self._cut.step)
        for i, begin, end in self._copied(range(self._given, len(self._arrays))):
            rows = self._rows(i, number, begin, end)
            slot.start_copy(rows, slot.bytes_at(self._cut.offsets[i] + begin, len(rows)))

    def _copied(self, arrays: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """The pieces of those arrays that the host copies: (array, begin, end)."""
        for i in arrays:
            if not self._locked[i]:
                for begin, end in self._cut.pieces[i]:
                    yield i, begin, end

    def _rows(self, i: int, number: int, begin: int, end: int) -> Array:
        """A piece of the caller's array; of the last chunk, what there is of it."""
        at = number * self._cut.step * self._cut.row_bytes[i]
        return self._arrays[i][at + begin : at + end]


_made: dict[int, Staging] = {}  # by the GPU's number
_making = threading.Lock()


def staging_of(gpu: Gpu) -> Staging:
    """The slots of a GPU, made when they are first asked for."""
    with _making:
        found = _made.get(gpu.index)
        if found is None or found.gpu is not gpu:
            found = _made[gpu.index] = Staging(gpu)
        return found


def _as_bytes(array: Array) -> Array:
    """The same memory as bytes; bytes of any type can be copied while other threads run."""
    return array.reshape(-1).view(np.uint8)


def _copy(target: Array, source: Array) -> None:
    np.copyto(target, source)
