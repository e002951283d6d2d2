"""Wrong names of settings: users of other libraries are led to ours."""

from __future__ import annotations

from typing import Any

import pytest

import coterie
from coterie.api.data import DataSettings
from coterie.api.settings import CALL, RUN, names
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.core.synonyms import OURS, THEIRS
from coterie.core.training import LocalTraining
from coterie.execution.choice import Execution
from coterie.methods import METHODS
from tests import toy

KNOWN = names(*METHODS.values(), LocalTraining, Execution, DataSettings, *RUN) | CALL.keys()


def refusal(method: str, **settings: Any) -> str:
    with pytest.raises(CoterieError) as error:
        coterie.run(method, toy.toy(), toy.network(), **settings)
    return str(error.value)


def test_the_table_leads_to_settings_that_there_are() -> None:
    assert OURS.keys() <= KNOWN
    assert KNOWN & THEIRS.keys() == set()  # a name of ours would be translated


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("learning_rate", "lr"), ("local_learning_rate", "lr"), ("eta", "lr"), ("num_rounds", "rounds"),
     ("global_rounds", "rounds"), ("communication_rounds", "rounds"), ("epochs", "local_epochs"),
     ("num_epochs", "local_epochs"), ("local_steps", "local_epochs"), ("fraction", "join_ratio"),
     ("client_fraction", "join_ratio"), ("fraction_fit", "join_ratio"), ("participation", "join_ratio"),
     ("batch", "batch_size"), ("bs", "batch_size"), ("wd", "weight_decay"), ("Learning-Rate", "lr"),
     ("momentun", "momentum"), ("evaluate_evry", "evaluate_every")],
)  # fmt: skip
def test_names_of_other_libraries(theirs: str, ours: str) -> None:
    for method in ("fedavg", "feddyn", "fedrep"):
        assert refusal(method, **{theirs: 1}) == f"unknown setting '{theirs}': did you mean '{ours}'?"


@pytest.mark.parametrize(
    ("method", "theirs", "said"),
    [("fedprox", "mu", "did you mean 'pull' (μ)?"),
     ("moon", "mu", "did you mean 'contrast' (μ)?"),
     ("ditto", "lamda", "did you mean 'pull' (λ)?"),
     ("ditto", "mu", "did you mean 'pull'?"),  # PFLlib's name; the paper's is λ
     ("fedpac", "lambda_", "did you mean 'align' (λ)?"),
     ("pfakd", "beta", "did you mean 'distill' or 'attention' (β)?"),
     ("feddyn", "alpha", "did you mean 'pull' (α)? Or it is a data setting: give it to coterie.load_clients"),
     ("fedavg", "num_workers", "did you mean 'processes'? It is a setting of Execution: give it as backend="),
     ("fedavg", "gpu", "did you mean 'device'? It is a setting of Execution"),
     ("fedavg", "n_clients", "did you mean 'num_clients'? It is a data setting: give it to coterie.load_clients"),
     ("fedavg", "verbose", "did you mean 'progress'? It is a parameter of coterie.run"),
     ("fedavg", "times", "did you mean 'seeds'? It is a parameter of coterie.compare"),
     ("fedavg", "blurb", "FedAvg has no settings of its own; help(coterie.run) lists those of all methods"),
     ("ditto", "zzz", "Ditto has personal_epochs, pull; help(coterie.run) lists those of all methods")],
)  # fmt: skip
def test_what_depends_on_the_method(method: str, theirs: str, said: str) -> None:
    assert said in refusal(method, **{theirs: 1})


def test_a_method_a_table_of_data_and_a_search_know_them_too() -> None:
    with pytest.raises(CoterieError, match="did you mean 'lr'"):
        coterie.make_method("fedper", learning_rate=0.1)
    with pytest.raises(CoterieError, match="unknown data setting 'n_clients': did you mean 'num_clients'"):
        coterie.load_clients(n_clients=4)
    with pytest.raises(CoterieError, match="did you mean 'batch_size'"):
        coterie.tune("fedper", {"bs": [5, 10]}, toy.toy(), toy.network())


@pytest.mark.parametrize(
    ("flag", "ours"),
    [("--num-rounds", "--rounds"), ("-ldg", "--schedule"), ("--learning-rate=0.1", "--lr"), ("--wd", "--weight-decay"),
     ("--gpu", "--device"), ("--client-fraction", "--join-ratio"), ("--n_clients", "--num-clients")],
)  # fmt: skip
def test_the_command_line_knows_them_too(flag: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "fedavg", flag, "5"])
    assert f"did you mean {ours}?" in capsys.readouterr().err
