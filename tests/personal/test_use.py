"""Predictions and measurements, against plain computations and against what the run itself measured."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import f1_score
from torch import Tensor

import coterie
import coterie.core.data
from coterie.api.saved_run import load_run
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.personal.samples import read_samples
from coterie.personal.use import evaluate, merged_confusion, predict
from coterie.runs.stored_run import StoredRun
from tests import toy
from tests.personal.conftest import Made

COLOUR = (3, 12, 10)


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Tensor, Tensor]:
    x, y = toy.toy().test.client(3)
    np.savez(tmp_path / "some.npz", x=x.numpy(), y=y.numpy())
    with (tmp_path / "some.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[f"pixel {i}" for i in range(144)], *x.flatten(1).tolist()])
    for number, image in enumerate(x):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number:02}.png")
    return x, y


def plain_logits(run: StoredRun, client: int, x: Tensor) -> Tensor:
    """Of FedPer: everybody's encoder, the client's own head; straight from the file, by torch's own module."""
    from safetensors.torch import load_file

    stored = load_file(run.members[client].file)
    network = toy.network()
    names = {f"down.shared.encoder.{i}": i for i in (0, 4)}
    for prefix, place in (*names.items(), ("state.personal.head", 6)):
        for kind in ("weight", "bias"):
            getattr(network[place], kind).data = stored[f"{prefix}.{kind}"]
    logits: Tensor = network((x.float() / 255 - 0.5) / 0.5)
    return logits.detach()


def test_predictions_are_the_networks(made: Made, samples: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    run, _ = made("fedper")
    x, _ = samples
    expected = plain_logits(run, 3, x).softmax(1)
    images = sorted(tmp_path.glob("*.png"))
    for files in (images, [tmp_path / "some.csv"], [tmp_path / "some.npz"]):
        found = predict(run, 3, read_samples(run, files), top=9)
        assert len(found) == len(x)
        for row, said in zip(expected, found, strict=True):
            probabilities = {c["class"]: c["probability"] for c in said["classes"]}
            assert [probabilities[k] for k in range(toy.CLASSES)] == pytest.approx(row.tolist(), abs=1e-6)
            assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)
    assert [said["sample"] for said in found[:2]] == [f"{tmp_path / 'some.npz'}:0", f"{tmp_path / 'some.npz'}:1"]


def test_grey_and_colour_are_converted(made: Made, tmp_path: Path, colour: StoredRun) -> None:
    grey, _ = made("fedper")
    pixels = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    weighed = (pixels @ np.array([299, 587, 114])) / 1000  # the usual weights of red, green and blue
    assert np.abs(read_samples(grey, [tmp_path / "colour.png"]).x[0, 0].numpy() - weighed).max() <= 1
    Image.fromarray(pixels[:, :10, 0]).save(tmp_path / "grey.png")
    read = read_samples(colour, [tmp_path / "grey.png"]).x
    assert torch.equal(read, torch.from_numpy(pixels[None, :, :10, 0].copy()).expand(3, 12, 10)[None])


