"""Networks that look ids up in every way there is; as a script: a thread writes to the ids while they are looked up.

The script is run by runtime/test_changing_ids.py in a process of its own, which a read outside a table may end.
"""

import threading
import time

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Concat, Conv1d, Embedding, GlobalMax, Identity, Permute, Reshape
from onchip.network.types import TensorType
from onchip.runtime.engine import compile

V, FAR = 50, 2**31 - 1  # rows of the table, and an id far past its end
SECONDS = 0.6  # of calls, each way

# How ids come to their look-up: the layer that makes them, the input's dtype, the rewrites that are left out.
WAYS = {
    "folded, int64": (Identity(), "int64", ()),
    "folded, int32": (Identity(), "int32", ()),
    "moved": (Concat(1), "int32", ()),
    "a layer at a time": (Reshape(), "int64", ("fold",)),
    "computed": (Add(), "int64", ()),
}


def text_network(way: str) -> Network:
    """Ids to maxima over time; the ids, as they are looked up, are an output too."""
    front, dtype, _ = WAYS[way]
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((V, 8), dtype=np.float32),
        "w": rng.standard_normal((16, 8, 3), dtype=np.float32),
        "zero": np.zeros(1, np.int64),
    }
    nodes = (
        Node("front", front, ("ids",), {"constant": "zero"} if way == "computed" else {}),
        Node("emb", Embedding(), ("front",), {"weight": "table"}), Node("turn", Permute((0, 2, 1)), ("emb",)),
        Node("conv", Conv1d(), ("turn",), {"weight": "w"}), Node("max", GlobalMax((-1,)), ("conv",)),
    )  # fmt: skip
    return Network({"ids": TensorType(("B", 16), dtype)}, nodes, ("max", "front"), weights)


def good_ids(way: str, B: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, V, (B, 16)).astype(WAYS[way][1])


def race(way: str) -> None:
    """Calls on ids, and with an `out` for ids, that a thread overwrites all the time."""
    engine = compile(text_network(way), "cpu", batch_hint=10**9, without=WAYS[way][2])
    good = good_ids(way, 4096)
    truth = engine(good)
    ids, out, stop = good.copy(), tuple(np.empty_like(y) for y in truth), threading.Event()

    def write() -> None:
        while not stop.is_set():
            for array, kept in ((ids, good), (out[1], truth[1])):
                array[...] = FAR
                array[...] = kept

    writer = threading.Thread(target=write)
    writer.start()
    answers = errors = 0
    end = time.perf_counter() + SECONDS
    try:
        while time.perf_counter() < end or not answers + errors:
            try:
                got, _ = engine(ids, out=out)
                assert np.array_equal(got, truth[0]), "neither an error nor the answer to these ids"
                answers += 1
            except InputError as error:
                if f"id {FAR}" not in str(error):
                    raise
                errors += 1
    finally:
        stop.set()
        writer.join()
    print(f"{way}: {answers} answers, {errors} errors")


if __name__ == "__main__":
    for way in WAYS:
        race(way)
