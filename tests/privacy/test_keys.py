"""Key files: made once, read by those they are for, and anything else is told."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.privacy.keys import CkksKeys, load_public, load_secret, make_keys

pytest.importorskip("tenseal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("keys") / "new" / "folder"
    make_keys(where)
    return where


def test_two_files_the_secret_for_its_owner_only(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["public.ckks", "secret.ckks"]
    assert stat.S_IMODE((folder / "secret.ckks").stat().st_mode) == 0o600


def test_both_are_read_and_belong_together(folder: Path) -> None:
    client, server = load_secret(folder), load_public(folder / "public.ckks")
    assert server == CkksKeys(client.public)
    assert client.context(secret=True).has_secret_key()
    assert not server.context().has_secret_key()


def test_no_secret_is_in_the_public_file(folder: Path) -> None:
    client = load_secret(folder)
    context = client.context(secret=True)
    parts = {"save_public_key": False, "save_galois_keys": False, "save_relin_keys": False}
    body = context.serialize(save_secret_key=True, **parts)[1000:2000]  # behind what all contexts begin with
    assert len(body) == 1000
    assert client.secret is not None
    assert body in client.secret
    assert body not in (folder / "public.ckks").read_bytes()


@pytest.mark.parametrize("name", ["secret.ckks", "public.ckks"])
def test_keys_are_never_overwritten(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(CoterieError, match="not overwritten"):
        make_keys(tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"precious")]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CoterieError, match=r"cannot write keys to .*file: "):
        make_keys(tmp_path / "file")


def test_wrong_files_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"secret\.ckks is a secret key; expected a public key"):
        load_public(folder / "secret.ckks")
    with pytest.raises(CoterieError, match=r"public\.ckks is a public key; expected a secret key"):
        load_secret(folder / "public.ckks")
    with pytest.raises(CoterieError, match="`coterie keys FOLDER` makes a pair"):
        load_secret(tmp_path)
    for content in (b"", b"\n", b"ssh-rsa AAAA\n", b"\xff\xfe\n\x00", b"coterie-ckks-1 other 00\n"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(CoterieError, match="is not a key that"):
            load_secret(tmp_path / "key")


@pytest.mark.parametrize("name", ["secret.ckks", "public.ckks"])
def test_damaged_files_are_told(name: str, folder: Path, tmp_path: Path) -> None:
    whole = (folder / name).read_bytes()
    load = load_secret if name == "secret.ckks" else load_public
    for at in (100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "key").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CoterieError, match="damaged"):
            load(tmp_path / "key")
        (tmp_path / "key").write_bytes(whole[:at])
        with pytest.raises(CoterieError, match="damaged"):
            load(tmp_path / "key")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", str(tmp_path / "made")])
    assert "secret.ckks: give it to the clients only" in capsys.readouterr().out
    load_secret(tmp_path / "made")
    with pytest.raises(SystemExit) as stop:
        main(["keys", str(tmp_path / "made")])
    assert stop.value.code == 2
    assert "not overwritten" in capsys.readouterr().err
