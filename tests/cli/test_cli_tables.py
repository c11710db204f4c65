"""onchip train and run on tables as people have them: text, missing values, ids, Parquet, folders."""

from __future__ import annotations

import json

import numpy as np
import pytest

import onchip
from onchip.network.meaning import Column

CITIES = ("Berlin", "Paris", "Rome")


@pytest.fixture
def people(tmp_path):
    """A table with an id, a text column and missing ages; the class depends on city and income."""
    rng = np.random.default_rng(0)
    lines = ["id;city;age;income;class"]
    for i in range(300):
        city, age, income = CITIES[i % 3], rng.integers(18, 80), rng.normal(30, 5) + 8 * (i % 3 == 0)
        is_high = income > 34
        lines.append(
            f"n{i};{city};{age if i % 7 else ''};{income:.2f};{'high' if is_high else 'low'}".replace(".", ",")
        )
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "people.csv"


TRAIN = ("train", "mlp", "--labels", "class", "--drop", "id", "--missing", "mean", "--hidden", "8", "--epochs", "2")


def test_a_table_with_text_and_missing_values(cli, people, tmp_path):
    ran = cli(*TRAIN, "--data", people, "-o", "net.onnx")
    assert ran.code == 0, ran.err
    assert "city: text, one-hot of 3 values: Berlin, Paris, Rome" in ran.err
    assert "missing values are replaced by the mean" in ran.err
    meaning = onchip.load(tmp_path / "net.onnx").meaning
    assert meaning.columns == ("city=Berlin", "city=Paris", "city=Rome", "age", "income")
    assert meaning.table[0] == Column("city", CITIES, meaning.table[0].fill)
    assert meaning.table[1].fill == pytest.approx(48, abs=10)

    (tmp_path / "new.csv").write_text("income,city,x,id,age\n30,Rome,?,=a,\n50,Oslo,?,b,40\n")
    ran = cli("run", "net.onnx", "new.csv", "--keep", "id", "-o", "out.csv")
    assert ran.code == 0, ran.err
    assert "city: 1 rows have a text that no training row had, such as 'Oslo'" in ran.err
    head, first, second = (tmp_path / "out.csv").read_text().splitlines()
    assert head == "id,label,probability"
    assert first.startswith("'=a,")  # no formula
    assert second.startswith("b,")

    pandas = pytest.importorskip("pandas")
    engine = onchip.compile(tmp_path / "net.onnx", device="cpu")
    by_hand = engine(np.array([[0, 0, 1, meaning.table[1].fill, 30], [0, 0, 0, 40, 50]], "f4"))
    np.testing.assert_array_equal(engine(pandas.read_csv(tmp_path / "new.csv")), by_hand)

    ran = cli("train", "net.onnx", "--data", people, "--labels", "class", "--epochs", "1", "-o", "more.onnx")
    assert ran.code == 0, ran.err
    assert onchip.load(tmp_path / "more.onnx").meaning == meaning


def test_rows_with_missing_values_are_dropped(cli, people, tmp_path):
    arguments = [each if each != "mean" else "drop" for each in TRAIN]
    ran = cli(*arguments, "--data", people, "--json")
    assert ran.code == 0, ran.err
    assert "missing: 43 of 300 rows are dropped" in ran.err
    found = json.loads(ran.out)
    assert (found["drop"], found["missing"], found["test_rows"]) == ("id", "drop", 51)
    ran = cli(*arguments, "--data", people, "--test-data", people)
    assert "257 training rows, 257 test rows" in ran.err


@pytest.mark.parametrize(("change", "words"), [
    (("--missing", "error"), ["column 'age' has missing values", "--missing mean"]),
    (("--missing", "meen"), ["unknown --missing", "did you mean mean?"]),
    (("--drop", "city"), ["people.csv: column 'id' has too many different texts", "--drop id"]),
    (("--drop", "id,town"), ["no column 'town' to drop"]),
    (("--drop", "id,class"), ["the label column cannot be dropped"]),
    (("--labels", "kind"), ["no column has this name"]),
])  # fmt: skip
def test_messages_of_train(cli, people, change, words):
    arguments = list(TRAIN)
    arguments[arguments.index(change[0]) + 1] = change[1]
    ran = cli(*arguments, "--data", people)
    assert ran.code == 2
    for word in [*words, "got:", "expected:"]:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_options_of_tables_for_other_data(cli, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 2), "f4"))
    np.save(tmp_path / "y.npy", np.arange(4) % 2)
    for option in ("--drop", "--missing"):
        ran = cli("train", "mlp", "--data", "x.npy", "--labels", "y.npy", option, "mean")
        assert (ran.code, f"{option} is for tables" in ran.err) == (2, True)
    ran = cli("train", "digits", "--data", "sklearn", "--drop", "id")
    assert (ran.code, "digits has its own data" in ran.err) == (2, True)
    ran = cli("run", "decode", "--count", "4", "--keep", "id")
    assert (ran.code, "--keep is for tables" in ran.err) == (2, True)


