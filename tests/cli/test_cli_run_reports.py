"""onchip run on the reports' own files: sentiment and faces, at small sizes, and errors in such files."""

import json

import numpy as np
import pytest

from checks import assert_error_within, assert_refused
from onchip.formats.images import to_pixels
from onchip.formats.tables.rows_text import read_rows_text
from onchip.formats.weights.flat_file import draw_flat
from onchip.kernels import reference
from onchip.network.recipe import materialise
from onchip.workloads import faces, sentiment
from small_reports import PICTURES, make_small, write_words


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The two workloads under their names, at small sizes."""
    make_small(monkeypatch)


@pytest.fixture
def words(tmp_path):
    """params.bin and inputs.bin; the network and its ids."""
    ids = write_words(tmp_path)
    return sentiment.network(tmp_path / "params.bin"), ids


@pytest.fixture
def pictures(tmp_path):
    """network.bin and input.txt; the network and its rows."""
    layout = faces.layout(PICTURES["latent"], PICTURES["channels"], PICTURES["start"])
    rng = np.random.default_rng(0)
    parts = [np.abs(rng.standard_normal(t.shape)) * 0.3 + 0.2 if t.name.endswith("var")
             else rng.standard_normal(t.shape) / 8 for t in layout]  # fmt: skip
    (tmp_path / "network.bin").write_bytes(b"".join(part.astype("<f4").tobytes() for part in parts))
    z = rng.standard_normal((7, 100)).astype(np.float32)
    lines = "\n".join(" ".join(f"{x:.9g}" for x in row) for row in z)
    (tmp_path / "input.txt").write_text(f"7\n{lines}\n")
    return faces.network(tmp_path / "network.bin"), z


def assert_right(got, net, x):
    assert_error_within(got, reference.forward(net, x), reference.forward(net, x, dtype="float32"))


# -- sentiment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 1, 7])
def test_answers(cli, tmp_path, words, batch):
    pieces = [] if batch is None else ["--batch", batch]
    ran = cli("run", "sentiment", "--weights", "params.bin", "inputs.bin", "-o", "y.bin", *pieces)
    assert ran.code == 0, ran.err
    assert ran.out == ""
    assert "random" not in ran.err
    assert "rows/s" in ran.err
    answers = np.fromfile(tmp_path / "y.bin", "<f4").reshape(-1, 2)
    assert len(answers) == 90
    assert_right(answers, *words)


def test_ids_and_answers_as_npy(cli, tmp_path, words):
    np.save(tmp_path / "ids.npy", words[1])
    for source, target in (("ids.npy", "y.bin"), ("inputs.bin", "y.npy")):
        assert cli("run", "sentiment", source, "--weights", "params.bin", "-o", target).code == 0
    assert np.load(tmp_path / "y.npy").tobytes() == (tmp_path / "y.bin").read_bytes()
    assert np.load(tmp_path / "y.npy").shape == (90, 2)


def test_ids_of_another_dtype(cli, tmp_path, words):
    np.save(tmp_path / "ids.npy", words[1].astype(np.int64))
    assert_refused(cli("run", "sentiment", "ids.npy", "-o", "y.bin"), tmp_path, "int64", "int32")


@pytest.fixture
def requested(monkeypatch):
    """The jobs that engines were planned for."""
    from onchip.runtime import run_job

    jobs, place = [], run_job.place

    def watched(net, device, job, *others):
        jobs.append(job)
        return place(net, device, job, *others)

    monkeypatch.setattr(run_job, "place", watched)
    return jobs


@pytest.mark.parametrize(
    ("flags", "without"),
    [
        ([], ()),
        (["--without", "fold"], ("fold",)),
        (["--without", "early,phases", "--without", "Merge"], ("merge", "phases", "early")),
    ],
)
def test_rewrites_can_be_left_out(cli, tmp_path, words, requested, flags, without):
    base = ["run", "sentiment", "inputs.bin", "--weights", "params.bin", "-o", "y.npy", "--json"]
    document = json.loads(cli(*base, *flags).out)
    assert document["without"] == list(without)
    assert requested[0].without == without
    assert_right(np.load(tmp_path / "y.npy"), *words)


def test_tables_in_half_precision(cli, tmp_path, words, requested):
    base = ["run", "sentiment", "inputs.bin", "--weights", "params.bin", "-o", "y.npy"]
    assert json.loads(cli(*base, "--tables", "bf16", "--json").out)["tables"] == "bf16"
    assert requested[0].tables == "bf16"
    got, truth = np.load(tmp_path / "y.npy"), reference.forward(*words)
    assert np.abs(got - truth).max() < 0.05 * np.abs(truth).max()
    (tmp_path / "y.npy").unlink()
    assert_refused(cli(*base, "--tables", "fp4"), tmp_path, "fp4", "fp32, fp16, bf16, fp8")


def test_the_plan_is_for_the_whole_job(cli, words):
    ran = cli("run", "sentiment", "inputs.bin", "--weights", "params.bin", "--batch", 10, "--json")
    assert json.loads(ran.out)["plan"]["batch"] == 90


@pytest.mark.parametrize(("row", "place", "bad"), [(17, 3, 30_000), (89, 15, 50), (0, 0, -1)])
def test_an_id_that_is_no_token(cli, tmp_path, words, row, place, bad):
    ids = words[1].copy()
    ids[row, place] = bad
    ids.tofile(tmp_path / "inputs.bin")
    ran = cli("run", "sentiment", "inputs.bin", "--weights", "params.bin", "-o", "y.bin", "--batch", 8)
    assert_refused(ran, tmp_path, f"row {row}, position {place}: id {bad}, expected 0 to 49")


@pytest.mark.parametrize(
    ("size", "words_"),
    [(0, ["less than one row"]), (90 * 64 - 4, ["at byte 5,696", "5,756 B", "multiple of 64 B"])],
)
def test_inputs_of_an_odd_size(cli, tmp_path, words, size, words_):
    data = (tmp_path / "inputs.bin").read_bytes()
    (tmp_path / "inputs.bin").write_bytes(data[:size])
    ran = cli("run", "sentiment", "inputs.bin", "--weights", "params.bin", "-o", "y.bin")
    assert_refused(ran, tmp_path, "inputs.bin", *words_)


@pytest.mark.parametrize(("file", "last"), [("params.bin", "fc3.bias"), ("network.bin", "tconv3.bias")])
@pytest.mark.parametrize("damage", ["empty", "short", "long", "nan"])
def test_weight_files_that_do_not_fit(cli, tmp_path, words, pictures, file, last, damage):
    data = (tmp_path / file).read_bytes()
    damaged = {"empty": b"", "short": data[:-1], "long": data + bytes(4), "nan": data[:-4] + b"\xff" * 4}[damage]
    (tmp_path / file).unlink()  # not truncated in place: the fixture's network maps it
    (tmp_path / file).write_bytes(damaged)
    model, rows = ("sentiment", "inputs.bin") if file == "params.bin" else ("faces", "input.txt")
    ran = cli("run", model, rows, "--weights", file, "-o", "y.bin")
    assert_refused(ran, tmp_path, file)
    if damage == "nan":
        assert f"'{last}'[" in ran.err
        assert f"nan at byte {len(data) - 4:,}" in ran.err
    else:
        assert f"got:      {len(damaged):,} B\n" in ran.err
        assert f"expected: {len(data):,} B" in ran.err
    if damage == "short":
        assert f"ends inside '{last}'" in ran.err


# -- faces -------------------------------------------------------------------------------------------------


def test_faces_as_text_and_numbers(cli, tmp_path, pictures):
    for target in ("y.txt", "y.npy", "y.bin"):
        ran = cli("run", "faces", "--weights", "network.bin", "input.txt", "-o", target)
        assert ran.code == 0, ran.err
        assert "random" not in ran.err
    y = np.load(tmp_path / "y.npy")
    assert (y.shape, y.dtype) == ((7, 24, 24, 3), np.float32)
    assert_right(y, *pictures)
    assert (tmp_path / "y.bin").read_bytes() == y.astype("<f4").tobytes()
    first, *lines = (tmp_path / "y.txt").read_text().splitlines()
    assert first == "7"
    assert lines == ["".join(f"{x:.4f} " for x in row.ravel().tolist()) for row in y]
    assert np.abs(read_rows_text(tmp_path / "y.txt", 24 * 24 * 3) - y.reshape(7, -1)).max() < 5.1e-5


@pytest.mark.parametrize("target", ["y.bmp", "y.png"])
def test_faces_as_pictures(cli, tmp_path, pictures, target):
    Image = pytest.importorskip("PIL.Image")
    ran = cli("run", "faces", "--weights", "network.bin", "input.txt", "-o", target, "--batch", 2)
    assert ran.code == 0, ran.err
    assert "uint8 [7, 24, 24, 3]" in ran.err
    with Image.open(tmp_path / target) as image:
        got = np.asarray(image).astype(int)
    assert got.shape == (3 * 24, 3 * 24, 3)
    truth = to_pixels(reference.forward(*pictures).astype(np.float32)).astype(int)
    for i in range(9):
        tile = got[i // 3 * 24 : i // 3 * 24 + 24, i % 3 * 24 : i % 3 * 24 + 24]
        assert (
            np.abs(tile - (truth[i] if i < 7 else 0)).max() <= 1
        )  # a value near a rounding boundary may round either way


def test_z_as_npy(cli, tmp_path, pictures):
    np.save(tmp_path / "z.npy", pictures[1])
    for source, target in (("z.npy", "a.npy"), ("input.txt", "b.npy")):
        assert cli("run", "faces", source, "--weights", "network.bin", "-o", target).code == 0
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        (lambda text: "", ["empty"]),
        (lambda text: "faces\n" + text, ["line 1: bad number of rows", "'faces'"]),
        (lambda text: text.replace("7\n", "8\n", 1), ["ends in line 9", "700 values", "800: 8 rows of 100"]),
        (lambda text: text.replace("7\n", "6\n", 1), ["line 8 has text after", "600: 6 rows of 100"]),
        (lambda text: text + "oops\n", ["line 9: not a number", "'oops'"]),
        (lambda text: text.rsplit(" ", 1)[0] + " nan\n", ["line 8: not a number", "'nan'"]),
    ],
    ids=["empty", "no count", "too few", "too many", "a word", "nan"],
)
@pytest.mark.parametrize("target", ["y.txt", "y.bmp"])
def test_bad_text(cli, tmp_path, pictures, change, words_, target):
    path = tmp_path / "input.txt"
    path.write_text(change(path.read_text()))
    ran = cli("run", "faces", "input.txt", "--weights", "network.bin", "-o", target)
    assert_refused(ran, tmp_path, "input.txt", *words_)


def test_phases_can_be_left_out(cli, tmp_path, pictures):
    for flags, split in ([], True), (["--without", "phases"], False):
        ran = cli("run", "faces", "input.txt", "--weights", "network.bin", "-o", "y.npy", "--json", *flags)
        assert ("split tconv1" in str(json.loads(ran.out)["plan"]["rewrites"])) == split
        assert_right(np.load(tmp_path / "y.npy"), *pictures)


def test_no_faces(cli, tmp_path, pictures):
    (tmp_path / "input.txt").write_text("0\n")
    assert cli("run", "faces", "input.txt", "--weights", "network.bin", "-o", "none.txt").code == 0
    assert (tmp_path / "none.txt").read_text() == "0\n"
    ran = cli("run", "faces", "input.txt", "--weights", "network.bin", "-o", "y.png")
    assert_refused(ran, tmp_path, "no images", "0 rows")


# -- random rows, random weights ---------------------------------------------------------------------------


def test_no_data_at_all(cli, tmp_path):
    ran = cli("run", "faces", "--count", 4, "--seed", 1, "-o", "y.png")
    assert ran.code == 0, ran.err
    assert "weights: the generator that comes with onchip" in ran.err
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")
    y = {}
    for seed in (0, 1):
        assert cli("run", "faces", "--count", 4, "--seed", seed, "-o", f"y{seed}.npy", "--batch", 3).code == 0
        y[seed] = np.load(tmp_path / f"y{seed}.npy")
        z = np.random.default_rng(seed).standard_normal((4, 100), dtype=np.float32)
        assert_right(y[seed], faces.network(), z)
    assert not np.array_equal(y[0], y[1])


def test_random_sentences(cli):
    ran = cli("run", "sentiment", "--count", 9)
    assert ran.code == 0, ran.err
    assert "the results mean nothing" in ran.err
    assert ran.out.startswith("float32 [9, 2]: ")
    assert "rows/s" in ran.out
    assert len(ran.out.splitlines()) == 1 + 5
    document = json.loads(cli("run", "sentiment", "--count", 9, "--json").out)
    ids = np.random.default_rng(0).integers(0, 50, (9, 16), dtype=np.int32)
    assert_right(np.array(document["first_rows"]), sentiment.network(), ids[:5])
    assert (document["input"], document["count"], document["weights"]) == (None, 9, None)


def test_random_rows_for_any_float_network(cli, tmp_path):
    assert cli("run", "decode", "--count", 11, "--seed", 2, "-o", "a.npy").code == 0
    np.save(tmp_path / "x.npy", np.random.default_rng(2).standard_normal((11, 72), dtype=np.float32))
    assert cli("run", "decode", "x.npy", "-o", "b.npy").code == 0
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


# -- misuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words_"),
    [
        (["sentiment", "-o", "y.npy"], ["INPUT or --count", "neither", "--count 64"]),
        (["faces", "input.txt", "--count", 4, "-o", "y.png"], ["input.txt and --count 4", "one of them"]),
        (["faces", "input.txt", "--seed", 4, "-o", "y.png"], ["--seed 4 with input.txt", "random rows"]),
        (["faces", "--count", 0, "-o", "y.png"], ["random rows", "at least 1"]),
        (["faces", "--count", -3, "-o", "y.png"], ["-3", "at least 1"]),
        (["faces", "--count", 4, "--seed", -1, "-o", "y.png"], ["seed", "at least 0"]),
        (["faces", "--count", 4, "-o", "y.jpg"], ["unknown format", ".jpg", ".png"]),
        (["sentiment", "--count", 4, "-o", "y.png"], ["'sentiment' does not output images", "float32[B, 2]"]),
        (["sentiment", "--count", 4, "-o", "y.txt"], ["'sentiment' does not output images"]),
        (["decode", "--count", 4, "--weights", "network.bin", "-o", "y.npy"], ["no weight file", "sentiment or faces"]),
        (["m.onnx", "--count", 4, "--weights", "network.bin", "-o", "y.npy"], ["no weight file", "m.onnx"]),
        (["faces", "--count", 4, "--weights", "nothing.bin", "-o", "y.png"], ["nothing.bin", "No such file"]),
        (["faces", "nothing.txt", "-o", "y.png"], ["nothing.txt", "No such file"]),
        (["faces", "nothing.bin", "-o", "y.png"], ["nothing.bin", "No such file"]),
        (["faces", "input.txt", "--batch", 0, "-o", "y.png"], ["rows per chunk", "at least 1"]),
        (["sentiment", "--count", 4, "--scale", 2, "-o", "y.npy"], ["only float rows can be scaled"]),
    ],
)
def test_misuse_is_known_before_the_work(cli, tmp_path, pictures, monkeypatch, args, words_):
    monkeypatch.setattr("onchip.runtime.engine.compile", lambda *given, **options: pytest.fail("the work began"))
    assert_refused(cli("run", *args), tmp_path, *words_)


# -- full size ---------------------------------------------------------------------------------------------


def test_faces_at_full_size(cli, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    tensors = draw_flat(faces.layout(faces.LATENT, faces.CHANNELS, faces.START), 0)
    with open("network.bin", "wb") as file:
        for name in tensors:
            file.write(materialise(name, tensors).astype("<f4").tobytes())
    ran = cli("run", "faces", "--weights", "network.bin", "--count", 2, "--seed", 1, "-o", "y.npy")
    assert ran.code == 0, ran.err
    z = np.random.default_rng(1).standard_normal((2, 100), dtype=np.float32)
    y = np.load(tmp_path / "y.npy")
    assert y.shape == (2, 64, 64, 3)
    assert_right(y, faces.network(), z)
