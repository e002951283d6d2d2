"""coterie.run as a user calls it: settings, wrong arguments, progress, Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from typing import Any

import pytest
import torch
from rich.console import Console

import coterie
from coterie.api import progress
from coterie.core import tree
from coterie.core.errors import CoterieError
from tests import toy

HERE = coterie.Execution(backend="looped", device="cpu", processes=1)


def run(method: Any = "fedper", **settings: Any) -> coterie.Result:
    settings = {"rounds": 2, "backend": HERE, **settings}
    return coterie.run(method, toy.toy(), toy.network(), **settings)


def same(a: coterie.Result, b: coterie.Result) -> bool:
    first, second = (
        tree.flatten({"server": r.server, "states": tuple(map(r.states.__getitem__, r.client_ids))}) for r in (a, b)
    )
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_groups_mean_the_same_as_names() -> None:
    named = run(rounds=2, lr=0.05, seed=3, join_ratio=0.5)
    grouped = run(
        rounds=None, settings=coterie.Settings(rounds=2, seed=3, join_ratio=0.5), train=coterie.LocalTraining(lr=0.05)
    )
    assert named.method.train == grouped.method.train
    assert named.method.train.momentum == 0.5  # the protocol's, since the group does not set it
    assert named.config is not None
    assert grouped.config is not None
    assert named.config["federation"] == grouped.config["federation"]
    assert named.config["federation"]["full_last_round"]  # the protocol's
    assert same(named, grouped)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"settings": coterie.Settings(rounds=2)}, "rounds is given by name, next to settings="),
        ({"train": coterie.LocalTraining(lr=1), "momentum": 0.1}, "momentum is given by name, next to train="),
        ({"train": coterie.Settings()}, "train must be a coterie.LocalTraining, got Settings"),
        ({"momentun": 0.1}, "unknown setting 'momentun': did you mean 'momentum'?"),
        ({"num_clients": 3}, "give it to coterie.load_clients"),
        ({"device": "cpu"}, "give it as backend=coterie.Execution"),
        ({"align": 1.0}, "'align' is a setting of FedCP, FedProto, FedPAC, FedPAC-Proto, FedTGP, not of FedPer"),
        ({"exist": "resume"}, "exist='resume' needs a run folder: pass one as `out`"),
        ({"resume": True}, "unknown setting 'resume': exist='resume' continues the run in `out`"),
        ({"watching": None}, "unknown setting 'watching': did you mean 'watch'?"),
        ({"track": "tensorboard"}, "track needs a run folder"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError) as error:
        run(**settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_swapped_arguments() -> None:
    order = r"the order is \(method, data, model\), such as coterie.run\('fedavg', data, 'cnn'\)"
    with pytest.raises(CoterieError, match=order):
        coterie.run("fedper", "linear", toy.toy())  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match=order):
        coterie.run("fedper", toy.network())  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match=r"data is \[1, 2\] \(list\); load data with coterie.load_clients"):
        coterie.run("fedper", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match=order):
        coterie.compare(["fedper"], "linear", toy.toy())  # type: ignore[arg-type]


class Interrupter:
    """Presses Ctrl-C in this round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, record: coterie.Round) -> None:
        if record.number == self.number:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("method", ["fedper", "fedavg"])  # fedavg has a final step
def test_an_interrupted_run_is_that_of_fewer_rounds(
    method: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while round 2 is reported: round 3 is the last, as if rounds=3 had been asked for."""
    before = signal.getsignal(signal.SIGINT)
    stopped = run(method, rounds=9, watch=Interrupter(2), evaluate_every=2, join_ratio=0.5)
    assert signal.getsignal(signal.SIGINT) is before
    whole = run(method, rounds=3, evaluate_every=2, join_ratio=0.5)
    assert stopped.ended is not None
    assert (stopped.ended.reason, stopped.ended.round) == ("interrupted", 3)
    assert same(stopped, whole)
    assert stopped.history.curve("pre") == whole.history.curve("pre")
    assert stopped.history.curve("pre")[-1][0] == 3
    assert "interrupted: the result has 3 of 9 rounds" in caplog.text
    assert "the run ends after this round" in capfd.readouterr().err
    assert "3 rounds (interrupted)" in repr(stopped)


def test_sigterm_still_ends_a_script(tmp_path: Any) -> None:
    """Only Ctrl-C is taken: a program that is told to terminate must not go on with a partial result."""
    seen = []
    run(rounds=1, watch=lambda record: seen.append(signal.getsignal(signal.SIGTERM)))
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_two_interrupts_stop_at_once() -> None:
    def twice(record: coterie.Round) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(rounds=9, watch=twice)


def test_no_progress_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    run()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "errors", Console(file=text, force_terminal=True, width=150))
    run()
    assert "FedPer" in text.getvalue()
    assert "2/2" in text.getvalue()
    assert "personal" in text.getvalue()
    length = len(text.getvalue())
    run(progress=False)
    assert len(text.getvalue()) == length
    assert capsys.readouterr().out == ""  # stdout is the user's


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's display is asked once, and its output is updated."""
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    def display(html: str, display_id: bool) -> Handle:
        assert display_id
        shown.append(html)
        return Handle()

    fake = types.ModuleType("IPython.display")
    vars(fake).update(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(progress, "errors", types.SimpleNamespace(is_jupyter=True, is_terminal=False))
    run()
    assert len(shown) == 3
    assert "<b>FedPer</b>" in shown[0]
    assert "0/2" in shown[0]
    assert "2/2 accuracy: personal" in shown[-1]
