"""Tasks other than classification, from a user's labels to tables, reports and personal models."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as truth
from torch import nn
from torch.utils.data import TensorDataset

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.data.user.export import export_clients

ROWS = 96
SHORT: dict[str, Any] = {
    "rounds": 2,
    "lr": 0.05,
    "backend": coterie.Execution("looped", processes=1),
    "progress": False,
}


def table(path: Path) -> Path:
    """Four sites; `score` and `risk` are numbers, `p` and `q` are 0 or 1."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 2))
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "site", "score", "risk", "p", "q"])
        for i, (a, b) in enumerate(x):
            score = 300 + 40 * a + 10 * (i % 4) + draw.normal()
            rows.writerow(
                [f"{a:.4f}", f"{b:.4f}", f"s{i % 4}", f"{score:.3f}", f"{b / 100:.6f}", int(a > 0), int(b > 0)]
            )
    return path


def loaded(path: Path, label: str, **settings: Any) -> coterie.FederatedData:
    others = ",".join(name for name in ("score", "risk", "p", "q") if name not in label.split(","))
    names = {"client_column": "site", "label_column": label, "drop_column": others}
    return coterie.load_clients(str(path), **names, **settings)


def tensors(kind: str) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(0)
    if kind == "next-token":
        text = torch.randint(0, 6, (3, 24, 7), generator=draw)
        return [TensorDataset(own[:, :-1], own[:, 1:]) for own in text]
    x = torch.rand(3, 24, 1, 6, 6, generator=draw)
    return [TensorDataset(own, (own[:, 0] > 0.5).long()) for own in x]


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6))
        if kind == "next-token"
        else nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1))
    )


def test_regression_is_in_the_units_of_the_labels(tmp_path: Path) -> None:
    data = loaded(table(tmp_path / "a.csv"), "score", validation=0.25)
    assert data.task.name == "regression"
    assert data.class_names == ("score",)
    assert data.task.options["mean"] == pytest.approx(
        [float(data.train.y.double().mean())]
    )  # not of validation or test
    assert data.task.options["std"] == pytest.approx([float(data.train.y.double().std(correction=0))])
    lines: list[str] = []
    result = coterie.run("fedper", data, "mlp", out=tmp_path / "run", show=lines.append, **SHORT)
    assert any("task: regression, 1 target, mse (guessed from the labels; --task or task=" in line for line in lines)
    run = coterie.load_run(tmp_path / "run")
    for client in range(4):
        x, y = data.test.client(client)
        output = run.personal_model(client)(x).detach()
        expected = {
            "rmse": truth.root_mean_squared_error(y, output),
            "mae": truth.mean_absolute_error(y, output),
            "r2": truth.r2_score(y, output),
        }
        row = result.clients.iloc[client]
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert row["FedPer"] == pytest.approx(expected["rmse"], rel=1e-4)
        assert 200 < float(output.mean()) < 400
    worst = max(result.clients["FedPer"])
    assert result.outcomes()[0].last.worst10 == pytest.approx(worst)  # of RMSE, the largest
    assert result.outcomes()[0].best_on_test == pytest.approx(min(score for _, score in result.history.curve("pre")))
    assert f"mean RMSE, {worst:.4g} worst tenth" in repr(result)
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["metric"] == "rmse"
    assert kept["metrics"]["personal"]["rmse"]["mean"] == pytest.approx(result.clients["rmse"].mean())
    again = coterie.run("fedper", data, "mlp", out=tmp_path / "run", resume=True, **SHORT)
    assert again.clients["r2"].tolist() == pytest.approx(result.clients["r2"].tolist(), rel=1e-6)
    assert [r.metric for r in run.history] == [r.metric for r in result.history]
    assert dict(run.history.curve("pre")) == pytest.approx(dict(result.history.curve("pre")))


