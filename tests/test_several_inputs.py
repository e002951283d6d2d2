"""Samples with several inputs, from the run to the personal model: on every back end, on disk, exported, adapted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.api.saved_run import load_run
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.packing import pack, unpack
from coterie.deploy.device_data import load_hosted_clients
from coterie.deploy.handshake import SampleSchema
from coterie.deploy.membership import check_schema
from coterie.deploy.wire import Refused
from coterie.execution import Stacked, Streams
from coterie.models import make_network
from coterie.personal.adapt import adapt
from coterie.personal.export import export
from coterie.personal.labelled import BY_NAME
from coterie.personal.samples import read_samples
from coterie.personal.use import evaluate, predict
from tests import toy

DRAW = torch.Generator().manual_seed(2)
QUICK: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "progress": False, "backend": toy.IN_TURN}


def ward(n: int) -> tuple[dict[str, Tensor], Tensor]:
    y = torch.arange(n) % 2
    image = torch.randint(0, 100, (n, 1, 6, 6), generator=DRAW, dtype=torch.uint8)
    image[y == 1, 0, 0] += 100
    tokens = torch.randint(1, 9, (n, 5), generator=DRAW)
    mask = torch.arange(5) < torch.randint(1, 5, (n, 1), generator=DRAW)
    return {"image": image, "tokens": tokens * mask, "mask": mask, "age": torch.randn(n, generator=DRAW) + y}, y


class Net(nn.Module):
    """Convolution with BatchNorm, attention with a mask, dropout."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None, classes: int = 2) -> None:
        super().__init__()
        assert shapes is None or shapes["tokens"] == (5,)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.look = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
            self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(3 + 4 + 1, 8)
            self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, classes)

    def forward(self, image: Tensor, tokens: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        words = self.embed(tokens)
        scores = (words @ words.transpose(1, 2)).masked_fill(~mask[:, None], -torch.inf)
        read = (scores.softmax(2) @ words).mean(1)
        z = torch.cat([self.look(image).mean((2, 3)), read, age[:, None]], 1)
        return self.head(self.drop(self.mix(z).relu()))


class Whole(nn.Module):
    """The same, given a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.net(**inputs)


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return coterie.clients_from({"a": ward(13), "b": ward(20), "c": ward(30)}, normalise="auto")


def model_for(data: FederatedData, network: nn.Module) -> Model:
    return make_network(network, data, 0).to("cpu", torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedrep", "fedem", "knn-per"])
def test_every_back_end_gives_the_same(name: str, data: FederatedData) -> None:
    method, model = toy.method(name), model_for(data, Net())
    expected, _ = toy.looped(method, model, data, rounds=2)
    for run in (toy.stacked, toy.streams):
        found, _ = run(method, model, data, rounds=2)
        assert toy.distance(expected, found) < 1e-10
    by_dictionary, _ = toy.looped(method, model_for(data, Whole()), data, rounds=2)
    renamed = {name.replace("net.", ""): t for name, t in by_dictionary.items()}
    assert toy.distance(expected, renamed) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fedrep", "fedem", "knn-per"])
@pytest.mark.parametrize("kind", [Stacked, Streams])
def test_a_gpu_gives_what_a_cpu_gives(name: str, kind: type[Stacked] | type[Streams], data: FederatedData) -> None:
    method, model = toy.method(name), model_for(data, Net())
    expected, _ = toy.looped(method, model, data, rounds=3)
    made, _ = toy.outcome(kind(method, model, data, 7, "cuda"), rounds=3)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.left(left) * self.right(right)).tanh())


class Joint(Halves):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, :3], x[:, 3:])


def test_the_same_as_one_input_that_the_network_divides() -> None:
    x, y = torch.randn(40, 5, generator=DRAW), torch.arange(40) % 2
    sides = [(x[:15], y[:15]), (x[15:], y[15:])]
    named = [({"left": own[:, :3], "right": own[:, 3:]}, labels) for own, labels in sides]
    one = coterie.clients_from(sides, sides, normalise="auto")
    two = coterie.clients_from(named, named, normalise="auto")
    method = toy.method("ditto")
    expected, before = toy.looped(method, model_for(one, Joint()), one, rounds=2)
    for run in (toy.looped, toy.stacked):
        found, after = run(method, model_for(two, Halves()), two, rounds=2)
        assert toy.distance(expected, found) < 1e-12
        assert before[-1].score("pre") == after[-1].score("pre")
        assert (before[-1].bytes_up, before[-1].bytes_down) == (after[-1].bytes_up, after[-1].bytes_down)


@pytest.mark.long
def test_a_run_on_disk(data: FederatedData, tmp_path: Path) -> None:
    """Save, resume, load, predict, evaluate and adapt."""
    whole = coterie.run("fedrep", data, Net(), new_clients=0.34, out=tmp_path / "whole", **QUICK)
    coterie.run("fedrep", data, Net(), new_clients=0.34, out=tmp_path / "run", **QUICK | {"rounds": 1}, keep_state=True)
    result = coterie.run("fedrep", data, Net(), new_clients=0.34, out=tmp_path / "run", exist="resume", **QUICK)
    assert result.history[-1].scores.keys() == whole.history[-1].scores.keys()
    assert any(point.startswith("new_") for point, _ in result.history[-1].scores)
    run, client = load_run(tmp_path / "run", Net()), result.client_ids[0]
    assert run.transform == data.transform
    model, (x, y) = run.personal_model(client), ward(6)
    with torch.no_grad():
        expected = whole.personal_model(client)(x)
        assert torch.equal(model(x), expected)
        assert torch.equal(model(pack(model.inputs, x)), expected)
        assert torch.equal(model({name: values.numpy() for name, values in x.items()}), expected)  # type: ignore[dict-item]
        assert torch.equal(model.network()(**model.preprocess(x)), expected)
    arrays = {f"x.{name}": values.numpy() for name, values in x.items()}
    np.savez(tmp_path / "new.npz", y=y, **arrays)
    answers = predict(run, client, read_samples(run, [tmp_path / "new.npz"]))
    said = [one["classes"][0]["probability"] for one in answers]
    assert said == pytest.approx(expected.softmax(1).amax(1).tolist(), abs=1e-4)
    (found,) = evaluate(run, [client], str(tmp_path / "new.npz"), reading=BY_NAME)
    assert found.scores["accuracy"] == float((expected.argmax(1) == y).double().mean())
    adapted = adapt(run, tmp_path / "new.npz", tmp_path / "adapted")
    assert adapted.score("new_post") is not None
    later = load_run(tmp_path / "adapted", Net()).personal_model(0)
    assert later(x).shape == (6, 2)
    for name, content, says in (
        ("rows.csv", "1,2\n", "several inputs; give an .npz file with x.image, x.tokens, x.mask, x.age"),
        ("photo.png", "", "several inputs; give an .npz file"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CoterieError, match=says):
            read_samples(run, [tmp_path / name])
    for changed, says in (
        ({"x.age": None}, "no array 'x.age'; expected: image"),
        ({"x.sex": y.numpy()}, "an unknown array 'x.sex'"),
        ({"x.age": arrays["x.age"][1:]}, "inputs of different lengths: image 6"),
        ({"x.age": arrays["x.age"] + np.nan}, "x.age: has values that are not finite"),
        ({"x.image": arrays["x.image"] / 255}, "x.image has fractions"),
        ({"x.tokens": arrays["x.tokens"][:, 1:]}, r"x.tokens has the shape \(6, 4\); expected \('samples', 5\)"),
    ):
        content = {name: values for name, values in {**arrays, **changed}.items() if values is not None}
        np.savez(tmp_path / "wrong.npz", **content)  # type: ignore[arg-type]
        with pytest.raises(CoterieError, match=says):
            read_samples(run, [tmp_path / "wrong.npz"])


def test_a_personal_model_refuses_what_it_does_not_take(data: FederatedData) -> None:
    model = coterie.run("fedavg", data, Net(), **QUICK | {"rounds": 1}).personal_model("b")
    x, _ = ward(3)
    for given, says in (
        ({k: v for k, v in x.items() if k != "age"}, "input 'age' is missing; this model takes image"),
        ({**x, "sex": x["age"]}, "input 'sex' is unknown"),
        ({**x, "age": x["age"][1:]}, "inputs of different lengths"),
        ({**x, "age": x["age"][:, None]}, r"input 'age' must have the shape \('batch',\), got \(3, 1\)"),
        ({**x, "tokens": x["tokens"].float()}, "input 'tokens' must be of type int64, got float32"),
        ({**x, "mask": x["mask"].long()}, "input 'mask' must be of type bool, got int64"),
        ({**x, "image": x["image"].float()}, "input 'image': .*from 0 to 255, or fractions"),
        (x["image"], "this model takes a dictionary of image"),
        ({**x, "age": ["old", "young", "old"]}, "inputs must be tensors or arrays of numbers"),
    ):
        with pytest.raises(CoterieError, match=says):
            model(given)
    with torch.no_grad():
        assert torch.allclose(model({**x, "image": x["image"] / 255}), model(x), atol=1e-5)


@pytest.mark.long
def test_exported_models_take_the_inputs_by_name(data: FederatedData, tmp_path: Path) -> None:
    coterie.run("fedrep", data, Net(), out=tmp_path / "run", **QUICK)
    run, (x, _) = load_run(tmp_path / "run", Net()), ward(7)
    with torch.no_grad():
        expected = run.personal_model("a")(x)
    (program,) = export(run, "a", "torch", tmp_path / "a.pt2")
    found = torch.export.load(program).module()(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    (path,) = export(run, "a", "onnx", tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (made,) = session.run(["logits"], {name: values.numpy() for name, values in x.items()})
    np.testing.assert_allclose(made, expected.numpy(), rtol=0, atol=1e-5)
    _, readme = export(run, "a", "safetensors", tmp_path / "a.safetensors")
    assert '"name": "tokens"' in readme.read_text()


def test_networks_by_name(data: FederatedData) -> None:
    made = make_network("tests.test_several_inputs:Net", data, 0)
    assert made.head_name == "head"
    with pytest.raises(CoterieError, match="model 'mlp' takes one input, the samples have image, tokens, mask, age; "):
        coterie.run("fedavg", data, rounds=1)
    with pytest.raises(CoterieError, match="forward takes left, right, the samples have the inputs image, tokens"):
        coterie.run("fedavg", data, Halves(), rounds=1)


def test_with_differential_privacy(data: FederatedData) -> None:
    pairs = [(unpack(data.transform.inputs, x), y) for x, y in map(data.train.client, range(3))]
    plain = [({"left": x["age"][:, None].expand(-1, 3), "right": x["age"][:, None].expand(-1, 2)}, y) for x, y in pairs]
    settings = {**QUICK, "dp": "sample", "dp_noise": 1.0, "dp_clip": 1.0}
    result = coterie.run("fedavg", coterie.clients_from(plain), Halves(), **settings)
    assert result.privacy is not None


def test_federations_of_devices_refuse_several_inputs(data: FederatedData, tmp_path: Path) -> None:
    x, y = ward(12)
    arrays = {f"x.{name}": values.numpy() for name, values in x.items()}
    np.savez(tmp_path / "ward.npz", y=y, client=np.zeros(12, int), **arrays)
    wanted = coterie.DataSettings(str(tmp_path / "ward.npz"))
    with pytest.raises(CoterieError, match=r"devices support samples with one input; those of .* have image, tokens"):
        load_hosted_clients("0", wanted)
    with pytest.raises(Refused, match="several inputs"):
        check_schema(replace(SampleSchema.of(data), class_names=()))
