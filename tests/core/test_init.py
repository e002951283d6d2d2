"""First weights: other draws of a network, and layers of a method's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.init import generator, linear, networks, normal, redrawn
from coterie.core.model import Model, make_model
from tests import toy


def test_the_first_is_the_start_and_all_are_different() -> None:
    model = toy.model(batch_norm=True)
    drawn = networks(model, 4)
    toy.assert_same(tree.flatten(tree.pick(drawn, 0)), tree.flatten(model.start))
    for name, t in tree.items(drawn):
        if ".1." not in name:  # BatchNorm is module 1
            assert all(not torch.equal(t[i], t[j]) for i in range(4) for j in range(i)), name
    norm = {n: t for n, t in tree.items(drawn) if ".1." in n}
    assert len(norm) == 4
    for name, t in norm.items():
        assert torch.equal(t, tree.flatten(model.start)[name].expand_as(t)), name


def test_they_are_as_wide_as_torch_draws_them() -> None:
    """Convolution and Linear draw uniformly in ±1/√inputs."""
    drawn = tree.flatten(redrawn(toy.model(), 1))
    for name, inputs in (("encoder.0", 9), ("encoder.4", 100), ("head", 8)):
        for tensor in (drawn[f"{name}.weight"], drawn[f"{name}.bias"]):
            assert tensor.abs().max() <= inputs**-0.5
        assert drawn[f"{name}.weight"].abs().max() > 0.8 * inputs**-0.5


def test_draws_depend_on_start_and_number_only() -> None:
    before = torch.random.get_rng_state()
    single, double = (redrawn(toy.model(kind), 2) for kind in (torch.float32, torch.float64))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, t in tree.items(double):
        assert t.dtype == torch.float64
        assert torch.equal(t.float(), tree.flatten(single)[name])
    assert toy.distance(tree.flatten(double), tree.flatten(redrawn(toy.model(), 3))) > 0.01
    assert toy.distance(tree.flatten(double), tree.flatten(redrawn(toy.model(seed=1), 2))) > 0.01


def test_layers_are_drawn_as_torch_draws_them() -> None:
    model, like = toy.model(), torch.zeros(0, dtype=torch.float64)
    weight, bias = linear(generator(model), 25, (300, 20), like)
    assert (weight.shape, bias.shape, weight.dtype) == ((300, 20, 25), (300, 20), torch.float64)
    theirs = nn.Linear(25, 6000)
    for mine, other in ((weight, theirs.weight), (bias, theirs.bias)):
        assert mine.abs().max() <= 0.2
        assert mine.mean().abs() < 0.01
        assert float(mine.std()) == pytest.approx(float(other.detach().std()), rel=0.05)
    table = normal(generator(model, 1), (100, 50), like)
    assert table.mean().abs() < 0.05
    assert float(table.std()) == pytest.approx(1, rel=0.05)
    again, _ = linear(generator(model), 25, (300, 20), like)
    assert torch.equal(weight, again)
    assert not torch.equal(weight, linear(generator(model, 1), 25, (300, 20), like)[0])


class Bare(nn.Module):
    """Weights that nothing knows how to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 144))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_network_that_cannot_be_drawn_anew_is_refused() -> None:
    """Equal models would silently stay one."""
    model: Model = make_model(nn.Sequential(nn.Flatten(), Bare()), toy.SHAPE, toy.CLASSES)
    with pytest.raises(CoterieError, match="reinitialized"):
        networks(model, 2)
    toy.assert_same(tree.flatten(tree.pick(networks(model, 1), 0)), tree.flatten(model.start))
