"""Run one network in every precision that a device supports, and compare the errors."""

import numpy as np

import onchip
from onchip.errors import DeviceError

net = onchip.load("decode")
x = np.random.default_rng(0).standard_normal((1000, 72), dtype=np.float32)
exact = onchip.compile(net, device="cpu")(x)

for precision in ("fp32", "tf32", "bf16", "fp16"):
    try:
        engine = onchip.compile(net, device="auto", precision=precision)
    except DeviceError as error:
        print(f"{precision}: {error.what}")
        continue
    error = np.abs(engine(x) - exact).max() / np.abs(exact).max()
    print(f"{precision}: {engine.chosen}, largest difference from fp32 on the CPU {error:.1e}")
