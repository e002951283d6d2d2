"""Heart disease in four hospitals (UCI): a federation that nobody had to simulate.

Target: is there any disease (diagnosis 1 to 4) or none (0). Of 14 columns 13 are inputs. Values that cannot be are
missing ones: a cholesterol or a blood pressure of 0. Missing values become the median (measurements) or the most
frequent value (categories) of the training patients; columns of which more than a tenth is missing get a second
column that says so. The categories without an order (chest pain, ECG, thallium scan) become one column per value.
All columns are standardised with the training patients' mean and deviation. These statistics are over all hospitals
together. In each hospital every fourth patient of each class, in file order, is a test patient.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError

CATEGORIES = {"sex", "cp", "fbs", "restecg", "exang", "slope", "thal"}
UNORDERED = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "thal": (3, 6, 7)}
NEVER_ZERO = ("trestbps", "chol")

Floats = NDArray[np.float32]


class Patients(NamedTuple):
    x: Floats  # (920, F)
    y: NDArray[np.int64]  # (920,) 1: disease
    hospital: NDArray[np.int64]  # (920,)
    test: NDArray[np.bool_]  # (920,) a test patient


def read_heart(path: Path) -> Patients:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, y, hospital = file["x"], file["y"] > 0, file["hospital"].astype(np.int64)
            columns = [str(name) for name in file["columns"][:-1]]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CoterieError(f"{path}: damaged; install Coterie again ({error})") from error
    test = every_fourth(2 * hospital + y)
    return Patients(inputs(x, columns, ~test), y.astype(np.int64), hospital, test)


def every_fourth(stratum: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) True for every fourth member of each stratum."""
    chosen = np.zeros(len(stratum), bool)
    for value in np.unique(stratum):
        chosen[np.flatnonzero(stratum == value)[3::4]] = True
    return chosen


def inputs(x: Floats, columns: list[str], train: NDArray[np.bool_]) -> Floats:
    """(N, F) complete and standardised, from raw columns (N, 13) with gaps."""
    made: list[Floats] = []
    for name, raw in zip(columns, x.T, strict=True):
        missing = np.isnan(raw) | ((raw == 0) & (name in NEVER_ZERO))
        known = raw[train & ~missing]
        values = np.where(missing, mode(known) if name in CATEGORIES else np.median(known), raw)
        made += [values == option for option in UNORDERED[name]] if name in UNORDERED else [values]
        if missing[train].mean() > 0.1:
            made.append(missing)
    table: Floats = np.stack(made, axis=1).astype(np.float32)
    standard: Floats = (table - table[train].mean(axis=0)) / table[train].std(axis=0)
    return standard


def mode(values: Floats) -> float:
    options, counts = np.unique(values, return_counts=True)
    return float(options[counts.argmax()])
