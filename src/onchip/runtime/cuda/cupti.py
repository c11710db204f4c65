"""The activity API of CUPTI through ctypes: when kernels, copies and memsets of this process ran on its GPUs."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from onchip.errors import DeviceError

LIBRARY, TOOLKIT = "libcupti.so.13", "/usr/local/cuda"
# CUPTI_ACTIVITY_KIND_*
MEMCPY, MEMSET, KERNEL, EXTERNAL_CORRELATION = 1, 2, 10, 39
# Of these driver calls CUPTI records under which id they were made (CUPTI_DRIVER_TRACE_CBID_*): cuMemsetD8Async,
# cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuGraphLaunch, cuLaunchKernelEx; then for per-thread default streams.
TAGGED_CALLS = (216, 277, 279, 514, 652, 428, 421, 422, 515, 653)
# CUPTI_API_VERSION of CUDA 13.0 to 13.4: later records are longer, these fields stay where they are.
KNOWN_VERSIONS = range(130000, 130500)
# start, end and correlationId of CUpti_ActivityMemcpy6 and CUpti_ActivityMemset4; with name: of CUpti_ActivityKernel10.
_COPY, _KERNEL = struct.Struct("<16xQQ12xI"), struct.Struct("<16xQQ60xI8xQ")
_EXTERNAL = struct.Struct("<8xQI")  # externalId and correlationId of CUpti_ActivityExternalCorrelation
_CUSTOM0 = 3  # CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0
_ALL_LIMIT, _OTHER_SUBSCRIBER = 12, 39  # CUPTI_ERROR_MAX_LIMIT_REACHED, _MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
_BUFFER_BYTES = 1 << 20  # about 4,000 records; CUPTI stops the launching thread for each new buffer
_TRIES = 5  # comparisons of two clocks: the shortest is the most accurate

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_OnCall = ctypes.CFUNCTYPE(None, _pointer, ctypes.c_int, ctypes.c_uint32, _pointer)
_OnRequest = ctypes.CFUNCTYPE(None, ctypes.POINTER(_pointer), ctypes.POINTER(_size), ctypes.POINTER(_size))
_OnComplete = ctypes.CFUNCTYPE(None, _pointer, ctypes.c_uint32, _pointer, _size, _size)
_ARGUMENTS = {
    "cuptiGetVersion": (_pointer,),
    "cuptiGetTimestamp": (_pointer,),
    "cuptiGetResultString": (ctypes.c_int, _pointer),
    "cuptiSubscribe": (_pointer, _OnCall, _pointer),
    "cuptiUnsubscribe": (_pointer,),
    "cuptiActivityRegisterCallbacks": (_OnRequest, _OnComplete),
    "cuptiActivityEnable": (ctypes.c_int,),
    "cuptiActivityDisable": (ctypes.c_int,),
    "cuptiActivityEnableDriverApi": (ctypes.c_uint32, ctypes.c_uint8),
    "cuptiActivityPushExternalCorrelationId": (ctypes.c_int, ctypes.c_uint64),
    "cuptiActivityPopExternalCorrelationId": (ctypes.c_int, _pointer),
    "cuptiActivityFlushAll": (ctypes.c_uint32,),
    "cuptiActivityGetNextRecord": (_pointer, _size, _pointer),
}


class CuptiError(DeviceError):
    """CUPTI cannot be used; the message says why, in a few words."""


class Activity(NamedTuple):
    """A kernel, copy or memset that ran."""

    kind: int
    correlation: int  # of the driver call that launched it; one for all nodes of a graph launch
    begin_ns: int  # of CUPTI's clock; 0: CUPTI could not tell
    end_ns: int
    name: int = 0  # address of a kernel's name


class Records(NamedTuple):
    activities: list[Activity]
    tags: dict[int, int]  # by correlation: the id under which the driver call was made


class Cupti:
    """A loaded CUPTI. Its records are for one user at a time."""

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            for name, types in _ARGUMENTS.items():
                getattr(library, name).argtypes = types
        except AttributeError as error:
            raise CuptiError(f"{LIBRARY} is incomplete: {error}") from None
        number = ctypes.c_uint32()
        self._call("cuptiGetVersion", ctypes.byref(number))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}"
        if number.value not in KNOWN_VERSIONS:
            raise CuptiError(f"the records of CUPTI {self.version} are not known")
        self._subscriber = ctypes.c_void_p()
        # CUPTI keeps pointers to these.
        self._callbacks = _OnCall(lambda *_: None), _OnRequest(self._on_request), _OnComplete(self._on_complete)
        self._buffers: dict[int, Any] = {}  # by address: those that CUPTI writes to
        self._complete: list[tuple[Any, int]] = []  # with their bytes of records

    @property
    def nbytes(self) -> int:
        """Of complete records that have not been read."""
        return len(self._complete) * _BUFFER_BYTES

    def start(self) -> None:
        """Record from now on. Other profilers cannot use CUPTI until `stop`."""
        code = self._library.cuptiSubscribe(ctypes.byref(self._subscriber), self._callbacks[0], None)
        if code == _OTHER_SUBSCRIBER:
            raise CuptiError("another profiler uses CUPTI")
        self._check(code, "cuptiSubscribe")
        try:
            self._call("cuptiActivityRegisterCallbacks", *self._callbacks[1:])
            for call in TAGGED_CALLS:
                self._call("cuptiActivityEnableDriverApi", call, 1)
            for kind in (EXTERNAL_CORRELATION, KERNEL, MEMCPY, MEMSET):
                self._call("cuptiActivityEnable", kind)
        except CuptiError:
            self.stop()
            raise

    def stop(self) -> None:
        """Record no more. Nothing is raised: what was enabled ends with the process at the latest."""
        library = self._library
        for kind in (KERNEL, MEMCPY, MEMSET, EXTERNAL_CORRELATION):
            library.cuptiActivityDisable(kind)
        for call in TAGGED_CALLS:
            library.cuptiActivityEnableDriverApi(call, 0)
        library.cuptiActivityFlushAll(1)  # also incomplete records: CUPTI must not complete a buffer at exit
        library.cuptiUnsubscribe(self._subscriber)
        self._complete.clear()

    def push(self, tag: int) -> None:
        """Driver calls of this thread are made under this id, until `pop`."""
        self._library.cuptiActivityPushExternalCorrelationId(_CUSTOM0, tag)

    def pop(self) -> None:
        self._library.cuptiActivityPopExternalCorrelationId(_CUSTOM0, None)

    def read(self) -> Records:
        """All records since the last call; those of work that is not done may come later."""
        self._call("cuptiActivityFlushAll", 0)
        records = Records([], {})
        while self._complete:
            buffer, nbytes = self._complete.pop(0)
            for offset in self._offsets(buffer, nbytes):
                _parse(buffer, offset, records)
        return records

    def name_of(self, activity: Activity) -> str:
        """A kernel's name, as the compiler mangled it."""
        return _text_at(activity.name) if activity.name else ""

    def ahead_ns(self) -> int:
        """How far time.perf_counter_ns is ahead of CUPTI's clock."""
        tries, now = [], ctypes.c_uint64()
        for _ in range(_TRIES):
            begin = perf_counter_ns()
            self._call("cuptiGetTimestamp", ctypes.byref(now))
            end = perf_counter_ns()
            tries.append((end - begin, (begin + end) // 2 - now.value))
        return min(tries)[1]

    def _offsets(self, buffer: Any, nbytes: int) -> Iterator[int]:
        """Of the records in a buffer; CUPTI knows how long each is."""
        address, record = ctypes.addressof(buffer), ctypes.c_void_p()
        following = self._library.cuptiActivityGetNextRecord
        while not (code := following(address, nbytes, ctypes.byref(record))):
            yield (record.value or 0) - address
        if code != _ALL_LIMIT:
            self._check(code, "cuptiActivityGetNextRecord")

    def _on_request(self, buffer: Any, size: Any, most_records: Any) -> None:
        buffer[0] = None  # if there is no memory, CUPTI drops records
        size[0] = most_records[0] = 0
        memory = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()
        self._buffers[ctypes.addressof(memory)] = memory
        buffer[0], size[0] = ctypes.addressof(memory), _BUFFER_BYTES

    def _on_complete(self, context: object, stream: int, buffer: int, size: int, nbytes: int) -> None:
        memory = self._buffers.pop(buffer, None)
        if memory is not None and nbytes:  # not another profiler's, which did not subscribe
            self._complete.append((memory, nbytes))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._library, name)(*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(code, ctypes.byref(text))
            raise CuptiError(f"{name} fails: {(text.value or b'').decode() or code}")


def _parse(buffer: Any, offset: int, records: Records) -> None:
    kind = buffer[offset // 8] & 0xFFFFFFFF  # records are aligned to 8 bytes
    if kind == EXTERNAL_CORRELATION:
        tag, correlation = _EXTERNAL.unpack_from(buffer, offset)
        records.tags[correlation] = tag
    elif kind == KERNEL:
        begin, end, correlation, name = _KERNEL.unpack_from(buffer, offset)
        records.activities.append(Activity(kind, correlation, begin, end, name))
    elif kind in (MEMCPY, MEMSET):
        begin, end, correlation = _COPY.unpack_from(buffer, offset)
        records.activities.append(Activity(kind, correlation, begin, end))


@functools.cache
def _text_at(address: int) -> str:
    return ctypes.string_at(address).decode(errors="replace")


@functools.cache
def load_cupti() -> Cupti:
    """CUPTI, loaded once; CuptiError says why there is none."""
    return Cupti(_load())


def _load() -> Any:
    """The library that is loaded already, as by torch: two of them would not work; else a package's, or a toolkit's."""
    try:
        return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded, not Linux
        pass
    why = "no CUPTI of CUDA 13: pip install 'onchip[profile]'"
    for path in _paths():
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            why = f"CUPTI does not load: {error}"
    raise CuptiError(why)


def _paths() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield from sorted(Path(folder).glob(f"*/lib/{LIBRARY}"))
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT)):
        paths = (Path(home, folder, LIBRARY) for folder in ("extras/CUPTI/lib64", "lib64"))
        yield from (path for path in paths if path.exists())
