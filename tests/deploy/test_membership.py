"""Which devices may take part: schemas, claims, rosters, certificates; and the pooling of their statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.deploy.certs import make_certificates
from coterie.deploy.handshake import Hello, HostedClient, SampleSchema, to_json
from coterie.deploy.membership import Membership
from coterie.deploy.roster import load_identity, read_roster, sign
from coterie.deploy.sample_schema import difference, pooled
from coterie.deploy.task_schema import TaskSchema
from coterie.deploy.wire import Refused

COLUMNS = tuple(map(Column, ("age", "sex", "trestbps", "chol")))
TABLE = SampleSchema(
    "heart",
    2,
    ("healthy", "sick"),
    (4,),
    "float32",
    Transform((0.0,) * 4, (1.0,) * 4, columns=COLUMNS),
    TaskSchema("classification", {"classes": 2}, ()),
)
THREE = TaskSchema("classification", {"classes": 3}, ())


def said(device: str, client: int = 0, schema: SampleSchema = TABLE, samples: int = 30, **more: Any) -> Hello:
    return Hello(device, schema, (HostedClient(client, (samples,), 10, None),), **more)


def with_columns(*columns: Column) -> SampleSchema:
    inputs = sum(len(column.inputs) for column in columns)
    transform = Transform((0.0,) * inputs, (1.0,) * inputs, columns=columns)
    return replace(TABLE, shape=(len(columns),), transform=transform)


age, sex, pressure, chol = COLUMNS
OTHERS = {
    "order": (
        with_columns(age, sex, chol, pressure),
        "device b has column 'chol' at position 3, device a has column 'trestbps'; the order of the columns "
        "differs: reorder them on one side",
    ),
    "name": (
        with_columns(age, sex, pressure, Column("glucose")),
        "device b has column 'glucose' at position 4, device a has column 'chol'; device b lacks 'chol' and also has "
        "'glucose'",
    ),
    "fewer": (with_columns(age, sex, pressure), "device b has no column at position 4, device a has column 'chol'"),
    "categories": (
        with_columns(age, Column("sex", ("m", "f")), pressure, chol),
        "in column 'sex' device b has the categories 'm', 'f', device a has none",
    ),
    "indicator": (
        with_columns(age, sex, pressure, Column("chol", fill=200.0, indicator=True)),
        "in column 'chol' device b marks missing values with one more input, device a does not",
    ),
    "classes": (
        replace(TABLE, class_names=("sick", "healthy")),
        "class 0 is 'sick' on device b and 'healthy' on device a",
    ),
    "more": (
        replace(TABLE, classes=3, class_names=(), task=THREE),
        "class 0 is none on device b and 'healthy' on device a",
    ),
    "type": (replace(TABLE, dtype="float16"), "device b has float16 samples of shape (4,), device a has float32"),
    "scaling": (
        replace(TABLE, transform=replace(TABLE.transform, mean=(), std=())),
        "device b normalises 0 values of a sample, device a normalises 4",
    ),
    "no names": (
        replace(TABLE, transform=replace(TABLE.transform, columns=())),
        "device a has a table with named columns, device b has arrays without names",
    ),
    "flips": (replace(TABLE, transform=replace(TABLE.transform, flip=True)), "device b has random flips set to True"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_schema_is_refused_and_both_sides_are_named(what: str) -> None:
    membership, (schema, words) = Membership(2), OTHERS[what]
    membership.register("a", to_json(said("a")))
    with pytest.raises(Refused) as refused:
        membership.register("b", to_json(said("b", 1, schema)))
    assert words in str(refused.value)
    assert difference("x", TABLE, "y", TABLE) is None


def test_other_means_and_fills_are_pooled() -> None:
    """Means by samples, deviations as of all samples together, fills by samples."""
    gaps = tuple(replace(column, fill=fill) for column, fill in zip(COLUMNS, (50.0, 0.0, 120.0, 200.0), strict=True))
    one = replace(TABLE.transform, mean=(1.0,) * 4, std=(2.0,) * 4, columns=gaps)
    two = replace(one, mean=(4.0,) * 4, std=(1.0,) * 4, columns=(replace(gaps[0], fill=62.0), *gaps[1:]))
    membership = Membership(2)
    membership.add(said("a", 0, replace(TABLE, transform=one), 10))
    membership.add(said("b", 1, replace(TABLE, transform=two), 20))
    found = membership.schema.transform
    assert found.mean == (3.0,) * 4  # (10 * 1 + 20 * 4) / 30
    assert found.std == pytest.approx([((10 * (4 + 4) + 20 * (1 + 1)) / 30) ** 0.5] * 4)
    assert [column.fill for column in found.columns] == pytest.approx([58.0, 0.0, 120.0, 200.0])


def test_a_hello_that_lies_of_its_samples() -> None:
    """With 2^39 samples of mean 1e6 it would spoil everybody's normalisation."""
    honest = replace(TABLE, transform=replace(TABLE.transform, mean=(1.0,) * 4, std=(2.0,) * 4))
    liar = replace(honest, transform=replace(honest.transform, mean=(1e6,) * 4, std=(1e-9,) * 4))
    for robust in (False, True):
        membership = Membership(3, robust=robust)
        with pytest.raises(Refused, match=r"client 2 claims 549755813898 samples, more than the limit of 10000000"):
            membership.add(said("c", 2, liar, 2**39))
        for device, client, schema in (("a", 0, honest), ("b", 1, honest), ("c", 2, liar)):
            membership.add(said(device, client, schema, 9_000_000))
        mean, std = membership.schema.transform.mean, membership.schema.transform.std
        assert (abs(mean[0] - 1) < 1e-9 and abs(std[0] - 2) < 1e-9) == robust
    small = Membership(1, max_samples=30)
    with pytest.raises(Refused, match=r"--max-samples"):
        small.add(said("a", 0))


