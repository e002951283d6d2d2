"""Results of trainings as small JSON files: provenance, curves, and every client's last accuracy."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.api.result import Result
from coterie.core.errors import CoterieError
from coterie.core.validation import MappingReader, fitting
from coterie.core.version import VERSION
from coterie.federation import History
from coterie.papers.matching import asked_by
from coterie.papers.recipes import Plan, Value
from coterie.runs.disk import check_tree, read_inside, subfolder, whole

log = logging.getLogger("coterie")
LAST = 10  # rounds of "mean of last 10"
TEXTS = ("recipe", "method", "date", "precision")
Found = dict[tuple[str, Value], dict[int, dict[str, Any]]]  # row, value -> seed -> result
NESTED = (("hardware", "machine", str), ("libraries", "torch", str), ("seconds", "total", float))


class Unwritable(CoterieError):
    """The folder of results cannot be written."""


class ResultFolder:
    """A folder of result files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Create the folder now, to fail early."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_tree(self.folder)
        except OSError as error:
            raise CoterieError(f"cannot create the folder {self.folder}: {error.strerror}") from None


class Shelf(ResultFolder):
    """A folder of results. A training with a result is not run again, for any recipe."""

    def find(self, plan: Plan, seed: int) -> dict[str, Any] | None:
        """The result of this training. Settings added since it was made count as their defaults."""
        fits = asked_by(plan)
        for path in sorted(self.folder.glob(f"*/*-seed{seed}-*.json")):
            content = read(path, path.stat().st_mtime_ns)
            if content is not None and content["seed"] == seed and fits(content):
                return content
        return None

    def add(self, recipe: str, method: str, value: Value, plan: Plan, seed: int, content: dict[str, Any]) -> Path:
        """Write a result atomically."""
        path = self.folder / plain(recipe) / f"{stem(method, value, plan, seed)}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            subfolder(self.folder, path.parent.name, make=True)
            with whole(path, shared=True) as part:
                part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise Unwritable(f"cannot write {path}: {error.strerror}") from None
        return path


@lru_cache(maxsize=4096)
def read(path: Path, changed: int) -> dict[str, Any] | None:
    """A result, cached until it changes; None if it cannot be read."""
    try:
        return checked(path)
    except CoterieError as error:
        log.warning("%s; the training counts as not run", error)
        return None


def load(path: Path) -> Any:
    try:
        return json.loads(read_inside(path.parent, path.name))
    except (OSError, ValueError, RecursionError) as error:
        raise CoterieError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def checked(path: Path) -> dict[str, Any]:
    """A result with all keys that tables need."""
    content = load(path)
    try:
        keys = MappingReader("", content)
        for name in TEXTS:
            keys.take(name, str)
        keys.take("seed", int)
        keys.take("commit", str | None)
        keys.take("settings", dict)
        for name, inner, kind in NESTED:
            MappingReader(f"{name}: ", keys.take(name, dict)).take(inner, kind)
        for point, curve in keys.take("history", dict).items():
            check_curve(f"history: {point}: ", curve)
        for point, last in keys.take("last", dict).items():
            check_last(f"last: {point}: ", last)
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    return dict(content)


def check_curve(where: str, curve: Any) -> None:
    keys = MappingReader(where, curve)
    rounds, *columns = (keys.take(name, list) for name in ("round", "clients", "samples"))
    for column in columns:
        if len(column) != len(rounds):
            raise CoterieError(f"{where}{len(rounds)} rounds, but {len(column)} accuracies")
        for share in column:
            if share is not None and not 0 <= fitting(f"{where}accuracy", share, float) <= 1:
                raise CoterieError(f"{where}accuracy {share} is not between 0 and 1")


def check_last(where: str, last: Any) -> None:
    keys = MappingReader(where, last)
    clients, correct, total = (keys.take(name, tuple[int, ...]) for name in ("client", "correct", "total"))
    if not len(clients) == len(correct) == len(total) or any(k > n for k, n in zip(correct, total, strict=True)):
        raise CoterieError(f"{where}needs one correct count per client, none above its total")


