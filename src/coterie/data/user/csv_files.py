"""CSV files, read in bounded memory. A column holds numbers, or text if one of its values is text."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from coterie.data.user.bounds import Bounded, Unusable, check_width
from coterie.data.user.frames import NOTHING, Columns, Frame, code, narrow, number
from coterie.data.user.reading import Array, Notes, as_text, joined_columns

CELLS = 1_000_000  # held as text at a time
Line = tuple[int, list[str]]  # number and fields


def csv_names(path: Path, known: Collection[str] = ()) -> list[str]:
    """The column names. A header of numbers is accepted only if one of them is known."""
    names = next(csv_lines(path))[1]
    if all(name and number(name) is not None for name in names) and not {*names} & {*known}:
        raise Unusable("the first line must contain column names, not numbers")
    if "" in names:
        raise Unusable(
            f"column {names.index('') + 1} has no name; name it, or write the table without its index (pandas: "
            "to_csv(index=False))"
        )
    if len(set(names)) < len(names):
        raise Unusable(
            f"two columns have the same name: {Counter(names).most_common(1)[0][0]!r}; is line 1 the header?"
        )
    return names


def csv_lines(path: Path) -> Iterator[Line]:
    """Yield line number and fields of the header, then of every row that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(2**20)
            file.seek(0)
            bounded = Bounded(file)
            reader = csv.reader(bounded, delimiter=max(",;\t", key=first.count))
            names = [name.strip() for name in next(reader, [])]
            check_width(len(names))
            if not any(names):
                raise Unusable("the first line must contain column names, but it is empty")
            yield 1, names
            bounded.letters = 0
            for fields in reader:
                bounded.letters = 0
                if fields:
                    yield reader.line_num, fields
    except UnicodeDecodeError:
        raise Unusable(f"line {first_bad_line(path)} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise Unusable(f"cannot be opened ({error.strerror})") from None
    except csv.Error as error:
        raise Unusable(f"not a CSV file ({error})") from None


def first_bad_line(path: Path) -> int:
    with path.open("rb") as file:
        for at, line in enumerate(iter(lambda: file.readline(2**24), b""), 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return at
    return 1


def read_csv(
    path: Path, columns: Columns, notes: Notes, text: Collection[int] = (), header: Sequence[str] | None = None
) -> Frame:
    """text: features to read as text in any case. header: column names, if the file has none."""
    for _ in range(2):  # read again if text was found in other columns
        own, found = Notes(room=notes.room), set[int]()
        frame = _read(path, columns, own, {*text}, found, header)
        if found <= {*text}:
            break
        text = {*text, *found}
    notes.add(own)
    return frame


def _read(
    path: Path, columns: Columns, notes: Notes, text: set[int], found: set[int], header: Sequence[str] | None
) -> Frame:
    lines = csv_lines(path)
    names = header or next(lines)[1]
    index = {name: i for i, name in enumerate(names)}
    at = [index[name] for name in columns.features]
    texts: dict[str, list[str]] = {n: [] for n in (*columns.labels, columns.client, columns.group) if n is not None}
    known: dict[int, dict[str, int]] = {column: {} for column in sorted(text)}
    pieces = [np.empty((0, len(at)), np.float32)]
    numbers: list[int] = []
    while block := list(itertools.islice(lines, max(1, CELLS // len(names)))):
        kept = [row for row in block if right_length(path, row, names, notes)]
        pieces.append(values(kept, at, known, found, partial(narrow, where=str(path), notes=notes), columns.features))
        numbers += [line for line, _ in kept]
        for name, cells in texts.items():
            cells += [fields[index[name]].strip() for _, fields in kept]
    lines_at = np.array(numbers, np.int64)

    def place(i: int) -> str:
        return f"{path}, line {lines_at[i]}"

    def named(name: str | None) -> Array | None:
        return None if name is None else as_text(texts[name], notes, path)

    y = joined_columns([labels_of_texts(texts[label], notes, path) for label in columns.labels], columns.labels, place)
    seen = {column: list(codes) for column, codes in known.items()}
    return Frame(np.concatenate(pieces), seen, y, named(columns.client), named(columns.group), place)


def right_length(path: Path, row: Line, names: Sequence[str], notes: Notes) -> bool:
    line, fields = row
    if len(fields) != len(names):
        notes.wrong("row of a different length", f"{path}, line {line}: {len(fields)} values for {len(names)} columns")
    return len(fields) == len(names)


def values(
    rows: list[Line],
    at: list[int],
    known: dict[int, dict[str, int]],
    found: set[int],
    narrowed: Callable[[Array, Sequence[str]], Array],
    names: Sequence[str],
) -> Array:
    """(n, F) numbers, and codes of text in `known` columns; other columns with text are added to `found`."""
    made = np.empty((len(rows), len(at)), np.float32)
    for column, codes in known.items():
        made[:, column] = [code(fields[at[column]], codes) for _, fields in rows]
    plain = [column for column in range(len(at)) if column not in known]
    if plain:
        numbers = numbers_of(rows, [at[column] for column in plain], plain, found)
        made[:, plain] = narrowed(numbers, [names[column] for column in plain])
    return made


def numbers_of(rows: list[Line], at: list[int], columns: list[int], found: set[int]) -> Array:
    cells = [[fields[i] for i in at] for _, fields in rows]
    for filled in (cells, [[cell or "nan" for cell in row] for row in cells]):
        try:
            return np.array(filled, np.float64).reshape(-1, len(at))
        except ValueError:
            pass
    made = [[number(cell) for cell in row] for row in cells]
    found |= {columns[i] for row in made for i, value in enumerate(row) if value is None}
    return np.array(made, np.float64).reshape(-1, len(at))


def labels_of_texts(texts: list[str], notes: Notes, path: Path) -> Array:
    """Integers or numbers if all labels are, else names."""
    try:
        return np.array([int(text) for text in texts], np.int64)
    except (ValueError, OverflowError):
        pass
    values = [None if text.lower() in NOTHING else number(text) for text in texts]
    if all(value is not None or text.lower() in NOTHING for value, text in zip(values, texts, strict=True)):
        return np.array([np.nan if v is None else v for v in values], np.float64)
    return as_text(["" if text.lower() in NOTHING - {"-"} else text for text in texts], notes, path)
