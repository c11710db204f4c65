"""Rows from the host's memory through a GPU and back: in chunks, through page-locked memory, copies under work.

A chunk goes through one of three slots: copied into the slot's page-locked memory, from there to the GPU, through the
kernels, and back the same way. A slot has a stream of its own, so one slot's copy in, another one's kernel and a
third one's copy out run at the same time. Slots are kept: the next batch finds them ready.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from onchip.errors import DeviceError
from onchip.runtime.cpu import core_count
from onchip.runtime.driver import OUT_OF_MEMORY, call, fail
from onchip.runtime.gpu import Buffer, Gpu
from onchip.spec.recipe import Array

SLOTS = 3
SLOT_BYTES = 16 << 20  # of inputs and outputs: what a copy takes dwarfs what it costs to start one
LEAST_CHUNK_BYTES = 1 << 20
LEAST_SLOT_BYTES = 128 << 10
MAPPED_BYTES = 64 << 10  # up to here the kernel reads and writes the host's memory itself: one launch, no copy
ALIGN_BYTES = 256
COPY_THREADS = 8  # one core copies at a fraction of the bus's rate

# enqueue(pointers of inputs, pointers of outputs, rows, stream): puts the network's work on the stream
Enqueue = Callable[[Sequence[int], Sequence[int], int, int], None]


def chunk_rows(row_bytes: Sequence[int], B: int) -> int:
    """Rows a chunk of a batch: a few chunks even of a smaller one, so that there is something to overlap.

    row_bytes  of each input and output
    """
    padding, of_all = ALIGN_BYTES * len(row_bytes), max(1, sum(row_bytes))
    most, least = (max(1, (size - padding) // of_all) for size in (SLOT_BYTES, LEAST_CHUNK_BYTES))
    return min(most, max(least, -(-B // (2 * SLOTS))))


def place_in_slot(row_bytes: Sequence[int], rows: int) -> list[int]:
    """Where each array of a chunk begins in its slot, and the size of all."""
    sizes = (-(-size * rows // ALIGN_BYTES) * ALIGN_BYTES for size in row_bytes)
    return [0, *accumulate(sizes)]


class _Slot:
    """A stream and, of the same size, page-locked memory on the host and memory on the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.stream = gpu.new_stream()
        self._gpu = gpu
        self.pinned = 0  # where the host's memory is
        self._bytes: Array = np.empty(0, np.uint8)  # the same as an array
        self._buffer: Buffer | None = None

    def ask(self, nbytes: int, row_bytes: int = 0) -> None:
        """Have at least this much on the host and, if it is told what a row takes in all, on the GPU too.

        Nothing of the slot may be in use.
        """
        if len(self._bytes) < nbytes:
            self._lock_memory(max(LEAST_SLOT_BYTES, 1 << (nbytes - 1).bit_length()))  # slow: in steps, seldom
        if row_bytes and (self._buffer is None or self._buffer.nbytes < nbytes):
            self._buffer = None
            self._buffer = self._gpu.reserve(len(self._bytes), row_bytes)

    def _lock_memory(self, nbytes: int) -> None:
        driver, pinned = self._gpu.driver, self.pinned
        self.pinned, self._bytes = 0, self._bytes[:0]
        if pinned:
            call(driver.cuMemFreeHost, pinned)
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        code, pointer = driver.cuMemHostAlloc(nbytes, flags)
        if int(code) == OUT_OF_MEMORY:
            hint = "free memory of the host, or raise the limit: ulimit -l"
            raise DeviceError("the host's memory cannot be page-locked", got=f"{nbytes:,} B asked for", hint=hint)
        if code:
            fail(int(code), f"page-locking {nbytes:,} B")
        self.pinned = int(pointer)
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pinned))

    @property
    def on_gpu(self) -> int:
        assert self._buffer is not None
        return self._buffer.pointer

    def bytes_at(self, offset: int, nbytes: int) -> Array:
        return self._bytes[offset : offset + nbytes]


@dataclass(frozen=True)
class _Sent:
    """A chunk on its way."""

    slot: _Slot
    start: int
    stop: int