@pytest.mark.parametrize(
    ("label", "task", "metric"), [("score,risk", "regression", "mae"), ("p,q", "multi-label", "auroc")]
)
def test_several_label_columns(tmp_path: Path, label: str, task: str, metric: str) -> None:
    data = loaded(table(tmp_path / "a.csv"), label, metric=metric)
    assert (data.task.name, data.task.metric.name, data.label_shape) == (task, metric, (2,))
    result = coterie.run("ditto", data, "mlp", **SHORT)
    x, y = data.test.client(1)
    output = result.personal_model(1)(x).detach()
    by_sklearn = {
        "mae": lambda: truth.mean_absolute_error(y, output),
        "auroc": lambda: truth.roc_auc_score(y, output, average="macro"),
    }[metric]()
    assert result.clients.iloc[1][metric] == pytest.approx(by_sklearn, rel=1e-4)


@pytest.mark.parametrize(("kind", "metric"), [("next-token", "perplexity"), ("segmentation", "miou")])
def test_tokens_and_masks(tmp_path: Path, kind: str, metric: str) -> None:
    data = coterie.clients_from(tensors(kind), metric=metric)
    assert data.task.name == kind
    result = coterie.run("fedavg", data, network(kind), out=tmp_path / "run", **SHORT)
    run = coterie.load_run(tmp_path / "run", network(kind))
    x, y = data.test.client(0)
    output = run.personal_model(0)(x).detach()
    if kind == "next-token":
        expected = float(nn.functional.cross_entropy(output.flatten(0, 1), y.flatten()).exp())
    else:
        expected = truth.jaccard_score(y.flatten(), output.argmax(1).flatten(), average="macro")
    assert result.clients.iloc[0][metric] == pytest.approx(expected, rel=1e-4)


def test_metrics_of_classes_after_the_last_round() -> None:
    data = coterie.load_clients("heart-disease", metric="auroc")
    result = coterie.run("fedavg", data, "mlp", **SHORT)
    assert result.metric.words == "AUROC"
    model, (x, y) = result.personal_model(0), data.test.client(0)
    shares = model.read(x).detach()
    row = result.clients.iloc[0]
    assert row["auroc"] == pytest.approx(truth.roc_auc_score(y, shares[:, 1]), rel=1e-6)
    assert row["macro_f1"] == pytest.approx(truth.f1_score(y, shares.argmax(1), average="macro"))
    assert result.finals is not None
    assert result.finals.confusion is not None
    assert int(result.finals.confusion.sum()) == len(data.test.y)
    labels, said = zip(*((data.test.client(i)[1], result.personal_model(i)(data.test.client(i)[0]).argmax(1))
                         for i in range(data.num_clients)), strict=True)  # fmt: skip
    assert result.finals.confusion.tolist() == truth.confusion_matrix(torch.cat(labels), torch.cat(said)).tolist()


def test_numbers_are_exported_and_read_again(tmp_path: Path) -> None:
    data = loaded(table(tmp_path / "a.csv"), "score,risk")
    export_clients(data, tmp_path / "out")
    again = coterie.load_clients(str(tmp_path / "out"), label_column="score,risk")
    assert again.task.name == "regression"
    assert torch.equal(again.test.y, data.test.y)


def command(*words: str) -> None:
    main(list(words))  # a SystemExit would fail the test


