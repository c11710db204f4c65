"""The model card of the generator that comes with onchip says what the run that trained it printed."""

import hashlib
import json
from pathlib import Path

from onchip.workloads import faces

ROOT = Path(__file__).parents[2]
CARD = (ROOT / "docs" / "models" / "faces.md").read_text()
RUN = json.loads((ROOT / "docs" / "models" / "faces.json").read_text())  # of `train faces --json`, without its plans


SCORES = ("generated", "training", "noise", "nearest_generated", "nearest_held_out")


def test_the_numbers_of_the_card_are_those_of_the_run():
    frechet = RUN["frechet"]
    found = {
        "pictures": RUN["pictures"], "epochs": RUN["epochs"], "date": RUN["date"],
        **{name: f"{frechet[name]:.3g}" for name in SCORES},
        "parameters": f"{RUN['parameters'][0]:,}", "steps": f"{RUN['epochs'] * steps_per_epoch():,}",
    }  # fmt: skip
    for name, value in found.items():
        assert str(value) in CARD, (name, value)
    assert f"--epochs {RUN['epochs']} " in CARD
    assert len(RUN["epoch_losses"]) == RUN["epochs"]


def steps_per_epoch():
    return (RUN["pictures"] - RUN["held_out"]) // RUN["batch_size"]


def test_the_options_of_the_command_are_those_of_the_run():
    command = next(line for line in CARD.splitlines() if line.startswith("onchip train faces"))
    for name in ("width", "batch_size"):
        assert f"--{name.replace('_', '-')} {RUN[name]}" in command
    assert ("--no-augment" in command) == (not RUN["augment"])
    assert "--seed" not in command
    assert RUN["seed"] == 0


def test_the_file_is_the_one_of_the_card():
    assert hashlib.sha256(faces.SHIPPED.read_bytes()).hexdigest() in CARD
    net = faces.shipped()
    assert (net.parameters, net.input.row_shape) == (RUN["parameters"][0], (RUN["latent"],))


def test_it_is_part_of_the_package():
    assert f'"{faces.SHIPPED.name}"' in (ROOT / "pyproject.toml").read_text()
