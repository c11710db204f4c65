"""The bindings of CUPTI: records in the layout of its header, and how the library is found."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_cupti import AHEAD_NS, EXTERNAL, KERNEL, MEMCPY, MEMSET, OFFSETS, SIZES, FakeCupti
from onchip.runtime import recording
from onchip.runtime.cuda import cupti
from onchip.runtime.cuda.cupti import TAGGED_CALLS, Activity, Cupti, CuptiError, load_cupti


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(cupti, "perf_counter_ns", lambda: 7 * AHEAD_NS)
    return FakeCupti(lambda: 7 * AHEAD_NS)


@pytest.fixture(autouse=True)
def _forgets():
    load_cupti.cache_clear()
    yield
    load_cupti.cache_clear()


@pytest.mark.parametrize("version", SIZES)
def test_records_of_every_known_version(library, version):
    library.version = version
    found = Cupti(library)
    assert found.version == f"13.{version // 100 % 100}"
    found.start()
    name = ctypes.create_string_buffer(b"_Z5denseILi6EEvv")
    times = {"start": AHEAD_NS + 100, "end": AHEAD_NS + 350}
    library._write(EXTERNAL, externalKind=3, externalId=2**40 + 1, correlationId=2**31 + 5)
    library._write(KERNEL, **times, correlationId=2**31 + 5, name=ctypes.addressof(name))
    library._write(MEMCPY, **times, correlationId=6)
    library._write(MEMSET, start=0, end=0, correlationId=7)
    activities, tags = found.read()
    assert tags == {2**31 + 5: 2**40 + 1}
    kernel = Activity(KERNEL, 2**31 + 5, 100, 350, ctypes.addressof(name))
    assert activities == [kernel, Activity(MEMCPY, 6, 100, 350), Activity(MEMSET, 7, 0, 0)]
    assert [found.name_of(each) for each in activities] == ["_Z5denseILi6EEvv", "", ""]
    assert found.read() == ([], {})
    assert found.ahead_ns() == AHEAD_NS


def test_records_fill_several_buffers(library, monkeypatch):
    monkeypatch.setattr(cupti, "_BUFFER_BYTES", 1000)
    found = Cupti(library)
    found.start()
    for number in range(50):
        library._write(MEMCPY, start=AHEAD_NS + 1, end=AHEAD_NS + 2, correlationId=number)
    assert found.nbytes == 4000
    assert [activity.correlation for activity in found.read().activities] == list(range(50))
    assert (found.nbytes, found._buffers) == (0, {})


def test_a_buffer_of_another_profiler_is_not_read(library):
    found = Cupti(library)
    found.start()
    buffer = (ctypes.c_uint64 * 100)()
    library._complete(None, 0, ctypes.addressof(buffer), 800, 800)
    assert found.read() == ([], {})


def test_what_is_enabled(library):
    found = Cupti(library)
    found.start()
    assert library.enabled == {KERNEL, MEMCPY, MEMSET, EXTERNAL}
    assert library.enabled_calls == set(TAGGED_CALLS)
    found.stop()
    assert (library.enabled, library.enabled_calls, library.subscribers) == (set(), set(), 0)
    found.start()
    assert library.subscribers == 1
    library._write(MEMCPY, start=0, end=0, correlationId=7)
    found.stop()
    found.start()
    assert (found.read(), found.nbytes) == (([], {}), 0)  # nothing of the time before


@pytest.mark.parametrize("version", [120900, 130500, 140000])
def test_records_of_another_version_are_not_read(library, version):
    library.version = version
    name = f"{version // 10000}.{version // 100 % 100}"
    with pytest.raises(CuptiError, match=f"^the records of CUPTI {name} are not known$"):
        Cupti(library)


def test_a_library_without_a_function():
    with pytest.raises(CuptiError, match=r"^libcupti.so.13 is incomplete: .* 'cuptiGetVersion'$"):
        Cupti(SimpleNamespace())


def test_the_real_library_finds_these_records(library):
    """Without a GPU it enables nothing, but it knows how long records are."""
    try:
        found = load_cupti()
    except CuptiError as error:
        pytest.skip(f"the layout of records is not compared with CUPTI: {error}")
    number = ctypes.c_uint32()
    found._call("cuptiGetVersion", ctypes.byref(number))
    library.version = max(known for known in SIZES if known <= number.value)
    kinds = [EXTERNAL, KERNEL, MEMCPY, MEMSET, KERNEL]
    names = {KERNEL: {"name": 0}, EXTERNAL: {"externalId": 3}}
    data = b"".join(library.record(kind, correlationId=5, **names.get(kind, {"start": 0})) for kind in kinds)
    buffer = (ctypes.c_uint64 * (len(data) // 8)).from_buffer_copy(data)
    try:
        offsets = list(found._offsets(buffer, len(data)))
    except CuptiError as error:
        pytest.skip(f"CUPTI {found.version} reads no records without a GPU: {error}")
    assert [buffer[offset // 8] & 0xFFFFFFFF for offset in offsets] == kinds


# -- the layout ----------------------------------------------------------------------------------------------

STRUCTS = {KERNEL: "Kernel", MEMCPY: "Memcpy", MEMSET: "Memset", EXTERNAL: "ExternalCorrelation"}
CALLS = ("cuMemsetD8Async", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuGraphLaunch", "cuLaunchKernelEx")


def headers():
    """Folders with CUPTI's headers of CUDA 13, and those with cuda.h."""
    toolkits = [Path(home, "include") for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if home]
    packages = [Path(folder, "nvidia", "cu13", "include") for folder in sys.path]
    folders = [*packages, *toolkits, *(home.parent / "extras" / "CUPTI" / "include" for home in toolkits)]
    here = [folder for folder in folders if folder.is_dir()]
    return next((f for f in here if (f / "cupti_activity.h").exists()), None), here


