"""A file is read once; its cache entry is used only while it is complete and the file unchanged."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from onchip.workloads import table_cache
from onchip.workloads.table_cache import CachedTable, read_cached


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tables"


@pytest.fixture
def reads(tmp_path, cache):
    """reads(): read source.txt through the cache; returns content, note, and how often it was really read."""
    path = tmp_path / "source.txt"
    path.write_text("3 4 5")
    count = 0

    def make() -> CachedTable:
        nonlocal count
        count += 1
        x = np.array(path.read_text().split(), np.float32).reshape(-1, 1)
        return CachedTable(x, np.arange(len(x)), ("a", "é"))

    def call(way: str = "way"):
        found, told = read_cached([path], way, make)
        return found, told, count

    return call


def test_the_second_time_it_is_mapped(reads):
    first, told, count = reads()
    assert (told.startswith("source.txt: read 3 rows in "), told.endswith("; cached")) == (True, True)
    second, told, count = reads()
    assert (told, count) == ("", 1)
    for found in (first, second):
        assert found.x.tolist() == [[3], [4], [5]]
        assert found.x.dtype == np.float32
        assert found.y.tolist() == [0, 1, 2]
        assert found.words == ("a", "é")
    second.x[0] = 7  # a private copy
    assert reads()[0].x[0] == 3


def test_another_way_is_another_entry(reads, cache):
    reads("a")
    assert reads("b")[2] == 2
    assert reads("a")[2] == reads("b")[2] == 2


def test_a_file_that_changed_is_read_again_and_its_old_rows_go(reads, cache, tmp_path):
    reads()
    reads("other")
    before = {path.name for path in cache.iterdir()}
    path = tmp_path / "source.txt"
    path.write_text("3 4 6")  # of the same size
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    found, told, count = reads()
    assert (found.x.tolist(), count) == ([[3], [4], [6]], 3)
    assert "cached" in told
    after = {path.name for path in cache.iterdir()}
    assert len(after) == len(before) == 6
    assert len(after & before) == 3  # entries of the other way


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "gone", "other dtype", "other shape", "garbage"])
@pytest.mark.parametrize("name", ["x.npy", "y.npy"])
def test_damaged_arrays_are_read_again(reads, cache, damage, name):
    reads()
    path = next(cache.glob(f"*-{name}"))
    data = path.read_bytes()
    array = np.load(path)
    if damage == "gone":
        path.unlink()
    elif damage.startswith("other"):
        np.save(path, array.astype("f8") if damage == "other dtype" else array[:-1])
    else:
        path.write_bytes({"cut": data[:-1], "longer": data + b"x", "empty": b"", "garbage": bytes(len(data))}[damage])
    found, told, count = reads()
    assert (count, found.x.tolist()) == (2, [[3], [4], [5]])
    assert "cached" in told
    assert reads()[1:] == ("", 2)


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "nonsense", '{"arrays": {}, "words": []}', "[" * 100_000, '{"arrays": 1, "words": []}',
    '{"arrays": {"x": 1, "y": 2}, "words": 3}',
])  # fmt: skip
def test_a_damaged_description_is_read_again(reads, cache, text):
    reads()
    next(cache.glob("*.json")).write_text(text)
    assert reads()[2] == 2
    assert reads()[1:] == ("", 2)


def test_another_version_is_another_entry(reads, monkeypatch):
    reads()
    monkeypatch.setattr(table_cache, "VERSION", table_cache.VERSION + 1)
    assert reads()[2] == 2


def test_a_cache_folder_that_cannot_be_created_is_not_fatal(reads, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        found, told, _ = reads()
        assert found.x.tolist() == [[3], [4], [5]]
        assert told.endswith("; not cached")
    assert capsys.readouterr().err.count("Not a directory") == 1


def test_a_full_disk_is_reported_and_leaves_no_partial_entry(reads, cache, monkeypatch):
    written = []

    def fill(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    found, told, _ = reads()
    assert found.x.tolist() == [[3], [4], [5]]
    assert told.endswith(f"; not cached: {cache}: No space left on device")
    assert list(cache.iterdir()) == []
    assert reads()[1].endswith("; cached")


def test_a_missing_file_is_the_readers_to_tell(cache, tmp_path):
    def read():
        raise LookupError("as the reader says")

    with pytest.raises(LookupError, match="as the reader says"):
        read_cached([tmp_path / "none"], "way", read)
    assert not cache.exists()
