"""The cache: a folder that nobody else can write to, entries that are whole, and work that goes on without."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from types import SimpleNamespace

import pytest

from onchip import cache
from onchip.cache import private_folder, read_entry, safe_cache_dir, write_entry

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
SOMEBODY = 12345


@pytest.fixture(autouse=True)
def requested(tmp_path, monkeypatch):
    """The folder asked for, which is not there yet; the user's default one is below tmp_path, too."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "a" / "b" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "printed", set())
    return tmp_path / "a" / "b" / "cache"


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- the folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_made_is_private_whatever_the_umask(requested, umask, capsys):
    before = os.umask(umask)
    try:
        folder = private_folder("numba")
        write_entry(folder, "key", b"content")
    finally:
        os.umask(before)
    assert folder == requested / "numba"
    assert [mode(path) for path in (folder, requested, requested.parent, requested.parent.parent)] == [0o700] * 4
    assert mode(folder / "key") == 0o600
    assert capsys.readouterr().err == ""


def test_a_folder_that_was_open_is_closed(requested):
    (requested / "numba").mkdir(parents=True)
    (requested / "numba").chmod(0o777)
    assert private_folder("numba") == requested / "numba"
    assert mode(requested / "numba") == 0o700


@AS_ROOT
def test_a_folder_of_roots_is_not_the_users(requested, monkeypatch, capsys):
    """Whoever owns / may own the folders above; what is in the cache itself must be the user's own."""
    requested.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: SOMEBODY)
    assert safe_cache_dir() is None
    assert f"{requested} belongs to another user" in capsys.readouterr().err


def open_to_all(requested):
    requested.chmod(0o777)


def open_to_all_and_sticky(requested):
    requested.chmod(0o1777)


def parent_open_to_all(requested):
    requested.parent.parent.chmod(0o777)


def shared_by_a_group(requested):
    os.chown(requested, -1, SOMEBODY)
    requested.chmod(0o2770)


def parent_shared_by_a_group(requested):
    os.chown(requested.parent, -1, SOMEBODY)
    requested.parent.chmod(0o770)


def of_somebody_else(requested):
    os.chown(requested, SOMEBODY, -1)


def parent_of_somebody_else(requested):
    os.chown(requested.parent, SOMEBODY, -1)


def link_to_an_open_folder(requested):
    requested.rename(requested.with_name("real"))
    requested.with_name("real").chmod(0o777)
    requested.symlink_to("real")


def link_of_somebody_else(requested):
    requested.rename(requested.with_name("real"))
    requested.symlink_to("real")
    os.chown(requested, SOMEBODY, -1, follow_symlinks=False)


def link_to_a_link_of_somebody_else(requested):
    link_of_somebody_else(requested)
    requested.rename(requested.with_name("theirs"))
    requested.symlink_to(requested.with_name("theirs"))


@pytest.mark.parametrize("make_unsafe", [
    open_to_all, open_to_all_and_sticky, parent_open_to_all, link_to_an_open_folder,
    *(pytest.param(trick, marks=AS_ROOT) for trick in (
        shared_by_a_group, parent_shared_by_a_group, of_somebody_else, parent_of_somebody_else,
        link_of_somebody_else, link_to_a_link_of_somebody_else,
    )),
])  # fmt: skip
def test_where_others_can_write_the_users_own_folder_is_used_and_said_once(requested, tmp_path, capsys, make_unsafe):
    requested.mkdir(parents=True)
    make_unsafe(requested)
    default = tmp_path / "home" / "onchip"
    assert [private_folder(name) for name in ("numba", "cubin", "numba")] == [
        default / name for name in ("numba", "cubin", "numba")
    ]
    assert safe_cache_dir() == default
    assert list(requested.iterdir()) == []
    said = capsys.readouterr().err
    assert said.startswith(f"cache: using {default} instead of {requested}: ")
    assert ("others can write to" in said) != ("belongs to another user" in said)
    assert said.count("\n") == 1


def test_where_the_users_own_folder_is_no_better_nothing_is_kept(requested, tmp_path, capsys):
    requested.mkdir(parents=True)
    open_to_all(requested)
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    assert private_folder("numba") is None
    assert private_folder("cubin") is None
    said = capsys.readouterr().err
    assert said.startswith(f"cache: nothing is cached in {requested}: others can write to {requested}; ")
    assert said.count("\n") == 1


