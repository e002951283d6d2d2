"""An attacker at a real broker: no forged message is accepted, and every process survives."""

from __future__ import annotations

import json
import random
import signal
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.deploy.certs import make_certificates
from coterie.deploy.chunks import SIZE, to_chunks
from tests.machines import HELD, Machines, assert_same_server, simulated, tls, wait_until

pytestmark = pytest.mark.network

SETTINGS = {"rounds": 6, "join_ratio": 1.0, "seed": 3}
FLAGS = ("--rounds", "6", "--join-ratio", "1", "--seed", "3")
ROOT = "coterie/federation"


@contextmanager
def stranger(machines: Machines, name: str = "stranger", **certificates: str) -> Iterator[Any]:
    """A client of the broker that is none of Coterie's."""
    import paho.mqtt.client as paho

    client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
    client.heard = []  # type: ignore[attr-defined]
    client.on_message = lambda c, d, message: c.heard.append((message.topic, message.payload))
    client.max_inflight_messages_set(1000)
    if certificates:
        client.tls_set(
            certificates["ca"], certificates["cert"], certificates["key"], tls_version=ssl.PROTOCOL_TLS_CLIENT
        )
    client.connect("127.0.0.1", machines.broker.port)
    client.loop_start()
    wait_until(client.is_connected, "the stranger's connection")
    yield client
    client.disconnect()
    client.loop_stop()


