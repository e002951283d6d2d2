"""A connection to an MQTT broker that comes back by itself, and the topics of a federation.

    presence/DEVICE                  device, kept by the broker: who it is; its last will: it is gone
    config                           server, kept: the federation
    round/plan                       server, kept: what is asked of whom, or that it is over
    model/start/N, model/all/N       server, kept: pieces of the first weights, and of what all are sent alike
    model/down/DEVICE/CLIENT         server: what a client is to join, train or finish with
    eval/ask/DEVICE/CLIENT           server: what it is to be measured with
    model/up/DEVICE/CLIENT           device: what it trained, with its statistics
    eval/report/DEVICE/CLIENT        device: scores
    ack/DEVICE/CLIENT                device: joined, finished, or trouble
    refused/DEVICE                   server: why a message was not taken
    claim/DEVICE, server             either, kept: since when it is the one of this name

All begin with coterie/NAME/. A device may write only below its own name, which the broker's list of rights ensures.
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
from coterie.network.chunks import cut

log = logging.getLogger("coterie")
PATIENCE = 10.0  # seconds for a broker to answer
DENIED = (134, 135)  # bad user name or password, not authorised


@dataclass(frozen=True)
class Broker:
    """Where the broker is, and who we are to it."""

    broker: str = field(default="127.0.0.1:1883", metadata={"help": "HOST:PORT of the MQTT broker"})
    ca: str | None = field(default=None, metadata={"help": "certificate of the authority, which switches TLS on"})
    cert: str | None = field(default=None, metadata={"help": "own certificate"})
    key: str | None = field(default=None, metadata={"help": "its private key"})
    keepalive: int = field(default=15, metadata={"help": "seconds after which the broker misses who is silent"})

    def __post_init__(self) -> None:
        host, _, port = self.broker.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise CoterieError(f"--broker is HOST:PORT, such as 127.0.0.1:1883, not '{self.broker}'")
        if (self.cert is None) != (self.key is None) or (self.cert and not self.ca):
            raise CoterieError("a certificate needs its key and the authority's certificate: --ca, --cert and --key")
        for path in (self.ca, self.cert, self.key):
            if path is not None and not Path(path).is_file():
                raise CoterieError(f"{path}: no such file")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.broker.rpartition(":")
        return host, int(port)


class Link:
    """Whoever comes by this name again takes the connection over, and this one ends.

    claim: a topic where whoever has the name says since when; brokers do not tell reliably who was taken over.
    up: called when the connection is there, the first time and after every break. heard: is given topic and payload.
    Both are called on a thread of this link's.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        claim: str,
        up: Callable[[], None],
        heard: Callable[[str, bytes], None],
        will: tuple[str, bytes] | None = None,
    ) -> None:
        paho = library()
        self.broker, self.name, self.claim, self.up, self.heard = broker, name, claim, up, heard
        self.since, self.mine = time.time_ns(), False  # whether the broker knows that the name is ours
        self.ended = ""  # why there is no connection any more, and will be none
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
        """An error within seconds, if there is no such broker, or it does not want us."""
        where = self.broker.broker
        try:
            self.client.connect_timeout = PATIENCE
            self.client.connect(*self.broker.address, keepalive=self.broker.keepalive)
        except ssl.SSLCertVerificationError as error:
            raise CoterieError(f"the broker at {where} cannot be trusted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise CoterieError(f"no TLS with {where}: {error.reason}; is that its TLS port?") from None
        except socket.gaierror:
            raise CoterieError(f"there is no machine '{self.broker.address[0]}'; is --broker right?") from None
        except ConnectionResetError:
            raise CoterieError(f"the broker at {where} hangs up; is that its TLS port?") from None
        except OSError as error:
            reason = error.strerror or "no answer"
            raise CoterieError(f"no MQTT broker at {where} ({reason}); is it running, and is --broker right?") from None
        self.client.loop_start()
        if not self.connected.wait(PATIENCE) or self.ended:
            reason = self.ended or f"it does not answer; is that its {'TLS' if self.broker.ca else 'plain'} port?"
            self.close()
            raise CoterieError(f"the broker at {where} does not let '{self.name}' in: {reason}")

    def say(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.client.publish(topic, payload, qos=1, retain=retain)

    def say_in_pieces(self, topic: str, message: bytes, retain: bool = False) -> None:
        """Kept ones each under a topic of their own, or the broker would keep the last only."""
        for number, piece in enumerate(cut(message)):
            self.say(f"{topic}/{number}" if retain else topic, piece, retain)

    def listen(self, *topics: str) -> None:
        self.client.subscribe([(topic, 1) for topic in topics])

    def close(self, farewell: tuple[str, bytes] | None = None) -> None:
        """farewell: said before, and kept."""
        if farewell and self.client.is_connected():
            with contextlib.suppress(RuntimeError):  # the connection is lost in this moment
                self.client.publish(*farewell, qos=1, retain=True).wait_for_publish(2)
        self.client.disconnect()
        self.client.loop_stop()

    def flush(self, seconds: float) -> bool:
        """Wait until the broker has all that was said; whether it has."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended:
            with contextlib.suppress(RuntimeError):  # there is no connection at the moment
                last = self.client.publish(f"coterie/flush/{self.name}", b"", qos=1)
                last.wait_for_publish(end - time.monotonic())
                return bool(last.is_published())
            time.sleep(0.2)
        return False

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        if code.is_failure:
            self.ended = "it is not allowed to" if code.value in DENIED else str(code)
            self.connected.set()
            return
        if self.lost:
            log.warning("the broker is back")
        self.lost = False
        self.listen(self.claim)
        self._say_claim()
        self.up()
        self.connected.set()

    def _on_disconnect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        if not self.connected.is_set():
            secret = "does it want a certificate, or another one than --cert?"
            self.ended = f"it hangs up; {secret if self.broker.ca else 'is that its plain port?'}"
            self.connected.set()
        elif code.is_failure and not self.lost:
            log.warning("the connection to the broker is lost; trying again")
            self.lost = True

    def _on_publish(self, client: Any, data: Any, number: int, code: Any, properties: Any) -> None:
        if code.value in DENIED:
            self.ended = f"the broker does not let '{self.name}' speak; is that the name in --cert?"
            client.disconnect()

    def _on_message(self, client: Any, data: Any, message: Any) -> None:
        try:
            if message.topic == self.claim:
                self._claimed(message.payload)
            else:
                self.heard(message.topic, message.payload)
        except Exception:  # whatever somebody sent, the connection stays
            log.exception("a message under %s could not be read", message.topic)

    def _say_claim(self) -> None:
        self.say(self.claim, str(self.since).encode(), retain=True)

    def _claimed(self, payload: bytes) -> None:
        """Somebody says since when the name is theirs: who came last has it."""
        since = int(payload) if payload.isdigit() and len(payload) < 20 else 0
        if since == self.since:
            self.mine = True
        elif since > self.since and self.mine:
            self.ended = f"another one of the name '{self.name}' has come"
            self.client.disconnect()
        else:
            self.since = max(self.since, since + 1)  # the clock of who was here before may be fast
            self._say_claim()


def library() -> Any:
    try:
        import paho.mqtt.client as paho
    except ImportError:
        raise CoterieError("MQTT needs a library: pip install 'coterie[mqtt]'") from None
    return paho


def check_certificates(broker: Broker) -> None:
    """What is wrong with our own files is told here: a broker only hangs up."""
    try:
        context = ssl.create_default_context(cafile=broker.ca)
        if broker.cert:
            context.load_cert_chain(broker.cert, broker.key)
    except ssl.SSLError as error:
        raise CoterieError(
            f"{broker.ca}, {broker.cert}, {broker.key}: not certificates that fit ({error.reason})"
        ) from None
    for path in (broker.ca, broker.cert):
        if path:
            check_dates(path)


def check_dates(path: str) -> None:
    try:
        from cryptography import x509
    except ImportError:
        return  # the broker will tell
    from datetime import UTC, datetime

    certificate, now = x509.load_pem_x509_certificate(Path(path).read_bytes()), datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise CoterieError(
            f"{path}: this certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make a new one"
        )
    if now < certificate.not_valid_before_utc:
        raise CoterieError(f"{path}: this certificate is not valid yet; is the clock right?")
