"""The Triton kernel without Triton: its body run in Python, on a stand-in for triton.language made of NumPy."""

import importlib
import sys
import types

import numpy as np
import pytest

import onchip.bench
from checks import random_mlp, rows
from onchip.bench.dense import dense_layers
from onchip.bench.frame import UnavailableError
from onchip.kernels import reference

torch = pytest.importorskip("torch")


class Pointer:
    """A flat array and offsets into it."""

    def __init__(self, array, offsets=0):
        self.array, self.offsets = array, offsets
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offsets):
        return Pointer(self.array, self.offsets + getattr(offsets, "value", offsets))


class Value(np.ndarray):
    """What Triton calls a tensor."""

    def to(self, dtype):
        return self.astype(dtype)


class Tile(int):
    def to(self, dtype):
        return int(self)


def load(pointer, mask=None, other=None):
    inside = np.broadcast_to(True if mask is None else mask, np.shape(pointer.offsets))
    assert inside.any()
    assert pointer.offsets[inside].max() < pointer.array.size  # a masked place is not touched
    read = np.where(inside, pointer.array[np.where(inside, pointer.offsets, 0)], 0 if other is None else other)
    return read.astype(pointer.array.dtype).view(Value)


def store(pointer, values, mask):
    pointer.array[pointer.offsets[np.broadcast_to(mask, values.shape)]] = values[np.broadcast_to(mask, values.shape)]


def dot(a, b, acc=None, input_precision=None):
    assert min(*a.shape, *b.shape) >= 16
    assert a.dtype == b.dtype
    product = (a.astype(np.float32) @ b.astype(np.float32)).view(Value)
    return product if acc is None else acc + product


@pytest.fixture
def triton_mlp(monkeypatch):
    place = types.SimpleNamespace(program=0, programs=1)
    language = types.ModuleType("triton.language")
    language.__dict__.update(
        constexpr=int, int64=np.int64, load=load, store=store, dot=dot, cdiv=lambda a, b: -(-a // b),
        arange=lambda a, b: np.arange(a, b), maximum=np.maximum, static_range=range,
        program_id=lambda axis: place.program, num_programs=lambda axis: place.programs,
    )  # fmt: skip

    class Kernel:
        def __init__(self, body):
            self.body = body
            body.__globals__["range"] = lambda *bounds: map(Tile, __builtins__["range"](*bounds))

        def __getitem__(self, grid):
            def launch(x, w, b, y, B, num_warps, num_stages, **constants):
                (place.programs,) = grid
                flat = [Pointer(t.numpy().reshape(-1)) for t in (x, w, b, y)]
                for program in range(place.programs):
                    place.program = program
                    self.body(*flat, B, **constants)

            return launch

    triton = types.ModuleType("triton")
    triton.__dict__.update(
        language=language, jit=lambda **_: Kernel, cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "onchip.bench.triton_mlp", raising=False)
    monkeypatch.setattr(onchip.bench, "triton_mlp", None, raising=False)  # the import sets it; so it is put back
    units = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: units)
    yield importlib.import_module("onchip.bench.triton_mlp")
    sys.modules.pop("onchip.bench.triton_mlp", None)


SHAPES = [(72, 64, 64, 4), (48, 32, 32, 32, 3), (16, 32, 1), (17, 20, 20, 19), (128, 16, 16, 16, 16, 10)]


@pytest.mark.parametrize("widths", SHAPES, ids=str)
@pytest.mark.parametrize("split", [True, False])
def test_the_kernel_runs_the_network(triton_mlp, widths, split):
    net = random_mlp(*widths, bias=widths[0] != 72)
    fused = triton_mlp.TritonMlp(dense_layers(net), torch.float32, "cpu", split)
    for choice in (triton_mlp.Choice(16, 4), triton_mlp.Choice(32, 4, 2, 1)):
        for B in (1, 32, 131):
            x = rows(B, widths[0])
            y = torch.full((B, widths[-1]), float("nan"))
            assert fused(torch.from_numpy(x), y, choice, "ieee") is y
            np.testing.assert_allclose(y.numpy(), reference.forward(net, x), rtol=1e-4, atol=1e-4)


def test_half_precision_between_float_rows(triton_mlp):
    net, x = random_mlp(9, 12, 12, 5), rows(33, 9)
    fused = triton_mlp.TritonMlp(dense_layers(net), torch.float16, "cpu", True)
    y = torch.zeros(33, 5)
    fused(torch.from_numpy(x), y, triton_mlp.Choice(16, 4), "ieee")
    error = np.abs(y.numpy() - reference.forward(net, x)).max()
    assert 1e-5 < error < 2e-2


def test_how_columns_are_padded(triton_mlp):
    assert [triton_mlp.padded(width) for width in (1, 16, 17, 64, 200)] == [16, 16, 32, 64, 256]
    parts = {72: (64, 16), 48: (32, 16), 128: (128, 0), 10: (16, 0), 100: (64, 64), 17: (16, 16)}
    assert {width: triton_mlp.two_parts(width) for width in parts} == parts


def test_networks_that_the_kernel_is_not_for(triton_mlp):
    for net, said in (
        (random_mlp(9, 12, 13, 5), "one width"),
        (random_mlp(9, 5), "one width"),
        (random_mlp(9, 12, 5, output="ReLU"), "nothing behind the last"),
    ):
        with pytest.raises(UnavailableError, match=said):
            triton_mlp.TritonMlp(dense_layers(net), torch.float16, "cpu", True)


def test_choices_go_with_the_rows_and_the_network(triton_mlp):
    def fused(*widths):
        return triton_mlp.TritonMlp(dense_layers(random_mlp(*widths)), torch.float16, "cpu", True)

    small, wide, deep = fused(72, 64, 64, 4), fused(48, 128, 3), fused(48, 64, 64, 64, 3)
    assert max(choice.TILE for choice in triton_mlp.choices(7, small)) == 64
    assert str(next(triton_mlp.choices(1_000, small))) == "16 rows a tile, 4 warps"
    assert any(choice.programs for choice in triton_mlp.choices(1 << 21, small))
    for net in (wide, deep):
        for B in (7, 1 << 21):
            assert max(choice.TILE for choice in triton_mlp.choices(B, net)) == 32  # by single warps
