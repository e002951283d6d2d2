"""State of the Union addresses: next character, each president one client.

The included file has 16,000 characters of each president's first addresses for training and the last 4,000 of the last
address for testing. Samples are consecutive windows of 80 characters; their labels are the characters that follow each
of them. No window overlaps another, and no label is in both splits.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.core.tasks import NextToken
from coterie.data.dataset import Dataset, Files, natural_dataset

WINDOW = 80  # characters


def read_presidents(folder: Path, files: Files) -> Dataset:
    """folder: of the included files."""
    path = folder / "presidents.xz"
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        vocabulary, presidents = str(content["vocabulary"]), content["presidents"]
        names = tuple(str(one["name"]) for one in presidents)
        texts = [(owner, split, one[split]) for owner, one in enumerate(presidents) for split in ("train", "test")]
        parts = [(owner, split, windows(coded(text, vocabulary))) for owner, split, text in texts]
    except (OSError, lzma.LZMAError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CoterieError(f"{path}: damaged; install Coterie again ({error})") from error
    x, y = (np.concatenate([pair[at] for _, _, pair in parts]) for at in (0, 1))
    owner = repeated([owner for owner, _, _ in parts], parts).astype(np.int64)
    test = repeated([split == "test" for _, split, _ in parts], parts)
    task = NextToken(len(vocabulary))
    return natural_dataset("presidents", (x, y), owner, test, tuple(vocabulary), client_names=names, task=task)


def repeated(values: Sequence[Any], parts: Sequence[Any]) -> NDArray[Any]:
    return np.repeat(np.array(values), [len(pair[0]) for _, _, pair in parts])


def coded(text: str, vocabulary: str) -> NDArray[np.int64]:
    """(n,) the position of each character in the vocabulary."""
    return np.array([vocabulary.index(letter) for letter in text], np.int64)


def windows(tokens: NDArray[np.int64], length: int = WINDOW) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Consecutive windows (n, T) of tokens, and the tokens (n, T) that follow each of theirs."""
    n = (len(tokens) - 1) // length
    return tokens[: n * length].reshape(n, length), tokens[1 : n * length + 1].reshape(n, length)
