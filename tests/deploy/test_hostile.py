"""Tens of thousands of invalid messages: every reader refuses each of them, and memory does not grow."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coterie.deploy.agreement import Agreement
from coterie.deploy.chunks import HEAD, ChunkBuffer, to_chunks
from coterie.deploy.compression import compress, decompress
from coterie.deploy.device import Device
from coterie.deploy.device_setup import DevicePolicy
from coterie.deploy.handshake import Hello, SampleSchema, Terms, from_json, hello, to_json
from coterie.deploy.membership import Membership
from coterie.deploy.messages import Received
from coterie.deploy.pending import PendingRequests, Timeouts
from coterie.deploy.remote import Remote
from coterie.deploy.server import announce
from coterie.deploy.store import Store
from coterie.deploy.transports.interface import AnswerReceived
from coterie.deploy.transports.mqtt import device as mqtt_device
from coterie.deploy.transports.mqtt import server as mqtt_server
from coterie.deploy.transports.mqtt.connection import Broker
from coterie.deploy.transports.mqtt.device import MqttDevice
from coterie.deploy.transports.mqtt.server import MqttTransport
from coterie.deploy.wire import LENGTH, Refused, body, read_header
from coterie.federation import Settings
from tests import direct, toy
from tests.deploy.test_wire import answer, make_agreement, make_request

MANY = 4000  # bad messages of each kind
NUMBERS = (0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (b"NaN", b"-1", b"1e999", b"9" * 400, b'""', b"null", b"true", b"[]", b"{}", b'"\\ud800"', b'"\xff"', b"\x00",
         b"[" * 2000, b'{"a":' * 600, b'"round":"4",', b'"kind":"train",', b'"client":"3",', b'"made":"",',
         "\u202e\u0661".encode(), b"\xef\xbb\xbf", b"\\u0033", b" ", b"\n", b"0", b"1", b"}", b'"', b",",
         b"../../")  # fmt: skip


def mutated(good: bytes, top: int, draw: random.Random) -> bytes:
    """A mutated message. top: bytes of the table and header; the rest are values, which may be anything."""
    at, other = draw.randrange(top), draw.randrange(top)
    first, last = min(at, other), max(at, other)
    match draw.randrange(9):
        case 0:
            return good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :]
        case 1:
            return good[:at] + bytes([draw.randrange(256)]) + good[at + 1 :]
        case 2:
            return good[: draw.randrange(len(good))]
        case 3:
            return good + draw.randbytes(draw.randrange(1, 40))
        case 4:
            return good[:first] + good[last:]
        case 5:
            return good[:last] + good[first:]
        case 6:
            return draw.choice(NUMBERS).to_bytes(LENGTH, "little") + good[LENGTH:]
        case 7:
            return sized(good[:at] + draw.choice(WORDS) + good[at:], len(good), draw)
        case _:
            word = draw.choice(WORDS)
            return good[:at] + word + good[at + len(word) :]


def sized(longer: bytes, length: int, draw: random.Random) -> bytes:
    """With the declared length adjusted, as an attacker would."""
    if len(longer) < LENGTH or draw.random() < 0.3:
        return longer
    top = int.from_bytes(longer[:LENGTH], "little") + len(longer) - length
    return top.to_bytes(8, "little", signed=True)[:LENGTH] + longer[LENGTH:] if 0 <= top < 2**62 else longer


def bad(good: bytes, top: int, seed: int, count: int = MANY) -> Iterator[bytes]:
    draw = random.Random(seed)
    while count:
        message = mutated(good, top, draw)
        if message != good:
            count -= 1
            yield message


def flat(act: Callable[[], None], most: int = 2**21) -> None:
    """The action does not grow the memory."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        act()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < most / 4  # includes caches
    assert peak - before < most


def refuse_all(read: Callable[[bytes], Any], messages: Iterator[bytes], same: Callable[[Any], bool]) -> None:
    """No message is accepted with other content than the good one; only `Refused` is raised."""
    refused = 0
    for message in messages:
        try:
            found = read(message)
        except Refused as reason:
            said = str(reason).encode()  # it can be printed
            refused += bool(said)
        else:
            assert found is None or same(found), message[:400]
    assert refused > 0


