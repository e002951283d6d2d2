"""Where clients run, and how precisely: what is chosen, what it changes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.api import Execution, fastest
from coterie.api.running import execute
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.execution import Looped, Turn
from coterie.execution.answers import Returned
from tests import toy


@pytest.mark.parametrize("kind", ["looped", "stacked"])
def test_bf16_changes_little_and_weights_stay_float32(kind: str) -> None:
    data, network = toy.toy(), toy.network().float()
    results = [
        coterie.run(
            toy.method("fedper"),
            data,
            network,
            rounds=2,
            backend=coterie.Execution(kind, precision=precision, processes=1),
        )
        for precision in ("fp32", "bf16")
    ]
    full, half = (result.server.shared.encoder["0.weight"] for result in results)
    assert half.dtype == torch.float32
    assert 0 < float((half - full).norm() / full.norm()) < 0.02
    assert results[1].model.precision == "fp32"  # who uses a personal model gets full precision


def test_what_is_refused() -> None:
    with pytest.raises(CoterieError, match="tf32 needs a GPU"):
        coterie.run(
            toy.method("fedavg"), toy.toy(), toy.network(), backend=coterie.Execution(device="cpu", precision="tf32")
        )
    with pytest.raises(CoterieError, match="unknown precision 'fp8'"):
        coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), backend=coterie.Execution(precision="fp8"))


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), *layers, nn.Linear(8, toy.CLASSES))


def test_what_is_chosen() -> None:
    """On a CPU, clients with small networks without convolutions side by side; on a GPU all that can be."""
    many, few = toy.toy(train=(8,) * 8, test=(2,) * 8), toy.toy()

    def chosen(network: nn.Module, data: FederatedData, device: str = "cpu", **how: int) -> str:
        model = make_model(network, toy.SHAPE, toy.CLASSES)
        return fastest(toy.method("fedavg"), model, data, device, Execution(**how)).backend

    assert chosen(dense(), many) == "stacked"
    assert chosen(dense(), few) == "looped"
    assert chosen(dense(), many, processes=2) == "looped"  # who asks for processes gets them
    assert chosen(dense(nn.Dropout(0.5)), many) == "stacked"
    assert chosen(dense(nn.RReLU()), many) == "looped"
    assert chosen(toy.network(), many) == "looped"
    assert chosen(toy.network(), few, "cuda") == "stacked"
    assert chosen(dense(nn.Dropout(0.5)), many, "cuda") == "stacked"
    assert chosen(dense(nn.RReLU()), many, "cuda") == "looped"
    assert chosen(toy.network(batch_norm=True), few, "cuda") == "streams"  # its convolutions are not fused
    assert chosen(Recurrent(), few, "cuda") == "streams"
    fused = list(toy.network().children())[:3]
    more = nn.Sequential(*fused, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, toy.CLASSES))
    assert chosen(more, few, "cuda") == "streams"  # only one of its two convolutions is fused


def test_the_first_lines_say_why_clients_are_stacked() -> None:
    many, lines = toy.toy(train=(8,) * 8, test=(2,) * 8), list[str]()
    execute("fedavg", many, dense(), rounds=1, show=lines.append)
    assert "clients run stacked (fastest for a small network without convolutions)" in "\n".join(lines)
    convolutional = make_model(toy.network(), toy.SHAPE, toy.CLASSES)
    why = fastest(toy.method("fedavg"), convolutional, many, "cuda", Execution()).why
    assert why == "fastest for a network with fused convolutions"


class Recurrent(nn.Module):
    """Reads an image row by row. torch has no rule to compute such layers side by side."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rows = kind(12, 8, batch_first=True)
        self.fc = nn.Linear(8, toy.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.rows(x[:, 0])[0][:, -1])
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_auto_loops_what_cannot_be_stacked(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    many, network = toy.toy(train=(8,) * 8, test=(2,) * 8), Recurrent(kind)
    found, looped = (
        coterie.run(toy.method("fedavg"), many, network, rounds=1, seed=3, backend=w, out=tmp_path / w)
        for w in ("auto", "looped")
    )
    said = (tmp_path / "auto" / "log.txt").read_text()
    assert found.history.curve("post") == looped.history.curve("post")
    assert "clients run looped (torch cannot stack them: Batching rule not" in "".join(said)


def test_stacked_by_name_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(
        CoterieError, match=r"clients cannot be stacked: .*lstm.*; use backend=looped, streams or auto"
    ) as error:
        coterie.run(toy.method("fedavg"), toy.toy(), Recurrent(), rounds=1, backend="stacked", out=out)
    assert "\n" not in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize("error", [RuntimeError("nothing works"), CoterieError("no")], ids=["crash", "refusal"])
def test_a_failure_before_the_first_round_leaves_no_folder(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def begin(*given: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Looped, "begin", begin)
        with pytest.raises(type(error), match=str(error)):
            coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=2, backend="looped", out=out)
    assert not out.exists()
    coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=2, backend="looped", out=out)
    assert (out / "result.json").exists()


def test_a_failure_in_a_later_round_leaves_what_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, begin = tmp_path / "run", Looped.begin

    def second(self: Looped, clients: Tensor, downs: object, turn: Turn) -> Returned:
        if turn.round == 1:
            raise RuntimeError("a power cut")
        return begin(self, clients, downs, turn)

    given = (toy.method("fedavg"), toy.toy(), toy.network())
    with monkeypatch.context() as patch:
        patch.setattr(Looped, "begin", second)
        with pytest.raises(RuntimeError, match="a power cut"):
            coterie.run(*given, rounds=2, backend="looped", out=out)
    result = coterie.run(*given, rounds=2, backend="looped", out=out, exist="resume")
    assert [record.number for record in result.history] == [1, 2, 2]
