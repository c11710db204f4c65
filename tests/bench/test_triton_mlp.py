"""The Triton kernel without Triton: its body runs in Python, on a NumPy stand-in for triton.language."""

import importlib
import sys
import types

import numpy as np
import pytest

import onchip.bench
from checks import random_mlp, rows
from onchip.bench.frame import UnavailableError
from onchip.bench.peers import gpu as gpu_peers
from onchip.bench.peers.dense import dense_layers
from onchip.kernels import reference
from torch_stage import CpuTorchStage

torch = pytest.importorskip("torch")


class Pointer:
    """A flat array and offsets into it."""

    def __init__(self, array, offsets=0):
        self.array, self.offsets = array, offsets
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offsets):
        return Pointer(self.array, self.offsets + getattr(offsets, "value", offsets))


class Value(np.ndarray):
    """A Triton tensor."""

    def to(self, dtype):
        return self.astype(dtype)


class Tile(int):
    def to(self, dtype):
        return int(self)


def load(pointer, mask=None, other=None):
    inside = np.broadcast_to(True if mask is None else mask, np.shape(pointer.offsets))
    assert inside.any()
    assert pointer.offsets[inside].max() < pointer.array.size  # masked elements are not read
    read = np.where(inside, pointer.array[np.where(inside, pointer.offsets, 0)], 0 if other is None else other)
    return read.astype(pointer.array.dtype).view(Value)


def store(pointer, values, mask):
    pointer.array[pointer.offsets[np.broadcast_to(mask, values.shape)]] = values[np.broadcast_to(mask, values.shape)]


def dot(a, b, acc=None, input_precision=None):
    assert min(*a.shape, *b.shape) >= 16
    assert a.dtype == b.dtype
    y = (a.astype(np.float32) @ b.astype(np.float32)).view(Value)
    return y if acc is None else acc + y


@pytest.fixture
def triton_mlp(monkeypatch):
    grid = types.SimpleNamespace(program=0, programs=1)
    language = types.ModuleType("triton.language")
    language.__dict__.update(
        constexpr=int, int64=np.int64, load=load, store=store, dot=dot, cdiv=lambda a, b: -(-a // b),
        arange=lambda a, b: np.arange(a, b), maximum=np.maximum, static_range=range,
        program_id=lambda axis: grid.program, num_programs=lambda axis: grid.programs,
    )  # fmt: skip

    class Kernel:
        def __init__(self, body):
            self.body = body
            body.__globals__["range"] = lambda *bounds: map(Tile, __builtins__["range"](*bounds))

        def __getitem__(self, size):
            def launch(x, w, b, y, B, num_warps, num_stages, **constants):
                (grid.programs,) = size
                flat = [Pointer(t.numpy().reshape(-1)) for t in (x, w, b, y)]
                for program in range(grid.programs):
                    grid.program = program
                    self.body(*flat, B, **constants)

            return launch

    triton = types.ModuleType("triton")
    triton.__dict__.update(
        language=language, jit=lambda **_: Kernel, cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "onchip.bench.peers.frameworks.triton_mlp", raising=False)
    monkeypatch.setattr(onchip.bench, "triton_mlp", None, raising=False)  # set by the import; monkeypatch restores it
    units = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: units)
    yield importlib.import_module("onchip.bench.peers.frameworks.triton_mlp")
    sys.modules.pop("onchip.bench.peers.frameworks.triton_mlp", None)


SHAPES = [(72, 64, 64, 4), (48, 32, 32, 32, 3), (16, 32, 1), (17, 20, 20, 19), (128, 16, 16, 16, 16, 10)]


