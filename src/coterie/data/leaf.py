"""FEMNIST and Shakespeare as LEAF writes them: `train/*.json` and `test/*.json`, each writer or role one client.

FEMNIST: images of 28 x 28 numbers in 0..1, white is 1; 62 digits and letters.
Shakespeare: 80 characters, and as label the one character that follows them: a classification of 80 characters. Samples
of a role overlap in all but one character, so that a loss at each of the 80 positions would count each one 80 times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.dataset import Arrays, Dataset, Files, natural_dataset
from coterie.data.image_datasets import DIGITS, LETTERS

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80
WINDOW = 80

Samples = tuple[list[Any], list[Any]]  # x and y of one user
Convert = Callable[[list[Any], list[Any], str], Arrays]


def read_femnist(files: Files) -> Dataset:
    return read_leaf("femnist", files, as_images, DIGITS + LETTERS)


def read_shakespeare(files: Files) -> Dataset:
    return read_leaf("shakespeare", files, as_characters, tuple(CHARACTERS))


def read_leaf(name: str, files: Files, convert: Convert, classes: tuple[str, ...]) -> Dataset:
    train, test = (read_users(files[split]) for split in ("train", "test"))
    if strangers := [user for user in test if user not in train]:
        raise CoterieError(
            f"{files['test']}: user '{strangers[0]}' has no training samples; split by samples, not by users "
            "(LEAF's preprocess.sh -t sample)"
        )
    users = tuple(sorted(train))
    parts = [(user, split, own[user]) for split, own in ((False, train), (True, test)) for user in users if user in own]
    made = [convert(*own, f"{name}, user '{user}'") for user, _, own in parts]
    x, y = (np.concatenate([arrays[at] for arrays in made]) for at in (0, 1))
    sizes = [len(arrays[1]) for arrays in made]
    owner = np.repeat(np.array([users.index(user) for user, _, _ in parts], np.int64), sizes)
    held = np.repeat(np.array([split for _, split, _ in parts], bool), sizes)
    return natural_dataset(name, (x, y), owner, held, classes, client_names=users)


def read_users(folder: Path) -> dict[str, Samples]:
    """User -> samples and labels, from all JSON files of a folder."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise CoterieError(f"{folder}: no .json files")
    found: dict[str, Samples] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            users, counts, data = content["users"], content["num_samples"], content["user_data"]
            pairs = [(str(user), counts[at], data[user]["x"], data[user]["y"]) for at, user in enumerate(users)]
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise CoterieError(f"{path}: cannot be read as a LEAF file ({error!r:.80})") from error
        for user, count, x, y in pairs:
            if not (isinstance(x, list) and isinstance(y, list) and len(x) == len(y) == count):
                raise CoterieError(f"{path}: user '{user}' does not have {count} samples and as many labels")
            if user in found:
                raise CoterieError(f"{path}: user '{user}' is in another file, too")
            if count:
                found[user] = (x, y)
    return found


def as_images(x: list[Any], y: list[Any], where: str) -> Arrays:
    try:
        pixels, labels = np.array(x, np.float32), np.array(y)
    except (ValueError, TypeError) as error:
        raise CoterieError(f"{where}: images are not lists of {28 * 28} numbers ({error})") from error
    if pixels.shape != (len(x), 28 * 28) or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise CoterieError(f"{where}: images must be {28 * 28} numbers in 0..1, got shape {pixels.shape[1:]}")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise CoterieError(f"{where}: labels must be whole numbers, got {labels.dtype} {labels.shape[1:]}")
    return np.round(255 * pixels).astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)


def as_characters(x: list[Any], y: list[Any], where: str) -> Arrays:
    number = {letter: i for i, letter in enumerate(CHARACTERS)}
    tokens = [encoded(text, WINDOW, number, where) for text in x]
    labels = [encoded(text, 1, number, where) for text in y]
    return np.array(tokens, np.int64), np.array(labels, np.int64)[:, 0]


def encoded(text: Any, length: int, number: Mapping[str, int], where: str) -> list[int]:
    if not isinstance(text, str) or len(text) != length:
        raise CoterieError(f"{where}: expected a text of {length} characters, got {text!r:.40}")
    if unknown := [letter for letter in text if letter not in number]:
        raise CoterieError(f"{where}: character {unknown[0]!r} is not one of LEAF's {len(number)}")
    return [number[letter] for letter in text]