@pytest.fixture
def parquet(people, tmp_path):
    """The same table in a partitioned folder of Parquet files, with typed ids."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [line.split(";") for line in people.read_text().splitlines()[1:]]
    for part in range(2):
        found = rows[part::2]
        table = pa.table({
            "id": pa.array(range(len(found)), pa.int64()), "city": [row[1] for row in found],
            "age": [float(row[2]) if row[2] else None for row in found],
            "income": [float(row[3].replace(",", ".")) for row in found], "class": [row[4] for row in found],
        })  # fmt: skip
        folder = tmp_path / "data" / f"part={part}"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "rows.parquet", row_group_size=40)
    return tmp_path / "data"


def test_partitioned_folders_in_and_out(cli, parquet, tmp_path):
    import pyarrow.parquet

    arguments = [each if each != "id" else "id,part" for each in TRAIN]
    ran = cli(*arguments, "--data", parquet, "-o", "net.onnx")
    assert ran.code == 0, ran.err
    for batch in (None, 7):
        ran = cli(
            "run", "net.onnx", "data", "--keep", "id,part", "-o", f"out{batch}", *(["--batch", batch] if batch else [])
        )
        assert ran.code == 0, ran.err
        files = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / f"out{batch}").rglob("*.parquet"))
        assert files == [f"out{batch}/part={part}/rows.parquet" for part in range(2)]
    tables = [pyarrow.parquet.ParquetFile(tmp_path / file).read() for file in files]
    assert tables[1].schema.names == ["id", "part", "label", "probability"]
    assert str(tables[1].schema.field("id").type) == "int64"
    assert tables[1].column("id").to_pylist() == list(range(150))
    assert set(tables[1].column("part").to_pylist()) == {"1"}
    other = pyarrow.parquet.ParquetFile(tmp_path / "outNone/part=1/rows.parquet").read()
    assert other.equals(tables[1])

    ran = cli("run", "net.onnx", *(f"data/part={part}/rows.parquet" for part in range(2)), "-o", "out.npy")
    assert ran.code == 0, ran.err
    y = np.load(tmp_path / "out.npy")
    assert y.shape == (300, 2)
    ran = cli("run", "net.onnx", "data/part=1/rows.parquet", "-o", "one.parquet", "--top", "2")
    names = pyarrow.parquet.read_table(tmp_path / "one.parquet").schema.names
    assert names == ["label1", "probability1", "label2", "probability2"]
    ran = cli("run", "net.onnx", "data", "-o", "outNone")
    assert (ran.code, "a folder with files" in ran.err) == (2, True)
    ran = cli("run", "net.onnx", "data", "--keep", "ids", "-o", "x.csv")
    assert (ran.code, "no column 'ids' to keep" in ran.err, "did you mean id?" in ran.err) == (2, True, True)
    ran = cli("run", "net.onnx", "data", "--keep", "id", "-o", "x.npy")
    assert (ran.code, "kept columns need a table" in ran.err) == (2, True)
    left = {path.name for path in tmp_path.iterdir()}
    assert not any("partial" in name or "manifest" in name or name.endswith(".tmp") for name in left)


def test_values_as_parquet(cli, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    np.save(tmp_path / "x.npy", np.ones((3, 72), "f4"))
    for output in ("y.parquet", "y.npy"):
        assert cli("run", "decode", "x.npy", "-o", output).code == 0
    table = pyarrow.parquet.read_table(tmp_path / "y.parquet")
    assert table.schema.names == ["y0", "y1", "y2", "y3"]
    np.testing.assert_array_equal(
        np.stack([column.to_numpy() for column in table.columns], 1), np.load(tmp_path / "y.npy")
    )
