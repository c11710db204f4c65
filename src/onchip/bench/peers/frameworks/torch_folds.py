"""The folds of `onchip train sentiment --folds N`, trained in torch: same texts, ids, weights, batches and options.

    python -m onchip.bench.peers.frameworks.torch_folds --data sentiment-mr --folds 10 > torch.json

Only the random numbers of the dropout differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from onchip.network.graph import Network
from onchip.network.recipe import materialise
from onchip.network.text_cnn import DROPOUT, KERNELS
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order, hold_out
from onchip.workloads.folds import fold_job, folds_of
from onchip.workloads.seeds import spread
from onchip.workloads.table_data import Source
from onchip.workloads.text_job import KIM, NETWORKS, read_texts, text_options
from onchip.workloads.train_job import TrainJob


class TextCnn(nn.Module):  # type: ignore[misc]  # torch has no types
    """The network of onchip.network.text_cnn with its weights, as one writes it in torch."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        weights = {name: torch.from_numpy(np.array(materialise(name, net.weights))) for name in net.weights}
        self.embedding = nn.Embedding.from_pretrained(weights["embedding.weight"], freeze=False)
        self.convs = nn.ModuleList()
        for K in KERNELS:
            C_out, C_in, _ = weights[f"conv{K}.weight"].shape
            self.convs.append(conv := nn.Conv1d(C_in, C_out, K))
            conv.weight.data, conv.bias.data = weights[f"conv{K}.weight"], weights[f"conv{K}.bias"]
        self.fc = nn.Linear(*reversed(weights["fc.weight"].shape))
        self.fc.weight.data, self.fc.bias.data = weights["fc.weight"], weights["fc.bias"]

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids).transpose(1, 2)
        best = torch.cat([torch.relu(conv(x)).amax(dim=2) for conv in self.convs], dim=1)
        return self.fc(nn.functional.dropout(best, DROPOUT, self.training))


def train_fold(job: TrainJob, options: TrainOptions) -> dict[str, Any]:
    """Adam, with early stopping on the rows that onchip holds out; the accuracy is that of the best epoch's weights."""
    module, started = TextCnn(job.net), time.perf_counter()
    optimiser = torch.optim.Adam(module.parameters(), lr=options.lr)
    x, y = torch.from_numpy(job.data.x_train).long(), torch.from_numpy(job.data.y_train)
    train, held = (torch.from_numpy(rows) for rows in hold_out(len(x), options.validation, options.seed))
    best: tuple[float, int, Any] = (np.inf, 0, None)
    for epoch in range(options.epochs):
        module.train()
        for batch in train[torch.from_numpy(epoch_order(len(train), options.seed, epoch))].split(options.batch_size):
            loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(module.eval()(x[held]), y[held]))
        if loss < best[0]:
            best = loss, epoch + 1, copy.deepcopy(module.state_dict())
        elif epoch + 1 - best[1] >= options.patience > 0:
            break
    module.load_state_dict(best[2])
    with torch.no_grad():
        predictions = module.eval()(torch.from_numpy(job.data.x_test).long()).argmax(dim=1).numpy()
    return {
        "accuracy": float((predictions == job.data.y_test).mean()), "test_rows": len(predictions), "epochs": epoch + 1,
        "best_epoch": best[1], "seconds": time.perf_counter() - started,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--first", type=int, help="train only the first folds")
    parser.add_argument("--network", default=KIM, choices=[name for name in NETWORKS if name != "report"])
    given = parser.parse_args()
    options, data = text_options({}), read_texts(Source(given.data))
    torch.manual_seed(options.seed)
    found: list[dict[str, Any]] = []
    for test in folds_of(len(data.train.texts), given.folds, options.seed)[: given.first]:
        found.append({"fold": len(found) + 1, **train_fold(fold_job(data, test, options, given.network), options)})
        print(f"fold {len(found)}: accuracy {found[-1]['accuracy']:.2%}", file=sys.stderr, flush=True)
    mean, deviation = spread([fold["accuracy"] for fold in found])
    document = {"torch": torch.__version__, "data": data.name, "network": given.network, **asdict(options)}
    print(json.dumps({**document, "accuracy": mean, "deviation": deviation, "folds": found}, indent=2))


if __name__ == "__main__":
    main()
