"""Train a CNN in onchip and in torch with the same losses; put the weights back into torch, and save them as ONNX."""

# needs: torch onnx matplotlib
import copy
import sys

import numpy as np
import torch
from matplotlib.figure import Figure

import onchip
from onchip.workloads.digits import load_data

BATCH, EPOCHS, SEED, LR, DECAY = 32, 10, 0, 2e-3, 0.01
data = load_data("sklearn")  # 1,797 images of 8x8 pixels
x, x_test = (rows.reshape(-1, 1, 8, 8) for rows in (data.x_train, data.x_test))
y, y_test = data.y_train, data.y_test
held = len(x) // 10  # to validate on
x, x_held, y, y_held = x[held:], x[:held], y[held:], y[:held]

torch.set_num_threads(1)  # the batches are small
torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(32 * 3 * 3, 10),
)  # fmt: skip

net = onchip.load(module, x[:1])
result = onchip.fit(
    net, x, y, optimiser="adamw", lr=LR, weight_decay=DECAY, batch_size=BATCH, epochs=EPOCHS, seed=SEED,
    validation_data=(x_held, y_held), checkpoint="cnn-run", resume=True, device="cpu",
)  # fmt: skip
print(result)


def losses_of_torch(dtype):
    """The loss of every step of a plain loop, from the same weights and with the same batches."""
    trained = copy.deepcopy(module).to(dtype)
    optimiser = torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=DECAY)
    images, classes, losses = torch.from_numpy(x).to(dtype), torch.from_numpy(y), []
    for epoch in range(EPOCHS):
        order = torch.from_numpy(np.random.default_rng((SEED, epoch)).permutation(len(x)))
        for batch in order.split(BATCH):
            loss = torch.nn.functional.cross_entropy(trained(images[batch]), classes[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    return np.array(losses)


truth = losses_of_torch(torch.float64)
runs = {"onchip": (result.losses, "#1f5fa8", 3), "torch": (losses_of_torch(torch.float32), "#e07b00", 1)}
figure = Figure(figsize=(9, 3.6), layout="constrained")
curves, differences = figure.subplots(1, 2)
for name, (losses, colour, width) in runs.items():
    curves.plot(losses, color=colour, linewidth=width, label=name)
    differences.plot(np.abs(losses - truth), color=colour, linewidth=1, label=name)
    print(f"{name}: at most {np.abs(losses - truth).max():.0e} from the losses of torch in float64")
curves.set(xlabel="step", ylabel="loss of the batch", yscale="log")
differences.set(xlabel="step", ylabel="difference from float64", yscale="log")
curves.legend(frameon=False)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "curves.png")

onchip.to_torch(module, result).eval()
with torch.no_grad():
    in_torch = module(torch.from_numpy(x_test)).numpy()
onchip.save(result.network, "cnn.onnx")
logits = onchip.compile("cnn.onnx", device="cpu")(x_test)
print(f"logits of the test images: at most {np.abs(logits - in_torch).max():.0e} from those of the module")
print(f"{(logits.argmax(axis=1) == y_test).mean():.1%} of {len(y_test)} test images")
