"""Protection as a user meets it: flags, folders, resume, personal models, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import coterie
from coterie.api.saved_run import load_run
from coterie.cli import main
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.protections import Protections
from coterie.federation import Round
from coterie.report.sections.settings import configuration
from coterie.runs.finding import open_run
from tests import toy

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "robust": ("fedavg", {"robust": "trimmed"}),
    "client": ("scaffold", {"dp": "client", "dp_noise": 2.0}),
    "sample": ("fedrep", {"dp": "sample", "dp_noise": 2.0}),
    "statistics": ("fedpac", {"dp_statistics": 2.0, "dp_statistics_clip": 1.0}),
}
TINY = ["-nc", "5", "--local-size", "30", "--test-size", "20", "--model", "linear", "--rounds", "2"]


def train(kind: str, out: Path | None = None, **more: Any) -> coterie.Result:
    name, settings = KINDS[kind]
    how = {"rounds": 3, "join_ratio": 0.6, "backend": "looped"} | settings | more
    return coterie.run(toy.method(name), toy.toy(), "tests.toy:network", out=out, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_says_how_it_was_protected_and_its_models_work(kind: str, tmp_path: Path) -> None:
    settings = KINDS[kind][1]
    result = train(kind, tmp_path / "run")
    told = json.loads((tmp_path / "run" / "config.json").read_text())
    assert told["method"]["name"] == result.method.title
    assert settings.items() <= told["protection"].items()
    found = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert found == told["protection"]["privacy"] == result.privacy
    assert (found is None) == (kind == "robust")
    run, (x, _) = load_run(tmp_path / "run", "tests.toy:network"), toy.toy().test.client(1)
    torch.testing.assert_close(run.personal_model(1)(x), result.personal_model(1)(x))
    page = configuration([open_run(tmp_path / "run")])
    assert ("Differential privacy" in page) == (found is not None)
    assert found is None or f"{found['epsilon']:.4g}" in page


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: str, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(record: Round) -> None:
        if record.number == 3:
            raise Enough

    whole = train(kind)
    with pytest.raises(Enough):
        train(kind, tmp_path / "cut", watch=stop)
    with pytest.raises(CoterieError, match="protection"):
        train(kind, tmp_path / "cut", exist="resume", dp_delta=1e-3)
    assert list((tmp_path / "cut" / "checkpoint").glob("server-*"))  # it does not begin again
    resumed = train(kind, tmp_path / "cut", exist="resume")
    toy.assert_same(tree.flatten(whole.server), tree.flatten(resumed.server))


def test_a_resumed_run_keeps_its_accountant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started where dp-accounting is missing, resumed where it is installed: the first accountant stays."""
    with monkeypatch.context() as without:
        without.setattr("coterie.privacy.best_accountant", lambda: "renyi")
        begun = train("sample", tmp_path / "run").privacy
    assert begun is not None
    assert begun["accountant"] == "renyi"
    again = train("sample", tmp_path / "run", exist="resume", rounds=4).privacy
    assert again is not None
    assert again["accountant"] == "renyi"
    assert again["epsilon"] > begun["epsilon"]
    with pytest.raises(CoterieError, match="dp_accountant"):
        train("sample", tmp_path / "run", exist="resume", rounds=5, dp_accountant="pld")
    fresh = train("sample", tmp_path / "other").privacy
    assert fresh is not None
    assert fresh["accountant"].startswith("pld (dp-accounting ")
    assert fresh["epsilon"] < begun["epsilon"]


def test_without_protection_nothing_is_said(tmp_path: Path) -> None:
    result = coterie.run(
        toy.method("fedavg"), toy.toy(), toy.network(), rounds=1, backend="looped", out=tmp_path / "run"
    )
    assert result.privacy is None
    assert json.loads((tmp_path / "run" / "config.json").read_text())["protection"] == {}
    assert "Differential privacy" not in configuration([open_run(tmp_path / "run")])


def test_the_command_line_ends_with_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "fedavg", *TINY, "--dp", "client", "--dp-noise", "3", "--out", str(tmp_path / "run")])
    told = capsys.readouterr().out
    privacy = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert f"FedAvg: ε = {privacy['epsilon']:.4g} at δ = 1e-05 for one client, accountant: exact" in told


def test_methods_that_cannot_have_it_are_told_before_any_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", "fedavg", "fedpac", *TINY, "--dp", "sample", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "FedPAC does not support --dp sample: clients send class statistics" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="BatchNorm"):
        coterie.run(
            toy.method("fedavg"), toy.toy(), toy.network(batch_norm=True), rounds=1, dp="sample", out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_methods_of_ones_own_can_be_robust_but_not_private() -> None:
    class Mine(type(toy.method("fedavg"))):  # type: ignore[misc]
        protections: ClassVar[Protections] = {}

    own = Mine(train=toy.method("fedavg").train)
    coterie.run(own, toy.toy(), toy.network(), rounds=1, backend="looped", robust="median")
    with pytest.raises(CoterieError, match="has not been checked"):
        coterie.run(own, toy.toy(), toy.network(), rounds=1, backend="looped", dp="sample")