def test_medians_of_two_devices_are_between_them() -> None:
    one, two = (Transform((value,), (1.0,)) for value in (0.0, 2.0))
    assert pooled([one, two], [1, 99], robust=True).mean == (1.0,)


def test_names_of_clients_travel() -> None:
    membership = Membership(3)
    membership.register("ward", to_json(replace(said("ward"), clients=(HostedClient(1, (5,), 2, None, "zürich"),))))
    assert membership.labels([0, 1, 2]) == "0, 1 (zürich, on ward), 2"


# Who may bring which client.


def test_a_roster_decides(tmp_path: Path) -> None:
    (tmp_path / "roster").write_text("# clients\n0 a\n1 b\n")
    (tmp_path / "roster.csv").write_text("client,device\n0,a\n1,b\n")
    for name in ("roster", "roster.csv"):
        membership = Membership(2, read_roster(tmp_path / name, 2))
        with pytest.raises(Refused, match="roster assigns client 1 to device b, not a"):
            membership.add(said("a", 1))
        membership.add(said("a", 0))
        membership.add(said("b", 1))
        assert membership.full


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 a\n", "no device for clients 1"),
        ("0 a\n0 b\n", "line 2: client 0 is listed twice"),
        ("7 a\n", "line 1: client 7 is not one of 0 to 1"),
        ("zero a\n", r"line 1: expected CLIENT DEVICE \[FINGERPRINT\], got 'zero a'"),
        ("0 a abc\n", "line 1: a fingerprint is the SHA-256 of a certificate, 64 hexadecimal digits"),
    ],
)
def test_an_invalid_roster_is_reported(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "roster").write_text(text)
    with pytest.raises(CoterieError, match=words):
        read_roster(tmp_path / "roster", 2)
    with pytest.raises(CoterieError, match="cannot read"):
        read_roster(tmp_path / "none", 2)


def test_a_certificate_is_proven_and_bound(tmp_path: Path) -> None:
    import hashlib

    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    for folder in ("one", "two"):
        make_certificates(tmp_path / folder, ["a"], "127.0.0.1", 8883, 30)
    (cert, key), (other, other_key) = (
        load_identity(str(tmp_path / folder / "a.pem"), str(tmp_path / folder / "a.key")) for folder in ("one", "two")
    )
    der = x509.load_pem_x509_certificate((tmp_path / "one" / "a.pem").read_bytes()).public_bytes(Encoding.DER)
    (tmp_path / "roster").write_text(f"0 a {hashlib.sha256(der).hexdigest()}\n1 b\n")

    mine, foreign = said("a", certificate=cert), said("a", certificate=other)
    roster = read_roster(tmp_path / "roster", 2)
    for bad, words in (
        (said("a"), "but got no certificate"),
        (mine, "invalid certificate|not signed"),
        (sign(mine, other_key), "not signed with the key of its certificate"),
        (
            replace(sign(mine, key), clients=(HostedClient(0, (99,), 1, None),)),
            "not signed with the key of its certificate",
        ),
        (sign(foreign, other_key), "the roster assigns client 0 to certificate"),
    ):
        with pytest.raises(Refused, match=words):
            Membership(2, roster).register("a", to_json(bad))
    Membership(2, roster).register("a", to_json(sign(mine, key)))

    waiting = Membership(2)  # without a roster, the first certificate counts, also before all clients are there
    waiting.register("a", to_json(sign(mine, key)))
    for other_hello in (sign(foreign, other_key), said("a")):
        with pytest.raises(Refused, match="device a is already connected with another certificate"):
            waiting.register("a", to_json(other_hello))
    waiting.register("a", b"")  # it left, as the broker says when a connection ends: another may come
    waiting.register("a", to_json(sign(foreign, other_key)))

    opened = Membership(1)
    opened.register("a", to_json(sign(mine, key)))
    opened.register("a", to_json(sign(replace(mine, session="again"), key)))
    with pytest.raises(Refused, match="device a changed its certificate since the federation began"):
        opened.register("a", to_json(sign(foreign, other_key)))
    with pytest.raises(Refused, match="client 0 is already hosted by device a"):
        opened.register("b", to_json(said("b")))


def test_hellos_are_restored_from_the_run_folder() -> None:
    import json
    from dataclasses import asdict

    before = Membership(2)
    before.add(said("a"))
    before.add(said("b", 1, samples=7))
    after = Membership(2)
    after.restore(json.loads(json.dumps([asdict(hello) for hello in before.devices.values()])))
    assert after.full
    assert after.about() == before.about()
    assert torch.equal(after.census.samples, torch.tensor([30, 7]))
    with pytest.raises(Refused, match="device b changed its clients, their names or their numbers of samples since"):
        after.register("b", to_json(said("b", 1, samples=8)))
