"""A loaded module is compared with its network: wrong exports are refused, and nothing else."""

from __future__ import annotations

import pytest

import onchip
from onchip.errors import InputError
from onchip.formats.torch import module as torch_module
from onchip.runtime import module_check

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *x):
        return self.function(*x)


class Inner(nn.Module):
    """A wrong layer between correct ones."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(1, 4, 3), nn.Softplus(1, 0.1), nn.Conv2d(4, 2, 3)

    def forward(self, x):
        return self.last(self.act(self.first(x))).sum(dim=(2, 3))


WRONG = {
    "unfold": (lambda x: x.unfold(-1, 3, 2), [(4, 9)], "Slice"),
    "floor division": (lambda x: x // 2, [(5,)], "Div"),
    "floor division by a fraction": (lambda x: x // 0.7, [(5,)], "Div"),
    "divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), [(3, 6, 6)], "output"),
    "softplus": (nn.Softplus(2, 3), [(9,)], "Mul"),
    "threshold": (nn.Softplus(1, 2), [(3,)], "output"),
    "distance": (lambda x, y: torch.cdist(x, y, p=1), [(5, 3), (4, 3)], "Sub"),
    "inner": (Inner(), [(1, 8, 8)], "/act/Softplus"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", WRONG)
def test_what_the_exporter_writes_wrongly_is_refused(case, dtype):
    function, shapes, layer = WRONG[case]
    module = function if isinstance(function, nn.Module) else Function(function)
    with pytest.raises(InputError, match=rf"layer '/?{layer}' .* is the first"):
        onchip.load(module.to(dtype), tuple(torch.zeros(1, *shape, dtype=dtype) for shape in shapes))


def test_inputs_that_the_module_does_not_use():
    for wrong in (lambda x, y: x // 2, lambda y, x: x // 2):
        with pytest.raises(InputError, match="something else"):
            onchip.load(Function(wrong), (torch.zeros(1, 5), torch.zeros(1, 5)))
    right = onchip.load(Function(lambda y, x: x * 2), (torch.zeros(1, 5), torch.zeros(1, 4)))
    assert right.input.row_shape == (4,)


def test_ints_divide_down():
    with pytest.raises(InputError, match="something else"):
        onchip.load(Function(lambda x: x // 2), torch.tensor([[1, -3], [4, 7]]))


class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(50, 8), nn.Linear(8, 7)

    def forward(self, ids):
        return self.fc(self.table(ids).mean(1)).argmax(-1)


class FloatIds(nn.Module):
    """Ids are in a float column: with noise they are invalid."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def forward(self, x):
        return self.table(x[:, 0].long()) * x[:, 1:2]


class Stays32(nn.Module):
    """Cannot run in float64, and has one output, which rounding may leave exact."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(400, 1)

    def forward(self, x):
        return self.fc(x.float())


class Tiny(nn.Module):
    """Its eps differs in float64, and is far larger than the value it is added to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(6)

    def forward(self, x):
        return self.norm(x * 1e-4)


class Nested(nn.Module):
    def forward(self, x):
        return {"b": x.softmax(-1), "a": (x * 2, [x + 1], None), "same": x}


def steps(x):
    return torch.round(x / 0.0039).clamp(-128, 127) * 0.0039, torch.floor(x / 0.1), (x > 0.3).float() * x


RIGHT = {
    "ids": (Ids(), torch.zeros(1, 9, dtype=torch.int64)),
    "ids in floats": (FloatIds(), torch.zeros(1, 2)),
    "float32 alone": (Stays32(), torch.zeros(1, 400)),
    "another eps": (Tiny(), torch.ones(1, 6)),
    "nested outputs": (Nested(), torch.zeros(1, 5)),
    "ties": (Function(lambda x: (x.argmax(-1), *x.topk(3))), torch.zeros(2, 9)),
    "steps": (Function(steps), torch.arange(2 * 9000).reshape(2, -1) / 10),
    "constants": (Function(lambda x: torch.sin(x * 314.159265358979)), torch.zeros(1, 50)),
    "not a number": (Function(lambda x: (x.log(), 1 / x, x**0.5)), torch.zeros(1, 5)),
    "masks": (Function(lambda x, m: x.masked_fill(~m, -1e9).softmax(-1)), (torch.zeros(2, 9), torch.ones(2, 9) > 0)),
    "default softplus": (nn.Softplus(), torch.full((1, 5), 50.0)),
    "half": (nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4)).half(), torch.ones(1, 8).half()),
    "bfloat16": (nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)).bfloat16(), torch.ones(1, 8).bfloat16()),
    "dropout": (nn.Sequential(nn.Linear(4, 30), nn.Dropout(), nn.BatchNorm1d(30)).train(), torch.zeros(1, 4)),
    "deep": (nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(9, 9), nn.Tanh())]), torch.zeros(1, 9)),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_else_is_refused(case, recwarn):
    onchip.load(*RIGHT[case])
    assert not recwarn


def test_a_module_runs_few_rows_once_more(monkeypatch):
    """In float64: up to 64 rows of a small network, two of a large one, however many the example has."""
    rows = []
    run = torch_module.TorchModule.run

    def counted(source, inputs, in_double=False):
        rows.append((len(inputs[0]), in_double))
        return run(source, inputs, in_double)

    monkeypatch.setattr(torch_module.TorchModule, "run", counted)
    for work in (1 << 30, 1000, 0):
        monkeypatch.setattr(module_check, "MAX_WORK", work)
        onchip.load(nn.Linear(4, 3), torch.zeros(100, 4))
    assert rows == [(64, True), (7, True), (2, True)]
