"""The prediction server of docs/personal-models.md: the client's model by token, and what it refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import coterie
from coterie.personal.export import export
from tests import toy
from tests.personal.conftest import Made

PAGE = Path(__file__).parent.parent.parent / "docs" / "personal-models.md"


Application = Callable[[dict[str, Any], Callable[..., None]], list[bytes]]


def server() -> Application:
    (code,) = re.findall(r"^```python\n(# predictions\.py\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    module: dict[str, Any] = {}
    exec(code, module)
    application: Application = module["application"]
    return application


def ask(
    application: Application, body: bytes, size: object = None, who: str = "Bearer a-long-random-token"
) -> tuple[str, dict[str, Any]]:
    found: list[str] = []
    length = str(len(body) if size is None else size)
    asked = {"HTTP_AUTHORIZATION": who, "CONTENT_LENGTH": length, "wsgi.input": io.BytesIO(body)}
    answer = application(asked, lambda status, headers: found.append(status))
    return found[0][:3], json.loads(b"".join(answer))


def cut(x: Tensor, value: float) -> bytes:
    """One sample with this value for its first pixel."""
    sample = x[:1].tolist()
    sample[0][0][0][0] = value
    return json.dumps(sample).encode()


def test_the_server_of_the_page(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = made("fedper")
    monkeypatch.chdir(tmp_path)
    export(run, 2, "onnx", tmp_path / "client-2.onnx")
    application = server()
    x, _ = toy.toy().test.client(2)
    samples = json.dumps(x.tolist()).encode()
    best = run.personal_model(2)(x).argmax(1)
    assert ask(application, samples) == ("200", {"classes": [(run.class_names or "0123456789")[k] for k in best]})
    for wrong in ("", "Bearer ", "Bearer a-long-random-tokem", "Basic a-long-random-token", "Bearer é"):
        assert ask(application, samples, who=wrong) == ("401", {"error": "unknown token"})
    for body in (b"", b"[", b"[[1, 2]]", b'{"x": 1}', b'["a"]', samples[:-1], cut(x, -1), cut(x, 3.5), cut(x, 300)):
        status, told = ask(application, body)
        assert status == "400", body[:20]
        assert told["error"].startswith("expected samples {")
    assert ask(application, samples, size="many")[0] == "400"
    assert ask(application, samples, size=20_000_000)[0] == "413"


def test_the_server_of_the_page_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of unknown categories and gaps are refused, since the network would take them."""
    monkeypatch.chdir(tmp_path)
    ward = {"a": [0.1, 0.9] * 10, "sex": ["f", "m"] * 10, "label": [0, 1] * 10}
    clients = coterie.clients_from({"north": ward, "south": ward})
    coterie.run("local", clients, "linear", rounds=1, progress=False, out="run", backend=toy.IN_TURN)
    export(coterie.load_run("run"), "north", "onnx", tmp_path / "client-2.onnx")
    application = server()
    assert ask(application, b"[[0.5, 1]]")[0] == "200"
    for body in (b"[[0.5, 2]]", b"[[0.5, -1]]", b"[[0.5, 0.5]]", b"[[NaN, 1]]", b"[[0.5, NaN]]", b"[[0.5]]"):
        assert ask(application, body)[0] == "400", body
