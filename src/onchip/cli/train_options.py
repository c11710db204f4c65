"""The options of `onchip train`. They have no defaults: a value that is not given comes from the config file or the
workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onchip.cli.options import DEVICES, completes
from onchip.train.options import ACTIVATIONS, OPTIMISERS, SCHEDULES, TrainOptions


def _training(name: str, text: str, *declarations: str) -> Any:
    default = getattr(TrainOptions, name)
    return Option(*declarations, help=f"{text} [default: {default}]", show_default=False)


Model = Annotated[
    str | None,
    Argument(
        metavar="MODEL",
        show_default=False,
        help="digits; backprop; mlp: a new network for your data; or a file (.onnx, .safetensors) to train further.",
        autocompletion=completes(("digits", "backprop", "mlp"), ".onnx", ".safetensors"),
    ),
]
Config = Annotated[
    Path | None, Option(metavar="FILE", help="A .toml with the options: lr = 0.1. The command line goes before it.")
]
Data = Annotated[
    str | None,
    Option(help="mnist, sklearn (8x8 digits) or auto; of your own a .csv, .npy, idx or idx.gz."),
]
Labels = Annotated[
    str | None, Option(help="A column of the .csv (first, last or its name), or a file: .npy, idx or idx.gz.")
]
TestData = Annotated[str | None, Option(metavar="FILE", help="Rows of your own to test on.")]
TestLabels = Annotated[str | None, Option(help="Their labels; for a .csv as --labels if not given.")]
TestShare = Annotated[
    float | None,
    Option(help="Share of your rows to test on, chosen by the seed, without --test-data; 0.2 if not given."),
]
Hidden = Annotated[str | None, Option(metavar="W,W", help="Hidden widths of a new network; else the model's.")]
Activation = Annotated[
    str | None, Option(help=f"{', '.join(ACTIVATIONS)}: between the layers of a new network; else the model's.")
]
Scale = Annotated[
    bool | None,
    Option(
        "--scale/--no-scale",
        help="Train on columns, and number targets, of mean 0 and deviation 1, folded into the network: it reads raw "
        "rows. [default: scale for tables of your own]",
    ),
]
Output = Annotated[Path | None, Option("--output", "-o", help="The .onnx or .safetensors to write.")]

Loss = Annotated[str | None, _training("loss", "cross_entropy for classes; mse or half_sse (half the sum) for numbers")]
LabelSmoothing = Annotated[
    float | None, _training("label_smoothing", "Of cross_entropy: share of a target that all classes have alike.")
]
ClassWeight = Annotated[
    str | None,
    Option(metavar="W,W", help="Of cross_entropy: balanced, or what rows of each class count. [default: 1 each]"),
]
Optimiser = Annotated[str | None, _training("optimiser", f"{', '.join(OPTIMISERS)}.", "--optimiser", "--optimizer")]
Lr = Annotated[float | None, _training("lr", "Learning rate.", "--lr", "--learning-rate")]
Momentum = Annotated[float | None, _training("momentum", "Of sgd.")]
WeightDecay = Annotated[
    float | None, _training("weight_decay", "Share of the weights added to their gradients; adamw: taken off weights.")
]
ClipNorm = Annotated[float | None, _training("clip_norm", "The longest gradient of a batch; 0: any.")]
Schedule = Annotated[str | None, _training("schedule", f"Of the learning rate: {', '.join(SCHEDULES)}.")]
StepEvery = Annotated[int | None, _training("step_every", "Epochs between the drops of step.")]
StepFactor = Annotated[float | None, _training("step_factor", "By which they multiply the learning rate.")]
BatchSize = Annotated[int | None, _training("batch_size", "Rows an update.")]
Epochs = Annotated[int | None, _training("epochs", "Passes over the data.")]
Validation = Annotated[
    float | None, _training("validation", "Share of the training rows that is held back and judged every epoch.")
]
Patience = Annotated[
    int | None, _training("patience", "Stop after so many epochs without a better validation loss; 0: never.")
]
Shuffle = Annotated[
    bool | None, Option("--shuffle/--no-shuffle", help="Another order of the rows every epoch. [default: shuffle]")
]
Precision = Annotated[str | None, _training("precision", "Of products: tf32, bf16 or fp16 on a GPU.")]
Seed = Annotated[int | None, _training("seed", "Of the first weights, the order, and what is held back.")]
Seeds = Annotated[
    int | None, Option(metavar="N", help="Train N networks side by side, with the seeds from --seed on; keep the best.")
]

Ranks = Annotated[
    int | None,
    Option(metavar="N", help="As so many MPI ranks of this machine: seeds, or rows of large batches."),
]

Checkpoint = Annotated[
    Path | None, Option(metavar="DIR", help="Where the run keeps its state, so that it can be taken up again.")
]
CheckpointEvery = Annotated[float | None, Option(metavar="SECONDS", help="At most so often; 10 if not given.")]
Resume = Annotated[bool | None, Option("--resume", help="Go on from what is in --checkpoint, if there is anything.")]
Debug = Annotated[
    bool | None, Option("--debug", help="Stop at the first number that is not finite, and say where it appears.")
]
Log = Annotated[Path | None, Option(metavar="FILE", help="The .jsonl to write: what was asked, then a line an epoch.")]
Plot = Annotated[Path | None, Option(metavar="FILE", help="The .png, .svg or .pdf to draw the learning curve in.")]
Device = Annotated[
    str | None,
    Option(help="auto, cpu, cuda or cuda:N. [default: auto]", show_default=False, autocompletion=completes(DEVICES)),
]