@pytest.mark.parametrize("widths", SHAPES, ids=str)
@pytest.mark.parametrize("split", [True, False])
def test_the_kernel_runs_the_network(triton_mlp, widths, split):
    net = random_mlp(*widths, bias=widths[0] != 72)
    fused = triton_mlp.TritonMlp(dense_layers(net), torch.float32, "cpu", split)
    for choice in (triton_mlp.Choice(16, 4), triton_mlp.Choice(32, 4, 2, 1), triton_mlp.Choice(16, 4, 2, 1, True)):
        for B in (1, 32, 131):
            x = rows(B, widths[0])
            y = torch.full((B, widths[-1]), float("nan"))
            assert fused(torch.from_numpy(x), y, choice, "ieee") is y
            np.testing.assert_allclose(y.numpy(), reference.forward(net, x), rtol=1e-4, atol=1e-4)


def test_half_precision_with_float_rows(triton_mlp):
    net, x = random_mlp(9, 12, 12, 5), rows(33, 9)
    fused = triton_mlp.TritonMlp(dense_layers(net), torch.float16, "cpu", True)
    y = torch.zeros(33, 5)
    fused(torch.from_numpy(x), y, triton_mlp.Choice(16, 4), "ieee")
    error = np.abs(y.numpy() - reference.forward(net, x)).max()
    assert 1e-5 < error < 2e-2


def test_column_padding(triton_mlp):
    assert [triton_mlp.padded(width) for width in (1, 16, 17, 64, 200)] == [16, 16, 32, 64, 256]
    splits = {72: (64, 16), 48: (32, 16), 128: (128, 0), 10: (16, 0), 100: (64, 64), 17: (16, 16)}
    assert {width: triton_mlp.split_width(width) for width in splits} == splits


def test_networks_that_the_kernel_refuses(triton_mlp):
    for net, message in (
        (random_mlp(9, 12, 13, 5), "one width"),
        (random_mlp(9, 5), "one width"),
        (random_mlp(9, 12, 5, output="ReLU"), "after the last"),
    ):
        with pytest.raises(UnavailableError, match=message):
            triton_mlp.TritonMlp(dense_layers(net), torch.float16, "cpu", True)


def test_choices_depend_on_the_rows_and_the_network(triton_mlp):
    def fused(*widths):
        return triton_mlp.TritonMlp(dense_layers(random_mlp(*widths)), torch.float16, "cpu", True)

    small, wide, deep = fused(72, 64, 64, 4), fused(48, 128, 3), fused(48, 64, 64, 64, 3)
    assert max(choice.TILE for choice in triton_mlp.choices(7, small)) == 64
    assert str(next(triton_mlp.choices(1_000, small))) == "16 rows per tile, 4 warps"
    assert any(choice.programs for choice in triton_mlp.choices(1 << 21, small))
    for net in (wide, deep):
        for B in (7, 1 << 21):
            assert max(choice.TILE for choice in triton_mlp.choices(B, net)) == 32  # mma, not wgmma


# -- the search --------------------------------------------------------------------------------------------


def test_settings_around_the_best(triton_mlp):
    Choice = triton_mlp.Choice
    near = triton_mlp.around(Choice(128, 4, 2, 2, True))
    assert Choice(128, 4, 3, 2, True) in near
    assert Choice(128, 4, 2, 4, True) in near
    assert Choice(128, 4, 2, 2, False) in near
    assert Choice(128, 4, 2, 2, True) not in near
    assert all(choice.programs > 0 for choice in triton_mlp.around(Choice(256, 8, 2, 1)))
    assert all(choice.programs and choice.TILE == 64 for choice in triton_mlp.around(Choice(64, 4)))
    assert len(near) == len(set(near)) < 9


def peer_of(triton_mlp, monkeypatch, ms, broken=()):
    """The Triton peer, whose settings take ms(choice), except broken ones; and the list of tried settings."""
    run, tried = triton_mlp.TritonMlp.__call__, []

    def call(self, x, y, choice, precision):
        tried.append((choice, self.KB > 0, precision))
        if choice in broken:
            return broken[choice](y)
        return run(self, x, y, choice, precision)

    class Stage(CpuTorchStage):
        def ms(self, work):
            call = work.args[0]  # a captured call: net, x, y, choice, precision
            return ms(call.args[2])

    monkeypatch.setattr(triton_mlp.TritonMlp, "__call__", call)
    monkeypatch.setattr(triton_mlp, "FEW_ROWS", 30)
    monkeypatch.setattr(gpu_peers, "need", lambda package: None)
    peer = gpu_peers.TritonPeer()
    return lambda task: peer(task, Stage()), tried


