"""CKKS keys and their two files.

All clients share one secret key, which decrypts; the server has the public key, which does not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError

SECRET, PUBLIC = "secret.ckks", "public.ckks"
MAGIC = "coterie-ckks-1"  # the first line of a key file: this, the kind, and the SHA-256 of the rest

# 128 bits of security by SEAL's own bound (218 bits of modulus for N = 8192), and room for one multiplication.
DEGREE, MODULI, SCALE = 8192, (60, 40, 60), 2.0**40


@dataclass(frozen=True)
class CkksKeys:
    public: bytes = field(repr=False)
    secret: bytes | None = field(default=None, repr=False)  # None: on the server

    @cached_property
    def fingerprint(self) -> int:
        """Identifies a pair of keys; the same for both halves."""
        return int.from_bytes(hashlib.sha256(self.public).digest()[:8]) >> 1  # fits into an int64

    def context(self, secret: bool = False) -> Any:
        """The tenseal context."""
        if not secret:
            return opened(self.public, os.getpid())
        if self.secret is None:
            raise CoterieError("this side has the public key only and cannot decrypt")
        return opened(self.secret, os.getpid())


@cache
def opened(content: bytes, process: int) -> Any:
    """process: part of the cache key. A context owns a thread that does not survive a fork: using or freeing it in a
    forked process would wait forever, so every process opens its own."""
    return tenseal().context_from(content, n_threads=1)


def tenseal() -> Any:
    try:
        import tenseal
    except ImportError:
        raise CoterieError("encryption needs tenseal: pip install 'coterie[he]'") from None
    return tenseal


def new_keys() -> CkksKeys:
    """Generate a pair in memory."""
    ts = tenseal()
    context = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULI), n_threads=1)
    context.global_scale = SCALE
    return CkksKeys(written(context, secret=False), written(context, secret=True))


def written(context: Any, secret: bool) -> bytes:
    content: bytes = context.serialize(save_secret_key=secret, save_galois_keys=False, save_relin_keys=False)
    return content


def make_keys(folder: str | Path) -> CkksKeys:
    """Generate a pair and write its files: secret.ckks for all clients, public.ckks for the server."""
    folder, keys = Path(folder), new_keys()
    assert keys.secret is not None
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, kind, content, mode in (
            (SECRET, "secret", keys.secret, 0o600),
            (PUBLIC, "public", keys.public, 0o644),
        ):
            place(folder / name, sealed_file(kind, content), mode)
            made.append(folder / name)
    except OSError as error:
        for path in made:
            path.unlink()
        if isinstance(error, FileExistsError) and folder.is_dir():
            raise CoterieError(f"{folder} already has keys, which are not overwritten; choose another folder") from None
        raise CoterieError(f"cannot write keys to {folder}: {error.strerror}") from None
    return keys


def place(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically; raises FileExistsError instead of replacing one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(part, path)  # unlike a rename, this fails if the file exists
    finally:
        part.unlink()


def sealed_file(kind: str, content: bytes) -> bytes:
    return f"{MAGIC} {kind} {hashlib.sha256(content).hexdigest()}\n".encode() + content


def load_secret(path: str | Path) -> CkksKeys:
    """Both keys, for a client. path: the file, or the folder it is in."""
    content = contents(path, SECRET, "secret")
    return checked(path, lambda: CkksKeys(written(opened(content, os.getpid()), secret=False), content))


def load_public(path: str | Path) -> CkksKeys:
    """The key of the server."""
    keys = CkksKeys(contents(path, PUBLIC, "public"))
    return checked(path, lambda: (keys.context(), keys)[1])


def contents(path: str | Path, name: str, kind: str) -> bytes:
    path = Path(path) / name if Path(path).is_dir() else Path(path)
    try:
        first, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise CoterieError(f"key {path} not found; `coterie keys FOLDER` makes a pair") from None
    except OSError as error:
        raise CoterieError(f"cannot read the key {path}: {error.strerror}") from None
    magic, found, digest = [*first.decode("ascii", "replace").split(" "), "", "", ""][:3]
    if magic != MAGIC or found not in ("secret", "public"):
        raise CoterieError(f"{path} is not a key that `coterie keys` made")
    if digest != hashlib.sha256(content).hexdigest():
        raise CoterieError(f"the key {path} is damaged: wrong checksum")
    if found != kind:
        raise CoterieError(f"{path} is a {found} key; expected a {kind} key, {name}")
    return content


def checked(path: str | Path, open: Callable[[], CkksKeys]) -> CkksKeys:
    try:
        return open()
    except (ValueError, RuntimeError) as error:
        raise CoterieError(f"the key {path} cannot be used by this tenseal: {error}") from None