@pytest.mark.long
def test_regression_by_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table(Path("a.csv"))
    data = ["--dataset", "./a.csv", "--client-column", "site", "--label-column", "score", "--drop-column", "risk,p,q"]
    short = ["--rounds", "2", "--model", "mlp", "--processes", "1"]
    command("compare", "local", "fedper", *data, *short, "--metric", "mae", "--task-args", "loss=huber", "--out", "c")
    said = capsys.readouterr().out
    assert "MAE on 4 clients of a" in said
    assert "accuracy" not in said.lower()
    assert " %" not in said.replace("worst 10 %", "").replace("at 5 %", "")
    command("table", "c", "--format", "csv")
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["method", "MAE", "worst 10 %"]
    command("report", "c", "--out", "c.html")
    assert "MAE over rounds" in Path("c.html").read_text()
    command("resume", "c", "--rounds", "3")
    capsys.readouterr()
    command("evaluate", "c/fedper-seed0", "--json")
    first = json.loads(capsys.readouterr().out)["clients"][0]
    assert first["mae"] <= first["rmse"]
    Path("new.csv").write_text("a,b\n0.5,0.1\n")
    command("predict", "c/fedper-seed0", "--client", "s2", "new.csv", "--json")
    value = json.loads(capsys.readouterr().out)[0]["values"]["score"]
    model = coterie.load_run("c/fedper-seed0").personal_model("s2")
    assert value == pytest.approx(model(torch.tensor([[0.5, 0.1]])).item(), rel=1e-5)
    command("tune", "fedavg", "--over", "lr=0.001,0.1", *data, *short, "--out", "t")
    tuned = json.loads(Path("t/tuned.json").read_text())
    means = [standing["mean"] for standing in tuned["standings"]]
    assert means == sorted(means)  # the smallest RMSE first
    assert tuned["metric"] == "rmse"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"label": "score", "metric": "rms"}, r"unknown metric of regression 'rms': did you mean 'rmse'"),
        ({"label": "score", "metric": "accuracy"}, r"unknown metric of regression 'accuracy'"),
        ({"label": "score", "task": "classification"}, r"target that is not a class.*--task regression"),
        ({"label": "score", "task": "multi-label"}, r"multi-label needs labels of 0 and 1"),
        ({"label": "score", "task": "regresion"}, r"unknown task 'regresion': did you mean 'regression'"),
        ({"label": "score", "task_args": "los=mae"}, r"task regression has no option 'los'; it has: targets"),
        ({"label": "score", "task_args": "loss=l1"}, r"unknown loss 'l1'"),
        ({"label": "score", "task_args": "huber"}, r"task options are NAME=VALUE"),
        ({"label": "score", "partition": "dirichlet"}, r"partition 'dirichlet' divides samples by class"),
        ({"label": "p", "task_args": {"class_weights": [1.0]}}, r"class_weights must have a number for each of 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError, match=said) as error:
        loaded(table(tmp_path / "a.csv"), **settings)
    assert "\n" not in str(error.value)


def test_targets_that_are_missing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,site,y\n" + "".join(f"{i},s{i % 2},{'' if i == 3 else i / 7}\n" for i in range(12)))
    with pytest.raises(CoterieError, match=r"target that is missing or infinite: .*a.csv, line 5"):
        coterie.load_clients(str(path), client_column="site")
    with pytest.raises(CoterieError, match=r"FedPAC needs one class per sample, so it cannot be used for regression"):
        coterie.run("fedpac", loaded(table(tmp_path / "b.csv"), "score"), "mlp", **SHORT)
    with pytest.raises(CoterieError, match=r"it must return 1 number per sample"):
        coterie.run("fedavg", loaded(table(tmp_path / "b.csv"), "score"), nn.Linear(2, 3), **SHORT)


def test_ages_are_not_taken_for_classes() -> None:
    """As classes, 0 to 28 would have no samples; so the user says which is meant."""
    x, ages = torch.randn(120, 3), torch.arange(120) % 40 + 29
    with pytest.raises(CoterieError, match=r"40 different whole numbers from 29 to 68; are they amounts or classes"):
        coterie.clients_from([(x, ages)] * 2)
    assert coterie.clients_from([(x, ages)] * 2, task="regression").task.name == "regression"
    assert coterie.clients_from([(x, ages)] * 2, task="classification").classes == 69
    assert coterie.clients_from([(x, ages)] * 2, classes=[str(age) for age in range(69)]).classes == 69
    assert coterie.clients_from([(x, ages - 29)] * 2).classes == 40  # all of 0 to 39 occur
