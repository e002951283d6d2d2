"""Data of users that nobody would write on purpose: damaged, hostile, huge, oddly named."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import CoterieError
from coterie.data.user import check, reading
from coterie.data.user.pickled import read_pickled_dict
from coterie.data.user.reading import Notes


def arrays(n: int = 24) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {"x": draw.normal(size=(n, 3)).astype(np.float32), "y": np.arange(n) % 2, "client": np.arange(n) // 8}


def write_csv(path: Path) -> None:
    given = arrays()
    rows = [f"{a},{b},{c},{y},site {own}" for (a, b, c), y, own in zip(*given.values(), strict=True)]
    path.write_text("\n".join(["a,b,c,label,site", *rows]), encoding="utf-8")


def write_parquet(path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    given = arrays()
    columns = {name: given["x"][:, i] for i, name in enumerate("abc")}
    parquet.write_table(arrow.table({**columns, "label": given["y"], "client": given["client"]}), path)


def write_pfllib(path: Path) -> None:
    np.savez_compressed(path, data=np.array({"x": arrays()["x"], "y": arrays()["y"]}, dtype=object))


def write_arrow(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    given = arrays()
    table = arrow.table({"x": given["x"].tolist(), "label": given["y"], "client": given["client"]})
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (path.parent / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    (path.parent / "dataset_info.json").write_text("{}")


def write_images(path: Path) -> None:
    from PIL import Image

    for client in "ab":
        for label in "xy":
            (path.parent / client / label).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), 7, np.uint8)).save(path.parent / client / label / "1.png")
    os.replace(path.parent / "a" / "x" / "1.png", path)


FORMS: dict[str, tuple[Callable[[Path], object], str, str]] = {  # writer, file that is damaged, what is read
    "npz": (lambda p: np.savez(p, **arrays()), "data.npz", "data.npz"),
    "packed": (lambda p: np.savez_compressed(p, **arrays()), "data.npz", "data.npz"),
    "csv": (write_csv, "data.csv", "data.csv"),
    "parquet": (write_parquet, "data.parquet", "data.parquet"),
    "pfllib": (write_pfllib, "train/0.npz", "."),
    "arrow": (write_arrow, "data.arrow", "."),
    "image": (write_images, "a/x/2.png", "."),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_give_errors_or_data(tmp_path: Path, form: str) -> None:
    """Bytes changed, cut off and put in at random: a report or a CoterieError comes back, and nothing else."""
    write, name, read = FORMS[form]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    whole, draw, refused = path.read_bytes(), random.Random(form), 0
    assert len(check(tmp_path / read).clients) >= 1
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 3, 20))):
            at = draw.randrange(len(content))
            content[at : at + draw.choice((0, 1, 1, 9))] = draw.randbytes(draw.choice((0, 1, 1, 9)))
        path.write_bytes(content[: draw.choice((len(content), draw.randrange(len(content))))])
        try:
            refused += not check(tmp_path / read).fine
        except CoterieError:
            refused += 1
    assert refused > 30


def test_pickle_that_asks_for_memory_is_refused(tmp_path: Path) -> None:
    header = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"
    for attack, told in (
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "too much memory"),  # a memo of 2^31 places
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "cannot be read"),  # 2^60 bytes
        (pickle.dumps(np.zeros(3), 2), "cannot be read"),
        (pickle.dumps({"x": np.array(["a"]), "y": Path("a")}, 4), "cannot be read"),
        (b"\x80\x02cnumpy\ndtype\nN}U\x01aK\x01s\x86b.", "cannot be read"),  # changes a stand-in
        (b"\x80\x02c_codecs\nencode\nN}U\x01aK\x01s\x86b.", "cannot be read"),
    ):
        with zipfile.ZipFile(tmp_path / "0.npz", "w") as archive:
            archive.writestr("data.npy", header + attack)
        with pytest.raises(CoterieError, match=told):
            read_pickled_dict(tmp_path / "0.npz", Notes())


def test_big_endian_and_fortran_arrays_in_pickles(tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4).astype(">f8"))
    y = np.array([1, 0, 1], ">i2")
    np.savez(tmp_path / "0.npz", data=np.array({"x": x, "y": y}, dtype=object))
    found = read_pickled_dict(tmp_path / "0.npz", Notes())
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["y"], y)


def test_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((1000, 100)), y=np.zeros(1000), client=np.zeros(1000))
    monkeypatch.setattr(reading, "memory", lambda: 100_000)
    with pytest.raises(CoterieError, match=r"zeros\.npz.*a quarter of the memory"):
        check(tmp_path / "zeros.npz")


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv")
    os.mkfifo(tmp_path / "b.csv")
    with pytest.raises(CoterieError, match="no data that can be read"):
        check(tmp_path / "b.csv")
    assert len(check(tmp_path, reading.Reading(client_column="site")).clients) == 3


def test_a_folder_with_one_file_is_one_client(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "me.csv").write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(8)))
    assert check(tmp_path / "only").clients == ("me",)


def test_splits_above_the_clients_are_not_clients(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / split / "cat" / "1.png")
    with pytest.raises(CoterieError, match="a folder for each client"):
        check(tmp_path)


def test_mixed_types_and_missing_clients_are_told(tmp_path: Path) -> None:
    for client, kind in enumerate(("float32", "uint8", "float32")):
        (tmp_path / "mixed" / "train").mkdir(parents=True, exist_ok=True)
        content = {"x": np.ones((4, 1, 3, 3), kind), "y": np.arange(4)}
        np.savez(tmp_path / "mixed" / "train" / f"{client}.npz", data=np.array(content, dtype=object))
    told = {p.what: p.examples for p in check(tmp_path / "mixed").problems}
    assert (
        "1.npz, row 0, 4 samples: 1 x 3 x 3 uint8, most have 1 x 3 x 3 float32"
        in told["different number type than the rest"][0].rpartition("/")[2]
    )
    (tmp_path / "a.csv").write_text("a,client,label\n1,x,0\n2,x,1\n3,,1\n4,,0\n")
    told = {p.what: p.examples for p in check(tmp_path / "a.csv").problems}
    assert told["sample without a client"][0].endswith("a.csv, line 4")


@pytest.mark.long
def test_odd_names_are_printed_everywhere(tmp_path: Path) -> None:
    """File names that are not text, on a terminal that knows ASCII only; the run's files are written too."""
    folder = os.path.join(os.fsencode(tmp_path), b"d\xff ata")
    os.mkdir(folder)
    for name in (b"\xfe.csv", "日本 ü.csv".encode()):
        with open(os.path.join(folder, name), "w") as file:
            file.write("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(8)))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "coterie", "data", "check", os.fsdecode(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 clients, 16 samples" in done.stdout
    data = coterie.load_clients(os.fsdecode(folder))
    coterie.run("local", data, "linear", rounds=1, out=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert "日本 ü" in config["data"]["client_names"]


@pytest.mark.parametrize("kind", [np.float16, np.uint8])
def test_images_of_any_type_train_alike_looped_and_stacked(tmp_path: Path, kind: type) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (60, 1, 16, 16)) if kind is np.uint8 else draw.random((60, 1, 16, 16))
    np.savez(tmp_path / "a.npz", x=x.astype(kind), y=np.arange(60) % 3, client=np.arange(60) // 20)
    data = coterie.load_clients(str(tmp_path / "a.npz"), normalise="auto")
    assert data.train.x.dtype == (torch.uint8 if kind is np.uint8 else torch.float16)
    looped, stacked = (coterie.run("fedpac", data, "cnn", rounds=2, backend=w) for w in ("looped", "stacked"))
    for client in range(3):
        images, _ = data.test.client(client)
        ours, theirs = (result.personal_model(client)(images) for result in (looped, stacked))
        assert ours.shape == (5, 3)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
