"""Devices fail in every round, and broker and server are killed; the federation ends and equals a simulation."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from coterie.api import load_clients
from tests.machines import Machines, assert_same_server, simulated

DEVICES, EACH = 10, 2  # devices, and clients of each
SHARE = 0.3  # of the devices that fail per round
DATA = {"num_clients": DEVICES * EACH, "local_size": 30, "test_size": 20}


def dying(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Of the three devices that fail in a round, one restarts at once and two a round later."""
    folder.mkdir()
    machines, draw = Machines(folder), random.Random(seed)
    samples = tuple(f"--{name.replace('_', '-')}={value}" for name, value in DATA.items())
    held = {f"device-{i}": f"{EACH * i}-{EACH * i + EACH - 1}" for i in range(DEVICES)}
    flags = ("--rounds", str(rounds), "--join-ratio", "1", "--seed", "3", "--grace", "2", "--max-left-out", "0.9")
    kills = {"devices": 0, "broker": 0, "server": 0}
    plan = {
        round(rounds * share): what
        for share, what in ((0.2, "broker"), (0.4, "server"), (0.6, "broker"), (0.8, "server"))
    }
    try:
        devices = {name: machines.join(name, clients, data=samples) for name, clients in held.items()}
        server = machines.serve("fedper", *flags, clients=DATA["num_clients"])
        done, away = 0, set[str]()
        while server.process.is_alive():
            if len(machines.rounds) > done:
                done = len(machines.rounds)
                back, dead = set(away), draw.sample(sorted(held.keys() - away), round(SHARE * DEVICES))
                for name in dead:
                    devices[name].kill()
                kills["devices"] += len(dead)
                what = next((plan.pop(at) for at in sorted(plan) if at <= done), "")
                if what == "broker":
                    machines.broker.kill()
                    time.sleep(1)
                    machines.broker.start()
                elif what == "server":
                    server.kill()
                    server = machines.serve("fedper", *flags, "--resume", clients=DATA["num_clients"])
                kills |= {what: kills[what] + 1} if what else {}
                away = set(dead[1:])
                for name in {*back, dead[0]}:
                    devices[name] = machines.join(name, held[name], data=samples)
            time.sleep(0.05)
        assert server.end() == 0, server.said[-3000:]
        left_out = machines.left_out
        data = load_clients(**DATA)  # type: ignore[arg-type]
        expected = simulated("fedper", left_out, data, rounds=rounds, join_ratio=1.0, seed=3)
        assert_same_server(machines.out, expected)
        assert len(machines.rounds) == rounds
    finally:
        machines.close()
    return {
        "rounds": rounds,
        "devices": DEVICES,
        "clients": DATA["num_clients"],
        "kills": kills,
        "equal_to_simulation": True,
        "answers_missing": sum(map(len, left_out.values())),
        "answers": rounds * DATA["num_clients"],
    }
