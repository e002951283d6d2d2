"""Failures of real processes: the federation ends, and its server equals a simulation without the clients that did
not answer."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, Machines, assert_same_server, simulated

pytestmark = pytest.mark.network

FAR, NEAR = "coterie-far", "coterie-near"  # a network, and the cable to it


def flags(rounds: int, *more: str) -> tuple[str, ...]:
    return ("--rounds", str(rounds), "--join-ratio", "1", "--seed", "3", *more)


def assert_as_simulated(machines: Machines, server: Machine, method: str, rounds: int, seconds: float = 120) -> None:
    assert server.end(seconds) == 0, server.said
    assert "Traceback" not in server.said
    expected = simulated(method, machines.left_out, rounds=rounds, join_ratio=1.0, seed=3)
    assert_same_server(machines.out, expected)


def assert_left_models(*devices: Machine) -> None:
    for device in devices:
        assert device.end(60) == 0, device.said
        assert "the federation has ended; the models of clients" in device.said
        assert "Traceback" not in device.said


def test_a_device_is_killed_and_started_again(machines: Machines) -> None:
    """FedPer's clients remember their heads: those of the device come from its disk."""
    devices = machines.join_all()
    server = machines.serve("fedper", *flags(12))
    server.wait_for("round 3:")
    devices["one"].kill()
    devices["one"] = machines.join("one", "0,3")
    assert_as_simulated(machines, server, "fedper", 12)
    assert_left_models(*devices.values())
    assert "starts over" not in server.said
    assert len(machines.rounds) == 12


def test_the_server_is_killed_and_resumes(machines: Machines) -> None:
    devices = machines.join_all()
    server = machines.serve("ditto", *flags(12))
    server.wait_for("round 4:")
    server.kill()
    assert all(device.process.is_alive() for device in devices.values())
    server = machines.serve("ditto", *flags(12), "--resume")
    assert_as_simulated(machines, server, "ditto", 12)
    assert "round 3:" not in server.said  # it did not begin again
    assert "starts over" not in server.said
    assert not any(machines.left_out.values())
    assert_left_models(*devices.values())


def test_a_resumed_server_continues_without_a_missing_device(machines: Machines) -> None:
    """As in a running server, client 1 is left out and the round continues."""
    devices = machines.join_all()
    server = machines.serve("fedper", *flags(10, "--grace", "2"))
    server.wait_for("round 2:")
    devices["two"].kill()
    server.kill()
    server = machines.serve("fedper", *flags(10, "--grace", "2"), "--resume")
    assert_as_simulated(machines, server, "fedper", 10)
    assert_left_models(devices["one"], devices["three"])
    assert [machines.left_out[round] for round in (7, 8, 9)] == [{1}] * 3
    assert "round 10: client 1 did not train: its device is not connected" in server.said


def test_ctrl_c_ends_the_round_and_devices_wait(machines: Machines) -> None:
    devices = machines.join_all()
    server = machines.serve("fedavg", *flags(20))
    server.wait_for("round 2:")
    server.signal(signal.SIGINT)
    assert server.end(60) == 130
    done = len(machines.rounds)
    assert f"stopped after round {done}; the same command with --resume continues after round {done}" in server.said
    assert "Traceback" not in server.said
    assert all(device.process.is_alive() for device in devices.values())
    server = machines.serve("fedavg", *flags(20), "--resume")
    assert_as_simulated(machines, server, "fedavg", 20)
    assert f"round {done}:" not in server.said
    assert_left_models(*devices.values())


@pytest.mark.slow
def test_a_device_that_never_answers(machines: Machines) -> None:
    """It is frozen, so its connection stays; when it thaws it finds that it is over, and leaves what it has."""
    devices = machines.join_all()
    server = machines.serve("fedper", *flags(6, "--deadline", "4"))
    server.wait_for("round 2:")
    devices["two"].signal(signal.SIGSTOP)
    assert_as_simulated(machines, server, "fedper", 6)
    assert {1} in machines.left_out.values()
    assert "client 1 did not train: " in server.said
    devices["two"].signal(signal.SIGCONT)
    assert_left_models(*devices.values())


@pytest.mark.slow
def test_a_device_slower_than_the_deadline(machines: Machines) -> None:
    """What it trained too late does not count, neither on the server nor for the client itself."""
    devices = machines.join_all()
    server = machines.serve("fedper", *flags(60, "--deadline", "2"))
    for _ in range(3):
        server.wait_for("round 2:")
        devices["three"].signal(signal.SIGSTOP)
        time.sleep(2.8)
        devices["three"].signal(signal.SIGCONT)
        time.sleep(0.3)
    assert_as_simulated(machines, server, "fedper", 60)
    assert any(machines.left_out.values())
    assert_left_models(*devices.values())


@pytest.mark.slow
def test_the_broker_is_away_for_twenty_seconds(machines: Machines) -> None:
    """It keeps nothing: what it had is said again."""
    devices = machines.join_all()
    server = machines.serve("fedper", *flags(200, "--deadline", "120", "--grace", "60"))
    server.wait_for("round 3:")
    machines.broker.kill()
    time.sleep(20)
    machines.broker.start()
    assert_as_simulated(machines, server, "fedper", 200, 300)
    assert "lost the connection to the broker" in server.said
    assert not any(machines.left_out.values())
    assert_left_models(*devices.values())


