"""Attention with heads, or windows of an image, merged with the batch axis."""

import numpy as np
import pytest

import onchip
from onchip.kernels import reference

torch = pytest.importorskip("torch")
nn = torch.nn


class Heads(nn.Module):
    """Heads merged after the batch, as torch.bmm requires; before it in the second."""

    def __init__(self, before):
        super().__init__()
        self.before = before
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        B = x.shape[0]
        order = (2, 0, 1, 3) if self.before else (0, 2, 1, 3)
        q, k, v = (part(x).view(B, 5, 2, 4).permute(*order).reshape(B * 2, 5, 4) for part in (self.q, self.k, self.v))
        mixed = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2, dim=-1), v)
        apart = mixed.view(2, B, 5, 4).permute(1, 2, 0, 3) if self.before else mixed.view(B, 2, 5, 4).transpose(1, 2)
        return self.out(apart.reshape(B, 5, 8))


class Windows(nn.Module):
    """Attention within each window of 2x2 pixels."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.places = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x):
        B = x.shape[0]
        windows = x.view(B, 3, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
        q, k, v = self.qkv(self.norm(windows)).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(-2, -1) * 0.5 + self.places, dim=-1) @ v
        y = self.out(mixed.transpose(1, 2).reshape(-1, 4, 8)) + windows
        return y.view(B, 3, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(B, 6, 4, 8)


@pytest.mark.parametrize(
    ("module", "row"), [(lambda: Heads(False), (5, 8)), (lambda: Heads(True), (5, 8)), (Windows, (6, 4, 8))],
    ids=["heads behind the batch", "heads before it", "windows"],
)  # fmt: skip
def test_computes_what_torch_computes(module, row):
    torch.manual_seed(0)
    made, x = module().double().eval(), torch.randn(3, *row, dtype=torch.float64)
    net = onchip.load(made, x)
    with torch.no_grad():
        np.testing.assert_allclose(reference.forward(net, x.numpy()), made(x).numpy(), rtol=1e-10, atol=1e-10)
    kinds = [node.layer.kind for node in net.nodes]
    assert (kinds.count("MatMul"), kinds.count("Softmax")) == (2, 1)
