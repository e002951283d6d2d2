"""A hospital uses its model: tables with named columns, labels in its own coding, clients by name."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import coterie
from coterie.cli import main
from coterie.personal.adapt import newcomer
from coterie.personal.labelled import LabelledReading

COLUMNS = ("age", "chol", "pain", "bp")
PAINS = ("none", "mild", "severe")
Table = list[dict[str, Any]]


def patients(count: int, seed: int) -> Table:
    """Disease is what old people with high cholesterol have; some cholesterol was not measured."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        age, chol = draw.uniform(30, 80), draw.uniform(120, 320)
        sick = (age - 55) / 15 + (chol - 220) / 60 > 0
        row = {
            "age": f"{age:.1f}",
            "chol": f"{chol:.0f}",
            "pain": draw.choice(PAINS),
            "bp": f"{draw.uniform(90, 180):.0f}",
        }
        rows.append({**row, "diagnosis": "disease" if sick else "healthy"})
    return rows


def write(path: Path, rows: Table, columns: Sequence[str], header: bool = True) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([columns] if header else [])
        writer.writerows([[row[column] for column in columns] for row in rows])
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals, each with a CSV of raw values; two of them lack some values."""
    base = tmp_path_factory.mktemp("hospitals")
    (base / "data").mkdir()
    for seed, name in enumerate(("bern", "basel", "geneva")):
        rows = patients(80, seed)
        for row in rows[::9]:
            row["chol"] = ""
        write(base / "data" / f"{name}.csv", rows, (*COLUMNS, "diagnosis"))
    main(["run", "fedavg", "--dataset", str(base / "data"), "--missing", "median", "--normalise", "auto",
          "--model", "mlp", "--rounds", "15", "--local-epochs", "5", "--lr", "0.1",
          "--out", str(base / "run")])  # fmt: skip
    return base / "run"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The JSON that a command prints."""

    def of(*arguments: object) -> Any:
        capsys.readouterr()
        main([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    return of


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line that a command ends with."""

    def of(*arguments: object) -> str:
        with pytest.raises(SystemExit) as left:
            main([*map(str, arguments)])
        assert left.value.code == 2
        return capsys.readouterr().err

    return of


def answers(told: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{c["name"]: c["probability"] for c in one["classes"]} for one in told]


def test_the_order_of_columns_does_not_matter(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    rows = patients(20, 7)
    rows[3]["chol"] = ""  # not measured
    straight = write(tmp_path / "a.csv", rows, COLUMNS)
    turned = write(tmp_path / "b.csv", rows, ("bp", "pain", "chol", "age"))
    first, second = (answers(ask("predict", run, "--client", "basel", file)) for file in (straight, turned))
    assert first == second
    said = [max(one, key=lambda name: one[name]) for one in first]
    assert sum(a == row["diagnosis"] for a, row in zip(said, rows, strict=True)) >= 15


def test_a_model_takes_a_table_by_hand(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    """What predict says is what the module says of numbers that were coded by hand, as its columns say."""
    row = {"age": "61", "chol": "", "pain": "severe", "bp": "140"}
    model = coterie.load_run(run).personal_model("basel")
    assert [column.name for column in model.columns] == list(COLUMNS)
    assert model.class_names == ("disease", "healthy")
    pain = next(column for column in model.columns if column.name == "pain")
    raw = torch.tensor([[61, float("nan"), pain.categories.index("severe"), 140]])
    (told,) = answers(ask("predict", run, "--client", "basel", write(tmp_path / "a.csv", [row], COLUMNS)))
    assert [told[name] for name in model.class_names] == pytest.approx(model(raw).softmax(1)[0].tolist(), abs=1e-6)


def test_columns_that_do_not_fit_are_named(run: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    rows = [{**row, "chol_mmol": "5", "id": str(n)} for n, row in enumerate(patients(5, 8))]
    lacking = refused("predict", run, "--client", "basel", write(tmp_path / "a.csv", rows, ("age", "pain", "bp")))
    assert f"Column 'chol' is missing in {tmp_path / 'a.csv'} (expected: age, chol, pain, bp)" in lacking
    assert "Column 'id' is unknown in" in refused(
        "predict", run, "--client", "basel", write(tmp_path / "b.csv", rows, (*COLUMNS, "id"))
    )
    rows[2]["pain"] = "unbearable"
    other = refused("predict", run, "--client", "basel", write(tmp_path / "c.csv", rows, COLUMNS))
    assert "'pain'" in other
    assert "unbearable" in other


def test_columns_can_be_dropped_by_name(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    rows = [{**row, "id": str(n)} for n, row in enumerate(patients(5, 8))]
    wide, plain = write(tmp_path / "a.csv", rows, ("id", *COLUMNS)), write(tmp_path / "b.csv", rows, COLUMNS)
    dropped = ask("predict", run, "--client", "basel", wide, "--drop-column", "id")
    assert answers(dropped) == answers(ask("predict", run, "--client", "basel", plain))


def test_a_label_column_is_shown(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    rows = patients(4, 9)
    told = ask("predict", run, "--client", "geneva", write(tmp_path / "a.csv", rows, (*COLUMNS, "diagnosis")))
    assert [one["label"] for one in told] == [row["diagnosis"] for row in rows]
    assert {one["client"] for one in told} == {"geneva"}


def test_a_file_without_header_is_taken_by_position(
    run: Path, tmp_path: Path, ask: Callable[..., Any], refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = patients(6, 10)
    named, bare = write(tmp_path / "a.csv", rows, COLUMNS), write(tmp_path / "b.csv", rows, COLUMNS, header=False)
    expected = answers(ask("predict", run, "--client", "bern", named))
    main(["predict", str(run), "--client", "bern", str(bare), "--json"])
    said = capsys.readouterr()
    assert answers(json.loads(said.out)) == expected
    assert "b.csv has no header; its columns were taken by position: age, chol, pain, bp" in said.err
    narrow = write(tmp_path / "c.csv", rows, ("age", "chol", "bp"), header=False)
    assert "3 columns instead of 4" in refused("predict", run, "--client", "bern", narrow)


def test_tables_of_other_kinds(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = patients(6, 10)
    columns = {
        "pain": [row["pain"] for row in rows],
        **{name: [float(row[name]) for row in rows] for name in ("bp", "age", "chol")},
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    expected = answers(ask("predict", run, "--client", "bern", write(tmp_path / "a.csv", rows, COLUMNS)))
    assert answers(ask("predict", run, "--client", "bern", tmp_path / "a.parquet")) == [
        pytest.approx(one, abs=1e-6) for one in expected
    ]


def test_labels_are_classes_by_name(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    """A newcomer that codes its labels in the other order gets the same model, once it says what they mean."""
    rows = patients(80, 20)
    named = write(tmp_path / "zug.csv", rows, (*COLUMNS, "diagnosis"))
    for row in rows:
        row["diagnosis"] = {"healthy": 0, "disease": 1}[row["diagnosis"]]
    coded = write(tmp_path / "chur.csv", rows, (*COLUMNS, "diagnosis"))
    by_name = ask("adapt", run, "--data", named, "--out", tmp_path / "zug")
    told = ask("adapt", run, "--data", coded, "--labels", "0=healthy,1=disease", "--out", tmp_path / "chur")
    assert (told["before"], told["after"]) == (by_name["before"], by_name["after"])
    assert told["before"] > 0.7
    one, two = (coterie.load_run(tmp_path / name).personal_model(name) for name in ("zug", "chur"))
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    accuracy = [
        ask("evaluate", run, "--client", "bern", "--data", file, *more)["clients"][0]["accuracy"]
        for file, more in ((named, ()), (coded, ("--labels", "0=healthy,1=disease")))
    ]
    assert accuracy[0] == accuracy[1] > 0.7


def test_numbers_are_not_taken_for_named_classes(run: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    rows = [{**row, "diagnosis": int(row["diagnosis"] == "disease")} for row in patients(20, 21)]
    file = write(tmp_path / "chur.csv", rows, (*COLUMNS, "diagnosis"))
    for command in ("adapt", "evaluate"):
        said = refused(command, run, "--data", file)
        assert "labels are 0, 1, but the classes of this run are disease, healthy" in said
        assert "--labels 0=disease,1=healthy" in said
    assert "unknown class 'sick'" in refused("adapt", run, "--data", file, "--labels", "0=healthy,1=sick")
    assert "does not map '0'" in refused("adapt", run, "--data", file, "--labels", "1=disease")
    rows[0]["diagnosis"] = "diseased"
    strange = write(tmp_path / "zug.csv", [rows[0]], (*COLUMNS, "diagnosis"))
    assert "unknown class 'diseased': did you mean 'disease'?" in refused("adapt", run, "--data", strange)
    assert not (run.parent / "run-chur").exists()


def test_inverted_labels_are_noticed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "diagnosis": int(row["diagnosis"] == "disease")} for row in patients(80, 22)]
    file = str(write(tmp_path / "chur.csv", rows, (*COLUMNS, "diagnosis")))
    for labels, noticed in (("0=healthy,1=disease", False), ("1=healthy,0=disease", True)):
        main(["adapt", str(run), "--data", file, "--labels", labels, "--out", str(tmp_path / labels)])
        main(["evaluate", str(run), "--client", "bern", "--data", file, "--labels", labels])
        said = capsys.readouterr().err
        assert (said.count("do the labels have the same meaning as in training?") == 2) == noticed
        assert (said.count("1 = healthy") == 2) == noticed


def test_a_newcomer_may_bring_arrays_or_a_folder(run: Path, tmp_path: Path, ask: Callable[..., Any]) -> None:
    """The same patients in every form give the same model."""
    rows = patients(60, 23)
    coded = [[float(r["age"]), float(r["chol"]), PAINS.index(r["pain"]), float(r["bp"])] for r in rows]
    pain = next(c for c in coterie.load_run(run).personal_model("bern").columns if c.name == "pain")
    x = np.array(coded, np.float32)
    x[:, 2] = [pain.categories.index(r["pain"]) for r in rows]
    names = [r["diagnosis"] for r in rows]
    split = {"x": x[:40], "x_test": x[40:]}
    np.savez(tmp_path / "words.npz", **split, y=np.array(names[:40]), y_test=np.array(names[40:]))
    own = ["healthy", "disease"]
    y = np.array([own.index(name) for name in names])
    turned = [2, 0, 3, 1]
    np.savez(
        tmp_path / "numbers.npz", x=x[:40][:, turned], x_test=x[40:][:, turned], y=y[:40], y_test=y[40:],
        classes=np.array(own), columns=np.array(COLUMNS)[turned],
    )  # fmt: skip
    for part, mine in (("train", rows[:40]), ("test", rows[40:])):
        (tmp_path / "folder" / part).mkdir(parents=True)
        write(tmp_path / "folder" / part / "zug.csv", mine, ("diagnosis", *reversed(COLUMNS)))
    told = [
        ask("adapt", run, "--data", tmp_path / name, "--out", tmp_path / f"out-{name}")
        for name in ("words.npz", "numbers.npz", "folder")
    ]
    assert told[0]["before"] > 0.6
    assert all((one["before"], one["after"]) == (told[0]["before"], told[0]["after"]) for one in told)


def test_a_newcomer_may_bring_images(tmp_path: Path, ask: Callable[..., Any], refused: Callable[..., str]) -> None:
    """A folder for each class. Which is named by its folder, not by its place in the alphabet."""
    data, out = coterie.load_clients(num_clients=2, local_size=60), tmp_path / "run"
    coterie.run("fedavg", data, "mlp", rounds=3, local_epochs=5, lr=0.05, backend="looped", out=out)
    x, y = data.test.client(0)
    for part, chosen in (("train", slice(0, 30)), ("test", slice(30, 50))):
        for n, (image, k) in enumerate(zip(x[chosen], y[chosen].tolist(), strict=True)):
            folder = tmp_path / "shop" / part / data.class_names[k].replace("/", "-")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(folder / f"{n}.png")
    mapping = ",".join(f"{name.replace('/', '-')}={name}" for name in data.class_names)
    told = ask("adapt", out, "--data", tmp_path / "shop", "--labels", mapping, "--out", tmp_path / "new", "--epochs", 1)
    assert told["after"] >= 0.3
    for path in (tmp_path / "shop" / "train").iterdir():
        path.rename(path.with_name(f"{path.name}s"))
    assert "unknown class" in refused("adapt", out, "--data", tmp_path / "shop", "--out", tmp_path / "other")


@pytest.mark.parametrize("form", ["onnx", "torch", "safetensors"])
def test_exported_models_know_their_columns(
    form: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["export", str(run), "--client", "geneva", "--to", form])
    if form == "onnx":
        about = {p.key: p.value for p in onnx.load("client-geneva.onnx").metadata_props}["about"]
    elif form == "torch":
        files = {"about.json": ""}
        torch.export.load("client-geneva.pt2", extra_files=files)
        about = files["about.json"]
    else:
        with safe_open("client-geneva.safetensors", "pt") as file:
            about = file.metadata()["about"]
    told = json.loads(about)
    assert [column["name"] for column in told["columns"]] == list(COLUMNS)
    assert told["columns"][2]["categories"] == sorted(PAINS)
    assert told["columns"][1]["fill"] > 0
    assert told["classes"] == ["disease", "healthy"]
    assert (told["client_name"], told["format"]) == ("geneva", 1)
    assert told["input"] == {"name": "samples", "shape": ["batch", 4], "dtype": "float32"}
    assert told["normalisation"]["mean"][0] == pytest.approx(55, abs=5)


def test_arrays_say_their_columns_or_are_taken_by_position(
    run: Path, tmp_path: Path, ask: Callable[..., Any], refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = patients(8, 21)
    codes = sorted(PAINS)
    x = np.array([[float(r["age"]), float(r["chol"]), codes.index(r["pain"]), float(r["bp"])] for r in rows])
    expected = answers(ask("predict", run, "--client", "bern", write(tmp_path / "a.csv", rows, COLUMNS)))
    np.savez(tmp_path / "turned.npz", x=x[:, ::-1], columns=COLUMNS[::-1])
    np.savez(tmp_path / "bare.npz", x=x)
    assert answers(ask("predict", run, "--client", "bern", tmp_path / "turned.npz")) == expected
    main(["predict", str(run), "--client", "bern", str(tmp_path / "bare.npz"), "--json"])
    said = capsys.readouterr()
    assert answers(json.loads(said.out)) == expected
    assert "bare.npz has no array 'columns'; x was taken by position: age, chol, pain, bp" in said.err
    x[2, 2] = 3  # of three categories
    np.savez(tmp_path / "wrong.npz", x=x)
    told = refused("predict", run, "--client", "bern", tmp_path / "wrong.npz")
    assert "column 'pain' holds 3; its categories are coded 0 for 'mild', 1 for 'none', 2 for 'severe'" in told


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_a_new_hospital_keeps_the_rows_of_a_patient_together(form: str, run: Path, tmp_path: Path) -> None:
    rows = [{**row, "age": f"{30 + n}", "patient": n // 5} for n, row in enumerate(patients(60, 5))]
    loaded, reading = coterie.load_run(run), LabelledReading()
    if form == "csv":
        path = write(tmp_path / "new.csv", rows, (*COLUMNS, "diagnosis", "patient"))
        reading = LabelledReading(group_column="patient")
    else:
        path = tmp_path / "new.npz"
        x = [[float(r["age"]), float(r["chol"]), PAINS.index(r["pain"]), float(r["bp"])] for r in rows]
        labels, patient = [r["diagnosis"] for r in rows], [r["patient"] for r in rows]
        np.savez(path, x=np.array(x), y=labels, group=patient, columns=COLUMNS)
    data = newcomer(loaded, path, reading)
    train, test = ({int(age - 30) // 5 for age in split.x[:, 0].tolist()} for split in (data.train, data.test))
    assert (len(train), len(test)) == (9, 3)
    assert not train & test
