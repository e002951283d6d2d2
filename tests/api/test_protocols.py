"""The papers' settings, by name: every name that a preset uses exists."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import coterie
from coterie.api import RULE_SETTINGS, make_method
from coterie.api.protocols import PROTOCOLS, method_preset, preset
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.data import DATASETS, PARTITIONS
from coterie.federation import Settings
from coterie.methods import METHODS
from coterie.models import MODELS
from tests import toy


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_presets_name_what_exists(protocol: str, dataset: str) -> None:
    known = (
        {f.name for kind in (LocalTraining, Settings) for f in fields(kind)}
        | set(RULE_SETTINGS)
        | {"partition", "model"}
    )
    chosen = preset(protocol, dataset)
    assert set(chosen) <= known
    assert chosen["model"] in MODELS
    assert chosen["partition"] in PARTITIONS
    LocalTraining(**{f.name: chosen[f.name] for f in fields(LocalTraining) if f.name in chosen})
    Settings(**{f.name: chosen[f.name] for f in fields(Settings) if f.name in chosen})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_methods_take_their_presets(protocol: str) -> None:
    assert set(PROTOCOLS[protocol].methods) <= set(METHODS)
    for name in METHODS:
        make_method(name, **method_preset(protocol, name))


@pytest.mark.parametrize("shape", [(3, 50), (50, 3)])
def test_a_series_has_a_network_for_series(shape: tuple[int, int]) -> None:
    """Its longer axis is time, and the first lines say so."""
    draw, told = torch.Generator().manual_seed(0), list[str]()
    data = coterie.clients_from([(torch.randn(12, *shape, generator=draw), torch.arange(12) % 2) for _ in range(2)])
    how = {"rounds": 1, "local_epochs": 1, "backend": toy.IN_TURN, "progress": False}
    for protocol in PROTOCOLS:
        assert preset(protocol, data.name, shape)["model"] == ("cnn1d" if shape == (3, 50) else "lstm")
    coterie.run("fedavg", data, show=told.append, **how)
    words = {(3, 50): "cnn1d (samples as 3 channels x 50 steps)", (50, 3): "lstm (samples as 50 steps x 3 features)"}
    assert any(line.startswith(f"network: {words[shape]}, ") for line in told)


def test_values_of_the_papers() -> None:
    """A few, as the papers print them."""
    assert preset("pac", "cifar10")["lr"] == 0.02
    assert preset("pac", "emnist")["batch_size"] == 100
    assert preset("crc", "mnist")["schedule"] == "steps:50=0.2:75=0.02"  # 0.05 -> 0.01 -> 0.001
    assert preset("akd", "cifar10")["schedule"] == "exponential:0.9"
    assert preset("reg", "cifar10")["keep_momentum"]
    assert method_preset("pac", "pfedhn") == {"lr": 0.01}  # "both the server and client learning rate", appendix B
    assert method_preset("akd", "fedpac", "cifar10") == {"align": 1.0}
    assert method_preset("akd", "fedpac", "cifar100") == {"align": 0.001}
    assert method_preset("akd", "gpfl", "cifar100") == {"pull": 0.0001, "table_decay": 0.1}
    assert [preset("reg", "cifar10", num_clients=n)["min_size"] for n in (50, 99, 100, 200, 500)] == [80, 80, 40, 4, 1]
    assert method_preset("crc", "fedprox") == {"pull": 0.1}
    assert method_preset("reg", "fedprox") == {"pull": 0.001}
    with pytest.raises(CoterieError, match="did you mean 'pac'"):
        preset("pca", "mnist")


@pytest.mark.parametrize(
    ("protocol", "method", "dataset", "settings"),
    [
        ("pac", "fedrep", "cifar10", {"head_epochs": 10, "encoder_epochs": 1}),
        ("pac", "pfedme", "cifar10", {"personal_lr": 0.005}),
        ("pac", "fedem", "cifar10", {"train_all": True, "finetune_all": True}),
        ("pac", "scaffold", "cifar10", {"controls_of_participants": True}),
        ("akd", "fedrep", "cifar10", {"head_epochs": 5, "encoder_epochs": 1}),
        ("akd", "fedpac", "cifar100", {"align": 0.001}),
        ("akd", "gpfl", "cifar100", {"pull": 0.0001, "table_decay": 0.1}),
    ],
)
def test_methods_are_set_as_in_the_tables(protocol: str, method: str, dataset: str, settings: dict[str, Any]) -> None:
    """Recipes take these from the protocol, so no comparison with them would notice another value."""
    assert method_preset(protocol, method, dataset) == settings


def test_a_variant_is_stronger_than_a_protocol() -> None:
    result = coterie.run("fedpac-none", toy.toy(), toy.network(), protocol="akd", rounds=1, drop_last=False)
    assert result.method.align == 0.0  # type: ignore[attr-defined]