def same_as(good: Received) -> Callable[[Received], bool]:
    def check(found: Received) -> bool:
        return found.header == good.header and all(bool((found.tensors[n] == t).all()) for n, t in good.tensors.items())

    return check


def top_of(message: bytes) -> int:
    return len(message) - len(body(message))


def test_answers() -> None:
    agreement = make_agreement()
    sent = make_request(agreement)
    message, _ = answer(agreement, sent.header)
    good = agreement.open_answer(message, sent.header)
    hostile = bad(message, top_of(message), 1)
    flat(lambda: refuse_all(lambda m: agreement.open_answer(m, sent.header), hostile, same_as(good)))
    error = agreement.error(sent.header, "it could not")
    said = agreement.open_answer(error, sent.header)
    hostile = bad(error, len(error), 2)

    def still_an_error(found: Received) -> bool:
        return found.header._replace(note="") == said.header._replace(note="") and not found.tensors

    flat(lambda: refuse_all(lambda m: agreement.open_answer(m, sent.header), hostile, still_an_error))


def test_requests_and_devices(tmp_path: Path) -> None:
    method, model, data = direct.small("fedpac")
    agreement = direct.agreement(method, model, data)
    device = Device(agreement, data.pick((0, 3)), (0, 3), Store(tmp_path))
    sent = make_request(agreement)
    good = agreement.open_request(sent.own, sent.shared)
    hostile = bad(sent.own, top_of(sent.own), 3)
    flat(lambda: refuse_all(lambda m: agreement.open_request(m, sent.shared), hostile, same_as(good)))
    hostile = bad(sent.shared, len(sent.shared), 4, 1000)  # its checksum is in the request
    flat(lambda: refuse_all(lambda m: agreement.open_request(sent.own, m), hostile, lambda found: False))
    refuse_all(lambda m: device.answer(m, sent.shared), bad(sent.own, top_of(sent.own), 5, 1000), lambda found: False)
    assert not list(tmp_path.iterdir())


def test_compressed_messages() -> None:
    pytest.importorskip("zstandard")
    agreement = make_agreement(compress="zstd")
    sent = make_request(agreement, measure=0)
    message, _ = answer(agreement, sent.header)
    good = agreement.open_answer(message, sent.header)
    bomb = compress(b"\0" * 2**26)
    with pytest.raises(Refused, match="more than the limit"):
        decompress(bomb, agreement.max_answer)

    def content_of_a_good_form(found: Received) -> bool:  # values may differ, as in any message
        return found.header == good.header

    flat(
        lambda: refuse_all(
            lambda m: agreement.open_answer(m, sent.header), bad(message, len(message), 6, 2000), content_of_a_good_form
        ),
        2**22,
    )


def test_chunks() -> None:
    message = b"m" * 1000
    chunk = to_chunks(message)[0]
    chunks = ChunkBuffer(2000)
    flat(lambda: refuse_all(chunks.add, bad(chunk, HEAD.size, 7), lambda found: found == message))


@cache
def said_hello() -> Hello:
    return hello("ward", toy.toy().pick((0, 3)), (0, 3))


def test_hellos_and_terms() -> None:
    said, told = said_hello(), make_terms(make_agreement())
    for good, kind, seed in ((said, Hello, 8), (told, Terms, 9)):
        message = to_json(good)
        assert from_json(kind, message) == good  # type: ignore[type-var]

        def well_formed(found: Any, good: Any = good) -> bool:
            """Other values are another valid hello, if their types are right."""
            return all(type(v) is type(getattr(good, n)) for n, v in vars(found).items()) and bool(to_json(found))

        refuse_all(lambda m, kind=kind: from_json(kind, m), bad(message, len(message), seed), well_formed)  # type: ignore[misc]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(Hello.__dataclass_fields__)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FIELDS), JSON)
