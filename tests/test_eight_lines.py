"""The README's promise: eight lines compile, run and train a network."""

import numpy as np

import onchip


def test_eight_lines_compile_run_and_train():
    net = onchip.mlp(20, 16, 3)
    x = np.random.default_rng(0).standard_normal((500, 20), dtype=np.float32)
    y = x[:, :3].argmax(axis=1)
    result = onchip.fit(net, x, y, epochs=20, lr=0.1, device="cpu")
    engine = onchip.compile(result.network, device="cpu")
    assert (engine(x).argmax(axis=1) == y).mean() > 0.9
    assert "mlp_fused<20,16,3,ReLU>" in str(engine.plan)
