"""Which device may host which client: the server's roster file, and certificates that devices prove to own."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.deploy.handshake import Hello, to_json
from coterie.deploy.wire import Refused


class RosterEntry(NamedTuple):
    """The device that hosts a client."""

    device: str
    fingerprint: str = ""  # SHA-256 of the device's certificate, in hexadecimal; empty: any


@dataclass(frozen=True)
class Roster:
    entries: dict[int, RosterEntry]
    source: str  # the file, for messages

    def check(self, client: int, hello: Hello) -> None:
        """Raise `Refused` unless the roster assigns this client to this device."""
        entry = self.entries[client]
        if entry.device != hello.device:
            raise Refused(f"the server's roster assigns client {client} to device {entry.device}, not {hello.device}")
        if entry.fingerprint and entry.fingerprint != (own := fingerprint(hello)):
            found = own or "no certificate (join with --cert and --key)"
            raise Refused(f"the roster assigns client {client} to certificate {entry.fingerprint}, but got {found}")


def read_roster(path: str | Path, num_clients: int) -> Roster:
    """Read lines `CLIENT DEVICE [FINGERPRINT]`, or the same as CSV; lines that start with # are comments."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"--roster: cannot read {path} ({getattr(error, 'strerror', None) or error})") from None
    entries = dict[int, RosterEntry]()
    for number, line in enumerate(lines, 1):
        words = [word.strip() for word in (next(csv.reader([line])) if "," in line else line.split())]
        if not any(words) or words[0].startswith("#") or (number == 1 and words[0].lower() == "client"):
            continue
        where = f"--roster {path}, line {number}"
        if len(words) not in (2, 3) or not words[0].isdecimal():
            raise CoterieError(f"{where}: expected CLIENT DEVICE [FINGERPRINT], got '{line.strip()[:80]}'")
        client, mark = int(words[0]), words[2].replace(":", "").lower() if len(words) == 3 else ""
        if client >= num_clients or client in entries:
            problem = (
                "is listed twice" if client in entries else f"is not one of 0 to {num_clients - 1} (--num-clients)"
            )
            raise CoterieError(f"{where}: client {client} {problem}")
        if mark and (len(mark) != 64 or not set(mark) <= set("0123456789abcdef")):
            raise CoterieError(f"{where}: a fingerprint is the SHA-256 of a certificate, 64 hexadecimal digits")
        entries[client] = RosterEntry(words[1], mark)
    if missing := [client for client in range(num_clients) if client not in entries]:
        raise CoterieError(f"--roster {path}: no device for clients {', '.join(map(str, missing[:20]))}")
    return Roster(entries, str(path))


def fingerprint(hello: Hello) -> str:
    """SHA-256 of the device's certificate, or "" without one; raises `Refused` if the signature is invalid."""
    if not hello.certificate:
        return ""
    x509, ec, hashes = libraries()
    try:
        der = base64.b64decode(hello.certificate, validate=True)
        key: Any = x509.load_der_x509_certificate(der).public_key()
        content = to_json(replace(hello, signature=""))
        key.verify(base64.b64decode(hello.signature, validate=True), content, *scheme(key, ec, hashes))
    except (binascii.Error, ValueError, TypeError):
        raise Refused("invalid certificate or signature") from None
    except Exception as error:
        raise Refused(f"the hello is not signed with the key of its certificate ({type(error).__name__})") from None
    return hashlib.sha256(der).hexdigest()


def sign(hello: Hello, key: Any) -> Hello:
    """Sign a hello with the key of the device's certificate."""
    _, ec, hashes = libraries()
    content = to_json(replace(hello, signature=""))
    return replace(hello, signature=base64.b64encode(key.sign(content, *scheme(key, ec, hashes))).decode())


def load_identity(cert: str, key: str) -> tuple[str, Any]:
    """The certificate of a device, base64 of DER, and its private key."""
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    x509, _, _ = libraries()
    try:
        certificate = x509.load_pem_x509_certificate(Path(cert).read_bytes())
        return base64.b64encode(certificate.public_bytes(Encoding.DER)).decode(), load_pem_private_key(
            Path(key).read_bytes(), None
        )
    except (OSError, ValueError, TypeError) as error:
        raise CoterieError(f"{cert} and {key} are not a certificate and its key ({error})") from None


def scheme(key: Any, ec: Any, hashes: Any) -> tuple[Any, ...]:
    """The signature algorithm for this type of key."""
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return (ec.ECDSA(hashes.SHA256()),)
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return padding.PKCS1v15(), hashes.SHA256()
    return ()


def libraries() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise CoterieError("certificates need the package cryptography: pip install 'coterie[mqtt]'") from None
    return x509, ec, hashes
