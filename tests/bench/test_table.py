import dataclasses

import pytest

from onchip.bench.report.results import ACCURACY, Results, Row, write_results
from onchip.bench.report.table import BEGIN, END, front, main, markdown, replace_table
from onchip.errors import FormatError

OURS = Row("decode", "12800 rows", "onchip", "fp32", 2.0, 1.9, 2.2, 6.4e6, "rows/s", 1.0, 1e-6, True, (2.0,), 2)
PEER = dataclasses.replace(OURS, engine="torch eager", median_ms=5.0)
WRONG = dataclasses.replace(OURS, case="7 rows", median_ms=None, checked=False)
SCORE = dataclasses.replace(OURS, workload="digits", case="30 epochs", rate=97.9123, unit=ACCURACY, floor_ms=None)
RESULTS = Results({"name": "a | chip", "cores": 2, "launch_us": 3.0}, {}, "abc", "onchip bench decode --peers", "today",
                  (OURS, PEER, WRONG, SCORE))  # fmt: skip
README = f"# Title\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"


def test_markdown():
    lines = markdown([RESULTS]).splitlines()
    assert lines[:3] == ["## decode, digits on a | chip, 2 cores", "", "`onchip bench decode --peers` at `abc`"]
    assert len(lines) == 8  # a wrong engine has no row
    assert lines[6] == "| 12800 rows | 2.000 ms | 5.000 ms (torch eager) | 2.50x | 50% |"
    assert lines[7] == "| 30 epochs | 97.91 % | - | - | - |"
    ours = dataclasses.replace(SCORE, score_std=0.071)
    peer = dataclasses.replace(SCORE, engine="torch eager", rate=97.8, score_std=0.12)
    text = markdown([dataclasses.replace(RESULTS, rows=(ours, peer))])
    assert "| 97.91 ± 0.07 % | 97.80 ± 0.12 % (torch eager) | - |" in text


def test_markdown_of_a_ladder():
    slow = dataclasses.replace(OURS, engine="ladder:slow", median_ms=1000.0, setting="timed on 2 rows, scaled")
    wrong = dataclasses.replace(WRONG, case=OURS.case, engine="ladder:wrong")
    quick, best = (
        dataclasses.replace(OURS, engine=f"ladder:{name}", median_ms=ms) for name, ms in (("a", 4), ("b", 2))
    )
    rungs = dataclasses.replace(RESULTS, rows=(slow, wrong, quick, best), command="onchip ladder decode")
    assert markdown([rungs]).splitlines()[2:] == [
        "| `slow` | 1,000 | - | - | 0.1% | 1.0e-06 | timed on 2 rows, scaled |",
        "| `wrong` | - | - | - | - | 1.0e-06 |  |",
        "| `a` | 4.000 | 250x | 250x | 25% | 1.0e-06 |  |",
        "| `b` | 2.000 | 500x | 2x | 50% | 1.0e-06 |  |",
        "",
        "12800 rows, 2 threads on a | chip, 2 cores: `onchip ladder decode` at `abc`",
    ]
    assert "ladder:" not in markdown([RESULTS, rungs])  # rungs are omitted among other results


def test_markdown_of_a_ladder_over_many_sizes():
    def climbed(B, *rungs):
        case = dataclasses.replace(OURS, case=f"{B} rows")
        rows = [dataclasses.replace(case, engine=f"ladder:{name}", median_ms=ms) for name, ms in rungs]
        return dataclasses.replace(RESULTS, rows=tuple(rows), command=f"onchip ladder decode --rows {B}")

    sizes = [climbed(B, ("a", B), ("b", B / 2)) for B in (100, 9, 20)]
    sizes[2] = dataclasses.replace(
        sizes[2], rows=tuple(dataclasses.replace(row, setting="scaled") for row in sizes[2].rows)
    )
    ranks = climbed(9, ("scattered", 3))
    whole, times, other = markdown([*sizes, ranks]).split("\n\n|")
    assert whole == markdown([sizes[0]])
    assert times.splitlines()[0] == " ms | `a` | `b` | note |"
    assert times.splitlines()[2:5] == [
        "| 9 rows | 9.000 | 4.500 |  |",
        "| 20 rows | 20.00 | 10.00 | `a`, `b`: scaled |",
        "| 100 rows | 100.0 | 50.00 |  |",
    ]
    assert times.splitlines()[6] == "; ".join(f"`onchip ladder decode --rows {B}` at `abc`" for B in (9, 20, 100))
    assert "|" + other == markdown([ranks])
    assert markdown(sizes[:2]) == "\n\n".join(markdown([each]) for each in sizes[:2])


