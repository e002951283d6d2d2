"""A certificate authority for testing: certificates for broker, server and devices, and the broker's configuration."""

from __future__ import annotations

import getpass
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy.membership import NAME, check_name
from coterie.deploy.roster import libraries
from coterie.runs.disk import whole, writing

SERVER_RIGHTS = """\
# The server of the federation {name}.
user server
topic readwrite coterie/{name}/#
topic write coterie/flush/+

"""

DEVICE_RIGHTS = """\
# {device} in the federation {name}. Its user name is the name in its certificate, so it publishes only as itself.
user {device}
topic readwrite coterie/{name}/presence/{device}
topic readwrite coterie/{name}/claim/{device}
topic write coterie/{name}/model/up/{device}/+
topic write coterie/{name}/eval/report/{device}/+
topic write coterie/{name}/ack/{device}/+
topic read coterie/{name}/config
topic read coterie/{name}/round/plan
topic read coterie/{name}/model/start/+
topic read coterie/{name}/model/all/+
topic read coterie/{name}/model/down/{device}/+
topic read coterie/{name}/eval/ask/{device}/+
topic read coterie/{name}/refused/{device}

"""

SETTINGS = """\
# mosquitto -c {folder}/mosquitto.conf
listener {port} {host}
cafile {folder}/ca.pem
certfile {folder}/broker.pem
keyfile {folder}/broker.key
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
acl_file {folder}/rights.acl
max_queued_messages 0
# the user that reads the keys; ignored unless started as root
user {user}
"""


def make_certificates(
    folder: Path, devices: list[str], host: str, port: int, days: int, federation: str = "federation"
) -> list[Path]:
    """Create or extend the certificates in a folder; returns the files that were written.

    An existing authority signs certificates for new devices; an interrupted call is completed. Devices get rights in
    this federation, and keep the rights that they have.
    """
    check_names(devices)
    check_name("federation", federation)
    libraries()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        made = [] if complete(folder, "ca") else [make(folder, "ca", None, (), days)]
        new = [name for name in ("broker", "server", *devices) if not complete(folder, name)]
        made += [make(folder, name, folder, (host, "localhost") if name == "broker" else (), days) for name in new]
        settings = SETTINGS.format(folder=folder.resolve(), port=port, host=host, user=getpass.getuser())
        if not (folder / "mosquitto.conf").exists():
            with whole(folder / "mosquitto.conf") as part:
                part.write_text(settings, encoding="utf-8")
            made.append(folder / "mosquitto.conf")
        if give_rights(folder / "rights.acl", devices, federation):
            made.append(folder / "rights.acl")
    return made


def give_rights(path: Path, devices: list[str], federation: str) -> bool:
    """Extend the broker's access control list, atomically; returns whether anything was new."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    blocks = [SERVER_RIGHTS.format(name=federation)]
    blocks += [DEVICE_RIGHTS.format(name=federation, device=device) for device in devices]
    new = "".join(block for block in blocks if block not in before)
    if new:
        with whole(path) as part:
            part.write_text(before + new, encoding="utf-8")
    return bool(new)


def check_names(devices: list[str]) -> None:
    for name in devices:
        if not NAME.fullmatch(name) or name in ("ca", "broker", "server"):
            raise CoterieError(
                f"invalid device name '{name}': use letters, digits, '-', '_' and '.'; "
                "'ca', 'broker' and 'server' are reserved"
            )


def complete(folder: Path, name: str) -> bool:
    """Whether key and certificate exist. The authority's key may be stored elsewhere once everything is signed."""
    return (folder / f"{name}.pem").exists() and (name == "ca" or (folder / f"{name}.key").exists())


def make(folder: Path, name: str, authority: Path | None, hosts: tuple[str, ...], days: int) -> Path:
    """Create a key, readable by its owner only, and a certificate signed by the authority, or self-signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    key, now = make_key(folder / f"{name}.key"), datetime.now(UTC)
    subject = named("Coterie test authority" if authority is None else name)
    signer: Any = key
    issuer = subject
    if authority is not None:
        signer = load_key(authority / "ca.key")
        if signer is None:
            raise CoterieError(f"{authority / 'ca.key'} is missing or damaged; it is needed to sign {name}")
        issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes()).subject
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if authority is None:
        rights = {name: name in ("key_cert_sign", "crl_sign") for name in USAGES}
        builder = builder.add_extension(x509.KeyUsage(**rights), critical=True)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([alternative(host) for host in hosts]), False)
    certificate = builder.sign(signer, hashes.SHA256())
    path = folder / f"{name}.pem"
    with whole(path) as part:
        part.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def make_key(path: Path) -> Any:
    """Create a key file, readable by its owner only; an existing valid key is reused."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if (found := load_key(path)) is not None:
        return found
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    with whole(path) as part, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(*form))
    return key


def load_key(path: Path) -> Any | None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(path.read_bytes(), None)
    except (FileNotFoundError, ValueError):
        return None


USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
          "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