@example("protocol", "\ud800")
@example("clients", [{"id": 10**400, "counts": [1] * 4, "test": 1, "validation": None}])
@example("device", "\ud800")
@example("schema", {"dtype": "load"})
def test_a_hello_with_anything_in_it(name: str, value: Any) -> None:
    """Refused by the reader or by the membership, or a network can be built for it."""
    told = json.loads(to_json(said_hello())) | {name: value}
    membership = Membership(5)
    try:
        membership.add(from_json(Hello, json.dumps(told).encode(errors="surrogatepass")))
    except Refused as reason:
        str(reason).encode()
    else:
        assert membership.devices


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2**20, 2**20)},
        {"shape": ()},
        {"shape": (0,)},
        {"classes": 0},
        {"classes": 10**9},
        {"dtype": "load"},
        {"class_names": ("a",)},
        {"transform": {"std": (0.0,), "mean": (0.5,)}},
        {"transform": {"crop": 10**6}},
    ],
    ids=str,
)
def test_samples_that_cannot_be(changes: dict[str, Any]) -> None:
    said = said_hello()
    if "transform" in changes:
        changes = {"transform": replace(said.schema.transform, **changes["transform"])}
    with pytest.raises(Refused):
        Membership(5).add(replace(said, schema=replace(said.schema, **changes)))


def make_terms(agreement: Agreement) -> Terms:
    told: list[bytes] = []

    class Told:
        def announce(self, federation: str, message: bytes, start: bytes, most: int) -> None:
            told.append(message)

    announce(Told(), agreement, SampleSchema.of(toy.toy()), Settings(rounds=3), "linear", None, {})  # type: ignore[arg-type]
    return from_json(Terms, told[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": "../../../../etc/cron"},
        {"federation": ""},
        {"start": "x"},
        {"compress": "rar"},
        {"splits": ["__class__"]},
        {"rounds": 0},
        {"clients": -1},
        {"seed": 1.5},
        {"network": 5},
        {"method": []},
    ],
    ids=str,
)
def test_terms_that_cannot_be(changes: dict[str, Any]) -> None:
    told = json.loads(to_json(make_terms(make_agreement()))) | changes
    with pytest.raises(Refused):
        from_json(Terms, json.dumps(told).encode())


# The server and a device as a whole, without a broker.


class Quiet:
    """A connection without a broker."""

    def __init__(self, *about: Any) -> None:
        self.ended, self.said = "", list[tuple[str, bytes]]()

    def open(self) -> None: ...

    def subscribe(self, *topics: str) -> None: ...

    def close(self, farewell: Any = None) -> None: ...

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.said = [*self.said[-9:], (topic, payload)]

    publish_chunks = publish


