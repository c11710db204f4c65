"""onchip data: files whole, by their checksums, from a folder or a server; what was cut short goes on."""

import hashlib
import http.server
import json
import threading

import pytest

from onchip.workloads import download
from onchip.workloads.download import DataFile, DataSet

CONTENT = {"images.gz": bytes(range(256)) * 2000, "labels.gz": b"0123456789"}
FILES = tuple(DataFile(name, len(text), hashlib.sha256(text).hexdigest()) for name, text in CONTENT.items())


class Server(http.server.BaseHTTPRequestHandler):
    """Gives CONTENT, or what a test puts in its place; begins in the middle where it is asked to, if it can."""

    content, asked, can_resume = dict(CONTENT), [], True

    def do_GET(self):
        begins = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        self.asked.append((self.path, int(begins)))
        text = self.content.get(self.path.rpartition("/")[2])
        if text is None:
            self.send_error(404)
            return
        begin = int(begins) if self.can_resume else 0
        self.send_response(206 if begin else 200)
        self.end_headers()
        self.wfile.write(text[begin:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Server, "content", dict(CONTENT))
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/mnist"
        running.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the files go; nothing is asked of the real places."""
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(download.DATA_SETS, "mnist", DataSet("mnist", FILES, ("http://127.0.0.1:9/nobody",)))
    return tmp_path / "data" / "mnist"


def kept(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_come_from_a_server_and_are_not_asked_for_twice(cli, server, folder):
    ran = cli("data", "MNIST", "--from", server)
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ran.err == f"{folder}: 2 files fetched and checked\n"
    assert kept(folder) == CONTENT
    asked = list(Server.asked)
    told = json.loads(cli("data", "mnist", "--from", server, "--json").out)
    assert (told["fetched"], Server.asked) == (0, asked)


@pytest.mark.parametrize("can_resume", [True, False])
def test_a_fetch_goes_on_where_it_stopped(cli, server, folder, monkeypatch, can_resume):
    monkeypatch.setattr(Server, "can_resume", can_resume)
    Server.content["images.gz"] = CONTENT["images.gz"][:70_000]  # it breaks off
    ran = cli("data", "mnist", "--from", server)
    assert ran.code == 2
    assert "it ends after 70,000 B" in ran.err
    assert [path.name for path in folder.iterdir()] == ["images.gz.part"]
    Server.content["images.gz"] = CONTENT["images.gz"]
    assert cli("data", "mnist", "--from", server).code == 0
    assert ("/mnist/images.gz", 70_000) in Server.asked
    assert kept(folder) == CONTENT


def test_wrong_bytes_are_refused_and_do_not_stay(cli, server, folder):
    Server.content["labels.gz"] = b"012345678X"
    ran = cli("data", "mnist", "--from", server)
    assert ran.code == 2
    assert "the bytes are not those that were published" in ran.err
    assert set(kept(folder)) == {"images.gz"}


def test_from_a_folder_to_another(cli, folder, tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name, text in CONTENT.items():
        (mirror / name).write_bytes(text)
    ran = cli("data", "mnist", "--from", mirror, "--to", "here")
    assert ran.code == 0
    assert kept(tmp_path / "here" / "mnist") == CONTENT
    assert f"export ONCHIP_DATA={tmp_path / 'here'}" in ran.err


def test_nobody_there_and_names_that_are_none(cli, folder):
    ran = cli("data", "mnist")
    assert ran.code == 2
    assert "127.0.0.1:9/nobody" in ran.err
    assert "try:      the same command again" in ran.err
    assert "try:      mnist" in cli("data", "mnsit").err.replace("did you mean ", "").replace("?", "")


def test_the_published_files_are_those_that_digits_reads():
    from onchip.workloads.digits import mnist_files

    names = [path.name for path in mnist_files(download.Path("nowhere"))]
    assert [file.name for file in download.MNIST.files] == [f"{name}.gz" for name in names]


@pytest.mark.timeout(10)
def test_what_is_no_file_of_ones_own_is_not_written(cli, server, folder, plant):
    folder.mkdir(parents=True)
    is_intact = plant(folder / "images.gz.part")
    ran = cli("data", "mnist", "--from", server)
    assert (ran.code, ran.out) == (2, "")
    assert "cannot write" in ran.err
    assert is_intact()
    assert [path.name for path in folder.iterdir()] == ["images.gz.part"]
