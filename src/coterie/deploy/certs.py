"""A certificate authority for trying things out: certificates of broker, server and devices, and the broker's files."""

from __future__ import annotations

import getpass
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy.roll import NAME

RIGHTS = """\
# Who may say and hear what. %u is the name in a device's certificate, so a device can speak only for itself.
user server
topic readwrite coterie/#

pattern readwrite coterie/+/presence/%u
pattern readwrite coterie/+/claim/%u
pattern write coterie/+/model/up/%u/+
pattern write coterie/+/eval/report/%u/+
pattern write coterie/+/ack/%u/+
pattern read coterie/+/config
pattern read coterie/+/round/plan
pattern read coterie/+/model/start/+
pattern read coterie/+/model/all/+
pattern read coterie/+/model/down/%u/+
pattern read coterie/+/eval/ask/%u/+
pattern read coterie/+/refused/%u
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
# who reads the keys; only of use if it is started as root
user {user}
"""


def make_certificates(folder: Path, devices: list[str], host: str, port: int, days: int) -> list[Path]:
    """The files made. An authority that is there makes certificates for devices that are new."""
    check_names(devices)
    ready()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [] if (folder / "ca.key").exists() else [make(folder, "ca", None, (), days)]
        new = [name for name in ("broker", "server", *devices) if not (folder / f"{name}.key").exists()]
        made += [make(folder, name, folder, (host, "localhost") if name == "broker" else (), days) for name in new]
        settings = SETTINGS.format(folder=folder.resolve(), port=port, host=host, user=getpass.getuser())
        for name, text in (("rights.acl", RIGHTS), ("mosquitto.conf", settings)):
            if not (folder / name).exists():
                (folder / name).write_text(text, encoding="utf-8")
                made.append(folder / name)
    except OSError as error:
        raise CoterieError(f"{folder} cannot be written to: {error.strerror}") from None
    return made


def check_names(devices: list[str]) -> None:
    for name in devices:
        if not NAME.fullmatch(name) or name in ("ca", "broker", "server"):
            raise CoterieError(f"'{name}' is no name for a device: letters, digits, '-', '_' and '.', and not 'server'")


def ready() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise CoterieError("certificates need a library: pip install 'coterie[mqtt]'") from None


def make(folder: Path, name: str, authority: Path | None, hosts: tuple[str, ...], days: int) -> Path:
    """A key, readable by its owner only, and a certificate of this name signed by the authority, or by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = named("Coterie test authority" if authority is None else name)
    signer: Any = key
    issuer = subject
    if authority is not None:
        signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
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
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    path = folder / f"{name}.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
          "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


def alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
