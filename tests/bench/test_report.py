"""onchip report: what the page shows of result files, profiles, training logs and pictures."""

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from onchip.bench.report.report import report
from onchip.bench.report.results import Results, Row, read_results, write_results
from onchip.bench.report.sources import Sources, read_sources, size_of
from onchip.errors import FormatError, InputError

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
MACHINE = {"device": "cpu-x86_64-2", "name": "a <CPU>", "cores": 2, "launch_us": 3.0}
HEAD = {
    "model": "digits",
    "data": "sklearn digits",
    "loss": "cross_entropy",
    "optimiser": "sgd",
    "lr": 0.03,
    "versions": {},
}


def row(case, engine, ms, **changes):
    made = Row("decode", case, engine, "fp32", ms, ms, ms, 1e3 / ms, "rows/s", 0.5, 1e-6, True, (ms,), 2)
    return dataclasses.replace(made, **changes)


def results(*rows, **changes):
    made = Results(
        MACHINE, {"onchip": "0.1.0"}, "abcdef1234", "onchip bench decode --peers", "2026-11-18T14:00:00", rows
    )
    return dataclasses.replace(made, **changes)


def page_of(*files, before=None, **more):
    found = [(Path(f"file{i}.json"), each) for i, each in enumerate(files)]
    older = None if before is None else Sources([(Path("file0.json"), before)])
    return report(Sources(found, **more), older)


class Outline(HTMLParser):
    """Headings, ids, links and addresses of a page; fails on tags that do not match."""

    VOID = ("meta", "img", "br", "rect", "path", "circle", "polygon")

    def __init__(self, page):
        super().__init__()
        self.open, self.headings, self.ids, self.targets, self.addresses, self.unnamed = [], [], [], [], [], 0
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.ids += [found["id"]] if "id" in found else []
        self.targets += [found["href"][1:]] if found.get("href", "").startswith("#") else []
        self.addresses += [value for name, value in attributes if name in ("href", "src") and not value.startswith("#")]
        self.unnamed += (tag == "svg" and not found.get("aria-label")) or (tag == "img" and not found.get("alt"))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def whole():
    """The page of the committed results."""
    return report(read_sources([RESULTS]))


def test_the_page_is_well_formed_and_loads_nothing(whole):
    found = Outline(whole)
    assert not found.addresses
    assert not re.findall(r"@import|url\(", whole)
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.targets) <= set(found.ids)
    assert found.unnamed == 0, "every picture has a description"
    assert found.headings[0] == 1
    assert found.headings.count(1) == 1
    assert all(deeper <= level + 1 for level, deeper in zip(found.headings, found.headings[1:], strict=False))


def test_every_committed_case_is_on_it(whole):
    """In a table: its median."""
    for path in RESULTS.rglob("*.json"):
        for each in read_results(path).rows:
            if each.engine == "onchip" and each.median_ms:
                assert f"<td>{each.case}" in whole, (path, each.case)


@pytest.mark.parametrize("name", ["speedups", "ladders", "roofline", "scaling", "sources"])
def test_sections_of_committed_results(whole, name):
    assert f'<section id="{name}"' in whole


def test_speedups_are_those_over_the_best_peer():
    page = page_of(
        results(row("a", "onchip", 2.0), row("a", "torch", 5.0), row("a", "jax", 3.0), row("b", "onchip", 1.0))
    )
    assert "a: 1.50x" in page
    assert "2.50x torch, 5.000 ms" in page  # the other peer, as a circle
    assert '<section id="times"' in page, "a case without a peer has its time"
    assert "b: 1 ms" in page
    assert "a &lt;CPU&gt;, 2 cores" in page


def test_many_cases_are_shown_by_their_means():
    cases = [f"net {i}, {rows} rows" for i in range(9) for rows in (1, 32, 1024)]
    page = page_of(
        results(*(row(case, engine, ms) for case in cases for engine, ms in (("onchip", 1.0), ("torch", 2.0))))
    )
    assert re.search(r"net 0: 2\.00x; net 1: 2\.00x;[^\"]* net 8: 2\.00x", page)
    assert page.count("<td>net 8, 1024 rows</td>") == 2, "the table has every engine at every case"