def test_the_search_finds_the_best_setting(triton_mlp, monkeypatch):
    Choice = triton_mlp.Choice
    best = Choice(64, 4, 3, 4, True)  # not among the first, but a neighbour of one
    near = Choice(64, 4, 2, 4, True)
    run, tried = peer_of(triton_mlp, monkeypatch, lambda choice: {best: 1.0, near: 2.0}.get(choice, 3.0))
    net, x = random_mlp(72, 64, 64, 4), torch.from_numpy(rows(33, 72))
    variants = run(gpu_peers.GpuTask(net, "fp32", "float32", x))
    names = list(variants)
    assert names[0] == "64 rows per tile, 4 warps, 4 programs per SM, 3 stages, resident weights, 64+16 columns, 3xTF32"
    assert "64+16" not in names[1]
    assert {precision for _, _, precision in tried} == {"tf32x3", "ieee"}
    assert len({(choice, split) for choice, split, _ in tried}) < 22
    for forward in variants.values():
        np.testing.assert_allclose(forward.call().numpy(), reference.forward(net, x.numpy()), rtol=1e-4, atol=1e-4)
    tried.clear()
    again = run(gpu_peers.GpuTask(net, "tf32", "float32", x))  # of the same kind: reuses the ranking
    assert next(iter(again)).startswith(str(best))
    assert len({choice for choice, _, _ in tried}) == 4


def test_settings_that_fail_or_are_wrong_are_skipped(triton_mlp, monkeypatch):
    def fail(y):
        raise RuntimeError("out of resource: shared memory\nlong trace")

    first, second = triton_mlp.WGMMA[:2]
    broken = {first: lambda y: y.zero_(), second: fail}
    run, _ = peer_of(triton_mlp, monkeypatch, lambda choice: float(choice is not first), broken)
    net, x = random_mlp(72, 64, 64, 4), torch.from_numpy(rows(33, 72))
    variants = run(gpu_peers.GpuTask(net, "tf32", "float32", x))
    assert variants
    assert not any(name.startswith((f"{first}, 64", f"{second}, 64")) for name in variants)
    monkeypatch.setattr(triton_mlp, "WGMMA", (second,))
    with pytest.raises(UnavailableError, match=r"triton .*: out of resource: shared memory$"):
        run(gpu_peers.GpuTask(random_mlp(72, 64, 64, 4), "fp32", "float32", x))


def test_a_search_without_time_uses_the_first_setting(triton_mlp, monkeypatch):
    monkeypatch.setattr("onchip.bench.peers.triton_search.TUNE_S", 0.0)
    run, tried = peer_of(triton_mlp, monkeypatch, lambda choice: 1.0)
    variants = run(gpu_peers.GpuTask(random_mlp(72, 64, 64, 4), "tf32", "float32", torch.from_numpy(rows(33, 72))))
    assert len(variants) == 1
    assert {choice for choice, _, _ in tried} == {triton_mlp.WGMMA[0]}


def test_few_rows_try_every_small_tile(triton_mlp, monkeypatch):
    run, _ = peer_of(triton_mlp, monkeypatch, lambda choice: float(choice.TILE))
    variants = run(gpu_peers.GpuTask(random_mlp(17, 33, 33, 33, 5), "tf32", "float32", torch.from_numpy(rows(1, 17))))
    assert [name.partition(",")[0] for name in variants] == [
        "16 rows per tile",
        "16 rows per tile",
        "32 rows per tile",
        "32 rows per tile",
    ]
