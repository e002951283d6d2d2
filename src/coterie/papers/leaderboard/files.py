"""The files of a leaderboard: one for each tuning, and one for each benchmark, method and seed."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from coterie.analysis.lookup import method_name
from coterie.analysis.outcomes import title
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.core.validation import MappingReader
from coterie.papers.leaderboard.rules import Benchmark, BoardRules
from coterie.papers.results import ResultFolder, Unwritable
from coterie.runs.disk import check_tree, read_inside, subfolder, whole

SEARCHES = "searches"  # folder of unfinished tunings
MOST_BYTES = 2**20  # of a file; real ones have a few kB
NAME = re.compile(r"[\w.-]{1,200}\.json")
PROVENANCE = ("date", "coterie", "commit", "hardware", "libraries", "precision", "seconds")  # not what was found
WITHDRAWN = ("refused", "failed")  # why there are no numbers


class FileKey(NamedTuple):
    """The cell and seed that a file belongs to."""

    benchmark: str
    method: str
    seed: int | None  # None: the tuning

    @property
    def path(self) -> PurePosixPath:
        plain = re.sub(r"[^\w.-]+", "-", self.method)
        return PurePosixPath(self.benchmark, f"{plain}-{'tuning' if self.seed is None else f'seed{self.seed}'}.json")

    @property
    def text(self) -> str:
        what = "tuning" if self.seed is None else f"seed {self.seed}"
        return f"{title(self.method)} on {self.benchmark}, {what}"


Contents = dict[FileKey, dict[str, Any]]


class BoardFolder(ResultFolder):
    """Such files."""

    def __init__(self, folder: Path, rules: BoardRules) -> None:
        super().__init__(folder)
        self.rules = rules

    def load(self) -> Contents:
        """All files, each valid, and all of these rules."""
        found: Contents = {}
        if self.folder.is_dir():
            check_tree(self.folder)
            for path, content in folder_files(self.folder):
                key = checked(f"{self.folder / path}", content, self.rules)
                if key.path != path:
                    raise CoterieError(f"{self.folder / path}: its content is {key.text}, which belongs in {key.path}")
                found[key] = content
        for key, content in found.items():
            check_settings(self.folder / key.path, found, key, content)
        return found

    def add(self, key: FileKey, content: dict[str, Any]) -> Path:
        """Write a file atomically."""
        path = self.folder / key.path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            subfolder(self.folder, key.benchmark, make=True)
            with whole(path, shared=True) as part:
                part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise Unwritable(f"cannot write {path}: {error.strerror}") from None
        return path

    def merge(self, sources: Sequence[Path]) -> int:
        """Add the files of other folders or archives. All are checked before one is written. Returns how many are new.

        Two files of one cell must agree in everything but when, where and how fast they were made.
        """
        known = self.load()
        origin = {key: str(self.folder / key.path) for key in known}
        new: Contents = {}
        for source in sources:
            for path, content in packed_files(source) if source.is_file() else folder_files(existing(source)):
                where = f"{source}: {path}"
                key = checked(where, content, self.rules)
                if key not in known:
                    known[key] = new[key] = content
                    origin[key] = where
                elif difference := conflict(known[key], content):
                    raise CoterieError(
                        f"{where} and {origin[key]} are both {key.text}, and differ in {difference}; nothing was "
                        "merged: delete one of them, and for a tuning also the results of its settings"
                    )
        for key, content in new.items():
            check_settings(origin[key], known, key, content)
        for key, content in new.items():
            self.add(key, content)
        return len(new)

    def pack(self, path: Path) -> Path:
        """Write all files into one archive, which `merge` reads."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in folder_files(self.folder):
                text = json.dumps(content).encode() + b"\n"
                entry = tarfile.TarInfo(str(name))
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
        try:
            with whole(path, shared=True) as part:
                part.write_bytes(buffer.getvalue())
        except OSError as error:
            raise Unwritable(f"cannot write {path}: {error.strerror}") from None
        return path


def existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise CoterieError(f"{folder}: no such folder or archive")
    check_tree(folder)
    return folder


def folder_files(folder: Path) -> Iterator[tuple[PurePosixPath, dict[str, Any]]]:
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name != SEARCHES:
            name = PurePosixPath(path.parent.name, path.name)
            try:
                yield name, loaded(str(path), read_inside(folder, str(name)))
            except OSError as error:
                raise CoterieError(f"{path}: cannot be read: {error.strerror}") from None