def test_images_of_another_size(colour: StoredRun, tmp_path: Path) -> None:
    Image.new("RGB", (30, 36), (10, 20, 30)).save(tmp_path / "large.png")
    with pytest.raises(CoterieError, match="30 x 36 pixels; the models of this run take 10 x 12"):
        read_samples(colour, [tmp_path / "large.png"])
    read = read_samples(colour, [tmp_path / "large.png"], resize=True).x
    assert torch.equal(read, torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, *COLOUR))


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """A run on colour images that are not square."""
    path = tmp_path_factory.mktemp("colour") / "run"
    grey = toy.toy(augmented=False)
    splits = [
        coterie.core.data.Split(s.x[..., :10].expand(-1, 3, -1, -1), s.y, s.sizes) for s in (grey.train, grey.test)
    ]
    data = coterie.core.data.FederatedData("colour", toy.CLASSES, *splits)
    coterie.run("local", data, "linear", rounds=1, local_epochs=1, backend=toy.IN_TURN, out=path)
    return load_run(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.png", b"no image", "cannot be read as an image"),
        ("a.csv", b"1,2,3\n", "sample 0: 3 columns; expected 144 numbers"),
        ("a.csv", b"\n", "no samples"),
        ("a.csv", b",".join([b"1"] * 143 + [b"nan"]) + b"\n" + b",".join([b"x"] * 144), "sample 0: 'x'"),
        ("a.csv", b",".join([b"256"] * 144), "must be in 0..255"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read"),
        ("a.npz", b"PK\x03\x04 cut", "not a valid .npz file"),
    ],
)
def test_bad_files(name: str, content: bytes, told: str, made: Made, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CoterieError, match=told):
        read_samples(made("fedper")[0], [tmp_path / name])


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"images": np.zeros((1, 1, 12, 12), np.uint8)}, "no array 'x'; it has: images"),
        ({"x": np.zeros((1, 1, 11, 12), np.uint8)}, r"expected \(samples, 1, 12, 12\)"),
        ({"x": np.zeros((0, 1, 12, 12), np.uint8)}, "no samples"),
        ({"x": np.full((1, 12, 12), 1.5)}, "fractions must be in 0..1"),
        ({"x": np.full((1, 12, 12), np.nan)}, "not finite"),
        ({"x": np.full((1, 12, 12), "a")}, "not numbers"),
        ({"x": np.full((1, 12, 12), None)}, "holds Python objects"),  # would be unpickled
    ],
)
def test_bad_arrays(arrays: dict[str, np.ndarray], told: str, made: Made, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CoterieError, match=told):
        read_samples(made("fedper")[0], [tmp_path / "a.npz"])


def test_fractions_are_the_same_images(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedper")
    x = toy.toy().test.client(0)[0]
    np.savez(tmp_path / "a.npz", x=x.numpy() / 255)
    model = run.personal_model(0)
    torch.testing.assert_close(model(read_samples(run, [tmp_path / "a.npz"]).x), model(x), rtol=0, atol=1e-5)


def test_tables_take_no_images(tmp_path: Path) -> None:
    data = coterie.load_clients("heart-disease")
    coterie.run("local", data, "linear", rounds=1, local_epochs=1, backend=toy.IN_TURN, out=tmp_path / "heart")
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    run = load_run(tmp_path / "heart")
    with pytest.raises(CoterieError, match="not images; give"):
        read_samples(run, [tmp_path / "a.png"])
    patients = data.test.client(1)[0]
    columns = data.transform.columns
    rows = [",".join(column.name for column in columns)]
    for patient in patients.tolist():
        cells = [c.categories[int(v)] if c.categories and v == v else v for c, v in zip(columns, patient, strict=True)]
        rows.append(",".join(map(str, cells)))
    (tmp_path / "a.csv").write_text("\n".join(rows), encoding="utf-8")
    torch.testing.assert_close(read_samples(run, [tmp_path / "a.csv"]).x, patients, equal_nan=True)
    assert predict(run, 1, read_samples(run, [tmp_path / "a.csv"]))[0]["classes"][0]["name"] in ("healthy", "disease")


@pytest.mark.parametrize(
    ("method", "point", "settings"),
    [
        ("fedavg", "finished", {}),
        ("fedrep", "pre", {}),
        ("fedpac", "pre", {"new_clients": 0.4}),
        ("local", "pre", {"partition": "dirichlet", "alpha": 0.3}),
    ],
)
def test_evaluate_gives_what_the_run_measured(
    method: str, point: str, settings: dict[str, object], tmp_path: Path
) -> None:
    sizes = {} if "partition" in settings else {"local_size": 40, "test_size": 20}
    federation = {name: settings.pop(name) for name in ("new_clients",) if name in settings}
    data = coterie.load_clients(num_clients=5, **sizes, **settings)
    out = tmp_path / "run"
    result = coterie.run(method, data, "linear", rounds=2, local_epochs=1, backend=toy.IN_TURN, out=out, **federation)
    measured = next(r for r in reversed(result.history) if (point, "test") in r.scores).scores[point, "test"]
    found = evaluate(load_run(out), range(len(measured.clients)))
    assert [int(e.confusion.diag().sum()) for e in found] == measured.weighted.tolist()
    assert [e.samples for e in found] == measured.total.tolist()
    assert [e.loss for e in found] == pytest.approx(measured.loss.tolist(), abs=1e-5)


def test_confusion_and_accuracy_by_class(made: Made, samples: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    run, _ = made("fedper")
    x, y = samples
    told = evaluate(run, [3, 1], str(tmp_path / "some.npz"))
    for client, found in zip((3, 1), told, strict=True):
        logits = plain_logits(run, client, x)
        said = logits.argmax(1)
        assert found.confusion is not None
        f1 = f1_score(y, said, average=None, labels=range(toy.CLASSES), zero_division=np.nan)
        assert [np.nan if score is None else score for score in found.class_f1] == pytest.approx(f1, nan_ok=True)
        for true in range(toy.CLASSES):
            for taken in range(toy.CLASSES):
                assert int(found.confusion[true, taken]) == sum((y == true) & (said == taken))
            among = y == true
            expected = float((said[among] == true).float().mean()) if among.any() else None
            assert found.class_accuracy[true] == (None if expected is None else pytest.approx(expected))
        assert found.scores["accuracy"] == pytest.approx(float((said == y).float().mean()))
        assert found.loss == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-6)
    assert merged_confusion(told).samples == 2 * len(y)


def test_evaluate_complains(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedper")
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 1, 12, 12), np.uint8), y=np.array([0, 4]))
    for data, told in (
        (None, "does not keep the data.*pass them with --data"),
        (str(tmp_path / "a.npz"), "unknown class '4': known: 0, 1, 2, 3"),
        (str(tmp_path / "b.npz"), "no such file"),
        ("fashion-mnist-small", "samples of shape 1 x 28 x 28; the models of this run take 1 x 12 x 12"),
        ("nothing", "unknown dataset"),
    ):
        with pytest.raises(CoterieError, match=told):
            evaluate(run, [0], data)
    with pytest.raises(CoterieError, match="no client 7"):
        evaluate(run, [7])


