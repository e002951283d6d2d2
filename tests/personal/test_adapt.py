"""A client that was never there gets a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.api.saved_run import load_run
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.method import Method
from coterie.execution import Looped
from coterie.federation.newcomers import meet
from coterie.methods import METHODS
from coterie.personal.adapt import adapt
from coterie.personal.export import export
from coterie.personal.samples import read_samples
from coterie.personal.use import predict
from tests import toy
from tests.personal.conftest import NETWORK, Made, network_name


def stranger(path: Path) -> FederatedData:
    """Its data, also in a file."""
    train, test = toy.split((24,), 11), toy.split((16,), 12)
    np.savez(path, x=train.x.numpy(), y=train.y.numpy(), x_test=test.x.numpy(), y_test=test.y.numpy())
    return FederatedData("stranger", toy.CLASSES, train, test, transform=toy.toy().transform)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_newcomer(name: str, made: Made, tmp_path: Path) -> None:
    """As the federation meets its newcomers; what is left behind is the model that was measured."""
    run, result = made(name)
    data = stranger(tmp_path / "new.npz")
    record = adapt(run, tmp_path / "new.npz", tmp_path / "new")
    met = meet(result.server, Looped(result.method, result.model, data, run.settings.seed, processes=1), run.settings)
    points = ["new_pre"] if type(result.method).client_finish is not Method.client_finish else ["new_pre", "new_post"]
    for point in points:
        assert toy.rows(record.scores[point, "test"])[:3] == toy.rows(met.scores[point, "test"])[:3]
    left = load_run(tmp_path / "new", network_name(name))
    x, y = data.test.client(0)
    with torch.no_grad():
        right = int((left.personal_model(0)(x).argmax(1) == y).sum())
    assert right == int(record.scores["new_post", "test"].weighted)
    assert left.members[0].score == right / 16
    assert left.members[0].samples == 24


def test_training_helps_and_epochs_count(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedavg")
    stranger(tmp_path / "new.npz")
    still = adapt(run, tmp_path / "new.npz", tmp_path / "still", epochs=0)
    long = adapt(run, tmp_path / "new.npz", tmp_path / "long", epochs=40)
    losses = [float(record.scores[point, "test"].loss) for record in (still, long) for point in ("new_pre", "new_post")]
    assert losses[0] == losses[1] == losses[2] > 1.3 * losses[3]
    assert load_run(tmp_path / "long", NETWORK).method.train.local_epochs == 40


def test_the_folder_is_understood(made: Made, tmp_path: Path) -> None:
    run, _ = made("knn-per")
    stranger(tmp_path / "new.npz")
    adapt(run, tmp_path / "new.npz", tmp_path / "new")
    left = load_run(tmp_path / "new", NETWORK)
    assert len(predict(left, 0, read_samples(left, [tmp_path / "new.npz"]))) == 24
    assert export(left, 0, "torch", tmp_path / "new.pt2")
    again = adapt(left, tmp_path / "new.npz", tmp_path / "again")  # it holds the server's state, too
    assert again.score("new_post") == left.members[0].score


def test_a_part_is_set_aside_for_testing(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedavg")
    split: Split = toy.split((24,), 11)
    np.savez(tmp_path / "new.npz", x=split.x.numpy(), y=split.y.numpy())
    record = adapt(run, tmp_path / "new.npz", tmp_path / "new")
    assert record.scores["new_post", "test"].total.tolist() == [6]
    assert load_run(tmp_path / "new", NETWORK).members[0].samples == 18


def test_complaints(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedavg")
    x = np.zeros((3, 1, 12, 12), np.uint8)
    for arrays, told in (
        ({"x": x}, "no array 'y'"),
        ({"x": x, "y": np.array([0, 1, 4])}, "unknown class '4': known: 0, 1, 2, 3"),
        ({"x": x, "y": np.array([0, 1])}, "one whole number or name for each of the 3 samples"),
        ({"x": x, "y": np.array([0.0, 1.0, 2.0])}, "one whole number"),
        ({"x": x[:1], "y": np.array([0])}, "one sample cannot be split"),
        ({"x": x[:, :, 1:], "y": np.array([0, 1, 2])}, "has the shape"),
    ):
        np.savez(tmp_path / "new.npz", **arrays)
        with pytest.raises(CoterieError, match=told):
            adapt(run, tmp_path / "new.npz", tmp_path / "new")
        assert not (tmp_path / "new").exists()
    stranger(tmp_path / "new.npz")
    (tmp_path / "new").mkdir()
    with pytest.raises(CoterieError, match="exists already"):
        adapt(run, tmp_path / "new.npz", tmp_path / "new")
    with pytest.raises(CoterieError, match="local_epochs must be at least 0"):
        adapt(run, tmp_path / "new.npz", tmp_path / "other", epochs=-1)
