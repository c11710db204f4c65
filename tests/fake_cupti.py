"""CUPTI in Python, beside the driver in fake_cuda: it records what that driver does, and knows what is enabled."""

# ruff: noqa: N802 - the names are CUPTI's

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

from fake_cuda import FakeDriver, Launched

MEMCPY, MEMSET, KERNEL, EXTERNAL = 1, 2, 10, 39
AHEAD_NS = 5_000_000_000  # how far the host's clock is ahead of CUPTI's
# Of cupti_activity.h in CUDA 13.0 to 13.4: test_cupti.py compiles a program that prints them, where there is a header.
OFFSETS = {
    KERNEL: {"kind": 0, "start": 16, "end": 24, "correlationId": 92, "name": 104},
    MEMCPY: {"kind": 0, "start": 16, "end": 24, "correlationId": 44},
    MEMSET: {"kind": 0, "start": 16, "end": 24, "correlationId": 44},
    EXTERNAL: {"kind": 0, "externalKind": 4, "externalId": 8, "correlationId": 16},
}
FORMATS = {"kind": "I", "start": "Q", "end": "Q", "correlationId": "I", "name": "Q", "externalKind": "I",
           "externalId": "Q"}  # fmt: skip
SIZES = {
    130000: {KERNEL: 216, MEMCPY: 96, MEMSET: 88, EXTERNAL: 24},
    130001: {KERNEL: 216, MEMCPY: 96, MEMSET: 88, EXTERNAL: 24},
    130101: {KERNEL: 224, MEMCPY: 96, MEMSET: 88, EXTERNAL: 24},
    130202: {KERNEL: 224, MEMCPY: 96, MEMSET: 88, EXTERNAL: 24},
    130301: {KERNEL: 232, MEMCPY: 96, MEMSET: 88, EXTERNAL: 24},
    130401: {KERNEL: 248, MEMCPY: 112, MEMSET: 104, EXTERNAL: 24},
}


class _Entry:
    """A function of the library: ctypes sets its argument types."""

    def __init__(self, function: Callable[..., int]) -> None:
        self.function, self.argtypes = function, ()

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes)
        return self.function(*arguments)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.ids: list[int] = []


