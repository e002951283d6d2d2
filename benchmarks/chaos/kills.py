"""kill -9 at random moments, then resume: the result must be bit-equal to an uninterrupted run."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.machines import HELD, Machine, Machines

TINY = ("--num-clients", "5", "--local-size", "30", "--test-size", "20", "--model", "linear", "--join-ratio", "0.4",
        "--processes", "1")  # fmt: skip
METHODS = ("fedavg", "fedper", "ditto", "scaffold", "fedpac", "knn-per", "fedfomo")
RECIPE = """\
id: {name}
paper: chaos
place: chaos
protocol: pac
dataset: fashion-mnist-small
partition: {{rule: dominant, num_clients: 5, noniid_s: 20, local_size: 30, test_size: 20}}
model: linear
settings: {{rounds: 25, join_ratio: 0.4, local_epochs: 1, batch_size: 10, lr: 0.05, momentum: 0.5, weight_decay: 0.0}}
report: last
average: clients
rows:
  - {{name: FedAvg, method: fedavg}}
  - {{name: Ditto, method: ditto}}
"""
PATIENT = ("--grace", "60")  # no client is left out, so the result equals that of a federation without kills
AWHILE = 20  # most kills of one run; after that it may finish
NOT_RESULTS = ("seconds", "folder", "file", "commit", "date", "machine", "out", "log")
Words = tuple[str, ...]


class Command(NamedTuple):
    """A command of one process."""

    first: Callable[[Path, int], Words]  # folder and number of the run -> arguments that start it
    again: Callable[[Path, int], Words]  # arguments that resume it
    begun: str  # file that exists once the run can be resumed


def recipe(out: Path) -> Path:
    """A small recipe, the same for the uninterrupted run and the killed ones."""
    path = out.parent / "chaos.yaml"
    path.write_text(RECIPE.format(name="chaos"), encoding="utf-8")
    return path


def run(out: Path, i: int) -> Words:
    where = ("looped", "stacked")[i % 2]
    more = ("--backend", where, "--rounds", "40", "--seed", str(i), "--out", str(out))
    return ("run", METHODS[i % len(METHODS)], *TINY, *more)


def compare(out: Path, i: int) -> Words:
    more = ("--rounds", "15", "--seeds", "2", "--seed", str(i), "--against", "fedavg", "--out", str(out))
    return ("compare", "fedavg", "ditto", *TINY, *more)


def tune(out: Path, i: int) -> Words:
    more = ("--over", "lr=0.01,0.1", "--rounds", "15", "--seeds", "2", "--seed", str(i), "--out", str(out))
    return ("tune", "ditto", *TINY, *more)


def reproduce(out: Path, i: int) -> Words:
    return ("reproduce", str(recipe(out)), "--seeds", "2", "--processes", "1", "--out", str(out))


def resume(out: Path, i: int) -> Words:
    return ("resume", str(out))


COMMANDS = {
    "run": Command(run, resume, "config.json"),
    "compare": Command(compare, resume, "command.json"),
    "tune": Command(tune, lambda out, i: ("tune", "--resume", str(out)), "search.json"),
    "reproduce": Command(reproduce, reproduce, ""),
}


def killed(name: str, kills: int, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kill a command this many times, and compare every finished run."""
    command, done, runs, equal, early = COMMANDS[name], 0, 0, 0, 0
    while done < kills:
        whole, interrupted = folder / f"{name}-whole-{runs}", folder / f"{name}-cut-{runs}"
        start = time.monotonic()
        finish(Machine(folder / f"{name}-whole-{runs}.log", command.first(whole, runs)))
        long = time.monotonic() - start
        for attempt in range(AWHILE + 1):
            begun = (interrupted / command.begun).exists()
            if not begun:  # killed before it wrote its command
                early += attempt > 0
                shutil.rmtree(interrupted, ignore_errors=True)
            words = (command.again if begun else command.first)(interrupted, runs)
            machine = Machine(folder / f"{name}-cut-{runs}-{attempt}.log", words)
            if attempt < AWHILE and done < kills:
                machine.process.join(draw.uniform(0.05, 0.9) * long)
            if attempt == AWHILE or done == kills or machine.process.exitcode is not None:
                finish(machine)
                break
            machine.kill()
            done += 1
        runs += 1
        equal += content(whole) == content(interrupted)
        shutil.rmtree(whole)
        shutil.rmtree(interrupted)
    return {"kills": done, "before_a_folder": early, "runs": runs, "bit_equal": equal}


def finish(machine: Machine) -> None:
    code = machine.end(300)
    assert code == 0, f"ended with {code}: {machine.said[-3000:]}"


def content(folder: Path) -> dict[str, Any]:
    """File -> content or SHA-256, for all results in a folder without times, paths and checkpoints."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "checkpoint" in name or "shared" in path.parts:
            continue
        if path.suffix == ".safetensors":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "clients.csv":
            found[name] = path.read_text()
        elif path.name == "metrics.csv":
            rows = csv.DictReader(path.read_text().splitlines())
            found[name] = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
        elif path.suffix == ".json" and path.name not in (
            "checksums.json",
            "config.json",
            "command.json",
            "search.json",
        ):
            found[name] = without_times(json.loads(path.read_text()))
    assert found, folder
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.startswith(NOT_RESULTS)}
    return [without_times(v) for v in value] if isinstance(value, list) else value


# A federation whose server, or a device, is killed and restarted.


def federation(folder: Path, who: str, kills: int, rounds: int, draw: random.Random) -> tuple[int, dict[str, Any]]:
    """Number of kills until the federation ended, and the results of server and devices."""
    folder.mkdir()
    machines, done = Machines(folder), 0
    flags = ("--rounds", str(rounds), "--join-ratio", "1", "--seed", "3", *PATIENT)
    try:
        devices = machines.join_all()
        server = machines.serve("fedper", *flags)
        if kills:
            server.wait_for("round 1:")
        while done < kills and server.process.is_alive():
            time.sleep(draw.uniform(0.05, 1.2))
            if not server.process.is_alive():
                break
            if who == "serve":
                server.kill()
                server = machines.serve("fedper", *flags, "--resume")
            else:
                name = draw.choice(sorted(devices))
                devices[name].kill()
                devices[name] = machines.join(name, HELD[name])
            done += 1
        for machine in (server, *devices.values()):
            finish(machine)
        assert not any(machines.left_out.values()), machines.left_out
        left = {"server": content(machines.out)["models/server.safetensors"]}
        left |= {"scores": (machines.out / "clients.csv").read_text()}
        for name in devices:
            models = sorted(machines.personal(name).glob("models/*.safetensors"))
            left |= {f"{name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in models}
        return done, left
    finally:
        machines.close()


def killed_federations(who: str, kills: int, folder: Path, draw: random.Random, rounds: int = 40) -> dict[str, Any]:
    _, expected = federation(folder / f"{who}-whole", who, 0, rounds, draw)
    done, runs, equal = 0, 0, 0
    while done < kills:
        more, left = federation(folder / f"{who}-{runs}", who, kills - done, rounds, draw)
        done, runs, equal = done + more, runs + 1, equal + (left == expected)
    return {"kills": done, "before_a_folder": 0, "runs": runs, "bit_equal": equal}