def test_markdown_of_a_gpu():
    half, peer = (
        dataclasses.replace(OURS, engine=e, precision="fp16", median_ms=ms, threads=None)
        for e, ms in (("onchip", 0.5), ("triton", 2.0))
    )
    gpu = dataclasses.replace(RESULTS, machine={"name": "NVIDIA H200", "device": "h200", "cores": 16, "launch_us": 5.0})
    lines = markdown([dataclasses.replace(gpu, rows=(OURS, half, peer, PEER))]).splitlines()
    assert lines[0] == "## decode on NVIDIA H200"
    assert lines[4:] == [
        "| case | onchip | best peer | speedup | of floor |",
        "| --- | --- | --- | --- | --- |",
        "| 12800 rows | 2.000 ms | 5.000 ms (torch eager) | 2.50x | 50% |",
        "| 12800 rows, fp16 | 0.5000 ms | 2.000 ms (triton) | 4.00x | 100% |",
    ]


def test_extra_properties_have_columns():
    known = dataclasses.replace(OURS, case="epoch", extra={"GPU MB": 201.5})
    lines = markdown([dataclasses.replace(RESULTS, rows=(OURS, known))]).splitlines()
    assert lines[4] == "| case | onchip | best peer | speedup | of floor | GPU MB |"
    assert lines[6:] == ["| 12800 rows | 2.000 ms | - | - | 50% | - |", "| epoch | 2.000 ms | - | - | 50% | 202 |"]


def test_every_file_has_a_table():
    text = markdown([RESULTS, dataclasses.replace(RESULTS, rows=(WRONG,)), RESULTS])
    assert text.count("## decode, digits on") == 2  # a file without a time has none


def test_markdown_of_rungs_on_a_gpu():
    rungs = [
        dataclasses.replace(OURS, engine=f"ladder:{name}", threads=None, extra=extra)
        for name, extra in (("a", {"registers": 64, "shared bytes": 49_152}), ("b", {"occupancy": 0.25}))
    ]
    gpu = {"name": "NVIDIA H200", "device": "h200", "cores": 16}
    lines = markdown([dataclasses.replace(RESULTS, machine=gpu, rows=tuple(rungs))]).splitlines()
    known = "registers | shared bytes | occupancy"
    assert lines[0] == f"| rung | ms | x first | x before | of floor | max error | {known} | note |"
    assert lines[2] == "| `a` | 2.000 | - | - | 50% | 1.0e-06 | 64 | 49,152 | - |  |"
    assert lines[3] == "| `b` | 2.000 | 1x | 1x | 50% | 1.0e-06 | - | - | 0.25 |  |"
    assert lines[-1] == "12800 rows on NVIDIA H200: `onchip bench decode --peers` at `abc`"


def test_readme_is_filled_and_checked(tmp_path, capsys):
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(README)
    write_results(RESULTS, folder / "cpu" / "decode.json")
    assert main([str(readme), str(folder), "--check"]) == 1
    assert readme.read_text() == README
    assert main([str(readme), str(folder)]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    assert "old" not in text
    assert "2.000 ms" in text
    assert main([str(readme), str(folder / "cpu" / "decode.json"), "--check"]) == 0
    assert main([str(readme), str(folder)]) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_readme_without_its_markers(text):
    with pytest.raises(FormatError, match="no markers"):
        replace_table(text, "table")


def test_misuse_is_exit_code_2(tmp_path, capsys):
    readme = tmp_path / "README.md"
    assert main([str(readme), str(tmp_path)]) == 2
    readme.write_text(README)
    assert main([str(readme), str(tmp_path)]) == 2
    assert "no result files" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert main([str(readme), str(tmp_path)]) == 2
    assert readme.read_text() == README


def test_a_missing_row_of_the_readme_table_is_an_error():
    with pytest.raises(FormatError, match="missing"):
        front([RESULTS])
