"""Several inputs: packed without loss, and given to a network by the documented rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.forward import forward, takes_names
from coterie.core.model import make_model
from coterie.core.packing import TYPES, Input, mixed, pack, unpack, width
from coterie.core.preprocess import Preprocess

INPUTS = (Input("image", (2, 3, 3), "uint8"), Input("age", (), "float32"), Input("tokens", (5,), "int64"))


def extreme(kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if kind.is_floating_point:
        limits = torch.finfo(kind)
        values = [limits.max, limits.min, limits.tiny, 0.1, -0.0]
        return torch.tensor(values, dtype=kind)[torch.randint(5, shape)]
    if kind == torch.bool:
        return torch.rand(shape) < 0.5
    whole = torch.iinfo(kind)
    return torch.tensor([whole.max, whole.min, 1, 7, whole.max - 1], dtype=kind)[torch.randint(5, shape)]


def test_every_type_is_packed_without_loss() -> None:
    inputs = tuple(Input(name, (3, 2)[: at % 3], name) for at, name in enumerate(TYPES))
    given = {one.name: extreme(one.type, (7, *one.shape)) for one in inputs}
    x = pack(inputs, given)
    assert (x.dtype, x.shape) == (torch.uint8, (7, width(inputs)))
    clients = x.view(1, 7, -1).repeat(3, 1, 1)
    stacked = torch.func.vmap(lambda rows: unpack(inputs, rows))(clients)
    for name, values in given.items():
        found = [unpack(inputs, x[rows:])[name] for rows in (0, 2, 6, 7)]  # also one sample, and none
        for made in (*found, stacked[name][1]):
            assert made.dtype == values.dtype
            assert torch.equal(made, values[7 - len(made) :]), name


def test_each_input_is_prepared_by_itself() -> None:
    image, _, tokens = INPUTS
    standard = (
        Input("image", image.shape, "uint8", (0.5, 0.0), (0.5, 1.0)),
        Input("age", (), "float32", (50.0,), (10.0,)),
    )
    given = {
        "image": torch.full((1, 2, 3, 3), 255, dtype=torch.uint8),
        "age": torch.tensor([30.0]),
        "tokens": torch.tensor([[0, 1, 2, 255, 7]]),
    }
    inputs = (*standard, tokens)
    prepare = Preprocess(Transform(inputs=inputs), torch.float64)
    for made in (prepare(pack(inputs, given)), prepare(given)):
        assert made["image"].flatten(2).unique(dim=2).squeeze(2).tolist() == [[1.0, 1.0]]
        assert (made["age"].tolist(), made["age"].dtype) == ([-2.0], torch.float64)
        assert torch.equal(made["tokens"], given["tokens"])


class Keywords(nn.Module):
    def forward(self, age: Tensor, image: Tensor, scale: float = 2.0) -> Tensor:
        return scale * image + age


class Whole(nn.Module):
    def forward(self, inputs: dict[str, Tensor], scale: float = 2.0) -> Tensor:
        return scale * inputs["image"] + inputs["age"]


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keywords()

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.inner(*args, **named)


def test_by_keyword_where_the_names_are_those_of_forward_else_as_a_dictionary() -> None:
    x = {"image": torch.ones(2, 1), "age": torch.zeros(2, 1)}
    for network in (Keywords(), Whole(), Wrapper(), nn.Sequential(Whole())):
        assert forward(network, x).tolist() == [[2.0], [2.0]]
    assert takes_names(Keywords(), ("image", "age"))
    assert not takes_names(Whole(), ("image", "age"))


@pytest.mark.parametrize(
    ("names", "parameters"),
    [
        (("image",), "age, image, scale"),  # age is required
        (("image", "age", "sex"), "age, image, scale"),  # sex is not taken
        (("left", "right"), "age, image, scale"),  # neither
    ],
)
def test_a_forward_that_does_not_fit_is_refused(names: tuple[str, ...], parameters: str) -> None:
    reason = f"takes {parameters}, the samples have the inputs {', '.join(names)}; name its"
    with pytest.raises(CoterieError, match=reason):
        takes_names(Keywords(), names)


class OneOfTwo(nn.Module):
    """Attention over five tokens, whose mask says which of them count."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.embed, self.head, self.keep = nn.Embedding(4, 6), nn.Linear(6, 2), keep

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        z = self.embed(tokens)
        scores = (z @ z.transpose(1, 2)).masked_fill(~(mask.bool() == self.keep)[:, None], -torch.inf)
        return self.head((scores.softmax(2) @ z).mean(1))


@pytest.mark.parametrize("keep", [True, False])
def test_a_network_is_tried_with_masks_of_either_meaning(keep: bool) -> None:
    """A mask that leaves nothing gives NaN, which would hide whether head(encoder(x)) equals network(x)."""
    inputs = (Input("tokens", (5,), "int64"), Input("mask", (5,), "bool"))
    model = make_model(OneOfTwo(keep), (width(inputs),), 2, Transform(inputs=inputs), sample_type=torch.uint8)
    assert model.head_name == "head"
    rows = mixed(torch.randint(2, (50, 3)))
    assert bool((rows.any(1) & ~rows.all(1)).all())


def test_a_network_that_cannot_take_an_input_is_refused() -> None:
    inputs = (Input("tokens", (5,), "float32"), Input("mask", (5,), "bool"))
    with pytest.raises(CoterieError, match=r"cannot take samples with tokens \(5,\) float32, mask \(5,\) bool: .*"):
        make_model(OneOfTwo(True), (width(inputs),), 2, Transform(inputs=inputs), sample_type=torch.uint8)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(a + b.float().mean(0))


def test_mixing_samples_through_one_of_the_inputs_is_found() -> None:
    inputs = (Input("a", (2,), "float32"), Input("b", (2,), "bool"))
    with pytest.raises(CoterieError, match="depends on the other samples of its batch"):
        make_model(Mixing(), (width(inputs),), 2, Transform(inputs=inputs), sample_type=torch.uint8)
