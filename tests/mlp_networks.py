"""Fully-connected networks that tests put through engines."""

from checks import random_mlp

NETWORKS = {
    "decode": random_mlp(72, 64, 64, 4, bias=False),
    "digits": random_mlp(784, 320, 160, 10),
    "one layer": random_mlp(5, 3),
    "one number": random_mlp(1, 1, output="Sigmoid"),
    "odd widths": random_mlp(7, 13, 5, 3, activation="Tanh", output="Softmax"),
    "ten layers": random_mlp(9, 17, 16, 15, 33, 31, 32, 8, 64, 65, 2, activation="Sigmoid"),
    "long sums": random_mlp(1000, 33, 17, output="LogSoftmax"),
}