def test_scaling_needs_three_sizes():
    def at(sizes):
        return page_of(results(*(row(f"{n} rows", "onchip", 1.0, rate=float(n)) for n in sizes)))

    assert '<section id="scaling"' not in at((1, 32))
    assert '<section id="scaling"' in at((1, 32, 1024))
    sizes = {
        "step, batch 64, uint8 pixels": 64,
        "MLP 784-512-10, 32 rows": 32,
        "2^20 numbers": 2**20,
        "1 image": 1,
        "x": 0,
    }
    assert {case: size_of(case) for case in sizes} == sizes


def test_a_ladder_of_several_sizes_is_shown_at_the_largest():
    def ladder(rows, ms):
        rungs = [row(f"{rows} rows", f"ladder:{name}", each) for name, each in (("first", ms), ("onchip", ms / 8))]
        return results(*rungs)

    page = page_of(ladder(10, 1.0), ladder(1000, 9.0), ladder(100, 3.0))
    section = page[page.index('<section id="ladders"') : page.index('<section id="scaling"')]
    assert section.count("<h3>") == 1
    assert "<h3>decode: 1000 rows</h3>" in section
    assert "<td>8x</td>" in section


def test_changes_since_older_results():
    old = results(row("a", "onchip", 2.0), row("b", "onchip", 2.0))
    new = results(row("a", "onchip", 1.0), row("b", "onchip", 2.0), commit="fedcba9")
    page = page_of(new, before=old)
    section = page[page.index('<section id="changes"') : page.index('<section id="times"')]
    assert "1 faster, 1 within noise; abcdef1 to fedcba9" in section
    assert "2.000x" in section
    assert "No file has changed" in page_of(new, before=new)
    assert 'id="changes"' not in page_of(new)


def epoch(number, loss, accuracy=None, validation=None):
    return {
        "epoch": number,
        "loss": loss,
        "accuracy": accuracy,
        "validation_loss": validation,
        "validation_accuracy": None,
    }


def write_log(path, *epochs, head=HEAD):
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *epochs)))
    return path


def test_training_curves(tmp_path):
    log = write_log(tmp_path / "a.jsonl", epoch(1, 2.0, 0.5, 2.1), epoch(2, 1.0, 0.75, 1.4), epoch(3, 0.5, 0.875, None))
    page = report(read_sources([log]))
    assert "digits on sklearn digits: loss: training 2 to 0.5; validation 2.1 to 1.4" in page
    assert "digits on sklearn digits: accuracy: training 50% to 87.5%" in page
    assert '<section id="training"' not in report(read_sources([write_log(tmp_path / "b.jsonl")])), "no epoch yet"


def test_the_log_of_a_run_that_diverged(tmp_path):
    log = write_log(tmp_path / "a.jsonl", epoch(1, 2.0), epoch(2, None), epoch(3, 3.0))
    assert "training 2 to 3" in report(read_sources([log]))


def test_a_profile_has_every_kernel(cli, tmp_path):
    ran = cli("profile", "digits", 64, "--device", "cpu", "--seconds", "0.1", "--json")
    (tmp_path / "profile.json").write_text(ran.out)
    profile = json.loads(ran.out)["engine"]
    page = report(read_sources([tmp_path / "profile.json"]))
    section = page[page.index('<section id="roofline"') :]
    for each in profile["kernels"]:
        assert f"<td>{each['kernel'].replace('<', '&lt;').replace('>', '&gt;')}</td>" in section
    assert profile["peak_flops"] > 0
    assert profile["bandwidth"] <= profile["cache_bandwidth"]


def test_pictures_are_inside_the_page(tmp_path):
    (tmp_path / "<faces>.png").write_bytes(PNG)
    page = report(read_sources([tmp_path]))
    assert f"data:image/png;base64,{base64.b64encode(PNG).decode()}" in page
    assert 'alt="&lt;faces&gt;.png"' in page


def test_a_folder_gives_all_its_kinds(tmp_path):
    write_results(results(row("a", "onchip", 1.0)), tmp_path / "cpu" / "decode.json")
    write_log(tmp_path / "run.jsonl", epoch(1, 1.0))
    (tmp_path / "faces.png").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("not for the report")
    found = read_sources([tmp_path])
    assert [len(each) for each in (found.results, found.profiles, found.logs, found.pictures)] == [1, 0, 1, 1]


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b"{}", b"\xff\xfe", b'{"rows": 1, "machine": 2}', b'{"engine": {}}', b'{"engine": 3}',
    b'{"a": 1}\n{"b": 2}', b'{"engine": {"kernels": [3]}}', b'{"engines": 7}',
    b'{"versions": 1}\n{"epoch": 1, "loss": "much"}', b"[" * 100_000,
])  # fmt: skip
def test_other_contents_are_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.json"):
        read_sources([path])


