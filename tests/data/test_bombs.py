"""Small files that would take much time or memory: refused in one sentence, within bounds of both."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import CoterieError
from coterie.core.validation import MOST_LETTERS, fitting, load_yaml
from coterie.data.user import check
from coterie.data.user.bounds import MOST_COLUMNS
from coterie.data.user.pickled import read_pickled_dict
from coterie.data.user.reading import Notes

SECONDS, MEGABYTES = 10.0, 900  # for one file, on top of what Python and torch take
READ = """
import json, resource, sys, time
from coterie.core.errors import CoterieError
from coterie.data.user import check, reading
reading.memory = lambda: 4 << 30  # the same limits on every machine
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # so that a failing test does not stop the machine
for path in sys.argv[1:]:
    before, start, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), "read"
    try:
        report = check(path)
        said = "read" if report.fine else str(report.problems[0])
    except CoterieError as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([said, time.monotonic() - start, grown / 1024]))
"""


def wide_csv(path: Path) -> None:
    names = [f"c{i}" for i in range(10**6)]
    path.write_text(",".join(["y", "client", *names]) + "\n" + ",".join(["0"] * (10**6 + 2)) + "\n")


def twin_columns(path: Path) -> None:
    names = [f"c{i}" for i in range(100_000)]
    path.write_text(",".join(["y", "client", *names, "c7"]) + "\n")


def endless_row(path: Path) -> None:
    path.write_text("a,y,client\n" + '"\n",' * 10**7)


def long_client(path: Path) -> None:
    path.write_text("a,y,client\n" + f"1,0,{'x' * 100_000}\n" + "1,1,b\n" * 200_000)


def repeated_text(path: Path) -> None:
    """One long text, 50,000 times by its number: 5 GB when each row gets its own."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    client = arrow.DictionaryArray.from_arrays(np.zeros(50_000, np.int32), ["x" * 100_000])
    columns = {"a": np.zeros(50_000), "y": np.arange(50_000) % 2, "client": client}
    parquet.write_table(arrow.table(columns), path)


def repeated_number(path: Path) -> None:
    """5 * 10^7 rows of three numbers: 1.2 GB in memory."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = arrow.table({name: np.zeros(10**7, np.int64) for name in ("a", "y", "client")})
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for _ in range(5):
            writer.write_table(table, row_group_size=10**7)


def hugging_face(path: Path, table: Any, compression: str | None = None) -> None:
    import pyarrow as arrow

    path.mkdir()
    options = arrow.ipc.IpcWriteOptions(compression=compression)
    with (
        arrow.OSFile(str(path / "data.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


def compressed_arrow(path: Path) -> None:
    import pyarrow as arrow

    zeros = np.zeros(3 * 10**7, np.int64)
    hugging_face(path, arrow.table({"a": zeros, "label": zeros, "client": zeros}), "zstd")


def rows_of_nothing(path: Path) -> None:
    import pyarrow as arrow

    hugging_face(path, arrow.table({name: arrow.nulls(10**9) for name in ("a", "label", "client")}))


def empty_values(path: Path) -> None:
    """An array of 10^9 texts of no letters, which takes no byte in the file."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x", "y", "client"):
            content = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                content, {"descr": "<U0", "fortran_order": False, "shape": (3 * 10**8,)}
            )
            archive.writestr(f"{name}.npy", content.getvalue())


BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {  # file, what writes it, what is said of it
    "columns": ("wide.csv", wide_csv, "1,000,002 columns; a table may have at most 200,000"),
    "twins": ("twins.csv", twin_columns, "two columns have the same name: 'c7'"),
    "row": ("row.csv", endless_row, "a row has more than 16,777,216 characters"),
    "client": ("client.csv", long_client, "more than a quarter of the memory"),
    "text": ("text.parquet", repeated_text, "more than a quarter of the memory"),
    "number": ("number.parquet", repeated_number, "more than a quarter of the memory"),
    "compressed": ("compressed", compressed_arrow, "holds compressed buffers"),
    "nulls": ("nulls", rows_of_nothing, "more than a quarter of the memory"),
    "nothing": ("nothing.npz", empty_values, "holds 300,000,000 empty values"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float, float]]:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("bombs")
    for name, write, _ in BOMBS.values():
        write(folder / name)
    command = [sys.executable, "-c", READ, *(str(folder / name) for name, _, _ in BOMBS.values())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), done.stderr[-2000:]
    return dict(zip(BOMBS, lines, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_in_bounded_time_and_memory(outcomes: dict[str, Any], bomb: str) -> None:
    said, seconds, megabytes = outcomes[bomb]
    assert BOMBS[bomb][2] in said
    assert "\n" not in said
    assert len(said) < 400
    assert seconds < SECONDS
    assert megabytes < MEGABYTES


@pytest.mark.long
def test_as_many_columns_as_allowed_are_read(tmp_path: Path) -> None:
    columns = MOST_COLUMNS - 2
    header = ",".join(["y", "client", *(f"c{i}" for i in range(columns))])
    rows = "".join(f"{i % 2},{i // 4},{','.join(['1'] * columns)}\n" for i in range(8))
    (tmp_path / "a.csv").write_text(f"{header}\n{rows}")
    assert check(tmp_path / "a.csv").shape == (columns,)


HEADER = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"
DOUBLED = b"(t" + b"q\x00h\x00\x86" * 60  # a tuple of itself twice, 60 times over


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x02}" + DOUBLED + b"K\x01s.",  # as a key, which is hashed
        b"\x80\x02}U\x01a" + DOUBLED + b"s.",
        b"\x80\x02}(t" + b"2\x86" * 60 + b"K\x01s.",  # by DUP
        b"\x80\x02}(t" + b"N0q\x00h\x00\x86" * 60 + b"K\x01s.",  # with something in between
        b"\x80\x02}(t" + b"Nbq\x00h\x00\x86" * 60 + b"K\x01s.",
        b"\x80\x04}(t" + b"\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60)) + b"K\x01s.",
        b"\x80\x02cnumpy\ndtype\n" + DOUBLED + b"\x85R.",
    ],
)
def test_doubled_tuples_in_pickles_are_refused(tmp_path: Path, attack: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "0.npz", "w") as archive:
        archive.writestr("data.npy", HEADER + attack)
    with pytest.raises(CoterieError, match="cannot be read as a dictionary of arrays"):
        read_pickled_dict(tmp_path / "0.npz", Notes())


def test_pickles_of_numpy_are_read_in_every_protocol(tmp_path: Path) -> None:
    import pickle

    x, y = np.arange(12.0).reshape(4, 3), np.arange(4)
    for protocol in range(6):
        with zipfile.ZipFile(tmp_path / "0.npz", "w") as archive:
            archive.writestr("data.npy", HEADER + pickle.dumps({"x": x, "y": y, "again": x}, protocol))
        if protocol == 5:
            continue  # NumPy stores such arrays out of band, in a form that no version of PFLlib wrote
        found = read_pickled_dict(tmp_path / "0.npz", Notes())
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["again"], x)
        np.testing.assert_array_equal(found["y"], y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("".join(f"key{i}: 1\n" for i in range(100_000)), f"at most {MOST_LETTERS:,} are read"),
        ("".join(f"k{i}: 1\n" for i in range(20_000)) + "k5: 2\n", "'k5' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "aliases"),
        ("a: &a {x: 1}\nb: {<<: *a}\n", "aliases"),
        ("a: 2020-99-99\n", "not YAML"),
        (f"a: {'9' * 10_000}\n", "not YAML"),
    ],
)
def test_yaml_bombs_are_refused(text: str, said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        load_yaml(text)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1" + "0" * 400])
def test_settings_are_finite(value: str) -> None:
    with pytest.raises(CoterieError, match=r"^lr is .*: it must be a finite number"):
        fitting("lr", load_yaml(f"lr: {value}")["lr"], float)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dataset_info.json", '{"features": [1, 2]}'),
        ("dataset_info.json", '{"features": "label"}'),
        ("dataset_info.json", "[" * 100_000),
        ("state.json", '{"_data_files": 3}'),
        ("state.json", '{"_data_files": [[]]}'),
        ("dataset_dict.json", '{"splits": {"train": 1}}'),
        ("dataset_dict.json", '{"splits": 3}'),
    ],
)
def test_odd_files_of_hugging_face_give_one_line(tmp_path: Path, file: str, content: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    hugging_face(tmp_path / "d", arrow.table({"x": [1.0, 2.0], "label": [0, 1], "client": [0, 0]}))
    (tmp_path / "d" / file).write_text(content)
    with pytest.raises(CoterieError, match=r"\A[^\n]*\Z"):
        check(tmp_path / "d")