def test_a_sticky_parent_and_links_of_ones_own_are_safe(requested, tmp_path, capsys):
    requested.mkdir(parents=True, mode=0o755)
    requested.parent.chmod(0o1777)
    requested.rename(tmp_path / "elsewhere")
    requested.symlink_to("../../elsewhere")
    assert private_folder("numba") == requested / "numba"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("members", [[], ["me"], ["me", "bob"]])
@pytest.mark.parametrize("name", ["me", "users"])
def test_the_users_private_group_may_write(requested, monkeypatch, members, name):
    requested.mkdir(parents=True)
    requested.chmod(0o775)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert (safe_cache_dir() == requested) == (name == "me" and "bob" not in members)


@pytest.mark.parametrize("trick", ["link", pytest.param("of somebody else", marks=AS_ROOT)])
def test_a_folder_in_the_cache_that_is_not_the_users_is_not_used(requested, tmp_path, capsys, trick):
    requested.mkdir(parents=True)
    if trick == "link":
        (tmp_path / "real").mkdir()
        (requested / "numba").symlink_to(tmp_path / "real")
    else:
        (requested / "numba").mkdir()
        os.chown(requested / "numba", SOMEBODY, -1)
    assert private_folder("numba") is None
    assert f"nothing is cached in {requested / 'numba'}: it is a link" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_once(requested, tmp_path, capsys):
    (tmp_path / "a").write_text("a file")
    for name in ("numba", "cubin"):
        folder = private_folder(name)
        assert folder is None
        write_entry(folder, "key", b"content")
        assert read_entry(folder, "key") is None
    reason = f"cache: nothing is cached in {requested}: Not a directory; set ONCHIP_CACHE to another folder\n"
    assert capsys.readouterr().err == reason


# -- entries -------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(requested):
    folder = private_folder("numba")
    assert read_entry(folder, "key") is None
    for content in (b"", b"first", b"second" * 1000):
        write_entry(folder, "key", content)
        assert read_entry(folder, "key") == content
    assert [path.name for path in folder.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "in half", "longer", "flip", "flip in the digest", "zeros", "rename"]
)
def test_an_entry_that_is_not_whole_is_refused_and_can_be_written_again(damage):
    folder = private_folder("numba")
    write_entry(folder, "key", bytes(range(200)))
    whole = (folder / "key").read_bytes()
    n = len(whole)
    (folder / "key").write_bytes({
        "empty": b"", "cut": whole[:-1], "in half": whole[: n // 2], "longer": whole + b"x", "zeros": bytes(n),
        "flip": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "rename": whole,
        "flip in the digest": bytes([whole[0] ^ 128]) + whole[1:],
    }[damage])  # fmt: skip
    key = "key"
    if damage == "rename":
        key = "other"
        os.rename(folder / "key", folder / key)
    assert read_entry(folder, key) is None
    write_entry(folder, key, b"new")
    assert read_entry(folder, key) == b"new"


@pytest.mark.parametrize("trick", [
    "link", "hers to write", "everybody's to write", "pipe", "folder", pytest.param("of somebody else", marks=AS_ROOT),
])  # fmt: skip
def test_an_entry_that_others_may_have_written_is_refused(tmp_path, trick):
    folder = private_folder("numba")
    write_entry(folder, "key", b"content")
    entry = folder / "key"
    if trick == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    elif trick == "of somebody else":
        os.chown(entry, SOMEBODY, -1)
    elif trick == "pipe":
        entry.unlink()
        os.mkfifo(entry)
    elif trick == "folder":
        entry.unlink()
        entry.mkdir()
    else:
        entry.chmod(0o660 if trick == "hers to write" else 0o606)
    assert read_entry(folder, "key") is None
    write_entry(folder, "key", b"new")
    if trick not in ("folder", "pipe"):  # which nobody replaces
        assert read_entry(folder, "key") == b"new"
        assert mode(entry) == 0o600


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_more_is_said_once(requested, capsys, monkeypatch, code):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    folders = [private_folder("numba"), private_folder("cubin")]
    write_entry(folders[0], "kept", b"before")
    monkeypatch.setattr("tempfile.mkstemp" if code == errno.EROFS else "os.fsync", refuse)
    for folder in folders:
        for key in ("a", "b"):
            write_entry(folder, key, b"content")
            assert read_entry(folder, key) is None
    assert read_entry(folders[0], "kept") == b"before"
    assert [path.name for folder in folders for path in folder.iterdir()] == ["kept"]
    said = f"cache: nothing is cached in {requested}: {os.strerror(code)}"
    said += "; set ONCHIP_CACHE to another folder\n"
    assert capsys.readouterr().err == said
