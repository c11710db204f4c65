"""Structs that kernels take by value: as the compiler lays them out, and packed by field name."""

import ctypes
import importlib
import pkgutil
from pathlib import Path

import pytest

import onchip.kernels.cuda
import onchip.ladders
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Struct, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.runtime.cuda.nvrtc import nvrtc_version, read_sources


def every_struct() -> dict[Path, list[type[CStruct]]]:
    """By the file that declares them."""
    for package in (onchip.kernels.cuda, onchip.ladders):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(info.name)
    found: dict[Path, list[type[CStruct]]] = {}
    for each in CStruct.__subclasses__():
        if each.__module__.startswith("onchip."):
            found.setdefault(each.source, []).append(each)
    return found


def log_of(source: Path, more: str) -> str:
    """What the compiler says of a file with more lines at its end."""
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    from cuda.bindings import nvrtc

    texts = read_sources(source)
    headers = {name.encode(): text.encode() for name, text in texts.items() if name != source.name}
    text = f"{texts[source.name]}\n{more}\n".encode()
    _, handle = nvrtc.nvrtcCreateProgram(text, b"layout.cu", len(headers), [*headers.values()], [*headers])
    nvrtc.nvrtcCompileProgram(handle, 2, [b"--gpu-architecture=sm_90a", b"--std=c++17"])
    _, size = nvrtc.nvrtcGetProgramLogSize(handle)
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(handle, log)
    nvrtc.nvrtcDestroyProgram(handle)
    return "\n".join(line for line in log.decode().splitlines() if "error" in line)


def layout_of(struct: type[CStruct]) -> str:
    """Assertions that the compiler's layout is that of the class."""
    names = [name for name, *_ in struct._fields_]
    checks = [f"sizeof({struct.c_name}) == {ctypes.sizeof(struct)}"]
    for name in names:
        field = getattr(struct, name)
        checks.append(f"__builtin_offsetof({struct.c_name}, {name}) == {field.offset}")
        checks.append(f"sizeof((({struct.c_name}*)nullptr)->{name}) == {field.size}")
    return "\n".join(f'static_assert({check}, "{check}");' for check in checks)


@pytest.mark.parametrize(
    ("source", "structs"), [pytest.param(path, found, id=path.name) for path, found in every_struct().items()]
)
def test_structs_are_laid_out_as_the_compiler_does(source, structs):
    assert log_of(source, "\n".join(map(layout_of, structs))) == ""


def test_another_layout_is_noticed():
    class Wrong(CStruct):
        source, c_name = Divider.source, "Divider"
        _fields_ = (("size", ctypes.c_uint64), ("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    log = log_of(Wrong.source, layout_of(Wrong))
    assert "sizeof(Divider) == 16" in log
    assert "__builtin_offsetof(Divider, magic) == 8" in log


class Pair(CStruct):
    source, c_name = Path("pair.cu"), "Pair"
    _fields_ = (
        ("count", ctypes.c_uint16), ("x", ctypes.c_void_p), ("by", Divider * 2), ("w", ctypes.c_void_p * 2),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def test_values_are_packed_at_their_offsets():
    packed = Pair.of(count=7, x=Input(1), by=[divider(3)], w=(Weight("w"),), scale=0.1)
    read = Pair.from_buffer_copy(packed.data)
    assert (read.count, read.x, read.by[0].size, read.by[1].size) == (7, None, 3, 0)
    assert read.scale == ctypes.c_float(0.1).value
    assert packed.pointers == ((8, Input(1)), (Pair.w.offset, Weight("w")))


def test_pointers_of_a_nested_struct_move_with_it():
    class Outer(CStruct):
        source, c_name = Path("outer.cu"), "Outer"
        _fields_ = (("first", ctypes.c_int64), ("pairs", Pair * 2))

    pair = Pair.of(count=7, x=Input(1), by=[], w=[Int64(-1)], scale=0)
    packed = Outer.of(first=-2, pairs=[pair, pair])
    assert packed.pointers == ((16, Input(1)), (16 + ctypes.sizeof(Pair), Input(1)))
    assert Outer.from_buffer_copy(packed.data).pairs[1].w[0] == 2**64 - 1


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"count": 1 << 16}, OverflowError, "Pair::count"),
        ({"by": [divider(1)] * 3}, OverflowError, r"3 values do not fit Pair::by\[2\]"),
        ({"by": [Struct(b"")]}, TypeError, "has 12 bytes, not 0"),
        ({"other": 1}, TypeError, "Pair has the fields count, x"),
    ],
)
def test_what_does_not_fit_is_refused(values, error, words):
    with pytest.raises(error, match=words):
        Pair.of(**({"count": 1, "x": NOTHING, "by": [], "w": [], "scale": 1} | values))
