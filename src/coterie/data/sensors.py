"""Activities from body-worn sensors, each subject one client: UCI HAR and PAMAP2.

UCI HAR: 9 signals of a phone in windows of 128 readings (2.56 s), or the publisher's 561 features of each window. The
publisher's own split has different subjects for training and testing, so Coterie splits by time: the last quarter of
each subject's windows of each activity is for testing. Windows overlap by half; the last one before the test windows is
left out.

PAMAP2: 27 signals (acceleration to 16 g, rotation, magnetic field at hand, chest and ankle) in windows of 5.12 s that
do not overlap, every fourth reading: 128 steps. Gaps are filled by interpolation in time; windows that lack more than
half of the readings of a signal are left out, and so is activity 0 (transitions). The last quarter of each activity is
for testing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.data.dataset import Dataset, Files, natural_dataset
from coterie.data.held_out import last_quarter

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
STEPS = 128
FEATURES = 561
ACTIVITIES = {
    1: "lying",
    2: "sitting",
    3: "standing",
    4: "walking",
    5: "running",
    6: "cycling",
    7: "Nordic walking",
    12: "ascending stairs",
    13: "descending stairs",
    16: "vacuum cleaning",
    17: "ironing",
    24: "rope jumping",
}
COLUMNS = 54  # of a PAMAP2 file: time, activity, heart rate, and 17 for each of three sensors
SENSED = [start + at for start in (3, 20, 37) for at in (1, 2, 3, 7, 8, 9, 10, 11, 12)]  # acceleration, rotation, field
READINGS, EVERY = 512, 4  # of a window, at 100 Hz

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]


def read_har(features: bool, files: Files) -> Dataset:
    """features: the 561 features of a window rather than its signals."""
    names = activity_names(files["activity_labels.txt"])
    parts = [read_har_split(files[split], split, features, len(names)) for split in ("train", "test")]
    x, y, subject = (np.concatenate(values) for values in zip(*parts, strict=True))
    subjects, owner = np.unique(subject, return_inverse=True)
    kept, test = last_quarter(owner * len(names) + y, gap=1)
    x, y, owner, test = x[kept], y[kept], owner.reshape(-1)[kept], test[kept]
    return natural_dataset(
        "uci-har-features" if features else "uci-har",
        (x, y),
        owner,
        test,
        names,
        transform=Transform() if features else channel_transform(x[~test]),
        client_names=tuple(f"subject {number}" for number in subjects),
    )


def activity_names(path: Path) -> tuple[str, ...]:
    """Lines such as `1 WALKING`."""
    try:
        words = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from error
    if [word[0] for word in words] != [str(i) for i in range(1, 1 + len(words))] or any(len(w) != 2 for w in words):
        raise CoterieError(f"{path}: expected lines such as '1 WALKING', numbered from 1")
    return tuple(word[1].lower().replace("_", " ") for word in words)


def read_har_split(folder: Path, split: str, features: bool, classes: int) -> tuple[Floats, Whole, Whole]:
    """Samples, activities from 0, and subjects."""
    y, subject = (whole(folder / f"{kind}_{split}.txt") for kind in ("y", "subject"))
    if features:
        x = table(folder / f"X_{split}.txt", FEATURES)
    else:
        own = [table(folder / "Inertial Signals" / f"{name}_{split}.txt", STEPS) for name in SIGNALS]
        lengths = {len(signal) for signal in own}
        if len(lengths) != 1:
            raise CoterieError(f"{folder / 'Inertial Signals'}: files of different lengths: {sorted(lengths)}")
        x = np.stack(own, axis=1)
    if not len(x) == len(y) == len(subject):
        raise CoterieError(f"{folder}: {len(x)} windows, {len(y)} activities and {len(subject)} subjects")
    if len(y) and not 1 <= y.min() <= y.max() <= classes:
        raise CoterieError(f"{folder / f'y_{split}.txt'}: activities are 1 to {classes}, got {y.min()} to {y.max()}")
    return x, y - 1, subject


def table(path: Path, columns: int, missing: bool = False) -> Floats:
    """(n, columns) the numbers of a text file. missing: whether NaN is allowed."""
    try:
        values: NDArray[Any] = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise CoterieError(f"{path}: cannot be read as a table of numbers ({error})") from error
    if values.shape[1] != columns or not len(values):
        raise CoterieError(f"{path}: {len(values)} rows of {values.shape[1]} numbers, expected {columns} in a row")
    if not missing and not np.isfinite(values).all():
        raise CoterieError(f"{path}: row {int(np.argmax(~np.isfinite(values).all(1)))} has a value that is not finite")
    return values


def whole(path: Path) -> Whole:
    """(n,) the whole numbers of a text file with one number in a row."""
    values = table(path, 1)[:, 0]
    if (values != np.round(values)).any():
        raise CoterieError(f"{path}: row {int(np.argmax(values != np.round(values)))} is not a whole number")
    return values.astype(np.int64)


def channel_transform(train: Floats) -> Transform:
    """Standardize each channel of series (n, C, T)."""
    mean, std = train.mean((0, 2), dtype=np.float64), train.std((0, 2), dtype=np.float64)
    return Transform(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()), axis=0)


def read_pamap2(files: Files) -> Dataset:
    paths = sorted(files["Protocol"].glob("subject*.dat"))
    if not paths:
        raise CoterieError(f"{files['Protocol']}: no files subject101.dat, ...")
    parts = [windows_of(path) for path in paths]
    x, y = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    if not len(x):
        raise CoterieError(f"{files['Protocol']}: no window of {READINGS} readings of one activity")
    owner = np.repeat(np.arange(len(paths)), [len(part[1]) for part in parts])
    _, test = last_quarter(owner * len(ACTIVITIES) + y)
    return natural_dataset(
        "pamap2",
        (x, y),
        owner,
        test,
        tuple(ACTIVITIES.values()),
        transform=channel_transform(x[~test]),
        client_names=tuple(path.stem.replace("subject", "subject ") for path in paths),
    )


def windows_of(path: Path) -> tuple[Floats, Whole]:
    """The windows (n, 27, 128) of one subject, and their activities."""
    readings = table(path, COLUMNS, missing=True)
    activity = readings[:, 1]
    known = list(ACTIVITIES)
    if strange := sorted(set(activity.tolist()) - {0.0, *map(float, known)}):
        raise CoterieError(f"{path}: activity {strange[0]:g} is not one of the protocol's")
    ends = [*np.flatnonzero(np.diff(activity)) + 1, len(activity)]
    x: list[Floats] = []
    y: list[int] = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        if activity[start] == 0:
            continue
        run = readings[start:end, SENSED]
        full = filled(run)
        for first in range(0, len(run) - READINGS + 1, READINGS):
            here = slice(first, first + READINGS)
            if np.isnan(run[here]).mean(0).max() <= 0.5:
                x.append(full[here][::EVERY].T)
                y.append(known.index(int(activity[start])))
    shape = (0, len(SENSED), READINGS // EVERY)
    return np.stack(x) if x else np.empty(shape, np.float32), np.array(y, np.int64)


def filled(run: Floats) -> Floats:
    """(n, C) with gaps filled by linear interpolation between readings, and by the nearest reading at the ends."""
    made = run.copy()
    steps = np.arange(len(run))
    for channel in made.T:
        gap = np.isnan(channel)
        if gap.any() and not gap.all():
            channel[gap] = np.interp(steps[gap], steps[~gap], channel[~gap])
    return made
