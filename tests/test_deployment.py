"""The web service of docs/deployment.md answers many requests at a time; its list of variables is complete."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import onchip

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def test_the_service_answers_16_threads(tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]:
        exec(compile(block, "deployment.md", "exec"), names)
    x = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    engine = onchip.compile("model.onnx", device="cpu")
    expected = [("no", "yes")[i] for i in engine(x).argmax(axis=1)]

    async def start() -> None:
        async with names["lifespan"](names["app"]):
            pass

    asyncio.run(start())
    (route,) = [route for route in names["app"].routes if route.path == "/predict"]
    with ThreadPoolExecutor(16) as pool:  # as FastAPI calls a function that is not async
        answers = pool.map(lambda row: route.endpoint(names["Rows"](rows=[row.tolist()])), x)
        assert [answer["labels"] for answer in answers] == [[label] for label in expected]


def test_every_variable_is_listed():
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"environ(?:\.get\(|\[)\"(ONCHIP_\w+)\"", text)}
    assert read - {"ONCHIP_SUPERVISOR"} <= set(re.findall(r"`(ONCHIP_\w+)`", PAGE))  # set by the launcher of ranks
    assert {"ONCHIP_CACHE", "ONCHIP_QUIET", "ONCHIP_DATA"} <= set(re.findall(r"`(ONCHIP_\w+)`", PAGE))
