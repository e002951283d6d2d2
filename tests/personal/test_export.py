"""Exported models give the same logits in programs that cannot import Coterie."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie.api.saved_run import load_run
from coterie.core.errors import CoterieError
from coterie.methods import METHODS
from coterie.personal.export import export
from coterie.runs.stored_run import StoredRun
from tests import toy
from tests.personal.conftest import Made

READER = """
import sys, warnings
sys.modules["coterie"] = None  # an import of it fails
import numpy as np, onnxruntime, torch
torch.set_num_threads(1)
for path in sys.argv[1:]:
    case = np.load(path[: path.rindex(".")] + ".npz")
    if path.endswith(".onnx"):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].shape[0] == "batch"
        model = lambda x: session.run(["logits"], {"samples": x})[0]
    else:
        program = torch.jit.load(path) if path.endswith(".ts") else torch.export.load(path).module()
        model = lambda x: program(torch.from_numpy(x)).detach().numpy()
    for size in (1, 2, len(case["x"])):
        gap = np.abs(model(case["x"][:size]) - case["logits"][:size]).max()
        assert gap <= 1e-5 * max(1, np.abs(case["logits"]).max()), (path, size, gap)
        print(path, size)
"""


def write(run: StoredRun, client: int, form: str, path: Path) -> str:
    """The exported model, and beside it what ours says."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randint(0, 256, (7, *run.shape), generator=draw, dtype=torch.uint8)
    x = x if run.dtype == torch.uint8 else (x / 50).to(run.dtype)
    with torch.no_grad():
        # One by one and two by two are the same here: no network of these tests looks at its batch.
        np.savez(path.with_suffix(".npz"), x=x.numpy(), logits=run.personal_model(client)(x).numpy())
    export(run, client, form, path)
    return str(path)