class FakeCupti:
    """The part of libcupti that onchip calls."""

    def __init__(self, now: Callable[[], int], version: int = 130001) -> None:
        """now  the host's clock"""
        self.now, self.version = now, version
        self.answers: dict[str, int] = {}  # function -> the code that it returns
        self.enabled: set[int] = set()
        self.enabled_calls: set[int] = set()
        self.subscribers = self.flushes = 0
        self.delivers: Callable[[int], bool] = lambda kind: True
        self._here, self._lock = _Thread(), threading.Lock()
        self._correlation = 100
        self._buffer: tuple[int, int] | None = None  # address and size of the one that is written to
        self._used = 0
        self._names: dict[str, Any] = {}
        for name in dir(FakeCupti):
            if name.startswith("cupti"):
                setattr(self, name, _Entry(getattr(self, name)))

    # -- what the driver does --------------------------------------------------------------------------------

    def watch(self, driver: FakeDriver, copy_ns: int = 0, advance: Callable[[int], None] = lambda ns: None) -> None:
        """Record the work of this driver. Kernels are timed by the clock; copies and memsets take `copy_ns`."""
        put, do, run, kinds = driver.put, driver._do, driver.run, [0]
        running: list[tuple[int, int]] = []  # correlation and kind of what the GPU does now

        def traced_put(stream: int, action: Callable[[], object]) -> None:
            correlation, kind = self._call_made(), kinds[0]

            def traced() -> None:
                running.append((correlation, kind))
                begin = self.now()
                action()
                if kind:
                    advance(copy_ns)
                    self._write(kind, start=begin, end=self.now(), correlationId=correlation)
                running.pop()

            put(stream, traced)

        def traced_do(action: Launched | Callable[[], object]) -> None:
            begin = self.now()
            do(action)
            correlation, kind = running[-1]
            if not isinstance(action, Launched) and not kind:  # a memset in a graph
                advance(copy_ns)
                self._write(MEMSET, start=begin, end=self.now(), correlationId=correlation)

        def traced_run(launched: Launched) -> None:
            begin = self.now()
            run(launched)
            self.ran(launched.kernel, begin, self.now(), running[-1][0])

        def of_kind(kind: int, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                kinds[0] = kind
                try:
                    return real(*arguments)
                finally:
                    kinds[0] = 0

            return call

        driver.put, driver._do, driver.run = traced_put, traced_do, traced_run
        for name, kind in (("cuMemcpyHtoDAsync", MEMCPY), ("cuMemcpyDtoHAsync", MEMCPY), ("cuMemsetD8Async", MEMSET)):
            setattr(driver, name, of_kind(kind, getattr(driver, name)))

    def ran(self, kernel: str, begin: int, end: int, correlation: int) -> None:
        name = self._names.setdefault(kernel, ctypes.create_string_buffer(kernel.encode()))
        self._write(KERNEL, start=begin, end=end, correlationId=correlation, name=ctypes.addressof(name))

    def _call_made(self) -> int:
        with self._lock:
            self._correlation += 1
            correlation = self._correlation
        if self._here.ids and self.enabled_calls:
            self._write(EXTERNAL, externalKind=3, externalId=self._here.ids[-1], correlationId=correlation)
        return correlation

    def _write(self, kind: int, **fields: int) -> None:
        if kind in self.enabled and self.delivers(kind):
            with self._lock:
                record = self.record(kind, **fields)
                if self._buffer is None or self._used + len(record) > self._buffer[1]:
                    self._finish_buffer()
                    address, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
                    self._request(ctypes.pointer(address), ctypes.pointer(size), ctypes.pointer(most))
                    assert address.value is not None
                    assert (address.value % 8, most.value) == (0, 0)
                    self._buffer, self._used = (address.value, size.value), 0
                ctypes.memmove(self._buffer[0] + self._used, record, len(record))
                self._used += len(record)

    def record(self, kind: int, **fields: int) -> bytes:
        """A record in this version's layout, with these times of the host's clock."""
        made = bytearray(b"\xab" * SIZES[self.version][kind])
        for name, value in {"kind": kind, **fields}.items():
            value -= AHEAD_NS if name in ("start", "end") and value else 0
            struct.pack_into(FORMATS[name], made, OFFSETS[kind][name], value)
        return bytes(made)

    def _finish_buffer(self) -> None:
        if self._buffer is not None:
            address, size = self._buffer
            self._buffer = None
            self._complete(None, 0, address, size, self._used)

    # -- the library -----------------------------------------------------------------------------------------

    def cuptiGetVersion(self, version):
        version._obj.value = self.version
        return self.answers.get("cuptiGetVersion", 0)

    def cuptiGetTimestamp(self, now):
        now._obj.value = self.now() - AHEAD_NS
        return 0

    def cuptiGetResultString(self, code, text):
        text._obj.value = f"CUPTI_ERROR_{code}".encode()
        return 0

    def cuptiSubscribe(self, subscriber, on_call, data):
        if code := self.answers.get("cuptiSubscribe", 39 if self.subscribers else 0):
            return code
        self.subscribers += 1
        return 0

    def cuptiUnsubscribe(self, subscriber):
        self.subscribers -= 1
        return 0

    def cuptiActivityRegisterCallbacks(self, request, complete):
        self._request, self._complete = request, complete
        return 0

    def cuptiActivityEnable(self, kind):
        self.enabled.add(kind)
        return self.answers.get("cuptiActivityEnable", 0)

    def cuptiActivityDisable(self, kind):
        self.enabled.discard(kind)
        return 0

    def cuptiActivityEnableDriverApi(self, call, is_enabled):
        (self.enabled_calls.add if is_enabled else self.enabled_calls.discard)(call)
        return 0

    def cuptiActivityPushExternalCorrelationId(self, kind, tag):
        assert kind == 3
        self._here.ids.append(tag)
        return 0

    def cuptiActivityPopExternalCorrelationId(self, kind, tag):
        self._here.ids.pop()
        return 0

    def cuptiActivityFlushAll(self, flag):
        self.flushes += 1
        with self._lock:
            self._finish_buffer()
        return self.answers.get("cuptiActivityFlushAll", 0)

    def cuptiActivityGetNextRecord(self, buffer, nbytes, record):
        last = record._obj.value
        sizes = SIZES[self.version]
        following = buffer if last is None else last + sizes[ctypes.c_uint32.from_address(last).value]
        if following >= buffer + nbytes:
            return self.answers.get("cuptiActivityGetNextRecord", 12)
        record._obj.value = following
        return 0
