"""Networks without a head: methods that do not divide a network take it as it is, others say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import coterie
from coterie.core.errors import CoterieError
from coterie.core.head import last_to_run
from coterie.core.model import make_model

LOOPED = coterie.Execution(backend="looped", processes=1)


class Spread(nn.Module):
    """Two layers whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x).tanh()  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """The last layer is a convolution, whose outputs are pooled, as in SqueezeNet."""

    def __init__(self) -> None:
        super().__init__()
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.features, self.classifier = nn.Conv2d(1, 4, 3), nn.Sequential(nn.Conv2d(4, 3, 1), *pool)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """A parameter of the network itself, as the class token of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(6))
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + self.token).relu())  # type: ignore[no-any-return]


def clients(*shape: int) -> coterie.FederatedData:
    draw = torch.Generator().manual_seed(0)
    return coterie.clients_from(
        [TensorDataset(torch.randn(12, *shape, generator=draw), torch.arange(12) % 3) for _ in range(2)]
    )


def run(method: str, network: nn.Module, *shape: int, **options: Any) -> coterie.Result:
    settings = {"rounds": 1, "progress": False, "backend": LOOPED}
    return coterie.run(method, clients(*shape), network, **{**settings, **options})


@pytest.mark.parametrize("method", ["fedavg", "ditto", "scaffold", "local"])
def test_methods_that_do_not_divide_a_network_take_any(method: str) -> None:
    network = Spread()
    result = run(method, network, 6)
    model = result.personal_model(0)
    assert (result.model.head_name, set(model.network_state_dict())) == ("", set(network.state_dict()))
    x = torch.randn(4, 6)
    network.load_state_dict(model.network_state_dict())
    assert torch.allclose(network(x), model(x))
    assert torch.allclose(model.network()(x), model(x))


def test_a_network_without_a_head_is_trained_as_with_one() -> None:
    """FedAvg does not depend on where the network is divided."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.zero = network, nn.Linear(6, 3).requires_grad_(False)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.zero(x)  # type: ignore[no-any-return]

    plain, hidden = run("fedavg", network, 6), run("fedavg", Hidden(), 6)
    assert (plain.model.headless, hidden.model.head_name) == ("", "")
    x = torch.randn(4, 6)
    assert torch.allclose(plain.personal_model(0)(x), hidden.personal_model(0)(x), atol=1e-6)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedproto", "moon", "fedpac", "knn-per"])
def test_methods_with_a_head_or_features_say_what_to_do(method: str) -> None:
    with pytest.raises(CoterieError, match=r"no head was found.*head=.*modules with parameters: a, b"):
        run(method, Spread(), 6)


def test_maps_as_features() -> None:
    assert run("fedavg", Pooled(), 1, 6, 6).model.head_name == ""
    with pytest.raises(CoterieError, match=r"FedPer divides a network .* features of shape \(4, 4, 4\)"):
        run("fedper", Pooled(), 1, 6, 6)
    with pytest.raises(CoterieError, match=r"the head 'classifier' is given features of shape \(4, 4, 4\)"):
        run("fedavg", Pooled(), 1, 6, 6, head="classifier")


@pytest.mark.long
def test_parameters_of_the_network_itself_do_not_hide_its_head() -> None:
    from peft import LoraConfig, get_peft_model  # takes seconds, which `make quick` need not wait for

    config = LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])
    network = get_peft_model(Tokens(), config)
    assert last_to_run(Tokens(), torch.randn(2, 6)) == "head"
    assert make_model(network, (6,), 3).head_name.startswith("base_model.model.head")
