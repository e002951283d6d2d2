"""A connection to an MQTT broker that reconnects automatically, and the topics of a federation.

    presence/DEVICE                  device, retained: its hello; the last will says that it disconnected
    config                           server, retained: the terms of the federation
    round/plan                       server, retained: the current phase and its clients, or the end of the federation
    model/start/N, model/all/N       server, retained: chunks of the initial weights, and of the shared part of requests
    model/down/DEVICE/CLIENT         server: requests to join, train or finish
    eval/ask/DEVICE/CLIENT           server: requests to evaluate
    model/up/DEVICE/CLIENT           device: updates
    eval/report/DEVICE/CLIENT        device: scores
    ack/DEVICE/CLIENT                device: joined, finished, or an error
    refused/DEVICE                   server: why a message was refused
    claim/DEVICE, server             either, retained: when the current owner of the name connected

All topics start with coterie/NAME/. The broker's access control list lets a device publish under its own name only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy.chunks import to_chunks

log = logging.getLogger("coterie")
TIMEOUT = 10.0  # seconds for a broker to answer
DENIED = (134, 135)  # reason codes: bad user name or password, not authorized


@dataclass(frozen=True)
class Broker:
    """The address of the broker, and the credentials for it."""

    broker: str = field(default="127.0.0.1:1883", metadata={"help": "HOST:PORT of the MQTT broker"})
    ca: str | None = field(default=None, metadata={"help": "certificate of the authority; enables TLS"})
    cert: str | None = field(default=None, metadata={"help": "certificate of this server or device"})
    key: str | None = field(default=None, metadata={"help": "private key of --cert"})
    keepalive: int = field(default=15, metadata={"help": "keepalive in seconds"})

    def __post_init__(self) -> None:
        host, _, port = self.broker.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise CoterieError(f"--broker must be HOST:PORT, such as 127.0.0.1:1883, got '{self.broker}'")
        if (self.cert is None) != (self.key is None) or (self.cert and not self.ca):
            raise CoterieError("--cert needs --key, its private key, and --ca, the authority's certificate")
        for path in (self.ca, self.cert, self.key):
            if path is not None and not Path(path).is_file():
                raise CoterieError(f"{path}: no such file")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.broker.rpartition(":")
        return host, int(port)


class MqttConnection:
    """A later connection with the same name takes over, and this one ends.

    claim: a retained topic with the time at which the name's owner connected; brokers do not report takeovers reliably.
    on_connect: called after every connection and reconnection. on_message: called with topic and payload. Both run on
    the connection's thread.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        claim: str,
        on_connect: Callable[[], None],
        on_message: Callable[[str, bytes], None],
        will: tuple[str, bytes] | None = None,
    ) -> None:
        paho = library()
        self.broker, self.name, self.claim = broker, name, claim
        self.on_connect, self.on_message = on_connect, on_message
        self.since, self.owned = time.time_ns(), False  # owned: the broker has confirmed our claim
        self.ended = ""  # why the connection has ended for good
        self.connected, self.lost = threading.Event(), False
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        self.client.on_connect, self.client.on_disconnect = self._on_connect, self._on_disconnect
        self.client.on_message, self.client.on_publish = self._on_message, self._on_publish
        self.client.reconnect_delay_set(1, 30)
        self.client.max_queued_messages_set(0)
        if will:
            self.client.will_set(*will, qos=1, retain=True)
        if broker.ca:
            check_certificates(broker)
            self.client.tls_set(broker.ca, broker.cert, broker.key, tls_version=ssl.PROTOCOL_TLS_CLIENT)

    def open(self) -> None:
        """Connect, or raise an error within seconds."""
        where = self.broker.broker
        try:
            self.client.connect_timeout = TIMEOUT
            self.client.connect(*self.broker.address, keepalive=self.broker.keepalive)
        except ssl.SSLCertVerificationError as error:
            raise CoterieError(f"untrusted certificate of the broker at {where}: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise CoterieError(f"TLS handshake with {where} failed: {error.reason}; is it the TLS port?") from None
        except socket.gaierror:
            raise CoterieError(f"unknown host '{self.broker.address[0]}'; check --broker") from None
        except ConnectionResetError:
            raise CoterieError(f"the broker at {where} closed the connection; is it the TLS port?") from None
        except OSError as error:
            reason = (error.strerror or "timed out").lower()
            raise CoterieError(
                f"cannot connect to a broker at {where}: {reason}; is it running? Check --broker"
            ) from None
        self.client.loop_start()
        if not self.connected.wait(TIMEOUT) or self.ended:
            reason = self.ended or f"timed out; is it the {'TLS' if self.broker.ca else 'plain'} port?"
            self.close()
            raise CoterieError(f"the broker at {where} refused the connection of '{self.name}': {reason}")

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.client.publish(topic, payload, qos=1, retain=retain)

    def publish_chunks(self, topic: str, message: bytes, retain: bool = False) -> None:
        """Retained chunks get a topic each, since a broker retains only the last message of a topic."""
        for number, chunk in enumerate(to_chunks(message)):
            self.publish(f"{topic}/{number}" if retain else topic, chunk, retain)

    def subscribe(self, *topics: str) -> None:
        self.client.subscribe([(topic, 1) for topic in topics])

    def close(self, farewell: tuple[str, bytes] | None = None) -> None:
        """farewell: topic and payload of a last retained message."""
        if farewell and self.client.is_connected():
            with contextlib.suppress(RuntimeError):  # the connection was lost just now
                self.client.publish(*farewell, qos=1, retain=True).wait_for_publish(2)
        self.client.disconnect()
        self.client.loop_stop()

    def flush(self, seconds: float) -> bool:
        """Wait until the broker has received all messages; returns whether it has."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended:
            with contextlib.suppress(RuntimeError):  # not connected at the moment
                last = self.client.publish(f"coterie/flush/{self.name}", b"", qos=1)
                last.wait_for_publish(end - time.monotonic())
                return bool(last.is_published())
            time.sleep(0.2)
        return False

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        if code.is_failure:
            self.ended = "not authorized" if code.value in DENIED else str(code)
            self.connected.set()
            return
        if self.lost:
            log.warning("reconnected to the broker")
        self.lost = False
        self.subscribe(self.claim)
        self._publish_claim()
        self.on_connect()
        self.connected.set()

    def _on_disconnect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        if not self.connected.is_set():
            hint = "does it require a certificate, or another --cert?" if self.broker.ca else "is it the plain port?"
            self.ended = f"it closed the connection; {hint}"
            self.connected.set()
        elif code.is_failure and not self.lost:
            log.warning("lost the connection to the broker; reconnecting")
            self.lost = True

    def _on_publish(self, client: Any, data: Any, number: int, code: Any, properties: Any) -> None:
        if code.value in DENIED:
            self.ended = f"the broker does not allow '{self.name}' to publish; is it the name in --cert?"
            client.disconnect()

    def _on_message(self, client: Any, data: Any, message: Any) -> None:
        try:
            if message.topic == self.claim:
                self._take_claim(message.payload)
            else:
                self.on_message(message.topic, message.payload)
        except Exception:  # no message may end the connection
            log.exception("failed to process a message on %s", message.topic)

    def _publish_claim(self) -> None:
        self.publish(self.claim, str(self.since).encode(), retain=True)

    def _take_claim(self, payload: bytes) -> None:
        """The latest claim owns the name."""
        since = int(payload) if payload.isdigit() and len(payload) < 20 else 0
        if since == self.since:
            self.owned = True
        elif since > self.since and self.owned:
            self.ended = f"another connection took over the name '{self.name}'"
            self.client.disconnect()
        else:
            self.since = max(self.since, since + 1)  # the clock of the previous owner may be fast
            self._publish_claim()


def library() -> Any:
    try:
        import paho.mqtt.client as paho
    except ImportError:
        raise CoterieError("MQTT needs the package paho-mqtt: pip install 'coterie[mqtt]'") from None
    return paho


def check_certificates(broker: Broker) -> None:
    """Validate our own certificates: a broker would close the connection without a reason."""
    try:
        context = ssl.create_default_context(cafile=broker.ca)
        if broker.cert:
            context.load_cert_chain(broker.cert, broker.key)
    except ssl.SSLError as error:
        raise CoterieError(
            f"{broker.ca}, {broker.cert} and {broker.key} do not belong together or are invalid ({error.reason})"
        ) from None
    for path in (broker.ca, broker.cert):
        if path:
            check_dates(path)


def check_dates(path: str) -> None:
    try:
        from cryptography import x509
    except ImportError:
        return  # the broker checks them, too
    from datetime import UTC, datetime

    certificate, now = x509.load_pem_x509_certificate(Path(path).read_bytes()), datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise CoterieError(
            f"{path}: the certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d}; create a new one"
        )
    if now < certificate.not_valid_before_utc:
        raise CoterieError(f"{path}: the certificate is not valid yet; check the clock of this machine")
