"""A hospital with tables as hospitals have them: gaps, text, clinical units, several rows per patient."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.api import DataSettings
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.core.preprocess import Preprocess
from coterie.data.user import read_table_by
from coterie.deploy.device_data import load_hosted_clients

PAIN = {1: "typical", 2: "atypical", 3: "other", 4: "none"}
NAMES = ["age", "sex", "pain", "pressure", "cholesterol"]


def patients() -> list[dict[str, Any]]:
    """Real ones: heart-disease, with text for sex and pain and gaps as the hospitals left them."""
    data = coterie.load_clients("heart-disease")
    at = [column.name for column in data.transform.columns].index
    rows = []
    for split in (data.train, data.test):
        for client, name in enumerate(data.client_names):
            for x, y in zip(*(values.tolist() for values in split.client(client)), strict=True):
                rows.append(
                    {
                        "age": x[at("age")],
                        "sex": "male" if x[at("sex")] else "female",
                        "pain": PAIN[int(x[at("cp")]) + 1],
                        "pressure": x[at("trestbps")],
                        "cholesterol": x[at("chol")],
                        "diagnosis": ("healthy", "disease")[y],
                        "hospital": name,
                        "patient_id": f"{name}-{len(rows) // 2}",
                    }
                )
    return rows


def text(value: Any) -> str:
    return "" if value != value else str(value)


def write(path: Path, rows: list[dict[str, Any]], names: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(names)
        table.writerows([text(row[name]) for name in names] for row in rows)
    return path


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return patients()


TABLE = [*NAMES, "diagnosis", "hospital"]


def test_missing_values_are_refused_by_name_or_filled_with_the_training_median(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    path = str(write(tmp_path / "all.csv", rows, TABLE))
    gaps = sum(row["cholesterol"] != row["cholesterol"] for row in rows)
    with pytest.raises(CoterieError, match=rf"--missing median.*'cholesterol': {gaps} missing, the first in .*line"):
        coterie.load_clients(path)
    data = coterie.load_clients(path, missing="median")
    columns = {column.name: column for column in data.transform.columns}
    assert [*columns] == NAMES
    x = data.train.x.double().numpy()
    for name in ("age", "pressure", "cholesterol"):
        values = x[:, NAMES.index(name)]
        assert columns[name].fill == np.median(values[~np.isnan(values)])
        assert columns[name].indicator == bool(np.isnan(values).any())
    assert columns["sex"].categories == ("female", "male")
    assert columns["pain"].categories == tuple(sorted(PAIN.values()))
    assert columns["sex"].fill == 1  # most patients are men
    assert not columns["age"].indicator
    sample = torch.tensor([[50.0, 0.0, 2.0, float("nan"), 200.0]])
    inputs = Preprocess(data.transform)(sample)[0].tolist()
    filled = columns["pressure"].fill
    assert inputs == [50.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, filled, 1.0, 200.0, 0.0]


def test_inputs_are_standardised_after_gaps_are_filled(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = str(write(tmp_path / "all.csv", rows, TABLE))
    data = coterie.load_clients(path, missing="median", normalise="auto")
    inputs = Preprocess(data.transform, torch.float64)(data.train.x)
    torch.testing.assert_close(inputs.mean(0), torch.zeros(11).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(11).double())
    result = coterie.run("fedavg", data, None, rounds=15, out=tmp_path / "run")
    assert result.history.curve("pre")[-1][1] > 0.65
    told = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["data"]
    assert [column["name"] for column in told["transform"]["columns"]] == NAMES
    assert told["client_names"] == ["cleveland", "hungarian", "long-beach", "switzerland"]
    assert any("sex (female, male)" in line for line in told["input"])


def test_the_rows_of_a_patient_stay_together(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    numbered = [{**row, "age": float(i)} for i, row in enumerate(rows)]  # so that a row can be found again
    path = str(write(tmp_path / "all.csv", numbered, [*TABLE, "patient_id"]))
    data = coterie.load_clients(path, missing="median", group_column="patient_id", validation=0.2)
    assert data.validation is not None
    assert "patient_id" not in [column.name for column in data.transform.columns]
    sides = [
        {rows[int(age)]["patient_id"] for age in split.x[:, 0].tolist()}
        for split in (data.train, data.test, data.validation)
    ]
    assert sum(map(len, sides)) == len(set().union(*sides)) == len({row["patient_id"] for row in rows})
    assert 0.15 < len(data.test.y) / len(rows) < 0.35
    with pytest.raises(CoterieError, match="would divide the groups"):
        coterie.load_clients(path, missing="median", group_column="patient_id", partition="dirichlet")


def test_data_check_tells_what_was_understood(
    tmp_path: Path, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    few = [{**row, "record": i} for i, row in enumerate(rows)]
    path = write(tmp_path / "all.csv", few, [*TABLE, "record"])
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(path), "--missing", "median"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for said in (
        "CSV, clients in column 'hospital'",
        "4 clients, 920 samples: 689 to train, 231 to test (set aside at random by client and class, seed 0)",
        "2 classes: disease 509, healthy 411",
        "6 columns (float32): age, sex, pain, pressure, cholesterol, record",
        "one input per category: sex (female, male), pain (",
        "missing values are filled with: age 54, sex male",
        "one more input marks missing values: pressure, cholesterol",
        "column that looks like an identifier is used as a feature",
        "column 'record': 920 different values in 920 rows",
        "long-beach |",
    ):
        assert said in shown
    assert len(shown.splitlines()) < 40


def test_text_that_is_no_category_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    wrong = [{**row, "age": "about fifty" if i == 7 else row["age"]} for i, row in enumerate(rows)]
    with pytest.raises(CoterieError, match=r"text in a column of numbers.*line 9, column 'age': 'about fifty'"):
        coterie.load_clients(str(write(tmp_path / "a.csv", wrong, TABLE)), missing="median")
    named = [{**row, "note": f"patient number {i}"} for i, row in enumerate(rows)]
    path = str(write(tmp_path / "b.csv", named, [*TABLE, "note"]))
    with pytest.raises(CoterieError, match=r"probably an identifier or free text.*column 'note': 920 different texts"):
        coterie.load_clients(path, missing="median")
    assert coterie.load_clients(path, missing="median", drop_column="note").shape == (5,)
    commas = [{**row, "pressure": "13,5"} for row in rows]
    with pytest.raises(CoterieError, match=r"decimal comma.*'13,5'"):
        coterie.load_clients(str(write(tmp_path / "c.csv", commas, TABLE)), missing="median")


def test_a_category_that_only_the_test_split_has_is_refused(tmp_path: Path) -> None:
    for split, ward in (("train", ("a", "b")), ("test", ("a", "c"))):
        (tmp_path / split).mkdir()
        lines = [f"{i},{ward[i % 2]},{i // 2 % 2}" for i in range(12)]
        (tmp_path / split / "north.csv").write_text("\n".join(["x,ward,label", *lines]), encoding="utf-8")
    with pytest.raises(
        CoterieError, match=r"category that no training sample has.*test/north.csv, line 3.*'ward': 'c'"
    ):
        coterie.load_clients(str(tmp_path))


def test_a_category_with_one_row_is_trained_on(tmp_path: Path) -> None:
    for seed in range(6):
        lines = [f"{i},{'rare' if i == 5 else 'often'},{i % 2},{i // 20}" for i in range(40)]
        (tmp_path / "a.csv").write_text("\n".join(["x,ward,label,client", *lines]), encoding="utf-8")
        data = coterie.load_clients(str(tmp_path / "a.csv"), split_seed=seed)
        rare = data.transform.columns[1].categories.index("rare")
        assert (data.train.x[:, 1] == rare).sum() == 1


def test_a_table_is_read_by_the_names_of_the_model(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    columns = coterie.load_clients(str(write(tmp_path / "all.csv", rows, TABLE)), missing="median").transform.columns
    some = rows[:30]
    table = read_table_by(columns, write(tmp_path / "a.csv", some, [*NAMES, "diagnosis"]))
    other = read_table_by(columns, write(tmp_path / "b.csv", some, ["diagnosis", *NAMES[::-1]]))
    assert torch.equal(table.x.nan_to_num(-1), other.x.nan_to_num(-1))
    assert table.labels is not None
    assert table.labels.tolist() == [row["diagnosis"] for row in some]
    assert [columns[2].categories[int(code)] for code in table.x[:, 2]] == [row["pain"] for row in some]
    assert not table.by_position
    headless = tmp_path / "c.csv"
    headless.write_text("63,male,typical,145,233\n,female,none,,\n", encoding="utf-8")
    taken = read_table_by(columns, headless)
    assert taken.by_position
    assert taken.x[0, 0] == 63
    assert taken.x[1].isnan().tolist() == [True, False, False, True, True]
    for change, said in (
        ({"names": ["age", "sex", "pain", "pressure"]}, "olumn 'cholesterol' is missing in .*expected: age, sex"),
        ({"names": [*NAMES, "weight"], "weight": 70}, "olumn 'weight' is unknown in"),
        ({"sex": "Male"}, "line 2: unknown category of column 'sex' 'Male': did you mean 'male'"),
        ({"age": "old"}, "line 2: column 'age' holds numbers, not 'old'"),
    ):
        names = change.pop("names", NAMES)
        wrong = write(tmp_path / "wrong.csv", [{**row, **change} for row in some], names)
        with pytest.raises(CoterieError, match=said):
            read_table_by(columns, wrong)
    plain = coterie.load_clients(
        str(write(tmp_path / "d.csv", [{**r, "pressure": 1, "cholesterol": 2} for r in rows], TABLE))
    )
    with pytest.raises(CoterieError, match="line 2: column 'age' has no value"):
        read_table_by(plain.transform.columns, headless)


def test_data_frames_keep_their_columns(rows: list[dict[str, Any]]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows).drop(columns=["patient_id"])
    data = coterie.clients_from(frame, client="hospital", missing="median", normalise="auto")
    assert data.client_names == ("cleveland", "hungarian", "long-beach", "switzerland")
    assert [column.name for column in data.transform.columns] == NAMES
    apart = {name: own.drop(columns=["hospital"]) for name, own in frame.groupby("hospital")}
    again = coterie.clients_from(apart, missing="median", normalise="auto")
    assert torch.equal(data.train.x.nan_to_num(-1), again.train.x.nan_to_num(-1))
    table = read_table_by(data.transform.columns, apart["hungarian"])
    assert table.labels is not None
    assert table.x.shape == (294, 5)
    columns = {name: {n: list(own[n]) for n in own} for name, own in apart.items()}
    third = coterie.clients_from(columns, missing="median", normalise="auto")
    assert torch.equal(data.train.x.nan_to_num(-1), third.train.x.nan_to_num(-1))


def test_parquet_with_gaps_and_text(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame(rows).drop(columns=["patient_id"]).to_parquet(tmp_path / "all.parquet")
    data = coterie.load_clients(str(tmp_path / "all.parquet"), missing="median")
    text = coterie.load_clients(str(write(tmp_path / "all.csv", rows, TABLE)), missing="median")
    assert torch.equal(data.train.x.nan_to_num(-1), text.train.x.nan_to_num(-1))
    assert data.transform == text.transform


def test_heart_disease_comes_in_clinical_units_under_the_names_of_its_hospitals() -> None:
    data = coterie.load_clients("heart-disease")
    assert data.client_names == ("cleveland", "hungarian", "switzerland", "long-beach")
    ages = data.train.x[:, [column.name for column in data.transform.columns].index("age")]
    assert (float(ages.min()), float(ages.max())) == (28, 77)
    with pytest.raises(CoterieError, match="--missing is for your own data"):
        coterie.load_clients("heart-disease", missing="median")


def test_labels_and_categories_are_written_alike_everywhere(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Otherwise one disease becomes two classes, and each hospital trains outputs that the others never see."""

    def here(row: dict[str, Any], column: str, other: Any) -> dict[str, Any]:
        return {**row, column: other(row[column])} if row["hospital"] == "hungarian" else row

    for column, other, said in (
        ("diagnosis", str.title, r"spelled differently.*the label: 'Disease' on hungarian and 'disease' on cleveland"),
        ("diagnosis", lambda y: int(y == "disease"), r"numbers on some clients.*the label: '0' on hungarian and 'dis"),
        ("sex", str.upper, r"spelled differently.*column 'sex': 'FEMALE' on hungarian and 'female' on cleveland"),
        ("sex", lambda sex: int(sex == "male"), r"numbers on some clients.*column 'sex': '0' on hungarian and 'fem"),
    ):
        path = write(tmp_path / "all.csv", [here(row, column, other) for row in rows], TABLE)
        with pytest.raises(CoterieError, match=said):
            coterie.load_clients(str(path), missing="median")
    letters = ["x,label,client", *(f"{i},{'aAbB'[i % 4]},{i // 20}" for i in range(40))]
    (tmp_path / "letters.csv").write_text("\n".join(letters), encoding="utf-8")
    assert coterie.load_clients(str(tmp_path / "letters.csv")).class_names == ("A", "B", "a", "b")  # both on one client