def test_the_server_under_fire(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Published under the topics of an honest device: only its valid answer is accepted."""
    monkeypatch.setattr(mqtt_server, "MqttConnection", Quiet)
    caplog.set_level("ERROR")
    method, model, data = direct.small("fedper")
    agreement, membership = direct.agreement(method, model, data), Membership(5)
    mqtt = MqttTransport(Broker(), "federation", membership.register)
    mqtt.announce(agreement.federation, b"", b"", agreement.max_answer)
    here = to_json(replace(said_hello(), ready=agreement.federation))
    mqtt._on_message("coterie/federation/presence/ward", here)
    mqtt.receive(0)
    assert [mqtt.is_ready(i) for i in range(5)] == [True, False, False, True, False]
    sent = make_request(agreement)
    message, _ = answer(agreement, sent.header)
    remote = Remote(agreement, direct.census(data), mqtt, Timeouts(), 0.5)
    pending = PendingRequests({3: sent}, agreement, mqtt, Timeouts(), remote.check, {})
    draw, whole = random.Random(0), list(bad(message, top_of(message), 10, 1500))

    def fire() -> None:
        for hostile in whole:
            branch = draw.choice(["model/up/ward/3", "model/up/other/3", "ack/ward/3", "eval/report/ward/99"])
            mqtt._on_message(f"coterie/federation/{branch}", to_chunks(hostile)[0])
            mqtt._on_message(f"coterie/federation/model/up/ward/{draw.choice(['3', '٣', 'x', '-1'])}", hostile)
        for hostile in bad(here, len(here), 11, 1500):
            mqtt._on_message(f"coterie/federation/presence/{draw.choice(['other', 'w' * 70, 'ä' * 20])}", hostile)
            while (event := mqtt.receive(0)) is not None or not mqtt.events.empty():
                if isinstance(event, AnswerReceived):
                    pending.take(event.client, event.message)

    fire()  # fills the caches
    assert not pending.answers
    flat(fire, 2**22)
    assert not pending.answers
    assert 3 in pending.waiting
    mqtt._on_message("coterie/federation/model/up/ward/3", to_chunks(message)[0])
    while isinstance(event := mqtt.receive(0), AnswerReceived):
        pending.take(event.client, event.message)
    assert list(pending.answers) == [3]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_device_under_fire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Invalid terms, plans, weights and requests: the device continues, and answers the valid request."""
    monkeypatch.setattr(mqtt_device, "MqttConnection", Quiet)
    caplog.set_level("ERROR")
    data = toy.toy()
    agreement, told, start = served(data)
    joined = MqttDevice(
        Broker(), "federation", "ward", data.pick((0, 3)), (0, 3), DevicePolicy(tmp_path), lambda line: None
    )
    connection: Any = joined.connection

    def hear(branch: str, *payloads: bytes) -> None:
        for payload in payloads:
            joined._on_message(f"coterie/federation/{branch}", payload)
        while not joined.events.empty():
            assert joined._process_event(0) is None

    hear("config", told)
    hear("model/start/0", *to_chunks(start))
    assert joined.device is not None
    assert joined.device.agreement.digest == agreement.digest
    assert joined.hello.ready == agreement.federation
    sent = make_request(agreement, "join", base="", round=-1)
    draw = random.Random(0)

    def fire() -> None:
        for hostile in bad(sent.own, top_of(sent.own), 12, 1000):
            hear(
                draw.choice(["model/down/ward/3", "eval/ask/ward/0", "model/down/ward/9"]),
                to_chunks(hostile)[0],
                hostile,
            )
        for hostile in bad(told, len(told), 13, 1500):
            content = json_or_none(hostile)
            if content is None or not isinstance(content, dict):
                hear("config", hostile)
            hear("round/plan", hostile, b'{"phase":"over","federation":"../../../x"}')
        for hostile in bad(start, len(start), 14, 300):
            hear("model/start/0", to_chunks(hostile)[0])
            hear("model/all/0", to_chunks(hostile)[0], hostile)
        hear("refused/ward", b"\xff\x1b[2J" * 400)
        hear("presence/ward", b"", to_json(replace(joined.hello, connected=False)))

    fire()
    flat(fire, 2**22)
    assert joined.device.agreement.digest == agreement.digest
    assert (connection.said[-1]) == ("coterie/federation/presence/ward", to_json(joined.hello))  # still connected
    hear("model/down/ward/3", *to_chunks(sent.own))
    topic, reply = connection.said[-1]
    assert topic == "coterie/federation/ack/ward/3"
    assert agreement.open_answer(reply, sent.header).header.kind == "join"
    assert not [record for record in caplog.records if record.exc_info]
    assert {path.name for path in tmp_path.iterdir()} == {agreement.federation[:16]}


def json_or_none(message: bytes) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


def served(data: Any) -> tuple[Agreement, bytes, bytes]:
    """The agreement of a server, its terms, and its initial weights."""
    from coterie.deploy.server import network_for

    schema = SampleSchema.of(data)
    agreement = direct.agreement(toy.method("fedper"), network_for("linear", schema, 7, None), data)
    said: dict[str, bytes] = {}

    class Told:
        def announce(self, federation: str, message: bytes, start: bytes, most: int) -> None:
            said.update(terms=message, start=start)

    announce(Told(), agreement, schema, Settings(rounds=3), "linear", None, {})  # type: ignore[arg-type]
    read_header(said["start"], agreement.start)
    return agreement, said["terms"], said["start"]
