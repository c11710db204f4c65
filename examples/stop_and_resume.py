"""Stop a training run and resume it: the result has the same bits as an uninterrupted run."""

import numpy as np

import onchip

rng = np.random.default_rng(0)
x = rng.standard_normal((600, 20), dtype=np.float32)
y = (x[:, :5].argmax(axis=1)).astype(np.int64)
net, options = onchip.mlp(20, 32, 5), {"epochs": 8, "lr": 0.1, "device": "cpu"}

whole = onchip.fit(net, x, y, **options)


class EnoughError(Exception):
    pass


def stop_early(epoch):
    if epoch.epoch == 4:
        raise EnoughError


try:
    onchip.fit(net, x, y, on_epoch=stop_early, checkpoint="run", checkpoint_every=0, **options)
except EnoughError:
    print("stopped after epoch 4")
resumed = onchip.fit(net, x, y, checkpoint="run", resume=True, **options)
same = all((whole.network.weights[name] == resumed.network.weights[name]).all() for name in whole.network.weights)
print("the same bits" if same else "other bits")
