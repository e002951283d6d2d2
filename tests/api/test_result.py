"""What users do with a result: tables, models, plots, reports, folders."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core.errors import CoterieError
from tests import toy


@pytest.fixture(scope="module")
def result() -> coterie.Result:
    return coterie.run(
        "fedavg", toy.toy(), toy.network(), rounds=3, evaluate_every=2, backend=toy.IN_TURN, progress=False
    )


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)


def test_tables_are_data_frames(result: coterie.Result) -> None:
    scores = result.scores
    assert scores["round"].tolist() == [2, 3]
    assert scores["pre"].tolist() == [a for _, a in result.history.curve("pre")]
    assert scores["finished"].dropna().tolist() == [result.outcomes()[1].last.mean]
    clients = result.clients
    assert clients["client"].tolist() == list(result.client_ids)
    assert clients["train_samples"].sum() == len(toy.toy().train.y)
    assert clients["FedAvg-FT"].mean() == pytest.approx(result.outcomes()[1].last.mean)
    present = [len(toy.toy().train.client(i)[1].unique()) for i in range(toy.toy().num_clients)]
    assert clients["classes"].tolist() == present
    assert result.metrics["bytes_up"].sum() == sum(record.bytes_up for record in result.history)


def test_tables_without_pandas(result: coterie.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = {name: getattr(result, name) for name in ("scores", "metrics", "clients")}
    without(monkeypatch, "pandas")
    for name, frame in frames.items():
        rows = getattr(result, name)
        assert type(rows) is list
        assert all(type(row) is dict for row in rows)
        assert len(rows) == len(frame)
        assert set().union(*rows) == set(frame.columns)


def test_repr_is_short_and_shows_no_tensor(result: coterie.Result) -> None:
    lines = repr(result).splitlines()
    assert len(lines) <= 6
    assert lines[0] == f"Result of FedAvg on toy, {toy.toy().num_clients} clients, 3 rounds"
    assert f"FedAvg: {100 * result.outcomes()[0].last.mean:.2f} % mean accuracy" in lines[1]
    assert "tensor" not in repr(result)
    html = result._repr_html_()
    assert "<table>" in html
    assert f"{100 * result.outcomes()[1].last.mean:.2f} %" in html


def test_repr_of_data_shows_sizes_and_no_tensor() -> None:
    data = coterie.load_clients(num_clients=3, local_size=30, test_size=10, validation=0.2)
    text = repr(data)
    assert "3 clients, 10 classes (T-shirt/top, Trouser, Pullover and 7 more)" in text
    assert f"train: {len(data.train.y)} samples" in text
    assert "test: 30 samples, 10 per client" in text
    assert "validation: " in text
    assert "shape (1, 28, 28), uint8" in text
    assert "tensor" not in text + repr(data.train)
    uneven = repr(toy.toy().train)
    sizes = toy.toy().train.sizes
    assert f"{min(sizes)} to {max(sizes)} per client" in uneven


def test_a_saved_result_is_a_run_folder(result: coterie.Result, tmp_path: Path) -> None:
    path = result.save(tmp_path / "saved")
    run = coterie.load_run(path, toy.network())
    x = toy.toy().test.client(1)[0]
    assert torch.equal(run.personal_model(1)(x), result.personal_model(1)(x))
    assert run.history.curve("pre") == result.history.curve("pre")
    with pytest.raises(CoterieError, match="exists already"):
        result.save(path)
    written = coterie.run(
        "fedavg", toy.toy(), toy.network(), rounds=3, evaluate_every=2, backend="looped", out=tmp_path / "out"
    )
    ours, theirs = (set(p.name for p in folder.iterdir()) for folder in (path, tmp_path / "out"))  # noqa: C401
    assert theirs - ours == {"checkpoint"}
    assert (path / "clients.csv").read_text() == (tmp_path / "out" / "clients.csv").read_text()
    assert written.folder == tmp_path / "out"
    again = written.save(tmp_path / "copy")
    assert (again / "clients.csv").read_text() == (path / "clients.csv").read_text()


def test_an_interrupted_result_can_be_saved(tmp_path: Path) -> None:
    from tests.api.test_run import Interrupter

    data = coterie.load_clients(num_clients=3, local_size=30, test_size=10)
    stopped = coterie.run("fedavg", data, "linear", rounds=9, watch=Interrupter(1), backend=toy.IN_TURN)
    run = coterie.load_run(stopped.save(tmp_path / "saved"))
    assert len(run.clients) == 3
    x = data.test.client(0)[0]
    assert torch.equal(run.personal_model(0)(x), stopped.personal_model(0)(x))
    stopped.report(tmp_path / "report.html")
    with (tmp_path / "saved" / "metrics.csv").open() as file:
        assert {row["round"] for row in csv.DictReader(file)} == {"1", "2"}


def test_a_report_of_a_result_in_memory(result: coterie.Result, tmp_path: Path) -> None:
    page = result.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "FedAvg-FT" in page
    assert f"{100 * result.outcomes()[0].last.mean:.1f} %" in page


@pytest.fixture
def agg(monkeypatch: pytest.MonkeyPatch) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_plot_has_the_curve(result: coterie.Result, agg: Any) -> None:
    ax = result.plot()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {"global model", "after local training"}  # FedAvg's personal model is the global one
    expected = result.history.curve("global")
    assert list(lines["global model"].get_xdata()) == [number for number, _ in expected]
    assert list(lines["global model"].get_ydata()) == pytest.approx([100 * a for _, a in expected])
    _, own = agg.subplots()
    assert result.plot(own) is own


def test_a_plot_without_matplotlib(result: coterie.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "matplotlib")
    with pytest.raises(CoterieError, match=r"^plots need matplotlib: pip install 'coterie\[plot\]'$"):
        result.plot()