def check(paths: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", READER, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * len(paths)


def test_models_of_every_kind_run_elsewhere(made: Made, tmp_path: Path) -> None:
    """A datastore, a mixture, two heads; tables of numbers, BatchNorm with running statistics."""
    out = tmp_path / "heart"
    coterie.run(
        "fedrep", coterie.load_clients("heart-disease"), "mlp", rounds=1, local_epochs=1, backend="looped", out=out
    )
    heart, out = load_run(out), tmp_path / "norm"
    coterie.run(toy.method("ditto"), toy.toy(), toy.network(True), rounds=1, backend=toy.IN_TURN, out=out)
    norm = load_run(out, toy.network(True))
    onnx = {"knn-per": made("knn-per")[0], "fedem": made("fedem")[0], "heart": heart}
    programs = {"fedrod": made("fedrod")[0], "norm": norm}
    check(
        [write(run, 3, "onnx", tmp_path / f"{name}.onnx") for name, run in onnx.items()]
        + [write(run, 3, "torch", tmp_path / f"{name}.pt2") for name, run in programs.items()]
        + [write(norm, 3, "torchscript", tmp_path / "norm-script.ts")]
    )
    predict_without_coterie(tmp_path, heart)


def predict_without_coterie(folder: Path, heart: StoredRun) -> None:
    """The script beside heart.onnx: arrays, and tables whose columns have names, in any order, with gaps."""
    model, columns = heart.personal_model(3), heart.transform.columns
    x = torch.from_numpy(np.load(folder / "heart.npz")["x"])
    for at, column in enumerate(columns):
        x[:, at] = x[:, at].round().clamp(0, len(column.categories) - 1) if column.categories else x[:, at]
    gap = next(at for at, column in enumerate(columns) if column.fill is not None)
    x[0, gap] = math.nan
    order = list(reversed(range(len(columns))))
    lines = [",".join(columns[at].name for at in order)]
    for row in x.tolist():
        cells = [columns[at].categories[int(row[at])] if columns[at].categories else repr(row[at]) for at in order]
        lines.append(",".join("" if math.isnan(row[at]) else cell for at, cell in zip(order, cells, strict=True)))
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    np.save(folder / "array.npy", x.numpy())
    np.save(folder / "bytes.npy", np.zeros(x.shape, np.uint8))
    with torch.no_grad():
        shares = model(x).softmax(1)
    expected = [(model.class_names[int(p.argmax())], float(p.max())) for p in shares]

    def predict(file: str) -> subprocess.CompletedProcess[str]:
        code = "import runpy, sys; sys.modules.update(coterie=None, torch=None); sys.argv = sys.argv[1:]; "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        words = [sys.executable, "-c", code, str(folder / "heart.predict.py"), str(folder / file)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    for file in ("array.npy", "table.csv"):
        done = predict(file)
        assert done.returncode == 0, done.stderr
        shown = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
        assert [name for name, _ in shown] == [name for name, _ in expected]
        assert [float(share) for _, share in shown] == pytest.approx([share for _, share in expected], abs=2e-4)
    assert "the model takes float32 ['batch', 13]" in predict("bytes.npy").stderr


@pytest.mark.slow
@pytest.mark.parametrize(("form", "ending"), [("torch", ".pt2"), ("onnx", ".onnx"), ("torchscript", ".ts")])
def test_every_method_runs_elsewhere(form: str, ending: str, made: Made, tmp_path: Path) -> None:
    check([write(made(name)[0], 3, form, tmp_path / f"{name}{ending}") for name in METHODS])


@pytest.mark.parametrize("name", ["apfl", "fedfomo", "fedbabu", "hypcluster"])
def test_weights_are_those_of_one_network(name: str, made: Made, tmp_path: Path) -> None:
    """Nothing of others' models, momentum or memories goes along, and torch's own module can take them."""
    run, result = made(name)
    weights, readme = export(run, 3, "safetensors", tmp_path / "client.safetensors")
    told, stored = json.loads(readme.read_text()), load_file(weights)
    assert told["one_network"]
    assert told["input"]["shape"] == ["batch", 1, 12, 12]
    network = toy.network()
    last = len(network) - 1
    network.load_state_dict({n.replace("encoder.", "").replace("head.", f"{last}."): t for n, t in stored.items()})
    x, _ = toy.toy().test.client(3)
    mean, std = told["normalisation"]["mean"][0], told["normalisation"]["std"][0]
    with torch.no_grad():
        expected = result.personal_model(3)(x)
        torch.testing.assert_close(network((x / 255 - mean) / std), expected, rtol=0, atol=1e-5)


def test_a_state_dict_is_that_of_the_users_network(made: Made, tmp_path: Path) -> None:
    run, result = made("fedper")
    weights, readme = export(run, 3, "state_dict", tmp_path / "client.pt")
    told, network = json.loads(readme.read_text()), toy.network()
    network.load_state_dict(torch.load(weights, weights_only=True))
    x, _ = toy.toy().test.client(3)
    mean, std = told["normalisation"]["mean"][0], told["normalisation"]["std"][0]
    with torch.no_grad():
        torch.testing.assert_close(network((x / 255 - mean) / std), result.personal_model(3)(x), rtol=0, atol=1e-5)
    mixture = export(made("fedem")[0], 3, "state_dict", tmp_path / "mixture.pt")[0]
    assert "state.tuned.shares" in torch.load(mixture, weights_only=True)


def test_descriptions_of_two_files_are_two_files(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedper")
    paths = [
        *export(run, 3, "safetensors", tmp_path / "a.safetensors"),
        *export(run, 3, "state_dict", tmp_path / "a.pt"),
    ]
    assert [path.name for path in paths] == [
        "a.safetensors", "a.safetensors.README.json", "a.pt", "a.pt.README.json",
    ]  # fmt: skip
    assert "load_state_dict" in json.loads(paths[3].read_text())["use"]
    assert "load_state_dict" not in json.loads(paths[1].read_text())["use"]
    (tmp_path / "b.pt.README.json").write_text("mine")
    (tmp_path / "b.predict.py").write_text("mine")
    for form, file in (("state_dict", "b.pt"), ("onnx", "b.onnx")):
        with pytest.raises(CoterieError, match=r"b\.(pt\.README\.json|predict\.py) exists already"):
            export(run, 3, form, tmp_path / file)
        assert not (tmp_path / file).exists()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated")
@pytest.mark.parametrize("kind", ["regression", "next-token"])
def test_other_tasks(kind: str, tmp_path: Path) -> None:
    data, model = toy.of_task(kind)
    network: nn.Module = nn.Sequential(*model.encoder.children(), model.head) if kind == "next-token" else toy.network()
    if kind == "regression":
        network[-1] = nn.Linear(8, 2)  # type: ignore[operator]
    coterie.run(toy.method("fedper"), data, network.float(), rounds=1, backend=toy.IN_TURN, out=tmp_path / "run")
    run = load_run(tmp_path / "run", network)
    x = data.test.client(3)[0]
    with torch.no_grad():
        expected = run.personal_model(3)(x)
    _, script = export(run, 3, "onnx", tmp_path / "a.onnx")
    (traced,) = export(run, 3, "torchscript", tmp_path / "a.ts")
    torch.testing.assert_close(torch.jit.load(traced)(x), expected, rtol=1e-5, atol=1e-5)
    np.save(tmp_path / "x.npy", x.numpy())
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "x.npy")], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    np.testing.assert_allclose(np.array(found), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_weights_of_a_mixture_are_what_it_needs(made: Made, tmp_path: Path) -> None:
    run, _ = made("fedem")
    weights, readme = export(run, 3, "safetensors", tmp_path / "client.safetensors")
    names = set(load_file(weights))
    assert "state.tuned.shares" in names
    assert not any("momentum" in name or name.startswith("down") for name in names)
    assert not json.loads(readme.read_text())["one_network"]


def test_torch_tells_what_it_is(made: Made, tmp_path: Path) -> None:
    told = {"about.json": ""}
    (path,) = export(made("fedavg")[0], 0, "torch", tmp_path / "a.pt2")
    torch.export.load(path, extra_files=told)
    assert json.loads(told["about.json"])["classes"] == ["0", "1", "2", "3"]


class Moody(nn.Sequential):
    """Inverts bright images: control flow that no graph can express."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(torch.stack([-one if one.mean() > 0 else one for one in x]))
        return out


def test_a_network_that_is_no_graph(tmp_path: Path) -> None:
    network = nn.Sequential(Moody(nn.Flatten()), nn.Linear(144, toy.CLASSES))
    coterie.run(toy.method("local"), toy.toy(), network, rounds=1, backend=toy.IN_TURN, out=tmp_path / "run")
    run = load_run(tmp_path / "run", network)
    with pytest.raises(CoterieError, match=r"torch\.export cannot trace this network"):
        export(run, 0, "torch", tmp_path / "a.pt2")
    assert len(export(run, 0, "safetensors", tmp_path / "a.safetensors")) == 2


def test_complaints(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = made("fedavg")
    (tmp_path / "a.pt2").write_text("mine")
    for form, file, told in (
        ("tflite", "a.tflite", "unknown form"),
        ("torch", "a.onnx", r"must end in \.pt2"),
        ("torch", "a.pt2", "exists already"),
        ("safetensors", "a.pt2/b.safetensors", "cannot be written"),
    ):
        with pytest.raises(CoterieError, match=told):
            export(run, 0, form, tmp_path / file)
    with pytest.raises(CoterieError, match="no client 5"):
        export(run, 5, "torch", tmp_path / "b.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[onnx\]'"):
        export(run, 0, "onnx", tmp_path / "b.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]
    assert (tmp_path / "a.pt2").read_text() == "mine"
