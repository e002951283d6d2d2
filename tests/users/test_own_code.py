"""Somebody who brings a method and a network as files: by import path, with mistakes in them, next to the baselines."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.cli import main
from coterie.core.data import FederatedData
from coterie.core.method import Method
from coterie.core.training import LocalTraining
from coterie.deploy.device_setup import DevicePolicy, allowed_method
from coterie.deploy.handshake import SampleSchema, Terms
from coterie.methods import FedAvg
from tests import toy

HERE = coterie.Execution(backend="looped", processes=1)
SMALL = ["--num-clients", "4", "--local-size", "20", "--test-size", "10", "--rounds", "1", "--local-epochs", "1"]
NUMBERS = itertools.count()

CODE = """
from dataclasses import dataclass

from torch import nn

from coterie.methods import FedAvg


@dataclass(frozen=True)
class Quiet(FedAvg):
    def client_predict(self, model, state, down, x):
        return -super().client_predict(model, state, down, x)


@dataclass(frozen=True)
class Impostor(FedAvg):
    title = "FedAvg"


@dataclass(frozen=True)
class Broken(FedAvg):
    def client_train(self, model, state, down, data):
        return self.helper(data)

    def helper(self, data):
        raise KeyError("no such thing")


@dataclass(frozen=True)
class Late(FedAvg):
    def client_train(self, model, state, down, data):
        if len(data.y) > 10:  # not in the rehearsal
            raise KeyError("too late")
        return super().client_train(model, state, down, data)


