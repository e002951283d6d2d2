"""`coterie certs` that is killed at any moment: the next call completes what it left, and all certificates hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import CoterieError
from coterie.deploy.certs import make_certificates
from coterie.runs import disk

pytest.importorskip("cryptography")
NAMES = ("ca", "broker", "server", "one", "two")


def certify(folder: Path) -> list[Path]:
    return make_certificates(folder, ["one", "two"], "127.0.0.1", 8883, 30)


def assert_complete(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    made = {path.name for path in folder.iterdir()}
    assert made == {"mosquitto.conf", "rights.acl", *(f"{name}.{end}" for name in NAMES for end in ("key", "pem"))}
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    for name in NAMES:
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        certificate.verify_directly_issued_by(authority)
        key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert key.public_key() == certificate.public_key()
        assert (folder / f"{name}.key").stat().st_mode & 0o077 == 0
    rights = (folder / "rights.acl").read_text()
    assert [rights.count(f"user {name}\n") for name in ("server", "one", "two")] == [1, 1, 1]
    assert "acl_file" in (folder / "mosquitto.conf").read_text()


def test_a_call_that_is_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Path] = []  # the folder as a kill leaves it before and after each file gets its name
    replace = os.replace

    def recorded(part: Any, path: Any) -> None:
        left.append(Path(shutil.copytree(tmp_path / "certs", tmp_path / f"before-{len(left)}")))
        replace(part, path)
        left.append(Path(shutil.copytree(tmp_path / "certs", tmp_path / f"after-{len(left)}")))

    monkeypatch.setattr(disk.os, "replace", recorded)
    certify(tmp_path / "certs")
    monkeypatch.undo()
    assert len(left) == 2 * (2 * len(NAMES) + 2)
    for folder in left:
        certify(folder)
        assert_complete(folder)
        assert certify(folder) == []


def test_what_was_signed_stays_valid(tmp_path: Path) -> None:
    """A lost ca.pem is made again from its key; an empty key, which an interrupted write left, is made again."""
    certify(tmp_path)
    (tmp_path / "ca.pem").unlink()
    (tmp_path / "one.pem").unlink()
    (tmp_path / "one.key").write_bytes(b"")
    assert {path.name for path in certify(tmp_path)} == {"ca.pem", "one.pem"}
    assert_complete(tmp_path)


def test_an_authority_whose_key_is_elsewhere(tmp_path: Path) -> None:
    certify(tmp_path)
    before = (tmp_path / "ca.pem").read_bytes()
    (tmp_path / "ca.key").rename(tmp_path.parent / "offline.key")
    assert certify(tmp_path) == []
    with pytest.raises(CoterieError, match=r"ca\.key is missing or damaged; it is needed to sign three"):
        make_certificates(tmp_path, ["three"], "127.0.0.1", 8883, 30)
    assert (tmp_path / "ca.pem").read_bytes() == before
    assert not (tmp_path / "three.pem").exists()