def test_a_folder_with_nothing(tmp_path):
    with pytest.raises(InputError, match="nothing to report"):
        read_sources([tmp_path])


def test_names_from_files_are_escaped():
    bad = '</script><script>alert("x")</script>'
    page = page_of(
        results(row(bad, "onchip", 1.0), row(bad, bad, 2.0), command=bad, commit=bad, date=bad, machine={"name": bad})
    )
    assert page.count("<script>") == 1
    Outline(page)


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_one_page(cli, tmp_path):
    write_results(
        results(row("a", "onchip", 1.0), row("a", "torch", 2.0)), tmp_path / "benchmarks/results/cpu/decode.json"
    )
    ran = cli("report")
    assert (ran.code, ran.out) == (0, "")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    ran = cli("report", "benchmarks", "--before", "benchmarks", "-o", "other.html")
    assert ran.code == 0
    assert "No file has changed" in (tmp_path / "other.html").read_text()


def test_misuse(cli, tmp_path):
    ran = cli("report")
    assert ran.code == 2
    assert "onchip bench decode --quick --out results" in ran.err
    (tmp_path / "x.json").write_text("{}")
    assert cli("report", "x.json").code == 2
    assert cli("report", "missing.json").code == 2
    assert cli("report", "x.json", "-o", "x.json").code == 2
    assert (tmp_path / "x.json").read_text() == "{}"
    assert cli("report", "x.json", "-o", "no/folder.html").code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


# -- damaged files -----------------------------------------------------------------------------------------

DAMAGE = [None, "x", -1, 0, 1e308, 5e-324, float("nan"), [], {}, [3], {"a": "b"}, True]


def damaged(value):
    """The document with each value in turn replaced by some of DAMAGE, by neighbours by others."""
    for i, key in enumerate(value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
        kept = value[key]
        for each in DAMAGE[i % 6 :: 6]:
            value[key] = each
            yield
        value[key] = kept
        yield from damaged(kept)


def check_damaged(path, lines):
    """Each is either a page or an error of onchip's."""
    refused = drawn = 0
    for _ in damaged(lines):
        path.write_text("\n".join(map(json.dumps, lines)))
        try:
            report(found := read_sources([path]), found)
            drawn += 1
        except InputError:
            refused += 1
    assert refused
    assert drawn


def test_damaged_results(tmp_path):
    peak = {"flops": {"fp32": 1e12, "tf32": 8e12}, "bandwidth": 1e11, "cache_bandwidth": 1e12}
    work = {"bytes per row": 100, "flop per row": 1000, "ranks": 2}
    ours = row("32 rows", "onchip", 1.0, extra=work)
    for rows in (
        (ours, row("32 rows", "torch", 2.0)),
        [row(f"{n} rows", "ladder:onchip", 1.0, extra=work) for n in (1, 8, 64)],
    ):
        found = results(*rows, machine={**MACHINE, "peak": peak}, skipped={"jax": "not installed"})
        check_damaged(tmp_path / "x.json", [json.loads(json.dumps(found.to_dict()))])


def test_damaged_profiles_and_logs(tmp_path):
    amounts = dict.fromkeys(("mean_us", "share", "nbytes", "flop", "of_floor", "estimate_us"), 0.5)
    rates = dict.fromkeys(("peak_flops", "bandwidth", "cache_bandwidth", "call_us", "kernel_us"), 1e12)
    names = dict.fromkeys(("network", "device", "precision"), "fp32")
    kernels = [{"kernel": "k", "layers": ["a", "b"], **amounts}, {"kernel": "l", "layers": ["c"], **amounts}]
    profile = {**names, **rates, "calls": 2, "rows": 3, "kernels": kernels}
    check_damaged(tmp_path / "profile.json", [{"engine": profile}])
    check_damaged(tmp_path / "log.jsonl", [dict(HEAD), epoch(1, 2.0, 0.5, 1.0), epoch(2, 1.0, 0.6, None)])
