"""onchip data: complete, verified files from a folder or a server; interrupted downloads are resumed."""

import contextlib
import hashlib
import http.server
import json
import os
import socket
import threading

import pytest

from onchip.workloads import download
from onchip.workloads.download import DataFile, DataSet

CONTENT = {"images.gz": bytes(range(256)) * 2000, "labels.gz": b"0123456789"}
FILES = tuple(DataFile(name, len(text), hashlib.sha256(text).hexdigest()) for name, text in CONTENT.items())


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT, or what a test substitutes; supports ranges if can_resume."""

    content, requested, can_resume = dict(CONTENT), [], True

    def do_GET(self):
        begins = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        self.requested.append((self.path, int(begins)))
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
    monkeypatch.setattr(Server, "requested", [])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/mnist"
        running.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The target folder; the real sources are not contacted."""
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(download.DATA_SETS, "mnist", DataSet("mnist", FILES, ("http://127.0.0.1:9/nobody",)))
    return tmp_path / "data" / "mnist"


def kept(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_downloaded_once(cli, server, folder):
    ran = cli("data", "MNIST", "--from", server)
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ran.err == f"{folder}: 2 files downloaded and verified\n"
    assert kept(folder) == CONTENT
    requested = list(Server.requested)
    told = json.loads(cli("data", "mnist", "--from", server, "--json").out)
    assert (told["fetched"], Server.requested) == (0, requested)


@pytest.mark.parametrize("can_resume", [True, False])
def test_a_download_is_resumed(cli, server, folder, monkeypatch, can_resume):
    monkeypatch.setattr(Server, "can_resume", can_resume)
    Server.content["images.gz"] = CONTENT["images.gz"][:70_000]  # truncated
    ran = cli("data", "mnist", "--from", server)
    assert ran.code == 2
    assert "it ends after 70,000 B" in ran.err
    assert [path.name for path in folder.iterdir()] == ["images.gz.part"]
    Server.content["images.gz"] = CONTENT["images.gz"]
    assert cli("data", "mnist", "--from", server).code == 0
    assert ("/mnist/images.gz", 70_000) in Server.requested
    assert kept(folder) == CONTENT


def test_wrong_bytes_are_refused_and_do_not_stay(cli, server, folder):
    Server.content["labels.gz"] = b"012345678X"
    ran = cli("data", "mnist", "--from", server)
    assert ran.code == 2
    assert "the checksum differs from the published one" in ran.err
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


def test_no_server_and_unknown_names(cli, folder):
    ran = cli("data", "mnist")
    assert ran.code == 2
    assert "127.0.0.1:9/nobody" in ran.err
    assert "try:      repeat the command" in ran.err
    assert "try:      mnist" in cli("data", "mnsit").err.replace("did you mean ", "").replace("?", "")


def test_the_published_files_are_those_that_digits_reads():
    from onchip.workloads.digits import mnist_files

    names = [path.name for path in mnist_files(download.Path("nowhere"))]
    assert [file.name for file in download.MNIST.files] == [f"{name}.gz" for name in names]


def test_only_regular_files_of_the_user_are_written(cli, server, folder, plant):
    folder.mkdir(parents=True)
    is_intact = plant(folder / "images.gz.part")
    ran = cli("data", "mnist", "--from", server)
    assert (ran.code, ran.out) == (2, "")
    assert "cannot write" in ran.err
    assert is_intact()
    assert [path.name for path in folder.iterdir()] == ["images.gz.part"]


# -- bad servers ----------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def redirect(place):
    return b"HTTP/1.1 302 Found\r\nLocation: " + place + b"\r\n\r\n"


LIES = {
    "nothing": b"",
    "no status": b"\0\xff no status\r\n\r\n",
    "no code": b"HTTP/1.1 abc OK\r\n\r\n",
    "a code of five digits": b"HTTP/1.1 20000 OK\r\n\r\n",
    "a long status": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "a long header": OK + b"A: " + b"a" * 70_000 + b"\r\n\r\n",
    "many headers": OK + b"A: b\r\n" * 200 + b"\r\n",
    "half a header": OK + b"Content-Le",
    "a length that is none": OK + b"Content-Length: many\r\n\r\n",
    "a negative length": OK + b"Content-Length: -9\r\n\r\n",
    "a length of many digits": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n12",
    "a file that is too short": OK + b"Content-Length: 512000\r\n\r\n12",
    "no number of a chunk": CHUNKED + b"zz\r\n12",
    "a negative chunk": CHUNKED + b"-5\r\n12345\r\n0\r\n\r\n",
    "half a chunk": CHUNKED + b"ffff\r\n12",
    "a chunk beyond all": CHUNKED + b"f" * 40 + b"\r\n12",
    "a long chunk line": CHUNKED + b"1;" + b"a" * 70_000 + b"\r\n1",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "no such range": b"HTTP/1.1 416 Range Not Satisfiable\r\n\r\n",
    "an error with escapes": b"HTTP/1.1 500 \x1b[2J\xff\r\n\r\n",
    "unauthorised": b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\n\r\n",
    "to no address": redirect(b"http://[::1/x"),
    "to an address with a space": redirect(b"http://127.0.0.1:9/a b"),
    "to an address of other letters": redirect("http://127.0.0.1:9/ö".encode()),
    "to an empty label": redirect(b"http://a..b/x"),
    "to a port that is none": redirect(b"http://127.0.0.1:many/x"),
    "to a port beyond all": redirect(b"http://127.0.0.1:99999/x"),
    "to a file": redirect(b"file:///etc/passwd"),
    "to another protocol": redirect(b"gopher://127.0.0.1/x"),
    "to itself": redirect(b"/mnist/images.gz"),
    "nowhere": b"HTTP/1.1 302 Found\r\n\r\n",
}
# Sent first, then repeated forever.
ENDLESS = {
    "silence": (b"", b""),
    "a status, bit by bit": (b"", b"H"),
    "headers, bit by bit": (OK + b"A: ", b"a"),
    "go on": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the file, bit by bit": (OK + b"\r\n", b"a"),
    "chunks, bit by bit": (CHUNKED, b"1\r\na\r\n"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"A: b\r\n"),
}


@pytest.fixture
def liar():
    """liar(first, then): the address of a server that sends `first`, then `then` forever."""
    listener, is_over, threads = socket.create_server(("127.0.0.1", 0)), threading.Event(), []

    def call(first, then=None):
        def answer(client):
            with client, contextlib.suppress(OSError):
                client.recv(1 << 16)
                client.sendall(first)
                while then is not None and not is_over.wait(0.001):
                    client.sendall(then)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                    threads[-1].start()

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/mnist"

    yield call
    is_over.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


def refused(ran):
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("images.gz could not be downloaded\n  got: ")
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err


@pytest.mark.parametrize("lie", LIES)
def test_a_server_with_wrong_data_is_refused(cli, liar, folder, monkeypatch, lie):
    monkeypatch.setenv("no_proxy", "127.0.0.1,a..b")
    folder.mkdir(parents=True)
    source = liar(LIES[lie])
    for there in (b"", CONTENT["images.gz"][:1000]):  # from the beginning, and in the middle
        (folder / "images.gz.part").write_bytes(there)
        refused(cli("data", "mnist", "--from", source))
    assert {path.name for path in folder.iterdir()} <= {"images.gz.part"}


@pytest.mark.parametrize("lie", ENDLESS)
def test_a_server_that_never_ends_is_abandoned(cli, liar, folder, monkeypatch, lie):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(download, "MIN_BYTES_S", 1e12)
    ran = cli("data", "mnist", "--from", liar(*ENDLESS[lie]))
    refused(ran)
    assert "too slow" in ran.err or "timed out" in ran.err


def test_after_a_bad_server_another_is_tried(cli, liar, server, folder, monkeypatch):
    monkeypatch.setitem(
        download.DATA_SETS, "mnist", DataSet("mnist", FILES, (liar(LIES["no status"]), "http://[", server))
    )
    assert cli("data", "mnist").code == 0
    assert kept(folder) == CONTENT


@pytest.mark.parametrize("place", ["http://", "http://[", "http://127.0.0.1:many/", "http://127.0.0.1:99999/x",
                                   "http://127.0.0.1:9/ö", "http://127.0.0.1:9/a b", "http://a..b/", "http://\x7f/",
                                   "file://nowhere", "pipes", "a\0b", "ö"])  # fmt: skip
def test_a_source_that_cannot_be_is_refused(cli, folder, tmp_path, place):
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "images.gz")
    ran = cli("data", "mnist", "--from", place)
    refused(ran)
    assert ran.err.count("got:") == 1


def test_a_complete_file_is_not_downloaded_again(cli, server, folder):
    folder.mkdir(parents=True)
    (folder / "images.gz.part").write_bytes(CONTENT["images.gz"])
    assert cli("data", "mnist", "--from", server).code == 0
    assert kept(folder) == CONTENT
    assert [path for path, _ in Server.requested] == ["/mnist/labels.gz"]