def origin(content: dict[str, Any]) -> dict[str, str]:
    """Provenance of a result."""
    hardware = content["hardware"]
    cores = f" ({hardware['cores']} CPU cores)" if hardware.get("cores") else ""
    return {
        "commit": content["commit"] or "unknown",
        "hardware": hardware["machine"] + cores,
        "precision": content["precision"],
        "torch": content["libraries"]["torch"],
        "measured": content["date"],
        "partition": f"`{str(content.get('partition'))[:12]}`",
    }


def origins(contents: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Kind of provenance -> its distinct values."""
    found = [origin(content) for content in contents]
    return {name: list(dict.fromkeys(o[name] for o in found)) for name in found[0]} if found else {}


def seeds(contents: Iterable[dict[str, Any]]) -> str:
    return ", ".join(map(str, sorted({content["seed"] for content in contents})))


def seconds_alone(content: dict[str, Any]) -> float | None:
    """Duration of a training; None if others shared the machine (any `jobs`, also null)."""
    return None if "jobs" in content["hardware"] else float(content["seconds"]["total"])


def stem(method: str, value: Value, plan: Plan, seed: int) -> str:
    """The name of a result, without its ending."""
    words = [method, *(f"{name}-{setting}" for name, setting in value)]
    return f"{plain('-'.join(words))}-seed{seed}-{plan.hash[:12]}"


def plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def describe(result: Result, plan: Plan, seed: int, seconds: float, commit: str | None) -> dict[str, Any]:
    """The content of a result file."""
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


def committed(path: Path = Path(__file__).parent) -> str | None:
    """The last commit of a folder or file, by default of this code, with a + if it was modified; None outside of a
    repository."""
    here, name = (path, ".") if path.is_dir() else (path.parent, path.name)
    try:
        outputs = [
            subprocess.run(  # noqa: S603 - fixed arguments
                ["git", "-C", here, *arguments],  # noqa: S607 - the git of the user's PATH
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for arguments in (["log", "-1", "--format=%h", "--", name], ["status", "--porcelain", "--", name])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{outputs[0]}{'+' if outputs[1] else ''}" if outputs[0] else None


def points(history: History) -> list[str]:
    return list(dict.fromkeys(point for record in history for point, split in record.scores if split == "test"))


def curve(history: History, point: str) -> dict[str, list[Any]]:
    """By round: accuracy with equal weight for every client, or for every sample."""
    summaries = [(r.number, r.summary(point)) for r in history.with_point(point)]
    return {
        "round": [number for number, _ in summaries],
        "clients": [share(s.mean) for _, s in summaries],
        "samples": [share(s.by_samples) for _, s in summaries],
    }


def last_trained(history: History) -> tuple[dict[str, list[Any]], dict[str, list[int]]]:
    """Curve and last scores of the models from each client's own last training. The curve starts once all clients that
    ever train have trained, because the mean over a few early ones could be the best."""
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
    """Correct and total of every client in the last measurement."""
    scores = list(history.with_point(point))[-1].scores[point, "test"]
    return dict(zip(("client", "correct", "total"), ([int(v) for v in t.tolist()] for t in scores[:3]), strict=True))


def share(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def outcome(content: dict[str, Any], point: str, report: str, average: str) -> float | None:
    """The number for a table, in percent; None if this training has none."""
    curve = content["history"].get(point, {})
    measured = [v for v in curve.get(average, []) if v is not None]
    if report == "best of every tenth":
        rounds = zip(curve.get("round", ()), curve.get(average, ()), strict=False)
        measured = [v for number, v in rounds if v is not None and number % 10 == 0]
    if not measured:
        return None
    if report.startswith("best"):
        return float(100 * max(measured))
    taken = measured[-LAST:] if report == "mean of last 10" else measured[-1:]
    return float(100 * sum(taken) / len(taken))


def accuracies(content: dict[str, Any], point: str) -> dict[int, float]:
    """Client -> accuracy in the last measurement."""
    last = content["last"].get(point, {"client": (), "correct": (), "total": ()})
    return {c: k / n for c, k, n in zip(last["client"], last["correct"], last["total"], strict=True) if n}