def test_commands_speak_json(made: Made, samples: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = made("fedper")
    main(["models", str(run.folder), "--json"])
    assert [c["samples"] for c in json.loads(capsys.readouterr().out)] == list(toy.TRAIN_SIZES)
    main(
        [
            "predict",
            str(run.folder),
            "--client",
            "3",
            str(tmp_path / "00.png"),
            "--top",
            "2",
            "--json",
            "--model",
            "tests.toy:network",
        ]
    )
    assert len(json.loads(capsys.readouterr().out)[0]["classes"]) == 2
    main(
        [
            "evaluate",
            str(run.folder),
            "--client",
            "3,0",
            "--data",
            str(tmp_path / "some.npz"),
            "--json",
            "--model",
            "tests.toy:network",
        ]
    )
    told = json.loads(capsys.readouterr().out)
    assert [c["client"] for c in told["clients"]] == [3, 0]
    assert sum(map(sum, told["clients"][0]["confusion"])) == 11
    with pytest.raises(SystemExit):
        main(["evaluate", str(run.folder), "--client", "three"])
    assert "unknown client 'three': these clients have no names; clients are 0 to 4" in capsys.readouterr().err


@pytest.mark.parametrize("full_last_round", [False, True])
@pytest.mark.parametrize("method", ["ditto", "fedrep", "fedper", "apfl", "knn-per"])
def test_models_lists_what_evaluate_finds(
    method: str, full_last_round: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever clients remember, and whether or not they train once more after the last round."""
    data = coterie.load_clients(num_clients=5, local_size=40, test_size=100)
    how = coterie.Execution(backend="looped", processes=1)
    settings = {"rounds": 2, "join_ratio": 0.4, "local_epochs": 2, "lr": 0.1, "full_last_round": full_last_round}
    coterie.run(method, data, "mlp", backend=how, out=tmp_path / "run", **settings)
    main(["models", str(tmp_path / "run"), "--json"])
    listed = [client["accuracy"] for client in json.loads(capsys.readouterr().out)]
    main(["evaluate", str(tmp_path / "run"), "--json"])
    assert listed == [client["accuracy"] for client in json.loads(capsys.readouterr().out)["clients"]]


def test_clients_are_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: object) -> None:
    """In Python, in every command, in lists and in the names of files."""
    names = ("Zürich", "basel", "3", "st. gallen, west", "genève")
    data = replace(toy.toy(), client_names=names)
    out, npz = str(tmp_path / "run"), str(tmp_path / "some.npz")
    result = coterie.run(toy.method("fedper"), data, "mlp", rounds=1, backend=toy.IN_TURN, out=out)
    x = data.test.client(1)[0]
    for one in (result, load_run(out)):
        model = one.personal_model("basel")
        assert (model.client, model.client_name) == (1, "basel")
        assert torch.equal(model(x), one.personal_model(1)(x))
        assert one.personal_model("3").client == 2  # a name comes before a number
        assert one.personal_model(3).client_name == "st. gallen, west"
        assert one.personal_model("4").client_name == "genève"
        with pytest.raises(CoterieError, match="unknown client 'bassel': did you mean 'basel'"):
            one.personal_model("bassel")
    main(["models", out, "--json"])
    assert [c["name"] for c in json.loads(capsys.readouterr().out)] == list(names)
    main(["models", out])
    assert "genève" in capsys.readouterr().out
    main(["predict", out, "--client", "genève", npz])
    assert "Client genève" in capsys.readouterr().out
    main(["evaluate", out, "--client", "basel,genève", "--data", npz, "--json"])
    assert [c["name"] for c in json.loads(capsys.readouterr().out)["clients"]] == ["basel", "genève"]
    main(["evaluate", out, "--client", "st. gallen, west", "--data", npz, "--json"])
    assert [c["client"] for c in json.loads(capsys.readouterr().out)["clients"]] == [3]
    main(
        ["export", out, "--client", "st. gallen, west", "--to", "safetensors", "--out", str(tmp_path / "a.safetensors")]
    )
    told = json.loads((tmp_path / "a.safetensors.README.json").read_text())
    assert (told["client"], told["client_name"]) == (3, "st. gallen, west")


def test_two_clients_of_one_name_are_told_apart() -> None:
    data = replace(toy.toy(), client_names=("a", "b", "a", "c", "d"))
    result = coterie.run(toy.method("local"), data, toy.network(), rounds=1, backend=toy.IN_TURN)
    with pytest.raises(CoterieError, match="clients 0, 2 are all named 'a'; give the number"):
        result.personal_model("a")
    assert result.personal_model(2).client_name == "a"


def test_a_table_with_the_columns_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the run left out, its label and its clients' column need not be named again."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{i},{'north' if i % 2 else 'south'},{i % 5},{i % 7},{'ill' if i % 3 else 'well'}" for i in range(40)]
    Path("all.csv").write_text("\n".join(["id,ward,a,b,state", *rows]), encoding="utf-8")
    Path("one.csv").write_text("\n".join(["id,a,b,state", "1,2,3,ill", "2,3,4,well"]), encoding="utf-8")
    own = ["--label-column", "state", "--client-column", "ward", "--drop-column", "id"]
    run = ["run", "local", "--dataset", "all.csv", *own, "--rounds", "1", "--processes", "1"]
    main([*run, "--out", "run", "--json"])
    capsys.readouterr()
    main(["predict", "run", "--client", "north", "all.csv", "--json"])
    assert [row["label"] for row in json.loads(capsys.readouterr().out)][:3] == ["well", "ill", "ill"]
    main(["evaluate", "run", "--client", "north", "--data", "one.csv", "--json"])
    assert json.loads(capsys.readouterr().out)["clients"][0]["samples"] == 2
    main(["adapt", "run", "--data", "all.csv", "--drop-column", "ward", "--out", "new", "--epochs", "1", "--json"])
    with pytest.raises(SystemExit):
        main(["evaluate", "run", "--client", "north", "--data", "all.csv"])
    assert "Column 'ward' is unknown in all.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*run[:3], "al.csv"])
    assert "al.csv: no such file or folder: did you mean 'all.csv'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*run, "--model", "nets.py:Net"])
    assert "name the module and not its file, such as nets:Net" in capsys.readouterr().err
