"""Common mistakes: a clear error within seconds, on the side that can fix it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from coterie.core.errors import CoterieError
from coterie.core.version import VERSION
from coterie.deploy.certs import make, make_certificates
from coterie.deploy.transports.mqtt import connection as mqtt_connection
from tests.machines import Machine, Machines, free_port, tls

pytestmark = pytest.mark.network

HEART = ("--dataset", "heart-disease")


def assert_ends(machine: Machine, *words: str, seconds: float = 60) -> None:
    """With a one-line error that contains these words."""
    start = time.monotonic()
    assert machine.end(seconds) == 2, machine.said
    assert time.monotonic() - start < seconds
    assert "Traceback" not in machine.said
    for word in words:
        assert word in machine.said, machine.said


@pytest.mark.parametrize("side", ["serve", "join"])
def test_no_such_broker(side: str, machines: Machines) -> None:
    for broker, words in (
        (f"127.0.0.1:{free_port()}", "connection refused; is it running? Check --broker"),
        ("no-such-machine.invalid:1883", "unknown host 'no-such-machine.invalid'; check --broker"),
        ("127.0.0.1", "--broker must be HOST:PORT"),
    ):
        machines.at = ("--broker", broker)
        assert_ends(machines.serve("fedavg") if side == "serve" else machines.join("one", "0,3"), words)


def test_a_port_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens there, but it is no broker."""
    monkeypatch.setattr(mqtt_connection, "TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = mqtt_connection.Broker(f"127.0.0.1:{silent.getsockname()[1]}")
        link = mqtt_connection.MqttConnection(broker, "one", "claim", lambda: None, lambda topic, payload: None)
        with pytest.raises(CoterieError, match=r"timed out; is it the plain port\?"):
            link.open()


def test_the_name_of_no_federation(machines: Machines) -> None:
    """Its server may start later: the device waits, and prints the name of the federation."""
    device = machines.join("one", "0,3", "--name", "ward")
    device.wait_for("one is connected to the broker; waiting for the server of 'ward'")
    server = machines.serve("fedavg", "--name", "wart", "--wait", "2")
    assert_ends(server, "timed out waiting for clients 0, 1, 2, 3, 4, 5 after 2 s (--wait); connected: none")
    assert device.process.is_alive()
    assert_ends(machines.join("two", "1", "--name", "a/#"), "invalid federation name 'a/#'")
    assert_ends(machines.join("a+b", "1"), "invalid device name 'a+b'")


@pytest.mark.parametrize(("server", "device"), [(1, 2), (2, 1)])
def test_another_protocol(server: int, device: int, machines: Machines) -> None:
    served = machines.serve("fedavg", protocol=server)
    joined = machines.join("one", "0,3", protocol=device)
    told = f"protocol version mismatch: received {device} (Coterie {VERSION}), expected {server}"
    assert_ends(joined, "the server refused this device: ", told, "install the same version of Coterie on both sides")
    served.wait_for(f"refused device one: {told}")


def test_two_devices_of_one_name(machines: Machines) -> None:
    machines.serve("fedavg")
    first = machines.join("one", "0,3")
    first.wait_for("one is connected to the broker")
    machines.join("one", "0,3", "--dir", str(machines.folder / "elsewhere"))
    assert_ends(first, "one stopped: another connection took over the name 'one'")


def test_two_devices_in_one_folder(machines: Machines) -> None:
    machines.join("one", "0,3").wait_for("one is connected to the broker")
    assert_ends(machines.join("two", "1", "--dir", str(machines.folder / "one")), "another process is using")


def test_two_devices_with_the_same_client(machines: Machines) -> None:
    server = machines.serve("fedavg")
    machines.join("one", "0,3")
    server.wait_for("one connected")
    assert_ends(machines.join("two", "1,3"), "client 3 is already hosted by device one")
    server.wait_for("refused device two: client 3 is already hosted by device one")


def test_a_device_that_left_makes_room(machines: Machines) -> None:
    """Before anything has begun: another one may bring its clients."""
    server = machines.serve("fedavg", "--rounds", "1")
    first = machines.join("one", "0-4")
    server.wait_for("one connected: clients 0, 1, 2, 3, 4")
    first.kill()
    server.wait_for("one disconnected")
    machines.join("two", "0-5")
    assert server.end() == 0, server.said


def test_a_client_out_of_range(machines: Machines) -> None:
    server = machines.serve("fedavg", clients=3)
    assert_ends(machines.join("one", "0,3"), "client 3 is out of range: clients are 0 to 2")
    server.wait_for("refused device one: client 3 is out of range")
    assert_ends(machines.join("two", "6"), "client 6 is out of range: this partition has clients 0 to 5")
    assert_ends(machines.join("two", "x"), "must be a number or a list such as 0-2,5, got 'x'")


def test_samples_of_another_kind(machines: Machines) -> None:
    server = machines.serve("fedavg")
    machines.join("one", "0,3")
    server.wait_for("one connected")
    two = machines.join("two", "1", data=HEART)
    assert_ends(two, "device two has a table with named columns, device one has arrays without names")


def test_a_network_of_the_servers_own(machines: Machines) -> None:
    """The device's user has not allowed its code to be imported."""
    server = machines.serve("fedavg", "--model", "tests.machines:Tiny")
    device = machines.join("one", "0-5")
    words = "the federation trains a custom network (tests.machines:Tiny); install its code on this device"
    assert_ends(device, words, "--model package.module:Class")
    machines.join("one", "0-5", "--model", "tests.machines:Tiny")
    server.wait_for("round 1:")


def test_a_second_server(machines: Machines) -> None:
    """The first server stops with an error: only one can serve a federation."""
    first = machines.serve("fedavg")
    first.wait_for("waiting for devices")
    second = machines.serve("fedavg", "--out", str(machines.folder / "other"))
    assert_ends(first, "the server lost its broker: another connection took over the name 'federation-server'")
    second.wait_for("waiting for devices")


def test_leftovers_of_a_federation_that_is_over(machines: Machines) -> None:
    """A device that comes before the next server of that name neither leaves at once nor joins what is over."""
    devices = machines.join_all({"one": "0-5"})
    assert machines.serve("fedper", "--rounds", "1").end() == 0
    assert devices["one"].end() == 0
    again = machines.join("one", "0-5")
    again.wait_for("waiting for the server")
    machines.out = machines.folder / "second"
    server = machines.serve("fedavg", "--rounds", "1")
    assert server.end() == 0, server.said
    assert again.end() == 0, again.said
    assert "FedAvg, 6 clients" in again.said
    assert "FedPer" not in again.said
    assert len(list((machines.folder / "one").glob("*/run"))) == 2


def test_the_next_federation_begins_while_devices_wait(machines: Machines) -> None:
    """Its server was killed and will not come back; another one takes the devices that wait."""
    device = machines.join("one", "0-5")
    server = machines.serve("fedper", "--rounds", "500")
    server.wait_for("round 1:")
    server.kill()
    machines.out = machines.folder / "second"
    server = machines.serve("ditto", "--rounds", "2")
    assert server.end() == 0, server.said
    assert device.end() == 0, device.said
    assert "Ditto, 6 clients, 2 rounds" in device.said


# TLS.


def test_tls_and_plain_mixed_up(secure: Machines, tmp_path: Path) -> None:
    plain = secure.join("one", "0,3")
    (tmp_path / "open").mkdir()
    other = Machines(tmp_path / "open")
    try:
        secret = other.join("one", "0,3", *tls(secure, "one"))
        assert_ends(plain, "refused the connection of 'one'", "plain port?")
        assert_ends(secret, "TLS port?")
    finally:
        other.close()


def test_certificates_that_are_not_good(secure: Machines) -> None:
    certs = secure.folder / "certs"
    make(certs, "late", certs, (), 0)
    make_certificates(secure.folder / "foreign", ["one"], "127.0.0.1", secure.broker.port, 30)
    time.sleep(1.1)
    late = secure.join("late", "0,3", *tls(secure, "late"))
    foreign = secure.join("one", "0,3", *tls(secure, "one", "foreign"))
    none = secure.join("two", "1", "--ca", str(certs / "ca.pem"))
    server = secure.serve("fedavg", *tls(secure, "late"))
    half = secure.join("three", "1", "--cert", str(certs / "three.pem"))
    swapped = secure.join("three", "1", *tls(secure, "three")[:-1], str(certs / "two.key"))
    expired = (f"{certs / 'late.pem'}: the certificate expired on", "create a new one")
    assert_ends(late, *expired)
    assert_ends(server, *expired)
    assert_ends(foreign, "refused the connection of 'one'", "another --cert?")
    assert_ends(none, "refused the connection of 'two'", "does it require a certificate")
    assert_ends(half, "--cert needs --key, its private key, and --ca")
    assert_ends(swapped, "do not belong together or are invalid")


def test_the_brokers_certificate_is_not_good(tmp_path: Path, secure: Machines) -> None:
    certs = secure.folder / "certs"
    for name in ("broker.key", "broker.pem"):
        (certs / name).unlink()
    make(certs, "broker", certs, ("127.0.0.1",), 0)
    secure.broker.kill()
    time.sleep(1.1)
    secure.broker.start()
    one = secure.join("one", "0,3", *tls(secure, "one"))
    assert_ends(one, "untrusted certificate of the broker", "certificate has expired")
    make_certificates(tmp_path / "foreign", ["one"], "127.0.0.1", secure.broker.port, 30)
    ca = ("--ca", str(tmp_path / "foreign" / "ca.pem"))
    assert_ends(secure.join("two", "1", *ca), "untrusted certificate")
