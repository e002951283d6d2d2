"""A folder that exists already: what is resumed, replaced or refused, and what is never touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.runs.disk import lock
from tests import toy
from tests.api.test_run import Interrupter

HOW: dict[str, Any] = {"backend": toy.IN_TURN, "progress": False}
FLAGS = ["--num-clients", "3", "--local-size", "30", "--test-size", "10", "--model", "linear", "--processes", "1",
         "--json"]  # fmt: skip


def run(out: Path, rounds: int = 2, **how: Any) -> coterie.Result:
    return coterie.run(toy.method("fedper"), toy.toy(), toy.network(), rounds=rounds, out=out, **HOW | how)


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_cell_that_is_run_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = run(out, exist="resume")  # nothing there: it starts
    before = state(out)
    again = run(out, exist="resume")
    assert again.history.curve("pre") == first.history.curve("pre")
    assert state(out).keys() == before.keys()
    assert (out / "metrics.csv").read_bytes() == before["metrics.csv"]  # not trained again
    assert len(run(out, rounds=3, exist="resume").history) == 3
    with pytest.raises(CoterieError, match=r"not the run that was started: federation\.seed was 0 and is 5"):
        run(out, rounds=3, exist="resume", seed=5)
    with pytest.raises(CoterieError, match=r"exists already; .*exist='resume' or exist='replace'") as refused:
        run(out)
    assert "remove" not in str(refused.value)


def test_a_run_is_replaced_when_the_new_one_is_done(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out)
    before = state(out)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after round 1; .*run\.new"):
        run(out, exist="replace", seed=5, watch=Interrupter(1), rounds=4)
    assert state(out) == before
    assert len((tmp_path / "run.new" / "metrics.csv").read_text().splitlines()) == 2  # what there was is kept
    seen = []
    result = run(out, exist="replace", seed=5, watch=lambda record: seen.append(state(out) == before))
    assert seen == [True, True]
    assert result.folder == out
    assert json.loads((out / "config.json").read_text())["federation"]["seed"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert coterie.load_run(out, toy.network()).personal_model(0) is not None


def test_what_is_not_a_run_is_never_replaced(tmp_path: Path) -> None:
    thesis, linked, noted, used = (tmp_path / name for name in ("thesis", "linked", "noted", "used"))
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("years of work")
    run(used)
    run(noted)
    (noted / "notes.md").write_text("mine")
    linked.symlink_to(used)
    before = state(tmp_path)
    for path, said in (
        (thesis, "is not the folder of a run or comparison"),
        (noted, r"holds notes\.md, which no run wrote"),
        (linked, "is a link"),
    ):
        with pytest.raises(CoterieError, match=said):
            run(path, exist="replace")
    with lock(used / "config.json"), pytest.raises(CoterieError, match="another process is using"):
        run(used, exist="replace")
    with pytest.raises(CoterieError, match="there is nothing to resume"):
        run(thesis, exist="resume")
    (tmp_path / "used.new").mkdir()
    (tmp_path / "used.new" / "own").write_text("mine, by chance of this name")
    with pytest.raises(CoterieError, match=r"used\.new is not the folder"):
        run(used, exist="replace")
    (tmp_path / "used.new" / "own").unlink()
    os.rmdir(tmp_path / "used.new")
    assert state(tmp_path) == before
    with pytest.raises(CoterieError, match="pass one as `out`"):
        coterie.run("local", toy.toy(), toy.network(), exist="replace")
    with pytest.raises(CoterieError, match="unknown value of exist 'replac': did you mean 'replace'"):
        run(used, exist="replac")


def test_a_file_that_is_put_there_while_the_run_trains_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out)
    run(out, exist="replace", watch=lambda record: (out / "thesis.tex").write_text("mine") and None)
    assert (tmp_path / "run.old" / "thesis.tex").read_text() == "mine"
    assert (out / "result.json").exists()


@pytest.mark.long
def test_comparisons(tmp_path: Path) -> None:
    out = tmp_path / "c"

    def compare(methods: list[str], **how: Any) -> coterie.Comparison:
        about = {"seeds": 1, "rounds": 1, "lr": 0.1, "out": out, **HOW, **how}
        return coterie.compare(methods, toy.toy(), toy.network(), **about)

    compare(["local"])
    before = state(out / "local-seed0")
    assert compare(["local", "fedper"], exist="resume").methods == ["Local", "FedPer"]
    assert state(out / "local-seed0") | {"log.txt": b""} == before | {"log.txt": b""}
    with pytest.raises(CoterieError, match=r"method\.train\.lr was 0\.1 and is 0\.2"):
        compare(["local", "fedper"], exist="resume", lr=0.2)  # of a finished run, too
    with pytest.raises(CoterieError, match=r"holds runs that are not part of this comparison \(fedper-seed0\)"):
        compare(["local"], exist="resume")
    assert compare(["local"], exist="replace", lr=0.2).methods == ["Local"]
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "local-seed0"]
    assert json.loads((out / "compare.json").read_text())["folder"] == str(out)


@pytest.mark.long
def test_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "c")

    def compare(*more: str) -> list[str]:
        main(["compare", "local", "fedper", *FLAGS, "--out", out, *more])
        return [row["method"] for row in json.loads(capsys.readouterr().out)["outcomes"]]

    assert compare("--rounds", "1", "--exist", "resume") == ["Local", "FedPer"]
    assert compare("--rounds", "2", "--exist", "resume") == ["Local", "FedPer"]
    assert len((tmp_path / "c" / "local-seed0" / "metrics.csv").read_text().splitlines()) == 3
    main(["resume", out, "--json"])  # its command is the last one
    assert "is finished" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare("--rounds", "2", "--lr", "0.5", "--exist", "resume")
    assert "lr was 0.01 and is 0.5" in capsys.readouterr().err
    assert compare("--rounds", "1", "--lr", "0.5", "--exist", "replace") == ["Local", "FedPer"]
    single = ["run", "local", *FLAGS, "--rounds", "1", "--out", str(tmp_path / "one")]
    main(single)
    for more in (["--exist", "resume"], ["--exist", "replace", "--seed", "3"]):
        main([*single, *more])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*single, "--seed", "4", "--exist", "resume"])
    assert "federation.seed was 3 and is 4" in capsys.readouterr().err


def test_what_a_notebook_shows_is_short(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=9)
    read = coterie.load_run(tmp_path / "run", toy.network())
    for thing in (result, result.history, result.history[0], result.model, read, read.history, toy.toy()):
        assert len(repr(thing)) < 1200, repr(thing)
        assert "tensor(" not in repr(thing)
        assert " object at 0x" not in repr(thing)
    first, *lines = repr(result.history).splitlines()
    assert first == "History of 9 rounds"
    assert [line.split(":")[0].strip() for line in lines] == [
        "Round 1", "Round 2", "Round 3", "...", "Round 7", "Round 8", "Round 9"]  # fmt: skip
    mean = 100 * (result.history[0].score("pre") or 0)
    assert f"pre {mean:.2f} %" in lines[0]
    first, *lines = repr(read).splitlines()
    assert first == "Run of FedPer on toy, 5 clients, 9 rounds"
    assert lines == repr(result).splitlines()[1:]
    assert f"  folder: {tmp_path / 'run'}" in lines
