"""The scripts in examples/ run, and what they show is right."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import mean_pinball_loss
from tools.adapters import table

import coterie
from examples import adapters, deploy, own_data, own_method, own_network, own_task
from tests import toy

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST_LINES = 110  # of a script for newcomers


@pytest.mark.long
def test_adapters(tmp_path: Path) -> None:
    out = tmp_path / "adapters.json"
    adapters.main(["--quick", "--device", "cpu", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    arms = {arm["trained"] + " " + arm["method"]: arm for arm in found["arms"]}
    full, shared, heads = arms["full fedper"], arms["lora fedper"], arms["head local"]
    assert full["frozen_parameters"] == 0
    assert shared["frozen_parameters"] == heads["frozen_parameters"] > 40 * shared["trained_parameters"]
    weights = 8 * (192 + 3 * 192) + 8 * (192 + 192)  # rank 8 on qkv and out of one layer
    assert shared["trained_parameters"] == weights + heads["trained_parameters"]
    assert [run["seed"] for run in full["runs"]] == [0, 1]
    for run, adapted in zip(full["runs"], shared["runs"], strict=True):
        assert adapted["bytes"] < 0.02 * run["bytes"]
    assert {run["bytes"] for name in ("lora local", "head local") for run in arms[name]["runs"]} == {0}
    assert all(0 < run["accuracy"] <= 1 for arm in arms.values() for run in arm["runs"])
    assert "personal heads, each client alone | Local | 0.01 | 1,930 | " in table(found)


@pytest.mark.long
def test_adapters_select_the_learning_rate_on_validation_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(adapters.QUICK, rates=2, rounds=2)
    network = adapters.vit(plan, adapters.clients_of(plan, None, 0), 10)
    experiment = adapters.Experiment(plan, network, None, "cpu", "fp32")
    assert experiment.searched.validation is not None
    assert [data.validation for data in experiment.data] == [None, None]
    arm = adapters.Arm("heads", "local", "head", (0.0, 1e-2))
    lr, scores = experiment.rate(arm)
    assert list(scores) == [0.0, 1e-2]
    assert lr == 1e-2


@pytest.mark.long
def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    own_data.main(["--rounds", "1"])
    shown = capsys.readouterr().out
    assert "machines: 5 clients (Essen, Graz, Lyon and 2 more), 2 classes (fails, runs)" in shown
    assert "FedPer: " in shown
    assert shown.count("Essen: [") == 3
    table = Path("machines.csv").read_text(encoding="utf-8")
    assert table.count("\n") == 1 + 5 * 60
    Path("mine.csv").write_text(table.replace("plant", "site").replace("state", "outcome"), encoding="utf-8")
    own_data.main(["mine.csv", "--client-column", "site", "--label-column", "outcome", "--rounds", "1"])
    assert capsys.readouterr().out == shown.replace("machines", "mine")


@pytest.mark.long
def test_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    own_network.main()
    assert "head: out\n" in capsys.readouterr().out
    own_network.SmallNet().load_state_dict(torch.load("client3.pt", weights_only=True))


@pytest.mark.long
def test_own_method(capsys: pytest.CaptureFixture[str]) -> None:
    own_method.main()
    assert "| FedBlend |" in capsys.readouterr().out


def test_own_method_is_fedavg_without_a_share_of_its_own() -> None:
    """And with all of it, a client predicts with the model that it trained."""
    data = coterie.load_clients(num_clients=3, local_size=20, test_size=12)
    fedavg, none, all_ = (
        coterie.run(method, data, "linear", rounds=2, progress=False, backend="looped")
        for method in ("fedavg", own_method.FedBlend(share=0.0), own_method.FedBlend(share=1.0))
    )
    assert none.history.curve("pre") == fedavg.history.curve("pre")
    assert all_.history.curve("pre") == all_.history.curve("post") == fedavg.history.curve("post")


def test_own_method_is_the_same_looped_and_stacked() -> None:
    method = own_method.FedBlend(train=toy.method("fedavg").train)
    (looped, _), (stacked, _) = (run(method, toy.model(), toy.toy()) for run in (toy.looped, toy.stacked))
    assert toy.distance(looped, stacked) < 1e-10


@pytest.mark.long
def test_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    own_task.main()
    assert "mean pinball" in capsys.readouterr().out


def test_own_task_against_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    output, y = torch.randn(50, 1, generator=draw), torch.randn(50, 1, generator=draw)
    task = own_task.Quantile(1, mean=[2.0], std=[4.0])
    true = mean_pinball_loss(y, output, alpha=own_task.LEVEL)
    assert task.loss(output, y).mean().item() == pytest.approx(true / 4, rel=1e-5)  # in standard deviations
    assert own_task.mean_pinball(output, y).item() == pytest.approx(true, rel=1e-6)
    assert own_task.coverage(output, y).item() == (y <= output).sum().item() / 50


@pytest.mark.network
def test_deploy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    deploy.main(["--folder", str(tmp_path / "devices"), "--rounds", "1"])
    shown = capfd.readouterr().out
    for ward, hospitals in {"ward-a": "cleveland", "ward-b": "hungarian", "ward-c": "switzerland, long-beach"}.items():
        assert f"{ward} has the models of {hospitals} in " in shown
    assert not list((tmp_path / "devices" / "served").rglob("client-*"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_script_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text.split('"""')[1]
    if path.name != "adapters.py":  # an experiment
        assert len(text.splitlines()) <= MOST_LINES
