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
    again = coterie.run("fedper", data, "mlp", out=tmp_path / "run", exist="resume", **SHORT)
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
        (
            {"label": "p", "task_args": "class_weights=balanced"},
            r"class_weights of task classification must be a list, each a number",
        ),
        ({"label": "p", "task_args": "class_weights={0: 2}"}, r"needs a number for each class: 0, 1; got 0"),
        ({"label": "p", "task_args": "positive=yes"}, r"unknown class for positive 'yes'"),
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


def test_classes_of_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are sorted, so that 'healthy' would be the positive class."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    y = ["sick" if a > 0.5 else "healthy" for a in x[:, 0]]
    with open(tmp_path / "a.csv", "w") as file:
        file.write("a,b,label,site\n")
        file.writelines(f"{a:.4f},{b:.4f},{name},s{i % 2}\n" for i, ((a, b), name) in enumerate(zip(x, y, strict=True)))
    options = "class_weights={sick: 3, healthy: 1},positive=healthy"
    data = coterie.load_clients(str(tmp_path / "a.csv"), client_column="site", task_args=options)
    assert data.class_names == ("healthy", "sick")
    assert data.task.options == {"classes": 2, "class_weights": [1.0, 3.0], "positive": 0}
    result = coterie.run("fedavg", data, "mlp", out=tmp_path / "run", show=print, **SHORT)
    assert "; positive: healthy (--task-args" in capsys.readouterr().out
    model, (x, label) = result.personal_model(0), data.test.client(0)
    expected = truth.recall_score(label, model(x).argmax(1), pos_label=0)
    assert result.clients["sensitivity"][0] == pytest.approx(expected)
    (tmp_path / "new.csv").write_text("a,b,label\n0.1,0.2,sick\n-1.0,0.3,healthy\n")
    main(["evaluate", str(tmp_path / "run"), "--client", "0", "--data", str(tmp_path / "new.csv")])
    assert "average precision: of class 'healthy'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("labels", "task", "said"),
    [
        (
            1.7e9 + torch.arange(24.0, dtype=torch.float64),
            "regression",
            r"float32 cannot tell these targets apart.*1.7e",
        ),
        (1_700_000_000 + torch.arange(24), "regression", r"float32 cannot tell these targets apart"),
        (torch.full((24, 2), 1e39, dtype=torch.float64), "regression", r"target beyond the range of float32"),
        (torch.eye(3, dtype=torch.int64).repeat(8, 1), None, r"exactly one of 3 label columns.*--task multi-label"),
        (torch.arange(24) % 2 * 2 - 1, None, r"-1 is not a class: whole numbers from 0, or names"),
        (255 * torch.randint(2, (24, 6, 6)), None, r"pixels of 255, and none of 254: mark ignored pixels with -1"),
        (torch.randint(2, (24, 1, 6, 6)), None, r"masks are \(H, W\), without an axis of one channel"),
        (
            torch.full((24, 6, 6), -100),
            "segmentation",
            r"classes are 0 to .*, and -1 where a label is ignored, got -100",
        ),
    ],
)
def test_labels_that_would_be_misread_are_refused(labels: torch.Tensor, task: str | None, said: str) -> None:
    x = torch.rand(24, 1, 6, 6)
    with pytest.raises(CoterieError, match=said):
        coterie.clients_from([TensorDataset(x, labels)] * 2, task=task)


def test_targets_far_from_0_are_learned() -> None:
    """A client's targets may be constant; R² is not defined there."""
    x = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    rising, still = 1e6 + 1e4 * x[:, 0].double(), torch.full((48,), 1e6)
    data = coterie.clients_from([(x, rising), (x, rising), (x, still)])
    result = coterie.run("local", data, nn.Sequential(nn.Flatten(), nn.Linear(2, 1)), **{**SHORT, "rounds": 4})
    assert result.clients["r2"].isna().tolist() == [False, False, True]
    assert result.clients["r2"][0] > 0.9
    model, (x, y) = result.personal_model(0), data.test.client(0)
    rmse = truth.root_mean_squared_error(y, model(x).detach())
    assert result.clients["rmse"][0] == pytest.approx(rmse, rel=1e-5)


def test_padding_that_has_labels_is_refused() -> None:
    tokens = torch.randint(1, 6, (24, 7))
    tokens[:, 5:] = 0
    with pytest.raises(CoterieError, match=r"padding id 0 among their tokens, with a label"):
        coterie.clients_from([(tokens[:, :-1], tokens[:, 1:])] * 2, padding=0)
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -1)
    data = coterie.clients_from([(tokens[:, :-1], labels)] * 2, padding=0)
    assert data.task.name == "next-token"


class Mixed(coterie.Regression):
    """Outputs (B, 1) minus labels (B,) are (B, B)."""

    name = "mixed"

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y[:, 0]).square().mean(1)


class Meaned(coterie.Regression):
    name = "meaned"

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, y).expand(len(y))


@pytest.mark.parametrize("kind", [Mixed, Meaned])
def test_a_loss_that_mixes_samples_is_refused(kind: type[coterie.Task]) -> None:
    x = torch.randn(24, 2)
    data = coterie.clients_from([(x, x[:, 0] * 1.1)] * 2, task=kind)
    with pytest.raises(CoterieError, match=rf"task {kind.name}: the loss of a sample depends on the other samples"):
        coterie.run("fedavg", data, nn.Sequential(nn.Flatten(), nn.Linear(2, 1)), **SHORT)


def test_a_single_layer_is_refused_with_what_to_write() -> None:
    x = torch.randn(24, 2)
    with pytest.raises(CoterieError, match=r"a single layer, without an encoder; pass nn.Sequential\(nn.Flatten"):
        coterie.run("fedavg", coterie.clients_from([(x, x[:, 0] * 1.1)] * 2), nn.Linear(2, 1), **SHORT)


@pytest.mark.parametrize("where", ["looped", "stacked"])
def test_batchnorm_on_a_batch_of_one_sample_is_refused_before_training(where: str) -> None:
    x, y = torch.randn(17, 2), torch.arange(17) % 2
    test = [(x[:4], y[:4])] * 2
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    settings: dict[str, Any] = {**SHORT, "batch_size": 4, "backend": coterie.Execution(where, processes=1)}
    with pytest.raises(CoterieError, match=r"BatchNorm cannot train on one sample: .* client 1 \(17 samples\)"):
        coterie.run("fedavg", coterie.clients_from([(x[:16], y[:16]), (x, y)], test), net, **settings)
    coterie.run("fedavg", coterie.clients_from([(x[:16], y[:16]), (x[:14], y[:14])], test), net, **settings)
