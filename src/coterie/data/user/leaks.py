"""Find leaks from training to test: near-duplicates, overlapping windows, identifiers among features."""

from __future__ import annotations

import re

import numpy as np

from coterie.data.user.frames import is_free_text
from coterie.data.user.pooled import Pooled
from coterie.data.user.reading import Array, Notes

TESTED, TRAINED = 2_000, 50_000  # most samples that are compared, drawn at random
NUMBERS = 2**25  # most numbers in these samples
DIMENSIONS = 48  # of the random projection that finds neighbors
NEAREST = 20  # the neighbor whose distance is the scale
NEAR = 0.05  # fraction of that distance below which a sample is a near-duplicate
FEW = 4  # with fewer columns, neighbors are always close
SHORTEST = 16  # fewest steps of a series
NEARLY_EQUAL = "test sample that nearly equals a training sample; keep related samples in one group with --group-column"
SHIFTED = (
    "test window that overlaps a training window; keep the windows of one recording together with --group-column, or "
    "provide your own split"
)
IDENTIFIER = (
    "column that looks like an identifier is used as a feature; leave it out with --drop-column, or keep its rows "
    "together with --group-column"
)
ID_NAME = re.compile(r"(^|[_\W])(id|ids|uuid|guid|mrn|ssn|patient|subject|record|index|unnamed: \d+)$", re.IGNORECASE)


def look_for_leaks(pooled: Pooled, notes: Notes) -> None:
    identifiers(pooled, notes)
    draw, most = np.random.default_rng(0), NUMBERS // pooled.x[0].size
    train = _some(draw, np.flatnonzero(~pooled.test), min(TRAINED, most))
    test = _some(draw, np.flatnonzero(pooled.test), min(TESTED, most))
    if not len(train) or not len(test):
        return
    overlapping = overlaps(pooled, train, test, notes)
    if not overlapping and pooled.x.dtype != np.int64 and pooled.x[0].size >= FEW and len(train) > 2 * NEAREST:
        near_duplicates(pooled, train, test, notes)


def _some(draw: np.random.Generator, rows: Array, most: int) -> Array:
    return rows if len(rows) <= most else np.sort(draw.choice(rows, most, replace=False))


def identifiers(pooled: Pooled, notes: Notes) -> None:
    """Report columns with the name of an identifier, or with a different integer in every row."""
    for at, column in enumerate(pooled.columns):
        if is_free_text(column.categories, len(pooled.x)):  # reported as an error
            continue
        values = pooled.x[:, at]
        known = values[np.isfinite(values)]
        different = len(np.unique(known))
        counted = len(known) >= 20 and different == len(known) and bool((known == np.trunc(known)).all())
        if (counted and not column.categories) or ID_NAME.search(column.name) or not column.name:
            notes.worth_knowing(
                IDENTIFIER, f"column '{column.name}': {different:,} different values in {len(values):,} rows"
            )


def near_duplicates(pooled: Pooled, train: Array, test: Array, notes: Notes) -> None:
    """Report test samples whose nearest training sample is far closer than their other neighbors."""
    scale = _scales(pooled.x[train])
    known, queries = (_projected(pooled.x[rows], *scale) for rows in (train, test))
    found: dict[int, int] = {}
    for start in range(0, len(test), 250):
        block = queries[start : start + 250]
        squares = (block**2).sum(1)[:, None] + (known**2).sum(1) - 2 * block @ known.T
        near = np.argpartition(squares, NEAREST, axis=1)[:, : NEAREST + 1]
        exact = np.stack(
            [_distances(pooled.x[i], pooled.x[train[own]], *scale) for i, own in zip(test[start:], near, strict=False)]
        )
        order = np.sort(exact, axis=1)
        close = (order[:, 0] > 0) & (order[:, 0] < NEAR * order[:, NEAREST])
        for row in np.flatnonzero(close):
            found[int(test[start + row])] = int(train[near[row, exact[row].argmin()]])
    _report(NEARLY_EQUAL, found, pooled, notes, len(test))


def _scales(x: Array) -> tuple[Array, Array, Array]:
    """Mean and standard deviation of each number of a sample, and a random projection."""
    flat = x.reshape(len(x), -1).astype(np.float32)
    with np.errstate(invalid="ignore"):
        mean = np.nan_to_num(np.nanmean(flat, axis=0)) if np.isfinite(flat).any() else np.zeros(flat.shape[1])
        std = np.nan_to_num(np.nanstd(flat, axis=0), nan=1.0)
    std[std == 0] = 1
    size = flat.shape[1]
    if size <= DIMENSIONS:
        return mean, std, np.eye(size, dtype=np.float32)
    return mean, std, np.random.default_rng(0).normal(size=(size, DIMENSIONS)).astype(np.float32)


