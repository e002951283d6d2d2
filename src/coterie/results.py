"""The result of one training as a small file: where it comes from, its curves, and every client's last accuracy."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.errors import CoterieError
from coterie.federation import History, Result
from coterie.federation.history import Summary
from coterie.recipes import Plan, Value
from coterie.recipes.keys import Keys, fitting
from coterie.version import VERSION

log = logging.getLogger("coterie")
LAST = 10  # rounds that "mean of last 10" takes
TEXTS = ("recipe", "method", "date", "precision")
NESTED = (("hardware", "machine", str), ("libraries", "torch", str), ("seconds", "total", float))


class Unwritable(CoterieError):
    """A result could not be kept; the next one could not be either."""


class Shelf:
    """A folder of results. A training that is there, whatever recipe asked for it, is not run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """The folder, told now and not after an hour if it cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CoterieError(f"cannot make the folder {self.folder}: {error.strerror}") from None

    def find(self, plan: Plan, seed: int) -> dict[str, Any] | None:
        """The result of this training. A setting that did not exist when it was made is as it is by default."""
        fits = asked_by(plan)
        for path in sorted(self.folder.glob(f"*/*-seed{seed}-*.json")):
            content = read(path, path.stat().st_mtime_ns)
            if content is not None and content["seed"] == seed and fits(content):
                return content
        return None

    def add(self, recipe: str, method: str, value: Value, plan: Plan, seed: int, content: dict[str, Any]) -> Path:
        """All of the file or nothing of it."""
        words = [method, *(f"{name}-{setting}" for name, setting in value)]
        name = re.sub(r"[^\w.-]+", "-", "-".join(words)) + ending(plan, seed)
        path = self.folder / re.sub(r"[^\w.-]+", "-", recipe) / name
        part = path.with_name(f".{name}.{os.getpid()}.part")
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise Unwritable(f"cannot write {path}: {error.strerror}") from None
        return path


@lru_cache(maxsize=4096)
def read(path: Path, changed: int) -> dict[str, Any] | None:
    """A result as it was when it was last changed; None if it cannot be read."""
    try:
        return checked(path)
    except CoterieError as error:
        log.warning("%s; its training counts as not run", error)
        return None


def load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CoterieError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def checked(path: Path) -> dict[str, Any]:
    """A result that has all that a table shows."""
    content = load(path)
    try:
        keys = Keys("", content)
        for name in TEXTS:
            keys.take(name, str)
        keys.take("seed", int)
        keys.take("commit", str | None)
        keys.take("settings", dict)
        for name, inner, kind in NESTED:
            Keys(f"{name}: ", keys.take(name, dict)).take(inner, kind)
        for point, curve in keys.take("history", dict).items():
            check_curve(f"history: {point}: ", curve)
        for point, last in keys.take("last", dict).items():
            check_last(f"last: {point}: ", last)
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    return dict(content)


def check_curve(where: str, curve: Any) -> None:
    keys = Keys(where, curve)
    rounds, *columns = (keys.take(name, list) for name in ("round", "clients", "samples"))
    for column in columns:
        if len(column) != len(rounds):
            raise CoterieError(f"{where}{len(rounds)} rounds, but {len(column)} accuracies")
        for share in column:
            if share is not None and not 0 <= fitting(f"{where}accuracy", share, float) <= 1:
                raise CoterieError(f"{where}accuracy {share} is not between 0 and 1")


def check_last(where: str, last: Any) -> None:
    keys = Keys(where, last)
    clients, correct, total = (keys.take(name, tuple[int, ...]) for name in ("client", "correct", "total"))
    if not len(clients) == len(correct) == len(total) or any(k > n for k, n in zip(correct, total, strict=True)):
        raise CoterieError(f"{where}must have as many correct as clients, and none above its total")


def asked_by(plan: Plan) -> Callable[[dict[str, Any]], bool]:
    """Whether a result is one of this training."""
    wanted, usual = (json.loads(json.dumps(settings)) for settings in (plan.settings, plan.usual))
    return lambda content: covers(content["settings"], wanted, usual)


def covers(made: Any, wanted: Any, usual: Any) -> bool:
    """Whether a result that was made with some settings is one of the wanted settings."""
    if not isinstance(made, dict) or not isinstance(wanted, dict):
        return bool(made == wanted)
    usual = usual if isinstance(usual, dict) else {}
    return made.keys() <= wanted.keys() and all(
        covers(made[name], value, usual.get(name)) if name in made else name in usual and value == usual[name]
        for name, value in wanted.items()
    )


def origin(content: dict[str, Any]) -> dict[str, str]:
    """Where a result comes from."""
    hardware = content["hardware"]
    cores = f" ({hardware['cores']} CPU cores)" if hardware.get("cores") else ""
    return {
        "commit": content["commit"] or "not known",
        "hardware": hardware["machine"] + cores,
        "precision": content["precision"],
        "torch": content["libraries"]["torch"],
        "measured": content["date"],
        "partition": f"`{str(content.get('partition'))[:12]}`",
    }


def origins(contents: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Every kind of origin -> all that occur."""
    found = [origin(content) for content in contents]
    return {name: list(dict.fromkeys(o[name] for o in found)) for name in found[0]} if found else {}