def nonsense(draw: random.Random, said: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """A hostile message: noise, incomplete chunks, or a modified copy of a real message."""
    device, client = draw.choice([("one", "0"), ("one", "3"), ("two", "1"), ("three", "2"), ("three", "5")])
    topic = draw.choice([f"model/up/{device}/{client}", f"eval/report/{device}/{client}", f"ack/{device}/{client}",
                         f"presence/{device}", f"presence/{draw.randrange(10**6)}", "config", "round/plan",
                         "model/start/0", "model/all/0", f"model/down/{device}/{client}",
                         f"eval/ask/{device}/{client}"])  # fmt: skip
    payload = draw.choice([
        draw.randbytes(draw.randrange(1, 200)), b"[" * 5000, b'{"protocol":99}', b"null", b"\xff\xfe{}",
        to_chunks(draw.randbytes(300))[0], to_chunks(bytes(2 * SIZE))[0][:50], json.dumps({"phase": "over"}).encode(),
        json.dumps({"phase": "over", "federation": "../.." * 8}).encode(), b'{"here":NaN}', b"9" * 6000,
    ])  # fmt: skip
    if said and draw.random() < 0.5:
        _, good = draw.choice(said)
        at = draw.randrange(len(good) + 1)
        payload = good[:at] + draw.randbytes(3) + good[at + draw.randrange(8) :]
    if topic.startswith("presence/") and payload[:1] == b"{" and draw.random() < 0.5:
        payload = b""  # a forged farewell: the device publishes its hello again
    return f"{ROOT}/{topic}", payload


def test_without_tls_nonsense_is_not_taken(machines: Machines) -> None:
    """Thousands of bad messages under the topics of honest devices and of the server."""
    devices = machines.join_all()
    server = machines.serve("fedper", *FLAGS, "--wait", "120")
    with stranger(machines) as client:
        client.subscribe(f"{ROOT}/#", qos=1)
        server.wait_for("round 1:")
        everybody = [server, *devices.values()]
        before = [machine.memory for machine in everybody]
        draw, memory, sent = random.Random(4), before, 0
        while server.process.is_alive() and sent < 6000:
            for _ in range(100):
                client.publish(*nonsense(draw, client.heard[-200:]), qos=1)
            sent += 100
            memory = [m.memory if m.process.is_alive() else b for m, b in zip(everybody, memory, strict=True)]
            time.sleep(0.02)
        assert server.end(60) == 0, server.said[-3000:]
    assert sent >= 500  # on a busy machine
    assert not any(machines.left_out.values())
    assert_same_server(machines.out, simulated("fedper", **SETTINGS))
    for device in devices.values():
        assert device.end(30) == 0, device.said[-3000:]
    assert max(now - then for now, then in zip(memory, before, strict=True)) < 40 * 2**20
    for machine in everybody:
        assert "Traceback" not in machine.said


def test_a_federation_over_tls(secure: Machines) -> None:
    """And a device that speaks for another, or for the server, is not heard."""
    flags = {"ca": str(secure.folder / "certs" / "ca.pem")}
    flags |= {name: str(secure.folder / "certs" / f"two.{end}") for name, end in (("cert", "pem"), ("key", "key"))}
    server_files = {n: str(secure.folder / "certs" / f"server.{end}") for n, end in (("cert", "pem"), ("key", "key"))}
    own = [f"{ROOT}/model/up/two/1", f"{ROOT}/ack/two/1", f"{ROOT}/presence/two"]
    foreign = ("presence/one", "model/up/one/0", "claim/one", "server", "config", "round/plan", "refused/one")
    log = secure.broker.log
    with stranger(secure, **{**flags, **server_files}) as witness:
        witness.subscribe("coterie/#", qos=1)
        for topic in foreign:  # the broker may hang up on who does this
            with stranger(secure, **flags) as thief:
                thief.publish(f"{ROOT}/{topic}", b"{}", retain=True)
                denied = f"Denied PUBLISH from two (d0, q0, r1, m0, '{ROOT}/{topic}'"
                wait_until(lambda words=denied: words in log.read_text(), denied)  # type: ignore[misc]
        with stranger(secure, "one", **flags) as thief:  # nor can it take the name of another, and throw it out
            thief.subscribe([(f"{ROOT}/{topic}", 1) for topic in ("model/up/#", "model/down/one/+", "presence/one")])
            for topic in own:
                thief.publish(topic, b"", qos=1).wait_for_publish(5)
            wait_until(lambda: len(witness.heard) >= len(own), "what the thief may say")
            assert [topic for topic, _ in witness.heard] == own
            assert "as one " not in log.read_text()
    devices = [secure.join(device, clients, *tls(secure, device)) for device, clients in HELD.items()]
    server = secure.serve("ditto", *FLAGS, *tls(secure, "server"))
    assert server.end() == 0, server.said
    assert all(device.end() == 0 for device in devices)
    assert_same_server(secure.out, simulated("ditto", **SETTINGS))
    assert not thief.heard


def test_a_device_of_another_name_than_its_certificate(secure: Machines) -> None:
    """The broker denies its messages, so the server never receives them."""
    server = secure.serve("fedavg", *tls(secure, "server"), "--wait", "4")
    device = secure.join("one", "0,3", *tls(secure, "two"))
    assert device.end() == 2
    assert "the broker does not allow 'one' to publish; is it the name in --cert?" in device.said
    assert server.end() == 2
    assert "timed out waiting for clients 0, 1, 2, 3, 4, 5" in server.said
    assert "one connected" not in server.said


def test_rights_end_with_the_federation(secure: Machines) -> None:
    """A device with rights in one federation can neither read nor publish in another one."""
    certs = secure.folder / "certs"
    make_certificates(certs, ["four"], "127.0.0.1", secure.broker.port, 30, federation="other")
    secure.broker.process.send_signal(signal.SIGHUP)  # read the list of rights again
    wait_until(lambda: "Reloading config" in secure.broker.log.read_text(), "the new rights")

    def files(name: str) -> dict[str, str]:
        return {"ca": str(certs / "ca.pem"), "cert": str(certs / f"{name}.pem"), "key": str(certs / f"{name}.key")}

    topics = (
        "config",
        "round/plan",
        "model/start/0",
        "model/all/0",
        "model/down/four/3",
        "refused/four",
        "presence/four",
    )
    with stranger(secure, **files("server")) as server, stranger(secure, **files("four")) as four:
        four.subscribe("coterie/#", qos=1)
        server.subscribe("coterie/#", qos=1)
        for name in ("federation", "other"):
            for topic in topics:
                server.publish(f"coterie/{name}/{topic}", b"x", qos=1).wait_for_publish(5)
        wait_until(lambda: len(four.heard) >= len(topics), "what it may hear")
        assert {topic for topic, _ in four.heard} == {f"coterie/other/{topic}" for topic in topics}
        server.heard.clear()
        four.publish("coterie/federation/presence/four", b"{}", qos=1)
        denied = "Denied PUBLISH from four (d0, q1, r0, m"
        wait_until(lambda: denied in secure.broker.log.read_text(), denied)
        assert not [topic for topic, _ in server.heard if topic.startswith("coterie/federation/presence")]
    assert not make_certificates(certs, ["four"], "127.0.0.1", secure.broker.port, 30, federation="other")


def test_keys_are_for_their_owner_only(secure: Machines) -> None:
    for path in (secure.folder / "certs").glob("*.key"):
        assert path.stat().st_mode & 0o077 == 0
    made = {path.name for path in Path(secure.folder / "certs").iterdir()}
    assert made >= {"ca.pem", "ca.key", "broker.pem", "server.pem", "one.pem", "rights.acl", "mosquitto.conf"}