def test_a_header_of_numbers_is_a_header(tmp_path: Path) -> None:
    """As pandas writes columns that have no names."""
    features = {str(k): [float(i * (k + 1)) for i in range(20)] for k in range(3)}
    columns = coterie.clients_from({"a": {**features, "label": [0, 1] * 10}}).transform.columns
    (tmp_path / "b.csv").write_text("2,1,0\n30,20,10\n", encoding="utf-8")
    table = read_table_by(columns, tmp_path / "b.csv")
    assert (table.x.tolist(), table.by_position) == ([[10.0, 20.0, 30.0]], False)
    (tmp_path / "c.csv").write_text("2,1,7\n30,20,10\n", encoding="utf-8")
    with pytest.raises(CoterieError, match=r"olumn '0' is missing in .*'7' is unknown"):
        read_table_by(columns, tmp_path / "c.csv")


def test_a_device_with_one_table_brings_one_client(tmp_path: Path) -> None:
    """A hospital that joins has no column that says so."""
    rows = "\n".join(f"{20 + i},{i % 2}" for i in range(12))
    (tmp_path / "basel.csv").write_text(f"age,label\n{rows}\n")
    ids, data = load_hosted_clients("3", DataSettings(str(tmp_path / "basel.csv")))
    assert (ids, data.num_clients, data.client_names) == ((3,), 1, ("basel",))


