"""Run a torch module in onchip: the same values, and the time of both."""

# needs: torch onnx
import time

import numpy as np
import torch

import onchip

module = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
    torch.nn.Linear(32, 10),
).eval()  # fmt: skip
images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))

engine = onchip.compile(onchip.load(module, images[:1]), device="cpu", batch_hint=len(images))
print(engine.plan)

with torch.no_grad():
    difference = np.abs(engine(images.numpy()) - module(images).numpy()).max()
    print(f"largest difference: {difference:.1e}")
    for name, run in (("torch", lambda: module(images)), ("onchip", lambda: engine(images.numpy()))):
        run()
        start = time.perf_counter()
        for _ in range(10):
            run()
        print(f"{name}: {(time.perf_counter() - start) * 100:.2f} ms for {len(images)} images")