def _scaled(x: Array, mean: Array, std: Array) -> Array:
    return np.nan_to_num((x.astype(np.float32) - mean) / std).astype(np.float32)


def _projected(x: Array, mean: Array, std: Array, projection: Array) -> Array:
    pieces = [_scaled(block.reshape(len(block), -1), mean, std) @ projection for block in _blocks(x)]
    return np.concatenate(pieces)


def _blocks(x: Array) -> list[Array]:
    return [x[start : start + 4096] for start in range(0, len(x), 4096)]


def _distances(x: Array, near: Array, mean: Array, std: Array, projection: Array) -> Array:
    """(k,) distances between a sample and others (k, ...), before projection."""
    apart = _scaled(near.reshape(len(near), -1), mean, std) - _scaled(x.reshape(1, -1), mean, std)
    made: Array = np.sqrt((apart**2).sum(1))
    return made


def overlaps(pooled: Pooled, train: Array, test: Array, notes: Notes) -> bool:
    """Report test windows whose beginning is the end of a training window, or vice versa."""
    shape = pooled.x.shape[1:]
    if len(shape) > 2 or pooled.x.dtype == np.uint8:
        return False
    found: dict[int, int] = {}
    for axis in range(len(shape)):
        if shape[axis] < SHORTEST:
            continue
        ours, theirs = (
            np.moveaxis(pooled.x[rows], 1 + axis, 1).reshape(len(rows), shape[axis], -1) for rows in (test, train)
        )
        ours_at, theirs_at = _steps(ours), _steps(theirs)
        for i, j in _shifted(ours, theirs, ours_at, theirs_at):
            found.setdefault(int(test[i]), int(train[j]))
        for j, i in _shifted(theirs, ours, theirs_at, ours_at):
            found.setdefault(int(test[i]), int(train[j]))
    _report(SHIFTED, found, pooled, notes, len(test))
    return bool(found)


def _steps(windows: Array) -> Array:
    """(n, T - w + 1) a hash of each run of w steps of windows (n, T, C); 0 for a constant run."""
    values = np.ascontiguousarray(windows.astype(np.float64)).view(np.uint64)
    factors = np.random.default_rng(1).integers(1, 2**63, values.shape[2], dtype=np.uint64) | np.uint64(1)
    mixed = values ^ (values >> np.uint64(29))
    steps = (mixed * factors).sum(axis=2, dtype=np.uint64)
    steps ^= steps >> np.uint64(31)
    width = max(4, windows.shape[1] // 8)
    made = np.zeros((len(steps), steps.shape[1] - width + 1), np.uint64)
    constant = np.ones(made.shape, bool)
    for at in range(width):
        piece = steps[:, at : at + made.shape[1]]
        made = made * np.uint64(0x9E3779B97F4A7C15) + piece
        constant &= piece == steps[:, : made.shape[1]]
    return np.where(constant, 0, made)


def _shifted(later: Array, earlier: Array, later_at: Array, earlier_at: Array) -> list[tuple[int, int]]:
    """Pairs (i, j): the beginning of later[i] is the end of earlier[j]. later_at, earlier_at: their hashes."""
    begin: dict[int, int] = {int(code): i for i, code in enumerate(later_at[:, 0]) if code}
    inside = np.isin(earlier_at, np.array(list(begin), np.uint64))
    inside[:, 0] = False  # no shift: an equal beginning, or a duplicate
    pairs = []
    for j, at in zip(*np.nonzero(inside), strict=True):
        i = begin[int(earlier_at[j, at])]
        if np.array_equal(later[i, : later.shape[1] - at], earlier[j, at:]):
            pairs.append((i, int(j)))
    return pairs


def _report(what: str, found: dict[int, int], pooled: Pooled, notes: Notes, checked: int) -> None:
    def describe(i: int) -> str:
        return f"{pooled.place(i)} and {pooled.place(found[i])}"

    rows = np.array(sorted(found), np.int64)
    notes.wrong_at(what, rows, describe, stops=False)
    total = int(pooled.test.sum())
    if len(rows) and checked < total:
        notes.problems[what].examples.append(f"{checked:,} of {total:,} test samples were checked")
