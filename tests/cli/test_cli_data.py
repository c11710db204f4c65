"""onchip data: files whole, by their checksums, from a folder or a server; what was cut short goes on."""

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
    """Gives CONTENT, or what a test puts in its place; begins in the middle where it is asked to, if it can."""

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
    requested = list(Server.requested)
    told = json.loads(cli("data", "mnist", "--from", server, "--json").out)
    assert (told["fetched"], Server.requested) == (0, requested)


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
    assert ("/mnist/images.gz", 70_000) in Server.requested
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


def test_what_is_no_file_of_ones_own_is_not_written(cli, server, folder, plant):
    folder.mkdir(parents=True)
    is_intact = plant(folder / "images.gz.part")
    ran = cli("data", "mnist", "--from", server)
    assert (ran.code, ran.out) == (2, "")
    assert "cannot write" in ran.err
    assert is_intact()
    assert [path.name for path in folder.iterdir()] == ["images.gz.part"]


# -- servers that lie -----------------------------------------------------------------------------------------

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
# What is sent first, and then for ever.
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
    """liar(first, then) is the address of a server that sends this to everybody, the second for ever."""
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
    assert ran.err.startswith("images.gz could not be fetched\n  got: ")
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_refused(cli, liar, folder, monkeypatch, lie):
    monkeypatch.setenv("no_proxy", "127.0.0.1,a..b")
    folder.mkdir(parents=True)
    source = liar(LIES[lie])
    for there in (b"", CONTENT["images.gz"][:1000]):  # from the beginning, and in the middle
        (folder / "images.gz.part").write_bytes(there)
        refused(cli("data", "mnist", "--from", source))
    assert {path.name for path in folder.iterdir()} <= {"images.gz.part"}


@pytest.mark.parametrize("lie", ENDLESS)
def test_a_server_that_never_ends_is_given_up(cli, liar, folder, monkeypatch, lie):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(download, "_MIN_BYTES_S", 1e12)
    ran = cli("data", "mnist", "--from", liar(*ENDLESS[lie]))
    refused(ran)
    assert "too slow" in ran.err or "timed out" in ran.err


def test_after_a_server_that_lies_another_is_asked(cli, liar, server, folder, monkeypatch):
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


def test_what_came_whole_is_not_asked_for_again(cli, server, folder):
    folder.mkdir(parents=True)
    (folder / "images.gz.part").write_bytes(CONTENT["images.gz"])
    assert cli("data", "mnist", "--from", server).code == 0
    assert kept(folder) == CONTENT
    assert [path for path, _ in Server.requested] == ["/mnist/labels.gz"]