class Staging:
    """The slots of one GPU. One batch at a time goes through them: the bus is what two would wait for."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        with gpu:
            self._slots = [_Slot(gpu) for _ in range(SLOTS)]

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], B: int, enqueue: Enqueue) -> None:
        """Run B > 0 rows; returns when the outputs are complete.

        inputs, outputs  (B, ...) each, row-major
        """
        arrays = [_as_bytes(array) for array in (*inputs, *outputs)]
        row_bytes = [len(array) // B for array in arrays]
        with self._lock, self._gpu:
            is_small = sum(row_bytes) * B <= MAPPED_BYTES
            try:
                (self._run_mapped if is_small else self._run_chunks)(arrays, row_bytes, len(inputs), B, enqueue)
            except BaseException:
                for slot in self._slots:  # nobody may write to a slot's memory when the next batch uses it
                    self._gpu.driver.cuStreamSynchronize(slot.stream)
                raise

    def _run_mapped(self, arrays: list[Array], row_bytes: list[int], given: int, B: int, enqueue: Enqueue) -> None:
        slot = self._slots[0]
        *offsets, size = place_in_slot(row_bytes, B)
        slot.ask(size)
        staged = [slot.bytes_at(offset, len(array)) for offset, array in zip(offsets, arrays, strict=True)]
        for target, source in zip(staged[:given], arrays, strict=False):
            target[:] = source
        pointers = [slot.pinned + offset for offset in offsets]
        enqueue(pointers[:given], pointers[given:], B, slot.stream)
        self._gpu.synchronise(slot.stream)
        for target, source in zip(arrays[given:], staged[given:], strict=True):
            target[:] = source

    def _run_chunks(self, arrays: list[Array], row_bytes: list[int], given: int, B: int, enqueue: Enqueue) -> None:
        step = chunk_rows(row_bytes, B)
        *offsets, size = place_in_slot(row_bytes, step)
        locked = [_is_locked(self._gpu, array) for array in arrays]
        sent: deque[_Sent] = deque()

        def chunk(i: int, start: int, stop: int) -> Array:
            return arrays[i][start * row_bytes[i] : stop * row_bytes[i]]

        def finish(done: _Sent) -> None:
            self._gpu.synchronise(done.slot.stream)
            for i in range(given, len(arrays)):
                if not locked[i]:
                    target = chunk(i, done.start, done.stop)
                    _copy(target, done.slot.bytes_at(offsets[i], len(target)))

        for number, start in enumerate(range(0, B, step)):
            if len(sent) == SLOTS:
                finish(sent.popleft())
            slot, stop = self._slots[number % SLOTS], min(start + step, B)
            slot.ask(size, sum(row_bytes))
            pointers = [slot.on_gpu + offset for offset in offsets]
            ends = []  # the host's end of each copy
            for i, offset in enumerate(offsets):
                rows = chunk(i, start, stop)
                staged = slot.bytes_at(offset, len(rows))
                if i < given and not locked[i]:
                    _copy(staged, rows)
                ends.append(rows if locked[i] else staged)
            for pointer, rows in zip(pointers[:given], ends, strict=False):
                self._send(pointer, rows, slot.stream)
            enqueue(pointers[:given], pointers[given:], stop - start, slot.stream)
            for pointer, rows in zip(pointers[given:], ends[given:], strict=True):
                self._fetch(pointer, rows, slot.stream)
            sent.append(_Sent(slot, start, stop))
        while sent:
            finish(sent.popleft())

    def _send(self, pointer: int, rows: Array, stream: int) -> None:
        copy = self._gpu.driver.cuMemcpyHtoDAsync
        call(copy, pointer, rows.ctypes.data, rows.nbytes, stream, doing="copying to the GPU")

    def _fetch(self, pointer: int, rows: Array, stream: int) -> None:
        copy = self._gpu.driver.cuMemcpyDtoHAsync
        call(copy, rows.ctypes.data, pointer, rows.nbytes, stream, doing="copying from the GPU")


@functools.cache
def staging_of(gpu: Gpu) -> Staging:
    return Staging(gpu)


def _as_bytes(array: Array) -> Array:
    """The same memory as bytes; bytes of any type can be copied while other threads run."""
    return array.reshape(-1).view(np.uint8)


def _copy(target: Array, source: Array) -> None:
    """target[:] = source, by several threads where it is worth it."""
    parts = min(COPY_THREADS, core_count(), len(source) // LEAST_CHUNK_BYTES)
    if parts <= 1:
        target[:] = source
        return
    cuts = [len(source) * i // parts for i in range(parts + 1)]
    pieces = [slice(*ends) for ends in pairwise(cuts)]
    list(_copiers().map(lambda piece: np.copyto(target[piece], source[piece]), pieces))


@functools.cache
def _copiers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="onchip-copy")


def _is_locked(gpu: Gpu, rows: Array) -> bool:
    """Whether the caller's memory is page-locked already (torch's pin_memory): it needs no copy of ours."""
    if not len(rows):
        return False
    kind: Any = gpu.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    host = int(gpu.driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    ends = (rows.ctypes.data, rows.ctypes.data + len(rows) - 1)
    answers = [gpu.driver.cuPointerGetAttribute(kind, end) for end in ends]
    return all(not code and int(found) == host for code, found in answers)