def seeds(contents: Iterable[dict[str, Any]]) -> str:
    return ", ".join(map(str, sorted({content["seed"] for content in contents})))


def seconds_alone(content: dict[str, Any]) -> float | None:
    """How long a training took; None if others ran beside it on the same machine, however many (`jobs`: null)."""
    return None if "jobs" in content["hardware"] else float(content["seconds"]["total"])


def ending(plan: Plan, seed: int) -> str:
    return f"-seed{seed}-{plan.hash[:12]}.json"


def describe(result: Result, plan: Plan, seed: int, seconds: float, commit: str | None) -> dict[str, Any]:
    """What is kept of a run."""
    history, partition = result.history, result.partition
    trained, latest = last_trained(history)
    return {
        "seed": seed,
        "rounds": plan.federation.rounds,
        "hash": plan.hash,
        "settings": plan.settings,
        "partition": partition and partition.hash,
        "date": time.strftime("%Y-%m-%d"),
        "coterie": VERSION,
        "commit": commit or committed(),
        "libraries": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "seconds": {
            "total": round(seconds, 2),
            **{p: round(sum(r.seconds.get(p, 0.0) for r in history), 2) for p in ("train", "receive", "evaluate")},
        },
        "bytes_up": sum(r.bytes_up for r in history),
        "bytes_down": sum(r.bytes_down for r in history),
        "left_out": sum(len(r.left_out) for r in history),
        "history": {point: curve(history, point) for point in points(history)} | {"last_trained": trained},
        "last": {point: final(history, point) for point in points(history)} | {"last_trained": latest},
        "records": {
            name: {str(r.number): r.report[name].tolist() for r in history if r.number in rounds and name in r.report}
            for name, rounds in plan.records.items()
        },
    }


def hardware(device: str) -> dict[str, Any]:
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {"machine": machine, "cores": os.cpu_count()}


def committed() -> str | None:
    """The commit of this code, with a + if it was changed since; None if it is not in a repository of its own."""
    here = Path(__file__).parent
    try:
        said = [
            subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["log", "-1", "--format=%h", "--", "."], ["status", "--porcelain", "--", "."])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{said[0]}{'+' if said[1] else ''}" if said[0] else None


def points(history: History) -> list[str]:
    return list(dict.fromkeys(point for record in history for point, split in record.scores if split == "test"))


def curve(history: History, point: str) -> dict[str, list[Any]]:
    """By round: the accuracy with every client, or every sample, counting the same."""
    summaries = [(r.number, Summary.of(r.scores[point, "test"])) for r in history.with_point(point)]
    return {
        "round": [number for number, _ in summaries],
        "clients": [share(s.mean) for _, s in summaries],
        "samples": [share(s.by_samples) for _, s in summaries],
    }


def last_trained(history: History) -> tuple[dict[str, list[Any]], dict[str, list[int]]]:
    """Curve and end for the models that clients have from their own last training. The curve begins when all of them
    have trained that ever do: the mean of a few early ones could be the best of all."""
    scored = [record.scores["post", "test"] for record in history.with_point("post")]
    everyone = len({c for s in scored for c, n in zip(s.clients.tolist(), s.total.tolist(), strict=True) if n})
    latest: dict[int, tuple[int, int]] = {}
    found: dict[str, list[Any]] = {"round": [], "clients": [], "samples": []}
    for record in history.with_point("post"):
        scores = record.scores["post", "test"]
        latest |= {c: (int(k), n) for c, k, n in zip(*(column.tolist() for column in scores[:3]), strict=True) if n}
        if latest and len(latest) == everyone:
            found["round"].append(record.number)
            found["clients"].append(share(sum(k / n for k, n in latest.values()) / len(latest)))
            found["samples"].append(share(sum(k for k, _ in latest.values()) / sum(n for _, n in latest.values())))
    rows = [(c, *latest[c]) for c in sorted(latest)]
    return found, {name: [row[i] for row in rows] for i, name in enumerate(("client", "correct", "total"))}


def final(history: History, point: str) -> dict[str, list[int]]:
    """What every client got right in the last measurement."""
    scores = list(history.with_point(point))[-1].scores[point, "test"]
    return dict(zip(("client", "correct", "total"), ([int(v) for v in t.tolist()] for t in scores[:3]), strict=True))


def share(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def outcome(content: dict[str, Any], point: str, report: str, average: str) -> float | None:
    """The number of a table, in percent; None if this training has no such number."""
    measured = [v for v in content["history"].get(point, {}).get(average, []) if v is not None]
    if not measured:
        return None
    if report == "best":
        return float(100 * max(measured))
    taken = measured[-LAST:] if report == "mean of last 10" else measured[-1:]
    return float(100 * sum(taken) / len(taken))


def accuracies(content: dict[str, Any], point: str) -> dict[int, float]:
    """Client -> accuracy in the last measurement."""
    last = content["last"].get(point, {"client": (), "correct": (), "total": ()})
    return {c: k / n for c, k, n in zip(last["client"], last["correct"], last["total"], strict=True) if n}