def packed_files(path: Path) -> Iterator[tuple[PurePosixPath, dict[str, Any]]]:
    try:
        with tarfile.open(path) as archive:
            for entry in archive:
                name = PurePosixPath(entry.name)
                if not entry.isfile() or len(name.parts) != 2 or not NAME.fullmatch(name.name):
                    raise CoterieError(f"{path}: {entry.name!r:.80} is not a file of a leaderboard")
                if entry.size > MOST_BYTES:
                    raise CoterieError(f"{path}: {name} has {entry.size:,} bytes; at most {MOST_BYTES:,} are read")
                file = archive.extractfile(entry)
                assert file is not None
                yield name, loaded(f"{path}: {name}", file.read())
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CoterieError(f"{path}: not an archive of a leaderboard: {error}") from None


def loaded(where: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CoterieError(f"{where}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CoterieError(f"{where}: must be a mapping")
    return content


def checked(where: str, content: dict[str, Any], rules: BoardRules) -> FileKey:
    """The cell and seed that a file belongs to; an error if it is invalid or of other rules."""
    try:
        keys = MappingReader("", content)
        benchmark, method = keys.take("benchmark", str), method_name(keys.take("method", str))
        seed, own = keys.take("seed", int | None), keys.take("protocol", str)
        known: dict[str, Benchmark] = {b.id: b for b in rules.benchmarks}
        if benchmark not in known:
            raise CoterieError(f"the rules have no benchmark '{benchmark}'")
        if own != rules.hash(known[benchmark], method):
            raise CoterieError(
                f"was made under other rules: the definition of {benchmark}, the budget or the space of "
                f"{title(method)} has changed; use another folder"
            )
        if seed is not None and seed not in rules.seeds:
            raise CoterieError(f"seed {seed} is not a seed of the rules")
        for name in ("date", "precision"):
            keys.take(name, str)
        keys.take("commit", str | None)
        MappingReader("hardware: ", keys.take("hardware", dict)).take("machine", str)
        MappingReader("libraries: ", keys.take("libraries", dict)).take("torch", str)
        keys.take("seconds", float)
        if any(keys.take(name, str | None, None) is not None for name in WITHDRAWN):
            return FileKey(benchmark, method, seed)
        keys.take("settings", dict)
        if seed is None:
            check_standings(keys.take("standings", list), rules.trials)
        else:
            check_scores(keys)
    except CoterieError as error:
        raise CoterieError(f"{where}: {error}") from None
    return FileKey(benchmark, method, seed)


def check_standings(standings: list[Any], trials: int) -> None:
    if len(standings) != trials:
        raise CoterieError(f"standings: {len(standings)} settings, but every method tries {trials}")
    for number, standing in enumerate(standings):
        keys = MappingReader(f"standings[{number}].", standing)
        keys.take("settings", dict)
        keys.take("mean", float | None)


def check_scores(keys: MappingReader) -> None:
    metric = metric_of(keys.take("metric", dict))
    scores = keys.take("scores", tuple[float, ...])
    if not scores or (metric.share and not all(0 <= score <= 1 for score in scores)):
        raise CoterieError(f"scores: needs one {metric.words} for each client, between 0 and 1")
    for name in ("bytes_up", "bytes_down", "left_out"):
        keys.take(name, int)
    keys.take("calibration", float | None)
    keys.take("measured", str)


def metric_of(content: dict[str, Any]) -> MetricScale:
    keys = MappingReader("metric: ", content)
    found = MetricScale(keys.take("name", str), *(keys.take(name, bool) for name in MetricScale._fields[1:]))
    keys.close()
    return found


def check_settings(where: object, found: Contents, key: FileKey, content: dict[str, Any]) -> None:
    """Raise an error for a result that was not trained with the settings that its tuning chose."""
    tuning = found.get(key._replace(seed=None))
    if key.seed is None or content.get("failed") is not None:
        return
    if tuning is None:
        raise CoterieError(f"{where}: the tuning that chose its settings is missing: {key._replace(seed=None).path}")
    if tuning.get("settings") != content["settings"]:
        raise CoterieError(
            f"{where}: trained with {content['settings']}, but {title(key.method)} was tuned to "
            f"{tuning.get('settings')} on {key.benchmark}; delete the results of one of them"
        )


def conflict(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first thing in which two files of one cell differ, apart from their provenance."""
    for name in dict.fromkeys((*one, *other)):
        if name not in PROVENANCE and essence(one.get(name)) != essence(other.get(name)):
            return f"{name} ({one.get(name)!r:.60} and {other.get(name)!r:.60})"
    return None


def essence(value: Any) -> Any:
    """Without the seconds of trials."""
    if isinstance(value, list):
        return [essence(part) for part in value]
    return {k: v for k, v in value.items() if k != "seconds"} if isinstance(value, dict) else value
