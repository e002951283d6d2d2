"""Files of checkpoints: tensors as safetensors, rounds as lines of JSON, each with a SHA-256 of its content."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.execution import Scores
from coterie.federation.history import Round
from coterie.runs.disk import open_inside, read_inside, same_file, whole
from coterie.runs.tensor_files import write_packed

FORMAT = 1  # of these files


class Damaged(Exception):
    """A file is incomplete or was changed."""


def write(path: Path, tensors: tree.Tree, about: dict[str, Any]) -> str:
    """Write a file atomically; returns the checksum of its content."""
    about = json.loads(json.dumps({"format": FORMAT, **about}))  # as it will be read
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    found = checksum(tensors, about)
    with whole(path) as part:
        write_packed(part, tensors, {"about": json.dumps(about), "sha256": found})
    return found


def read(path: Path) -> tuple[tree.Tree, dict[str, Any]]:
    try:
        with open_inside(path.parent, path.name) as stream, safe_open(same_file(stream, path), framework="pt") as file:
            metadata = file.metadata()
            about = json.loads(metadata["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        good = metadata["sha256"] == checksum(tensors, about)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Damaged(f"{path} cannot be read ({reason(error)})") from None
    if not good:
        raise Damaged(f"{path} does not match its checksum")
    if about["format"] != FORMAT:
        raise CoterieError(f"{path} is a checkpoint of another version of Coterie")
    return tensors, about


def checksum(tensors: tree.Tree, about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"\n{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(raw(t))
    return digest.hexdigest()


def raw(t: Tensor) -> memoryview:
    t = t.detach().cpu().contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data


def filled(server: Any, tensors: tree.Tree) -> Any:
    """These tensors as a server state of the given form, on its device."""
    form = tree.flatten(server)
    if form.keys() != tensors.keys():
        raise CoterieError(
            f"the checkpoint holds another server state: {', '.join(sorted(form.keys() ^ tensors.keys()))}"
        )
    return tree.fill(server, {name: tensors[name].to(t.device, copy=True) for name, t in form.items()})


def to_line(record: Round) -> bytes:
    content = json.dumps(
        {
            **vars(record),
            "participants": to_text(record.participants),
            "scores": [[*at, *map(to_text, scores)] for at, scores in record.scores.items()],
            "report": {name: to_text(t) for name, t in record.report.items()},
        }
    ).encode()
    return hashlib.sha256(content).hexdigest().encode() + b" " + content + b"\n"


def from_line(line: bytes) -> Round:
    found, _, content = line.partition(b" ")
    if not line.endswith(b"\n") or found != hashlib.sha256(content[:-1]).hexdigest().encode():
        raise Damaged("a line is incomplete or was changed")
    fields = json.loads(content)
    fields["participants"] = from_text(fields["participants"])
    fields["left_out"] = tuple(fields["left_out"])
    fields["scores"] = {(point, split): Scores(*map(from_text, columns)) for point, split, *columns in fields["scores"]}
    fields["report"] = {name: from_text(t) for name, t in fields["report"].items()}
    fields["metric"] = MetricScale(*fields.get("metric", ()))
    fields.pop("higher", None)  # of runs that were not trained for another metric than accuracy
    return Round(**fields)


def to_text(t: Tensor) -> list[Any]:
    """Such as ["float64", [2, 3], "AAAA..."]."""
    return [str(t.dtype).removeprefix("torch."), list(t.shape), base64.b64encode(raw(t)).decode()]


def from_text(text: list[Any]) -> Tensor:
    dtype, shape, content = getattr(torch, text[0]), text[1], bytearray(base64.b64decode(text[2]))
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.zeros(shape, dtype=dtype)


def read_all_records(folder: Path) -> list[Round]:
    """The whole history of a finished run, from its folder of checkpoints."""
    try:
        return [from_line(line) for line in read_inside(folder, "history.jsonl").splitlines(keepends=True)]
    except (OSError, Damaged) as error:
        raise CoterieError(f"{folder / 'history.jsonl'} is damaged: {reason(error)}") from None


def reason(error: Exception) -> str:
    """The system's message, without what safetensors adds."""
    text = str(getattr(error, "strerror", None) or error)
    return text.rpartition("I/O error: ")[2].partition(" (os error")[0]