@pytest.fixture
def apart(tmp_path: Path, mosquitto: None) -> Iterator[Machines]:
    """A broker at the near end of a cable, and a network of its own at the far end."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed: apt-get install iproute2")
    try:
        for words in (f"netns add {FAR}", f"link add {NEAR} type veth peer name far0 netns {FAR}",
                      f"addr add 10.231.77.1/30 dev {NEAR}", f"link set {NEAR} up",
                      f"-n {FAR} addr add 10.231.77.2/30 dev far0", f"-n {FAR} link set far0 up",
                      f"-n {FAR} link set lo up"):  # fmt: skip
            done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"networks of one's own need root: ip {words}: {done.stderr.strip()}")
        found = Machines(tmp_path, host="10.231.77.1")
        yield found
        found.close()
    finally:
        for words in (f"link del {NEAR}", f"netns del {FAR}"):
            subprocess.run(["ip", *words.split()], capture_output=True, check=False)


@pytest.mark.slow
def test_the_cable_is_cut(apart: Machines) -> None:
    """Packets are dropped silently. The broker notices by the keepalive; the device reconnects when the link is up."""
    devices = [apart.join("one", "0,3"), apart.join("two", "1")]
    far = apart.join("three", "2,4-5", "--keepalive", "4", network=FAR)
    server = apart.serve("fedper", *flags(40, "--deadline", "20", "--grace", "3"))
    server.wait_for("round 3:")
    subprocess.run(["ip", "link", "set", NEAR, "down"], check=True)
    server.wait_for("three disconnected")
    server.wait_for("without clients 2, 4, 5")
    subprocess.run(["ip", "link", "set", NEAR, "up"], check=True)
    assert_as_simulated(apart, server, "fedper", 40)
    assert_left_models(*devices, far)
    assert {2, 4, 5} in apart.left_out.values()


@pytest.mark.slow
def test_every_message_comes_twice_and_late(machines: Machines) -> None:
    with Echo(machines.broker.port):
        devices = machines.join_all()
        server = machines.serve("fedper", *flags(12))
        assert_as_simulated(machines, server, "fedper", 12)
        assert not any(machines.left_out.values())
        assert_left_models(*devices.values())


@pytest.mark.slow
def test_thirty_clients_of_whom_a_fifth_fails(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    """In every round two of ten devices are killed: one is started again at once, the other a round later."""
    from tests import machines as here

    count, rounds = 30, 50
    data = tuple(f"--{name}={value}" for name, value in (("num-clients", 30), ("local-size", 30), ("test-size", 20)))
    held = {f"device-{i}": f"{3 * i}-{3 * i + 2}" for i in range(10)}
    devices = {name: machines.join(name, clients, data=data) for name, clients in held.items()}
    start = time.monotonic()
    server = machines.serve("fedper", *flags(rounds, "--grace", "1", "--evaluate-every", "10"), clients=count)
    draw, done, away = random.Random(0), 0, set[str]()
    while server.process.is_alive():
        if len(machines.rounds) > done:
            done = len(machines.rounds)
            back, (soon, late) = set(away), draw.sample(sorted(held.keys() - away), 2)
            for name in (soon, late):
                devices[name].kill()
            away = {late}
            for name in back | {soon}:
                devices[name] = machines.join(name, held[name], data=data)
        time.sleep(0.05)
    seconds = time.monotonic() - start
    assert server.end() == 0, server.said
    samples = here.load_clients(num_clients=count, local_size=30, test_size=20)
    expected = simulated("fedper", machines.left_out, samples, rounds=rounds, join_ratio=1.0, seed=3, evaluate_every=10)
    assert_same_server(machines.out, expected)
    assert len(machines.rounds) == rounds
    assert any(machines.left_out.values())
    missed = sum(map(len, machines.left_out.values()))
    with capsys.disabled():
        print(f"\n30 clients on 10 devices, two killed every round: {rounds} rounds in {seconds:.0f} s, {missed} of "
              f"{rounds * count} answers missing")  # fmt: skip


class Echo:
    """Repeats every message, a little later and in another order."""

    def __init__(self, port: int) -> None:
        import paho.mqtt.client as paho
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties
        from paho.mqtt.subscribeoptions import SubscribeOptions

        self.held: list[tuple[float, str, bytes]] = []
        self.lock, self.ended, self.draw = threading.Lock(), threading.Event(), random.Random(1)
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id="echo", protocol=paho.MQTTv5)
        self.client.on_message = self._heard
        self.client.connect("127.0.0.1", port, properties=Properties(PacketTypes.CONNECT))
        self.client.subscribe("coterie/#", options=SubscribeOptions(qos=1, noLocal=True))
        self.client.loop_start()
        self.thread = threading.Thread(target=self._say)

    def __enter__(self) -> Echo:
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ended.set()
        self.thread.join()
        self.client.disconnect()
        self.client.loop_stop()

    def _heard(self, client: Any, data: Any, message: Any) -> None:
        if message.retain:
            return
        with self.lock:
            self.held += [(time.monotonic() + self.draw.uniform(0, 1), message.topic, message.payload)]

    def _say(self) -> None:
        while not self.ended.wait(0.02):
            with self.lock:
                now = time.monotonic()
                due = [said for said in self.held if said[0] <= now]
                self.held = [said for said in self.held if said[0] > now]
            self.draw.shuffle(due)
            for _, topic, payload in due:
                self.client.publish(topic, payload, qos=1)
