"""onchip cache: shown, cleared, and nothing else touched."""

import json

import pytest

from onchip.cache import FOLDERS, private_folder, write_entry


@pytest.fixture
def filled(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("ONCHIP_CACHE", str(root))
    for name in ("numba", "rates"):
        write_entry(private_folder(name), "entry", bytes(968))
    (root / "data").mkdir()
    (root / "data" / "mine").write_text("a user's own")
    return root


def test_it_is_shown(cli, filled):
    ran = cli("cache")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ["folder", *FOLDERS]
    assert str(filled) in ran.err
    told = json.loads(cli("cache", "--json").out)
    assert told["kept"]["numba"] == {"files": 1, "bytes": 1000}
    assert told["removed"] == 0


def test_it_is_cleared_and_other_files_stay(cli, filled):
    ran = cli("cache", "--clear")
    assert ran.out == f"removed 2 files, 0.0 MiB, from {filled}\n"
    assert [path.name for path in filled.rglob("*") if path.is_file()] == ["mine"]
    assert cli("cache", "--clear").out.startswith("removed 0 files")


def test_a_link_is_not_followed(cli, filled, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "precious").touch()
    (filled / "cubin").symlink_to(tmp_path / "else")
    assert cli("cache", "--clear").code == 0
    assert (tmp_path / "else" / "precious").exists()


def test_a_missing_cache_is_not_created(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "none"))
    assert cli("cache").code == 0
    assert not (tmp_path / "none").exists()
