"""Heart disease in four hospitals (UCI): a natural federation, not a simulated one.

Samples are columns in clinical units, NaN where a value is missing. A cholesterol or blood pressure of 0 is impossible
and counts as missing. The model fills missing values with the median (measurements) or the most frequent value
(categories) of the training patients; columns with more than a tenth missing get an indicator input. Unordered
categories (chest pain, ECG, thallium scan) are one-hot encoded. All inputs are standardized with the training patients'
mean and standard deviation. These statistics are pooled over all hospitals. In each hospital every fourth patient of
each class, in file order, is a test patient; for tasks without classes, every fourth patient.

disease: any disease (diagnosis 1 to 4) or none (0), from the other 13 columns.
grades: the diagnosis, 0 to 4, from the same columns: five classes, of which the rarest has 3 % of the patients.
findings: five labels from the other nine columns. Patients with an unknown label are left out.
rate: the maximum heart rate reached, from the other 12 columns. Patients without it are left out.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.core.task import Classification, Task
from coterie.core.tasks import MultiLabel, Regression
from coterie.data.dataset import Dataset, Files, natural_dataset
from coterie.data.held_out import every_fourth
from coterie.data.statistics import standardised

CATEGORIES = {"sex", "cp", "fbs", "restecg", "exang", "slope", "thal"}
UNORDERED = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "thal": (3, 6, 7)}
NEVER_ZERO = ("trestbps", "chol")
HOSPITALS = {"va_long_beach": "long-beach"}  # shorter names
GRADES = ("none", "grade 1", "grade 2", "grade 3", "grade 4")
FINDINGS = ("disease", "exercise angina", "abnormal ECG", "high blood pressure", "ST depression")
FOUND_IN = ("exang", "restecg", "trestbps", "oldpeak")  # columns of the findings

Floats = NDArray[np.float32]


class Patients(NamedTuple):
    columns: dict[str, Floats]  # (920,) raw values, NaN if missing
    grade: NDArray[np.int64]  # (920,) 0 to 4
    hospital: NDArray[np.int64]  # (920,)
    hospitals: tuple[str, ...]  # names


def read_patients(path: Path) -> Patients:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, y, hospital = file["x"], file["y"].astype(np.int64), file["hospital"].astype(np.int64)
            names = [str(name) for name in file["columns"][:-1]]
            hospitals = tuple(HOSPITALS.get(str(name), str(name)) for name in file["hospital_names"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CoterieError(f"{path}: damaged; install Coterie again ({error})") from error
    columns = {name: known_values(name, values) for name, values in zip(names, x.T, strict=True)}
    return Patients(columns, y, hospital, hospitals)


class Target(NamedTuple):
    y: NDArray[Any]  # (920,) classes, or (920, ...) numbers with NaN where they are unknown
    names: tuple[str, ...]  # of classes, labels or targets
    stratum: NDArray[np.int64]  # (920,) within which every fourth patient is for testing
    columns: tuple[str, ...] = ()  # from which it is made; they are not inputs


def target_of(goal: str, patients: Patients) -> Target:
    columns, grade, hospital, _ = patients
    if goal == "disease":
        disease = (grade > 0).astype(np.int64)
        return Target(disease, ("healthy", "disease"), 2 * hospital + disease)
    if goal == "grades":
        return Target(grade, GRADES, len(GRADES) * hospital + grade)
    if goal == "findings":
        return Target(findings(columns, grade), FINDINGS, hospital, FOUND_IN)
    return Target(columns["thalach"][:, None], ("maximum heart rate",), hospital, ("thalach",))


def read_heart(folder: Path, goal: str, files: Files) -> Dataset:
    """folder: of the included files. goal: disease, grades, findings or rate."""
    patients = read_patients(folder / "heart_disease.npz")
    target = target_of(goal, patients)
    columns = {name: values for name, values in patients.columns.items() if name not in target.columns}
    known = ~np.isnan(target.y).reshape(len(target.y), -1).any(1)
    x = np.stack([coded(name, values) for name, values in columns.items()], axis=1)[known]
    y, test = target.y[known], every_fourth(target.stratum[known])
    task: Task | type[Task] = Classification
    if goal == "findings":
        y, task = y.astype(np.int64), MultiLabel(len(FINDINGS))
    elif goal == "rate":
        task = Regression(1, y[~test].mean(0).tolist(), y[~test].std(0).tolist())
    return natural_dataset(
        f"heart-{goal}",
        (x, y),
        patients.hospital[known],
        test,
        target.names,
        transform=standardised(fitted(list(columns), x[~test]), x[~test]),
        client_names=patients.hospitals,
        task=task,
    )


def findings(columns: Mapping[str, Floats], grade: NDArray[np.int64]) -> Floats:
    """(920, 5) 0 and 1, NaN where a finding is unknown."""
    exang, ecg, pressure, depression = (columns[name] for name in FOUND_IN)
    limits = ((exang, 1), (ecg, 1), (pressure, 140), (depression, 1))  # mm Hg; mm of ST depression
    found = [np.where(np.isnan(values), np.float32(np.nan), values >= low) for values, low in limits]
    return np.stack([(grade > 0).astype(np.float32), *found], axis=1).astype(np.float32)


def known_values(name: str, values: Floats) -> Floats:
    """(N,) NaN where a value is missing or impossible."""
    return np.where((values == 0) & (name in NEVER_ZERO), np.float32(np.nan), values)


def coded(name: str, values: Floats) -> Floats:
    """(N,) a column of the samples: an unordered category as its index."""
    if name not in UNORDERED:
        return values
    missing = np.isnan(values)
    at = np.searchsorted(UNORDERED[name], np.where(missing, 0, values)).astype(np.float32)
    return np.where(missing, np.float32(np.nan), at)


def fitted(names: list[str], train: Floats) -> Transform:
    """Fit fill values and indicators. train (n, F): raw values of the training patients."""
    columns = []
    for name, values in zip(names, train.T, strict=True):
        known = values[~np.isnan(values)]
        fill = mode(known) if name in CATEGORIES else float(np.median(known))
        categories = tuple(map(str, UNORDERED.get(name, ())))
        columns.append(Column(name, categories, fill, indicator=bool(np.isnan(values).mean() > 0.1)))
    return Transform(columns=tuple(columns))


def mode(values: Floats) -> float:
    options, counts = np.unique(values, return_counts=True)
    return float(options[counts.argmax()])