def test_an_index_column_without_a_name_is_refused(tmp_path: Path) -> None:
    """As `DataFrame.to_csv` writes it: it would be used as a feature."""
    table = tmp_path / "patients.csv"
    table.write_text(",age,label,client\n0,50,0,a\n1,61,1,a\n2,40,0,b\n3,70,1,b\n", encoding="utf-8")
    with pytest.raises(CoterieError, match=r"column 1 has no name; name it, or write the table without its index"):
        coterie.load_clients(str(table))


@pytest.mark.parametrize("kind", ["csv", "parquet", "columns"])
def test_numbers_that_float32_cannot_hold_are_refused(kind: str, tmp_path: Path) -> None:
    """Seconds since 1970 would be rounded to multiples of 128."""
    rows = {"time": [1_700_000_001.0, 1_700_000_002.0] * 4, "label": [0, 1] * 4, "client": ["a"] * 4 + ["b"] * 4}
    path = tmp_path / f"visits.{kind}"
    if kind == "csv":
        lines = ["time,label,client", *(f"{t:.0f},{y},{c}" for t, y, c in zip(*rows.values(), strict=True))]
        path.write_text("\n".join(lines), encoding="utf-8")
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(rows), path)
    own = {name: {"time": rows["time"][:4], "label": rows["label"][:4]} for name in ("a", "b")}
    load = partial(coterie.clients_from, own) if kind == "columns" else partial(coterie.load_clients, str(path))
    with pytest.raises(CoterieError, match=r"beyond 16,777,216 lose digits in float32.*column 'time': 1700000001"):
        load()


def test_differences_that_float32_cannot_hold_are_refused() -> None:
    times = np.array([1_700_000_001.25, 1_700_000_002.5, 1_700_000_009.75, np.nan] * 4)
    tables = {name: {"time": times, "label": [0, 1] * 8} for name in ("a", "b")}
    with pytest.raises(CoterieError, match=r"beyond 16,777,216 lose digits in float32.*column 'time': 1700000001.25"):
        coterie.clients_from(tables, missing="median")
    far = {name: {"income": times * np.tile([1.001, 2.001, 3.001, 4.0], 4), "label": [0, 1] * 8} for name in ("a", "b")}
    assert coterie.clients_from(far, missing="median").train.x.nanmean() > 1e9
