"""The papers' settings, by name: every name that a preset uses exists."""

from __future__ import annotations

from dataclasses import fields

import pytest

import coterie
from coterie.api import RULE_SETTINGS, make_method
from coterie.core.errors import CoterieError
from coterie.core.local import Sgd
from coterie.data import DATASETS, PARTITIONS
from coterie.federation import Settings
from coterie.methods import METHODS
from coterie.models import MODELS
from coterie.protocols import PROTOCOLS, method_preset, preset
from tests import toy


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_presets_name_what_exists(protocol: str, dataset: str) -> None:
    known = {f.name for kind in (Sgd, Settings) for f in fields(kind)} | set(RULE_SETTINGS) | {"partition", "model"}
    chosen = preset(protocol, dataset)
    assert set(chosen) <= known
    assert chosen["model"] in MODELS
    assert chosen["partition"] in PARTITIONS
    Sgd(**{f.name: chosen[f.name] for f in fields(Sgd) if f.name in chosen})
    Settings(**{f.name: chosen[f.name] for f in fields(Settings) if f.name in chosen})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_methods_take_their_presets(protocol: str) -> None:
    assert set(PROTOCOLS[protocol].methods) <= set(METHODS)
    for name in METHODS:
        make_method(name, **method_preset(protocol, name))


def test_values_of_the_papers() -> None:
    """A few, as the papers print them."""
    assert preset("pac", "cifar10")["lr"] == 0.02
    assert preset("pac", "emnist")["batch"] == 100
    assert preset("crc", "mnist")["lr_steps"] == ((50, 0.2), (75, 0.02))  # 0.05 -> 0.01 -> 0.001
    assert preset("akd", "cifar10")["lr_decay"] == 0.9
    assert preset("reg", "cifar10")["keep"]
    assert method_preset("pac", "pfedhn") == {"lr": 0.01}  # "both the server and client learning rate", appendix B
    assert method_preset("crc", "fedprox") == {"pull": 0.1}
    assert method_preset("reg", "fedprox") == {"pull": 0.001}
    with pytest.raises(CoterieError, match="did you mean 'pac'"):
        preset("pca", "mnist")


def test_a_variant_is_stronger_than_a_protocol() -> None:
    result = coterie.run("fedpac-none", toy.network(), toy.toy(), protocol="akd", rounds=1, drop_last=False)
    assert result.method.align == 0.0  # type: ignore[attr-defined]