def test_the_layout_is_the_headers(tmp_path):
    folder, includes = headers()
    compiler = shutil.which("gcc")
    if folder is None or compiler is None or not any((each / "cuda.h").exists() for each in includes):
        pytest.skip("no gcc, or no headers of CUPTI and CUDA 13: the layout of its records is not compared")
    text = (folder / "cupti_activity.h").read_text()

    def newest(name):
        numbers = [int(each.split(";")[0] or 1) for each in text.split(f"}} CUpti_Activity{name}")[1:]
                   if each.split(";")[0].isdigit() or each[0] == ";"]  # fmt: skip
        return f"CUpti_Activity{name}{max(numbers) if max(numbers) > 1 else ''}"

    lines = ['printf("%d\\n", CUPTI_API_VERSION);']
    for kind, name in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({newest(name)}));')
        lines += [f'printf("%zu\\n", offsetof({newest(name)}, {field}));' for field in OFFSETS[kind]]
    calls = [*CALLS, "cuMemsetD8Async_ptsz", *(f"{name}_ptsz" for name in CALLS[1:])]
    lines += [f'printf("%d\\n", CUPTI_DRIVER_TRACE_CBID_{name});' for name in calls]
    kinds = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "EXTERNAL_CORRELATION")
    lines += [f'printf("%d\\n", CUPTI_ACTIVITY_KIND_{name});' for name in kinds]
    names = "CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0", "CUPTI_ERROR_MAX_LIMIT_REACHED"
    lines += [f'printf("%d\\n", {name});' for name in (*names, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")]
    includes_text = "".join(
        f"#include <{name}>\n"
        for name in ("stdio.h", "stddef.h", "cupti_version.h", "cupti_activity.h", "cupti_driver_cbid.h")
    )
    (tmp_path / "layout.c").write_text(includes_text + "int main(void) {" + "\n".join(lines) + "return 0; }")
    flags = [f"-I{each}" for each in (folder, *includes)]
    subprocess.run([compiler, *flags, "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    out = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    version, *numbers = map(int, out.split())
    assert version in cupti.KNOWN_VERSIONS
    sizes = SIZES[max(known for known in SIZES if known <= version)]
    expected = [number for kind in STRUCTS for number in (sizes[kind], *OFFSETS[kind].values())]
    expected += [*TAGGED_CALLS, KERNEL, MEMCPY, MEMSET, EXTERNAL, 3, cupti._ALL_LIMIT, cupti._OTHER_SUBSCRIBER]
    assert numbers == expected


# -- the library ---------------------------------------------------------------------------------------------


def loads(monkeypatch, loaded, loadable, library):
    """dlopen finds these; returns what was opened."""
    opened = []

    def dlopen(path, mode=0):
        opened.append(path)
        if path in (loaded if mode else loadable):
            return library
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", dlopen)
    monkeypatch.setattr(cupti, "TOOLKIT", "")
    return opened


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Site-packages with nvidia-cuda-cupti."""
    path = tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: type("Spec", (), {
        "submodule_search_locations": [str(tmp_path / "nvidia")],
    }))  # fmt: skip
    return str(path)


def test_the_library_of_a_package(monkeypatch, package, library):
    opened = loads(monkeypatch, [], [package], library)
    assert load_cupti().version == "13.0"
    assert opened == ["libcupti.so.13", package]
    assert load_cupti() is load_cupti()


def test_the_library_that_is_loaded_already(monkeypatch, package, library):
    opened = loads(monkeypatch, ["libcupti.so.13"], [package], library)
    load_cupti()
    assert opened == ["libcupti.so.13"]


@pytest.mark.parametrize("folder", ["extras/CUPTI/lib64", "lib64"])
def test_the_library_of_a_toolkit(monkeypatch, tmp_path, library, folder):
    path = tmp_path / folder / "libcupti.so.13"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loads(monkeypatch, [], [str(path)], library)
    assert load_cupti().version == "13.0"
    assert recording.clock_of_profiles() == "CUPTI 13.0"


def test_no_library(monkeypatch, package, library):
    loads(monkeypatch, [], [], library)
    with pytest.raises(CuptiError, match=f"^CUPTI does not load: {package}: cannot open"):
        load_cupti()
    monkeypatch.setattr(cupti, "_paths", lambda: iter(()))
    told = "CUDA events, one launch at a time: no CUPTI of CUDA 13: pip install 'onchip[profile]'"
    assert recording.clock_of_profiles() == told
