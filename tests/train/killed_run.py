"""Run by test_checkpoint.py in a separate process: a training run that is killed 20 times at random moments.

Arguments: a folder. Prints how often it killed and the steps that the checkpoints stood at; leaves resumed.npz and
whole.npz. The parent trains a little, which loads all kernels, so every child starts at once by a fork.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import onchip

KILLS = 20


def train(folder: Path | None, out: Path, epochs: int = 600) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((1500, 20), dtype=np.float32), rng.integers(0, 3, 1500)
    kept = {} if folder is None else {"checkpoint": folder, "checkpoint_every": 0.0, "resume": True}
    result = onchip.fit(
        onchip.mlp(20, 32, 3), x, y, device="cpu", optimiser="adamw", weight_decay=0.1, lr=0.002, batch_size=11,
        epochs=epochs, validation=0.1, patience=epochs - 1, schedule="cosine", clip_norm=0.5, label_smoothing=0.1,
        class_weight="balanced", sample_weight=np.linspace(0, 2, len(x)), **kept,
    )  # fmt: skip
    told = [(e.loss, e.accuracy, e.validation_loss, e.validation_accuracy, e.lr) for e in result.history]
    np.savez(out, losses=result.losses, told=told, best=result.best_epoch, **result.network.weights, **result.state)


def start(folder: Path | None, out: Path) -> int:
    child = os.fork()
    if child == 0:
        train(folder, out)
        os._exit(0)
    return child


def main() -> None:
    root = Path(sys.argv[1])
    folder = root / "checkpoints"
    train(None, root / "short.npz", epochs=2)
    os.waitpid(start(None, root / "whole.npz"), 0)
    moments, kills, stood = random.Random(1), 0, []
    while kills < KILLS:
        child = start(folder, root / "resumed.npz")
        time.sleep(moments.random() * 0.5)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the run ended by itself after {kills} kills: make it longer")
        kills += 1
        names = sorted(folder.glob("checkpoint-*.safetensors")) if folder.exists() else []
        stood.append(int(names[-1].stem.split("-")[1]) if names else 0)
    _, status = os.waitpid(start(folder, root / "resumed.npz"), 0)
    print(kills, *stood)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
