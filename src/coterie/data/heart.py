"""Heart disease in four hospitals (UCI): a natural federation, not a simulated one.

Target: any disease (diagnosis 1 to 4) or none (0). The samples are the other 13 columns in clinical units, NaN where a
value is missing. A cholesterol or blood pressure of 0 is impossible and counts as missing. The model fills missing
values with the median (measurements) or the most frequent value (categories) of the training patients; columns with
more than a tenth missing get an indicator input. Unordered categories (chest pain, ECG, thallium scan) are one-hot
encoded. All inputs are standardized with the training patients' mean and standard deviation. These statistics are
pooled over all hospitals. In each hospital every fourth patient of each class, in file order, is a test patient.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.core.preprocess import Preprocess

CATEGORIES = {"sex", "cp", "fbs", "restecg", "exang", "slope", "thal"}
UNORDERED = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "thal": (3, 6, 7)}
NEVER_ZERO = ("trestbps", "chol")
HOSPITALS = {"va_long_beach": "long-beach"}  # shorter names

Floats = NDArray[np.float32]


class Patients(NamedTuple):
    x: Floats  # (920, 13) NaN: missing
    y: NDArray[np.int64]  # (920,) 1: disease
    hospital: NDArray[np.int64]  # (920,)
    test: NDArray[np.bool_]  # (920,) True: test patient
    hospitals: tuple[str, ...]  # names
    transform: Transform


def read_heart(path: Path) -> Patients:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, y, hospital = file["x"], file["y"] > 0, file["hospital"].astype(np.int64)
            names = [str(name) for name in file["columns"][:-1]]
            hospitals = tuple(HOSPITALS.get(str(name), str(name)) for name in file["hospital_names"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CoterieError(f"{path}: damaged; install Coterie again ({error})") from error
    test = every_fourth(2 * hospital + y)
    x = np.stack([raw_values(name, values) for name, values in zip(names, x.T, strict=True)], axis=1)
    columns = tuple(fitted(name, values) for name, values in zip(names, x[~test].T, strict=True))
    transform = standardised(Transform(columns=columns), x[~test])
    return Patients(x, y.astype(np.int64), hospital, test, hospitals, transform)


def every_fourth(stratum: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) True for every fourth member of each stratum."""
    chosen = np.zeros(len(stratum), bool)
    for value in np.unique(stratum):
        chosen[np.flatnonzero(stratum == value)[3::4]] = True
    return chosen


def raw_values(name: str, values: Floats) -> Floats:
    """(N,) a column of the samples: NaN if missing, the index of an unordered category."""
    missing = np.isnan(values) | ((values == 0) & (name in NEVER_ZERO))
    if name in UNORDERED:
        values = np.searchsorted(UNORDERED[name], np.where(missing, 0, values)).astype(np.float32)
    return np.where(missing, np.float32(np.nan), values)


def fitted(name: str, train: Floats) -> Column:
    """Fit fill value and indicator. train (n,): raw values of the training patients."""
    known = train[~np.isnan(train)]
    fill = mode(known) if name in CATEGORIES else float(np.median(known))
    categories = tuple(map(str, UNORDERED.get(name, ())))
    return Column(name, categories, fill, indicator=bool(np.isnan(train).mean() > 0.1))


def standardised(transform: Transform, train: Floats) -> Transform:
    inputs = Preprocess(transform)(torch.from_numpy(train)).numpy()
    return replace(transform, mean=tuple(inputs.mean(axis=0).tolist()), std=tuple(inputs.std(axis=0).tolist()))


def mode(values: Floats) -> float:
    options, counts = np.unique(values, return_counts=True)
    return float(options[counts.argmax()])