class Net(nn.Module):
    def __init__(self, hidden, bias=True):
        super().__init__()
        if hidden < 1:
            raise ValueError("hidden is too small")
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU())
        self.fc = nn.Linear(hidden, 10, bias=bias)

    def forward(self, x):
        return self.fc(self.body(x))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, another one in each test."""
    monkeypatch.chdir(tmp_path)
    name = f"own_code_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def refused(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_derived_method_is_a_row_of_its_own(module: str, tmp_path: Path) -> None:
    main(["compare", "fedavg", f"{module}:Quiet", "--model", "linear", *SMALL, "--out", "both", "--json"])
    found = {o["method"]: o["mean"] for o in json.loads((tmp_path / "both/compare.json").read_text())["outcomes"]}
    assert found.keys() == {"FedAvg", "FedAvg-FT", "Quiet", "Quiet-FT"}
    assert found["Quiet-FT"] < found["FedAvg-FT"]


def test_two_methods_of_one_name_are_not_taken_for_seeds(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("compare", "fedavg", f"{module}:Impostor", *SMALL, capsys=capsys)
    assert f"fedavg and {module}:Impostor both report their results as 'FedAvg'" in said


def test_results_that_lack_the_title_are_refused_before_training() -> None:
    made = type("Odd", (FedAvg,), {"results": {"Other": "pre"}})
    with pytest.raises(coterie.CoterieError, match=r"its `results` \['Other'\] do not name its title, Odd"):
        coterie.run(made(), toy.toy(), "linear", rounds=1)
    wrong = type("Odd", (FedAvg,), {"results": {"Odd": "after"}})
    with pytest.raises(coterie.CoterieError, match="measured at after; known: finished, global, post, pre"):
        coterie.run(wrong(), toy.toy(), "linear", rounds=1)


@pytest.mark.parametrize("where", ["looped", "stacked"])
@pytest.mark.parametrize(("name", "word"), [("Broken", "no such thing"), ("Late", "too late")])
def test_errors_of_a_method_show_its_own_lines(
    name: str, word: str, where: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("run", f"{module}:{name}", "--model", "linear", *SMALL, "--backend", where, capsys=capsys)
    first, *lines = said.strip().splitlines()
    assert first.startswith("coterie: ")
    assert f"KeyError: '{word}'" in first
    assert any(f"{module}.py" in line for line in lines)
    assert not any("coterie/" in line and module not in line for line in lines)


def test_arguments_of_a_network_are_kept_with_the_run(module: str, tmp_path: Path) -> None:
    own = ["--model", f"{module}:Net"]
    main(["run", "fedavg", *own, "--model-args", "hidden=7", "bias=False", *SMALL, "--out", "run", "--json"])
    assert json.loads((tmp_path / "run/config.json").read_text())["network"]["args"] == {"hidden": 7, "bias": False}
    weights = coterie.load_run("run", f"{module}:Net").personal_model(0).state_dict()
    assert {tuple(t.shape) for t in weights.values()} >= {(7, 784), (10, 7)}
    main(["resume", "run", *own, "--rounds", "2"])
    assert len((tmp_path / "run/metrics.csv").read_text().splitlines()) == 4  # names, two rounds, the final step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing a required argument: 'hidden'; --model-args name=value sets arguments (hidden, bias)"),
        (["--model-args", "hidden=-1"], "cannot be built: ValueError: hidden is too small"),
        (["--model-args", "hidden=3", "width=3"], "got an unexpected keyword argument 'width'"),
    ],
)
def test_mistakes_in_a_constructor(
    arguments: list[str], message: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("run", "fedavg", "--model", f"{module}:Net", *arguments, *SMALL, capsys=capsys)
    assert message in said


def test_resume_takes_the_method_that_it_asks_for(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", f"{module}:Quiet", "--model", "linear", *SMALL, "--out", "run", "--json"])
    capsys.readouterr()
    assert f"pass --method {module}:Quiet" in refused("resume", "run", "--rounds", "2", capsys=capsys)
    assert "pass --method" in refused("resume", "run", "--rounds", "2", "--method", f"{module}:Late", capsys=capsys)
    main(["resume", "run", "--rounds", "2", "--method", f"{module}:Quiet"])
    assert "round 2/2" in capsys.readouterr().out


def test_a_device_imports_only_the_method_that_its_user_named(tmp_path: Path) -> None:
    sums = "0" * 64
    schema = SampleSchema.of(toy.toy())

    def terms(kind: str) -> Terms:
        return Terms(sums, sums, sums, {"class": kind}, None, None, 5, 1, ("test",), 0, "none", schema)

    assert allowed_method(terms("fedavg"), DevicePolicy(tmp_path)) is None
    assert allowed_method(terms("lab.ours:New"), DevicePolicy(tmp_path, method="lab.ours:New")) == "lab.ours:New"
    with pytest.raises(coterie.CoterieError, match=r"custom method \(lab.ours:New\).*--method"):
        allowed_method(terms("lab.ours:New"), DevicePolicy(tmp_path))
    with pytest.raises(coterie.CoterieError, match=r"uses the method evil:Class, but --method is lab.ours:New"):
        allowed_method(terms("evil:Class"), DevicePolicy(tmp_path, method="lab.ours:New"))


def test_a_method_object_can_be_tuned(tmp_path: Path) -> None:
    named, given = (
        coterie.tune(method, {"lr": [1e-6, 0.5]}, toy.toy(), "linear", rounds=3, backend=HERE, out=tmp_path / name)
        for name, method in (("named", "fedavg"), ("given", FedAvg()))
    )
    assert named.best == given.best
    assert [s.scores for s in named.standings] == [s.scores for s in given.standings]
    with pytest.raises(coterie.CoterieError, match=r"lr=0.5: lr is set twice: 0.1 in the method and 0.5 in this call"):
        coterie.tune(FedAvg(train=LocalTraining(lr=0.1)), {"lr": [0.5]}, toy.toy(), "linear", out=tmp_path / "twice")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 1.5}, r"rounds must be a whole number, got 1.5 \(float\)"),
        ({"lr": "0.1"}, r"lr must be a number, got '0.1' \(str\)"),
        ({"momentum": True}, r"momentum must be a number, got True \(bool\)"),
        ({"head_epochs": 2.0}, r"head_epochs must be a whole number, got 2.0 \(float\)"),
        ({"until": 3}, r"until must be text or None, got 3 \(int\)"),
        ({"robust_share": "x"}, r"robust_share must be a number, got 'x' \(str\)"),
        ({"clip": 1.0}, r"unknown setting 'clip': did you mean 'clip_gradient' or"),
        ({"epochs": 1}, r"unknown setting 'epochs': did you mean 'local_epochs'\?"),
        ({"untill": "accuracy>0.9"}, r"unknown setting 'untill': did you mean 'until'\?"),
    ],
    ids=lambda v: str(v)[:20],
)  # fmt: skip
def test_settings_have_their_types_and_names(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(coterie.CoterieError, match=message):
        coterie.run("fedrep", toy.toy(), toy.network(), **{"rounds": 1, **settings})


def test_data_settings_and_places_have_their_types() -> None:
    with pytest.raises(coterie.CoterieError, match=r"num_clients must be a whole number or None, got 4.5"):
        coterie.load_clients(num_clients=4.5)
    with pytest.raises(coterie.CoterieError, match="processes must be a whole number or None, got '2'"):
        coterie.Execution(processes="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fedavg", toy.network(), toy.toy()), r"data is a model; the order is \(method, data, model\)"),
        ((toy.toy(), "fedavg", "linear"), "method is data of clients; the order is"),
        (("fedavg", "heart-disease", "linear"), "data is 'heart-disease'.*coterie.load_clients"),
        ((FedAvg, toy.toy(), "linear"), r"method is the class FedAvg: pass an object, such as FedAvg\(...\)"),
        (("fedavg", toy.toy(), nn.Linear), "model is the class Linear: pass an object"),
    ],
    ids=["model second", "data first", "a name", "a class", "class of a network"],
)
def test_arguments_in_the_wrong_place(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(coterie.CoterieError, match=message):
        coterie.run(*arguments, rounds=1)


def derived(**functions: Any) -> Method[Any, Any, Any, Any]:
    return dataclass(frozen=True)(type("Mine", (FedAvg,), functions))()


def whole_loss(self: Any, model: Any, state: Any, down: Any, data: Any) -> Any:
    self.train(down.weights, lambda w, batch: batch.y, data, state.momentum)


@pytest.mark.parametrize("where", ["looped", "stacked"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        (derived(client_train=whole_loss), "the loss must have one value for each sample, .* got torch.int64"),
        (derived(client_finish=lambda *given: None), r"Mine.client_finish returns None"),
        (derived(client_finish=lambda self, m, state, down, d: (state, down)), "must return State, got tuple"),
    ],
    ids=["whole numbers", "nothing", "a pair"],
)  # fmt: skip
def test_what_comes_last_is_tried_first(method: Any, message: str, where: str) -> None:
    with pytest.raises(coterie.CoterieError, match=message):
        coterie.run(method, toy.toy(), toy.network(), backend=where, rounds=1)


class Series(nn.Module):
    """(B, T, F) samples, which a layer takes for (T, B, F) if it is not told otherwise."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.fc = layer, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.fc((out[0] if isinstance(out, tuple) else out)[:, -1])


