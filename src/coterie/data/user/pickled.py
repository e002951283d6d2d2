"""Read pickled dictionaries of arrays from .npz files without executing anything."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.formats import SafeUnpickler
from coterie.data.user.reading import Array, Notes

KINDS = {f"{kind}{size}" for kind, sizes in (("f", "248"), ("i", "1248"), ("u", "1248"), ("b", "1")) for size in sizes}
MEMO = 100_000  # most places in the memo; a larger number only wastes memory
STORES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
FETCHES = ("GET", "BINGET", "LONG_BINGET")
NEUTRAL = (*STORES, "PROTO", "FRAME")  # do not change the top of the stack
ATOMS = {  # opcodes whose result holds no other objects, or is one of the stand-ins below
    "REDUCE", "NEWOBJ", "GLOBAL", "STACK_GLOBAL", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", *FETCHES,
}  # fmt: skip


class _Type:
    """Stand-in for `numpy.dtype`: numbers, or objects (the dictionary itself)."""

    def __init__(self, kind: Any, *flags: object) -> None:
        self.kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        self.order = "="
        if self.kind not in KINDS | {"O8", "O4"}:
            raise pickle.UnpicklingError(f"unexpected array type '{self.kind[:20]}'")

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("damaged array type")
        self.order = state[1]


class _PickledArray:
    """Stand-in for `numpy.ndarray`: a shape and raw bytes, or one object."""

    value: Any = None

    def __init__(self, *arguments: object) -> None:
        pass  # __setstate__ gets the content

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Type):
            raise pickle.UnpicklingError("array without a type")
        if kind.kind.startswith("O"):
            self.value = raw[0] if len(raw) == 1 else None  # one object, here a dictionary
            return
        values = np.frombuffer(raw, np.dtype(kind.order + kind.kind))
        self.value = values.reshape(shape, order="F" if fortran else "C")


class _Unpickler(SafeUnpickler):
    dtype, array = _Type, _PickledArray


def check_memo(content: io.BytesIO) -> None:
    """Refuse a memo that wastes memory, and repeated references to tuples or lists.

    Nested tuples that each contain the next one twice are a small file whose hash or text takes exponential time.
    """
    atoms: set[int] = set()
    puts, made = 0, ""
    for code, argument, _ in pickletools.genops(content):
        if code.name in STORES:
            place = puts if code.name == "MEMOIZE" else int(str(argument))
            puts += 1
            if place > MEMO:
                raise pickle.UnpicklingError("the memo takes too much memory")
            (atoms.add if made in ATOMS else atoms.discard)(place)
        elif code.name == "DUP" or (code.name in FETCHES and int(str(argument)) not in atoms):
            raise pickle.UnpicklingError("repeated reference to a tuple, list or dictionary")
        if code.name not in NEUTRAL:
            made = code.name


def read_pickled_dict(path: Path, notes: Notes) -> dict[str, Array]:
    """Read the arrays of the pickled dictionary `data` in an .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("data.npy")
            notes.need(entry.file_size, path)
            content = io.BytesIO(archive.read(entry))
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header(content)
        start = content.tell()
        check_memo(content)
        content.seek(start)
        outer = _Unpickler(content, encoding="latin1").load()
        fields = outer.value if isinstance(outer, _PickledArray) else outer
        found = {str(name): value.value for name, value in fields.items() if isinstance(value, _PickledArray)}
    except CoterieError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CoterieError(f"{path}: cannot be read as a dictionary of arrays ({error})") from None
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
