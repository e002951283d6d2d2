"""One YAML file for a run or a comparison: the same run as by flags and in Python, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import coterie
from coterie.api.saved_config import data_in_force, run_in_force
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.methods import METHODS

TINY = ["--num-clients", "3", "--local-size", "30", "--test-size", "10", "--model", "linear", "--processes", "1"]
FILE = """
method: fedpac
model: linear
data: {num_clients: 3, local_size: 30, test_size: 10}
backend: {backend: looped, processes: 1}
rounds: 2
lr: 2e-2
align: 0.5
"""


def told(folder: Path) -> dict[str, Any]:
    """What a run was, and its weights."""
    config = json.loads((folder / "config.json").read_text())
    parts = {name: config[name] for name in ("method", "federation", "data", "model", "task", "ending", "protection")}
    return {**parts, "models": (folder / "models" / "models.sha256").read_text()}


@pytest.mark.long
def test_flags_file_and_python_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = tmp_path / "run.yaml", tmp_path / "saved.yaml"
    file.write_text(FILE)
    flags = [*TINY, "--backend", "looped", "--rounds", "2", "--lr", "0.02", "--align", "0.5"]
    main(["run", "fedpac", *flags, "--out", str(tmp_path / "flags"), "--json"])
    main(["run", "--config", str(file), "--out", str(tmp_path / "file"), "--json", "--save-config", str(saved)])
    main(["run", f"--config={saved}", "--out", str(tmp_path / "saved"), "--json"])
    coterie.run(**coterie.load_config(file), out=tmp_path / "python", progress=False)
    coterie.run(**coterie.load_config(saved), out=tmp_path / "python-saved", progress=False)
    runs = [told(tmp_path / name) for name in ("flags", "file", "saved", "python", "python-saved")]
    assert all(run == runs[0] for run in runs)
    main(["run", "--config", str(file), "--rounds", "1", "--align", "2", "--out", str(tmp_path / "other"), "--json"])
    other = told(tmp_path / "other")
    assert (other["federation"]["rounds"], other["method"]["align"], other["method"]["train"]["lr"]) == (1, 2.0, 0.02)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["run", "fedpac", *TINY, "--save-config", str(saved), "--out", str(tmp_path / "none")])
    assert "saved.yaml exists already" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("protocol", ["pac", "reg", "crc", "akd", "quick"])
def test_settings_in_force_are_complete(protocol: str) -> None:
    """Given all at once, for every method, they lead to themselves."""
    given = {"dataset": "heart-disease", "protocol": protocol}
    data = coterie.load_clients(**given)
    shown = data_in_force(given, data)
    again = coterie.load_clients(**shown, protocol=protocol)
    assert again.partition
    assert data.partition
    assert again.partition.hash == data.partition.hash
    for name in METHODS:
        force = run_in_force(name, data, protocol, {"optimizer": "adam"} if name == "fedavg" else {"lr": 0.3})
        own = {key: value for key, value in force.items() if key not in ("model", "protocol")}
        assert run_in_force(name, data, protocol, own) == force


@pytest.mark.long
def test_partitions_in_force() -> None:
    for protocol, settings in (("quick", {}), ("reg", {"num_clients": 5}), ("pac", {"partition": "dirichlet"})):
        data = coterie.load_clients(protocol=protocol, **settings)
        shown = data_in_force({"protocol": protocol, **settings}, data)
        again = coterie.load_clients(**shown, protocol="akd" if protocol == "reg" else protocol)
        assert again.partition
        assert data.partition
        assert again.partition.hash == data.partition.hash, protocol


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("method: fedpca", ["unknown method 'fedpca': did you mean 'fedpac'?"]),
        ("method: fedpac\nroundz: 3", ["unknown key 'roundz': did you mean 'rounds'?"]),
        ("method: fedavg\nalign: 3", ["'align' is a setting of FedCP, FedProto, FedPAC"]),
        ("method: fedpac\nnum_clients: 3", ["'num_clients' is a setting of data: write it below `data:`"]),
        ("method: fedpac\ndevice: cpu", ["'device' is a setting of backend: write it below `backend:`"]),
        ("method: fedpac\nseeds: 3", ["'seeds' is a key of coterie.compare, not of coterie.run"]),
        ("method: fedpac\ndata: {num_client: 3}", ["unknown key in data 'num_client': did you mean 'num_clients'?"]),
        ("method: fedpac\ndata: {protocol: reg}", ["give `protocol` outside of `data`"]),
        (
            "method: fedpac\nrounds: many\nlr: [1]\nnesterov: 3\ndata: {alpha: low}\nmax_time: [2]",
            ["rounds is 'many': it must be a whole number", "lr is [1]", "nesterov is 3: it must be true or false",
             "data.alpha is 'low'", "max_time is [2]: it must be text"],
        ),
        ("- fedpac", ["maps names of settings to values"]),
        ("method: [", ["not YAML, line"]),
        ("method: fedpac\nlr: -1", ["lr must be at least 0"]),
        ("rounds: 3", ["give a METHOD"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line_each(
    content: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--config", str(file), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == len(lines)
    for line, expected in zip(shown, lines, strict=True):
        assert line.startswith("coterie: ")
        assert expected in line
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"none\.yaml: cannot be read: No such file"):
        coterie.load_config(tmp_path / "none.yaml")


@pytest.mark.long
def test_a_sweep_is_a_run_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = tmp_path / "c.yaml", tmp_path / "saved.yaml"
    file.write_text(
        "methods: [local, fedper, fedavg]\nover: {lr: [0.1, 0.01], average_heads: [true, false]}\nrounds: 1\n"
        "model: linear\ndata: {num_clients: 3, local_size: 30, test_size: 10}\n"
        "backend: {backend: looped, processes: 1}\n"
    )
    out = tmp_path / "c"
    main(["compare", "--config", str(file), "--out", str(out), "--save-config", str(saved), "--json"])
    shown = json.loads(capsys.readouterr().out)
    names = [row["method"] for row in shown["outcomes"]]
    assert names == [
        "Local, lr 0.1", "Local, lr 0.01",
        "FedPer, lr 0.1, average heads True", "FedPer, lr 0.1, average heads False",
        "FedPer, lr 0.01, average heads True", "FedPer, lr 0.01, average heads False",
        "FedAvg, lr 0.1", "FedAvg-FT, lr 0.1", "FedAvg, lr 0.01", "FedAvg-FT, lr 0.01",
    ]  # fmt: skip
    config = json.loads((out / "fedper-lr=0.01-average_heads=true-seed0" / "config.json").read_text())
    assert (config["method"]["train"]["lr"], config["method"]["average_heads"]) == (0.01, True)
    data = coterie.load_config(file)["data"]
    alone = coterie.run("fedavg", data, "linear", rounds=1, lr=0.01, backend="looped", progress=False)
    by_name = dict(zip(names, shown["outcomes"], strict=True))
    assert alone.outcomes()[0].last.mean == by_name["FedAvg, lr 0.01"]["mean"]
    assert coterie.load_comparison(out).methods == names  # in the order of the sweep
    assert coterie.load_comparison(out).against is None
    content = yaml.safe_load(saved.read_text())
    assert content["over"] == {"lr": "0.1,0.01", "average_heads": "true,false"}
    found = coterie.compare(**coterie.load_config(saved) | {"methods": ["fedavg"], "over": {"lr": "0.1,0.01"}}, seeds=1)
    assert found.methods == ["FedAvg, lr 0.1", "FedAvg-FT, lr 0.1", "FedAvg, lr 0.01", "FedAvg-FT, lr 0.01"]
    assert [row["mean"] for row in found.outcomes] == [by_name[name]["mean"] for name in found.methods]
    (out / "fedavg-lr=0.01-seed0" / "result.json").unlink()  # as if it had been stopped
    (out / "compare.json").unlink()
    main(["resume", str(out), "--json"])
    assert [row["mean"] for row in json.loads(capsys.readouterr().out)["outcomes"]] == [
        row["mean"] for row in shown["outcomes"]
    ]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"lr": "0.1", "rounds": [1, 2]}, "rounds cannot vary in a comparison"),
        ({"alpha": [1, 2]}, "alpha cannot vary: all methods of a comparison share their data"),
        ({"lrr": [1]}, "did you mean 'lr'"),
        ({"lr": "0.1,x"}, "lr must be a finite number, got 'x'"),
        ({"momentum": [0.5]}, "momentum is given twice"),
    ],
)
def test_what_cannot_vary(over: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        coterie.compare(["fedavg"], over=over, momentum=0.9)
    with pytest.raises(CoterieError, match="lr is set in FedAvg and varies"):
        coterie.compare([coterie.make_method("fedavg", lr=0.1)], over={"lr": [1.0]})


def test_a_setting_among_methods_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "fedavg", "lr=0.1,1"])
    assert "to vary a setting, write --over lr=0.1,1" in capsys.readouterr().err