def series() -> FederatedData:
    torch.manual_seed(0)
    held = {name: [(torch.randn(5, 8), k % 2) for k in range(12)] for name in ("a", "b")}
    return coterie.clients_from(held)


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_layers_that_take_the_batch_for_time_are_refused(kind: str) -> None:
    def made(first: bool) -> nn.Module:
        if kind == "lstm":
            return nn.LSTM(8, 8, batch_first=first)
        return nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=first)

    coterie.run("fedavg", series(), Series(made(True)), rounds=1, local_epochs=1, backend=HERE)
    with pytest.raises(coterie.CoterieError, match=r"depends on the other samples of its batch.*batch_first=True"):
        coterie.run("fedavg", series(), Series(made(False)), rounds=1, backend=HERE)


class Centred(nn.Module):
    """Uses the mean of a batch in training, a constant in testing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - (x.mean(0) if self.training else 0.5)


def test_a_layer_that_mixes_a_batch_in_training_is_not_stacked() -> None:
    network = nn.Sequential(toy.network(), Centred(), nn.Linear(toy.CLASSES, toy.CLASSES))
    coterie.run("fedavg", toy.toy(), network, rounds=1, backend="auto")
    with pytest.raises(coterie.CoterieError, match=r"cannot be stacked.*mixes the samples of a batch"):
        coterie.run("fedavg", toy.toy(), network, rounds=1, backend="stacked")


class Remembers(nn.Module):
    """Keeps what it saw, as one does to look at attention maps."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


@pytest.mark.parametrize("where", [HERE, "stacked"], ids=["looped", "stacked"])
def test_a_layer_may_keep_what_it_saw(where: Any) -> None:
    torch.manual_seed(0)
    plain = [toy.network(), nn.Identity(), nn.Linear(toy.CLASSES, toy.CLASSES)]
    data = toy.toy()
    runs = [
        coterie.run("fedavg", data, nn.Sequential(plain[0], middle, plain[2]), rounds=2, backend=where)
        for middle in (nn.Identity(), Remembers())
    ]
    x = data.test.x[:3]
    assert torch.equal(*(run.personal_model(1)(x) for run in runs))


def test_the_first_lines_say_what_was_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    main(["run", "fedrep", "--model", "linear", *SMALL, "--momentum", "0.25", "--out", str(out)])
    said = capsys.readouterr().out
    for line in (
        "data: fashion-mnist-small, 4 clients, 80 training samples, 40 test samples",
        "samples: images of 1 x 28 x 28 bytes, scaled from 0..255 to 0..1",
        "network: linear, 0 numbers in the encoder, 7,850 in the head 'head', nothing frozen",
        "method: FedRep with personal head, head_epochs 10, encoder_epochs 1, average_heads False",
        "local training: sgd, 1 epochs, batch size 50, lr 0.01, weight decay 0.0005, momentum 0.25",
        "federation: 1 rounds, all clients in each, seed 0; clients run looped",
    ):
        assert line in said
        assert line in (out / "log.txt").read_text()
    assert said.index("federation: ") < said.index("round 1/1") < 1500
