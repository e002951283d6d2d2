"""The command line as a user meets it: real processes, exit codes, what is left behind."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from coterie.cli import main

TINY = ["--num-clients", "4", "--local-size", "40", "--test-size", "20", "--processes", "1", "--model", "linear"]


def coterie(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coterie", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "a run with spaces é"
    done = coterie("run", "fedpac", *TINY, "-gr", "2", "-jr", "0.5", "--validation", "0.2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "FedPAC" in done.stdout
    return out


def test_a_run_leaves_a_folder(finished: Path) -> None:
    names = {"config.json", "metrics.csv", "clients.csv", "partition.npz", "partition.svg", "result.json", "log.txt"}
    assert names <= {path.name for path in finished.iterdir()}
    assert not list(finished.rglob("*.part"))
    config = json.loads((finished / "config.json").read_text())
    assert config["method"]["align"] == 1.0
    assert config["method"]["train"]["momentum"] == 0.5  # the protocol's
    assert config["federation"]["join_ratio"] == 0.5
    assert len(config["data"]["partition"]["hash"]) == 64


def test_metrics_are_a_table(finished: Path) -> None:
    with (finished / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3"]  # the third: all clients train once more
    for row in rows[:2]:
        assert 0 <= float(row["pre_mean"]) <= 1
        assert 0 <= float(row["validation_pre_mean"]) <= 1
        assert int(row["bytes_up"]) > 0
    with (finished / "clients.csv").open() as file:
        clients = list(csv.DictReader(file))
    last = [float(r["accuracy"]) for r in clients if (r["round"], r["point"], r["split"]) == ("2", "pre", "test")]
    assert len(last) == 4
    assert float(rows[1]["pre_mean"]) == pytest.approx(sum(last) / 4, abs=1e-5)


def test_models_and_reports_can_be_read(finished: Path) -> None:
    model = load_file(finished / "models" / "client-3.safetensors")
    assert model["down.head.weight"].shape == (10, 784)
    with np.load(finished / "reports.npz") as reports:
        weights = reports["head_weights/00002"]
    np.testing.assert_allclose(weights.sum(1), 1)


def test_a_partition_can_be_used_again(finished: Path, tmp_path: Path) -> None:
    main([
        "run", "local", "--partition", str(finished / "partition.npz"), "--model", "linear", "--rounds", "1",
        "--processes", "1", "--out", str(tmp_path / "again"),
    ])  # fmt: skip
    first, second = (json.loads((f / "config.json").read_text()) for f in (finished, tmp_path / "again"))
    assert first["data"]["partition"]["hash"] == second["data"]["partition"]["hash"]


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    done = coterie(
        "compare", "local", "fedavg", "fedavg-ft", *TINY, "--rounds", "1", "--json", "--out", str(tmp_path / "c")
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [o["method"] for o in table["outcomes"]] == ["Local", "FedAvg", "FedAvg-FT"]  # two of one run
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "command.json", "compare.json", "fedavg-seed0", "local-seed0",
    ]  # fmt: skip


def test_names_that_users_of_the_field_know(tmp_path: Path) -> None:
    main([
        "run", "-nc", "3", "-jr", "1.0", "-gr", "1", "-ls", "1", "-lbs", "10", "--lr", "0.1",
        "--local-size", "30", "--noniid-s", "50", "--seed", "4", "--device", "cpu", "--model", "linear",
        "--processes", "1", "--out", str(tmp_path / "r"), "FedRep", "--head-epochs", "2",
    ])  # fmt: skip
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert (config["method"]["name"], config["method"]["head_epochs"]) == ("FedRep", 2)
    assert config["data"]["clients"] == 3
    train = config["method"]["train"]
    assert (train["local_epochs"], train["batch_size"], train["lr"]) == (1, 10, 0.1)
    assert config["data"]["partition"]["noniid_s"] == 50
    assert config["federation"]["seed"] == 4


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """The installed command finds a module in the folder it is called from."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(784, 6), nn.ReLU(), nn.Linear(6, classes))\n"
    )
    command = Path(sys.executable).with_name("coterie")
    arguments = ["run", "fedper", *TINY[:-2], "--model", "mine:Net", "--rounds", "1", "--out", "r"]
    done = subprocess.run([command, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "r" / "models" / "client-0.safetensors")["state.personal.head.weight"].shape == (10, 6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "fedpca"], "did you mean 'fedpac'"),
        (["run", "fedpac", "--dataset", "fashonmnist"], "did you mean 'fashion-mnist"),
        (["run", "fedpac", "--model", "cnm"], "did you mean 'cnn'"),
        (["run", "fedpac", "--partition", "dominent"], "did you mean 'dominant'"),
        (["run", "fedpac", "--protocol", "pack"], "did you mean 'pac'"),
        (["run", "fedpac", "--backend", "staked"], "did you mean 'stacked'"),
        (["run", "fedpac", "--num-clients", "0"], "num_clients must be at least 1, got 0"),
        (["run", "fedpac", "--noniid-s", "120"], "between 0 and 100"),
        (["run", "fedpac", "--local-size", "60000"], "class"),
        (["run", "fedpac", "--rounds", "0"], "rounds must be at least 1"),
        (["run", "fedpac", "--join-ratio", "0"], "join_ratio must be above 0 and at most 1, got 0.0"),
        (["run", "fedpac", "--batch-size", "0"], "batch_size must be at least 1"),
        (["run", "fedpac", "--lr", "-1"], "lr must be at least 0"),
        (["run", "fedpac", "--batch-size", "999", "--drop-last"], "drop-last"),
        (["run", "fedpac", "--partition", "dirichlet", "--alpha", "0"], "alpha must be between 0.001 and"),
        (["run", "fedpac", "--partition", "nowhere.npz"], "nowhere.npz"),
        (["run", "fedpac", "--partition", "natural"], "which client a sample comes from"),
        (["run", "fedpac", "--dataset", "cifar10", "--data-dir", "nowhere"], "cifar10 was not found"),
        (["run", "fedpac", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["run", "fedpac", "--dataset", "heart-disease", "--model", "cnn"], "cnn"),
        (["run", "fedpac", "--model", "no.such.module:Net"], "no.such.module"),
        (["run", "fedpac", "--schedule", "steps:50-0.2"], "must have the form steps:START=FACTOR"),
        (["run", "fedpac", "--aline", "2"], "--aline"),
        (["run", "fedavg", "--align", "2"], "--align"),
        (["compare", "local", "--seeds", "0"], "seeds must be at least 1"),
        (["conquer"], "conquer"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert said in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_bad_input_of_a_process(tmp_path: Path) -> None:
    done = coterie("run", "fedpca", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("coterie: unknown method 'fedpca'")
    assert "Traceback" not in done.stderr


def test_a_folder_that_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        main(["run", "local", *TINY, "--out", str(tmp_path / "mine")])
    assert stop.value.code == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.long
def test_listings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods", "--json"])
    methods = json.loads(capsys.readouterr().out)
    names = {name for m in methods for name in (m["name"], *m["variants"])}
    assert {"local", "fedavg", "fedavg-ft", "fedpac"} <= names
    main(["data", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert {"fashion-mnist-small", "heart-disease"} <= {d["name"] for d in data["datasets"]}
    assert "dominant" in {p["name"] for p in data["partitions"]}


@pytest.mark.parametrize(
    ("command", "usual"),
    [
        (["run", "fedprox"], ["of sgd; default: 0.5 (set by --protocol)", "rounds; default: 200 (set by --protocol)",
                              "evaluated; default: True (set by --protocol)", "all randomness; default: 0"]),
        (["run", "gpfl"], ["(λ); default: 0.001 (set by --protocol)", "valve (μ); default: 0.1"]),
        (["compare"], ["(adamw: 0.01); default: 0.0005 (set by --protocol)", "clients; default: set by --protocol"]),
        (["run", "fedpac-fa"], ["combine the heads of all clients; default: False"]),
        (["serve", "fedavg"], ["of sgd; default: 0.5 (set by --protocol)", "number of clients; required"]),
    ],
)  # fmt: skip
def test_help_says_the_defaults(command: list[str], usual: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert [line for line in usual if line not in told] == []


COMMANDS = {
    "train": ["demo", "run", "compare", "resume", "tune"],
    "inspect": ["methods", "cite", "data", "privacy", "pictures", "watch", "report", "plot", "table"],
    "use models": ["models", "predict", "evaluate", "export", "adapt"],
    "papers": ["recipes", "reproduce", "leaderboard"],
    "deploy": ["serve", "join", "certs", "flower", "keys"],
}


def test_help_groups_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.split("train:", 1)[1].join(["train:", ""]).splitlines():
        if line.endswith(":"):
            groups[line[:-1]] = []
        elif line.startswith("  "):
            name, about = line.split(maxsplit=1)
            assert about
            list(groups.values())[-1].append(name)
    assert groups == COMMANDS


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names])
def test_no_help_says_usually(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert "usually" not in told
    assert "the protocol decides" not in told


def test_usage_of_a_command_with_many_flags_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (
        ("run", "coterie run [options] [METHOD]"),
        ("recipes", "coterie recipes [-h] [--data-dir FOLDER] [--json] [WORD ...]"),
        ("predict", "coterie predict --client NAME|NUMBER [options] RUN FILE [FILE ...]"),
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert capsys.readouterr().out.split("\n\n")[0] == f"usage: {usage}"


@pytest.mark.parametrize("command", ["run", "serve", "keys"])
def test_only_the_module_of_a_command_is_imported(command: str) -> None:
    script = f"""import sys
from coterie.cli import GROUPS, make_parser
make_parser(["{command}"])
own = {{f"coterie.cli.{{name}}" for modules in GROUPS.values() for name in modules}} & set(sys.modules)
print(*sorted(own - {{"coterie.cli.train"}}))"""  # other modules share flags with it
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ([] if command == "run" else ["coterie.cli.deploy"])


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; from coterie.cli import make_parser; make_parser([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.long
def test_imported_modules_are_no_garbage() -> None:
    """Garbage collection begins after the imports, and leaves out what they made."""
    script = """import contextlib, gc
from coterie.cli import main
full = []
gc.callbacks.append(lambda phase, about: full.append(about["generation"] == 2))
with contextlib.suppress(SystemExit):
    main(["run", "--help"])
print(gc.isenabled(), gc.get_freeze_count() > 100_000, any(full))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True False"


@pytest.mark.long
def test_train_only_is_recorded_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A linear probe by name: the encoder is frozen in the run, in its personal models and in its continuation."""
    out, probe = tmp_path / "run", [*TINY[:-1], "mlp", "--train-only", "head", "--keep-state"]
    main(["run", "fedavg", *probe, "-gr", "1", "--out", str(out)])
    config = json.loads((out / "config.json").read_text())
    assert config["network"]["train_only"] == "head"
    assert config["model"]["encoder_parameters"] == 0
    assert config["model"]["frozen_parameters"] > 0
    main(["resume", str(out), "--rounds", "2"])
    main(["export", str(out), "--client", "1", "--to", "safetensors", "--out", str(tmp_path / "model.safetensors")])
    frozen, model = load_file(out / "models" / "frozen.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(model[name], t) for name, t in frozen.items())
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["run", "fedavg", *TINY, "--train-only", "haed", "--out", str(tmp_path / "other")])
    assert "unknown parameter 'haed': did you mean 'head'?" in capsys.readouterr().err
