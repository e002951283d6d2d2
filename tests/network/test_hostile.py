"""Tens of thousands of bad messages against everything that reads: refused, one by one, and nothing grows."""

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

from coterie.clients import mqtt as post
from coterie.clients.mqtt import Mqtt
from coterie.clients.remote import Answer, Asked, Patience, Remote
from coterie.deploy import member as joined
from coterie.deploy.device import Device
from coterie.deploy.member import Member
from coterie.deploy.parts import Plans
from coterie.deploy.roll import Roll
from coterie.deploy.server import announce
from coterie.deploy.store import Store
from coterie.deploy.terms import Brief, Facts, Hello, from_json, hello, to_json
from coterie.federation import Settings
from coterie.network.chunks import HEAD, Pieces, cut
from coterie.network.letters import Agreement, Said
from coterie.network.mqtt import Broker
from coterie.network.squeeze import expand, squeeze
from coterie.network.wire import LENGTH, Refused, body, peek
from tests import direct, toy
from tests.network.test_wire import answer, deal, letter

MANY = 4000  # bad messages of each kind
NUMBERS = (0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (b"NaN", b"-1", b"1e999", b"9" * 400, b'""', b"null", b"true", b"[]", b"{}", b'"\\ud800"', b'"\xff"', b"\x00",
         b"[" * 2000, b'{"a":' * 600, b'"round":"4",', b'"kind":"train",', b'"client":"3",', b'"made":"",',
         "\u202e\u0661".encode(), b"\xef\xbb\xbf", b"\\u0033", b" ", b"\n", b"0", b"1", b"}", b'"', b",",
         b"../../")  # fmt: skip


def mutated(good: bytes, top: int, draw: random.Random) -> bytes:
    """Something else. top: bytes at the beginning that say what the rest is; the rest are numbers, of any value."""
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
    """As somebody would send it who knows that lengths are looked at."""
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
    """What is done takes no memory that stays."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        act()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < most / 4  # what is made once, such as tables, is among it
    assert peak - before < most


def refuse_all(read: Callable[[bytes], Any], messages: Iterator[bytes], same: Callable[[Any], bool]) -> None:
    """None is let in that says anything else than the good one; nothing but Refused is raised."""
    refused = 0
    for message in messages:
        try:
            found = read(message)
        except Refused as reason:
            said = str(reason).encode()  # it can be said and printed
            refused += bool(said)
        else:
            assert found is None or same(found), message[:400]
    assert refused > 0


def same_as(good: Said) -> Callable[[Said], bool]:
    def check(found: Said) -> bool:
        return found.header == good.header and all(bool((found.tensors[n] == t).all()) for n, t in good.tensors.items())

    return check


def top_of(message: bytes) -> int:
    return len(message) - len(body(message))


def test_answers() -> None:
    terms = deal()
    sent = letter(terms)
    message, _ = answer(terms, sent.header)
    good = terms.open_answer(message, sent.header)
    hostile = bad(message, top_of(message), 1)
    flat(lambda: refuse_all(lambda m: terms.open_answer(m, sent.header), hostile, same_as(good)))
    trouble = terms.trouble(sent.header, "it could not")
    said = terms.open_answer(trouble, sent.header)
    hostile = bad(trouble, len(trouble), 2)

    def still_trouble(found: Said) -> bool:
        return found.header._replace(note="") == said.header._replace(note="") and not found.tensors

    flat(lambda: refuse_all(lambda m: terms.open_answer(m, sent.header), hostile, still_trouble))


def test_letters_and_devices(tmp_path: Path) -> None:
    method, model, data = direct.small("fedpac")
    terms = direct.agreement(method, model, data)
    device = Device(terms, data.pick((0, 3)), (0, 3), Store(tmp_path))
    sent = letter(terms)
    good = terms.open_letter(sent.own, sent.shared)
    hostile = bad(sent.own, top_of(sent.own), 3)
    flat(lambda: refuse_all(lambda m: terms.open_letter(m, sent.shared), hostile, same_as(good)))
    hostile = bad(sent.shared, len(sent.shared), 4, 1000)  # its checksum is in the letter
    flat(lambda: refuse_all(lambda m: terms.open_letter(sent.own, m), hostile, lambda found: False))
    refuse_all(lambda m: device.answer(m, sent.shared), bad(sent.own, top_of(sent.own), 5, 1000), lambda found: False)
    assert not list(tmp_path.iterdir())


def test_squeezed_messages() -> None:
    pytest.importorskip("zstandard")
    terms = deal(compress="zstd")
    sent = letter(terms, measure=0)
    message, _ = answer(terms, sent.header)
    good = terms.open_answer(message, sent.header)
    bomb = squeeze(b"\0" * 2**26)
    with pytest.raises(Refused, match="longer than"):
        expand(bomb, terms.most_answer)

    def content_of_a_good_form(found: Said) -> bool:  # numbers may be others, as in any message
        return found.header == good.header

    flat(
        lambda: refuse_all(
            lambda m: terms.open_answer(m, sent.header), bad(message, len(message), 6, 2000), content_of_a_good_form
        ),
        2**22,
    )


def test_pieces() -> None:
    message = b"m" * 1000
    piece = cut(message)[0]
    pieces = Pieces(2000)
    flat(lambda: refuse_all(pieces.add, bad(piece, HEAD.size, 7), lambda found: found == message))


@cache
def said_hello() -> Hello:
    return hello("ward", toy.toy().pick((0, 3)), (0, 3))


def test_what_devices_and_servers_say_of_themselves() -> None:
    said, told = said_hello(), brief(deal())
    for good, kind, seed in ((said, Hello, 8), (told, Brief, 9)):
        message = to_json(good)
        assert from_json(kind, message) == good  # type: ignore[type-var]

        def well_formed(found: Any, good: Any = good) -> bool:
            """Other words and numbers are somebody else's hello. But of the same kind, all the way down."""
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
@example("facts", {"dtype": "load"})
def test_a_hello_with_anything_in_it(name: str, value: Any) -> None:
    """Refused by the reader or by the roll, or fit to build a network for."""
    told = json.loads(to_json(said_hello())) | {name: value}
    roll = Roll(5)
    try:
        roll.add(from_json(Hello, json.dumps(told).encode(errors="surrogatepass")))
    except Refused as reason:
        str(reason).encode()
    else:
        assert roll.devices


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
        changes = {"transform": replace(said.facts.transform, **changes["transform"])}
    with pytest.raises(Refused):
        Roll(5).add(replace(said, facts=replace(said.facts, **changes)))


def brief(terms: Agreement) -> Brief:
    told: list[bytes] = []

    class Told:
        def announce(self, federation: str, message: bytes, start: bytes, most: int) -> None:
            told.append(message)

    announce(Told(), terms, Facts.of(toy.toy()), Settings(rounds=3), "linear", None, {})  # type: ignore[arg-type]
    return from_json(Brief, told[0])


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
    told = json.loads(to_json(brief(deal()))) | changes
    with pytest.raises(Refused):
        from_json(Brief, json.dumps(told).encode())


# The server and a device as a whole, without a broker.


class Quiet:
    """A link to nobody."""

    def __init__(self, *about: Any) -> None:
        self.ended, self.said = "", list[tuple[str, bytes]]()

    def open(self) -> None: ...

    def listen(self, *topics: str) -> None: ...

    def close(self, farewell: Any = None) -> None: ...

    def say(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.said = [*self.said[-9:], (topic, payload)]

    say_in_pieces = say


def test_the_server_under_fire(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Under the topics of an honest device: the good answer that comes between is taken, and no other."""
    monkeypatch.setattr(post, "Link", Quiet)
    caplog.set_level("ERROR")
    method, model, data = direct.small("fedper")
    terms, roll = direct.agreement(method, model, data), Roll(5)
    mqtt = Mqtt(Broker(), "federation", roll.greet)
    mqtt.announce(terms.federation, b"", b"", terms.most_answer)
    here = to_json(replace(said_hello(), ready=terms.federation))
    mqtt._heard("coterie/federation/presence/ward", here)
    mqtt.receive(0)
    assert [mqtt.present(i) for i in range(5)] == [True, False, False, True, False]
    sent = letter(terms)
    message, _ = answer(terms, sent.header)
    asked = Asked(Remote(terms, direct.census(data), mqtt, Patience(), 0.5), {3: sent})
    draw, whole = random.Random(0), list(bad(message, top_of(message), 10, 1500))

    def fire() -> None:
        for hostile in whole:
            branch = draw.choice(["model/up/ward/3", "model/up/other/3", "ack/ward/3", "eval/report/ward/99"])
            mqtt._heard(f"coterie/federation/{branch}", cut(hostile)[0])
            mqtt._heard(f"coterie/federation/model/up/ward/{draw.choice(['3', '٣', 'x', '-1'])}", hostile)
        for hostile in bad(here, len(here), 11, 1500):
            mqtt._heard(f"coterie/federation/presence/{draw.choice(['other', 'w' * 70, 'ä' * 20])}", hostile)
            while (event := mqtt.receive(0)) is not None or not mqtt.events.empty():
                if isinstance(event, Answer):
                    asked._take(event.client, event.message)

    fire()  # what is made once, such as caches, is made now
    assert not asked.answers
    flat(fire, 2**22)
    assert not asked.answers
    assert 3 in asked.waiting
    mqtt._heard("coterie/federation/model/up/ward/3", cut(message)[0])
    while isinstance(event := mqtt.receive(0), Answer):
        asked._take(event.client, event.message)
    assert list(asked.answers) == [3]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_device_under_fire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Terms, plans, weights and letters that are wrong: it goes on, and answers the good letter."""
    monkeypatch.setattr(joined, "Link", Quiet)
    caplog.set_level("ERROR")
    data = toy.toy()
    terms, told, start = served(data)
    member = Member(Broker(), "federation", "ward", data.pick((0, 3)), (0, 3), Plans(tmp_path), lambda line: None)
    link: Any = member.link

    def hear(branch: str, *payloads: bytes) -> None:
        for payload in payloads:
            member._heard(f"coterie/federation/{branch}", payload)
        while not member.events.empty():
            assert member._next(0) is None

    hear("config", told)
    hear("model/start/0", *cut(start))
    assert member.device is not None
    assert member.device.agreement.digest == terms.digest
    assert member.hello.ready == terms.federation
    sent = letter(terms, "join", base="", round=-1)
    draw = random.Random(0)

    def fire() -> None:
        for hostile in bad(sent.own, top_of(sent.own), 12, 1000):
            hear(draw.choice(["model/down/ward/3", "eval/ask/ward/0", "model/down/ward/9"]), cut(hostile)[0], hostile)
        for hostile in bad(told, len(told), 13, 1500):
            with_brief = json_or_none(hostile)
            if with_brief is None or not isinstance(with_brief, dict):
                hear("config", hostile)
            hear("round/plan", hostile, b'{"phase":"over","federation":"../../../x"}')
        for hostile in bad(start, len(start), 14, 300):
            hear("model/start/0", cut(hostile)[0])
            hear("model/all/0", cut(hostile)[0], hostile)
        hear("refused/ward", b"\xff\x1b[2J" * 400)
        hear("presence/ward", b"", to_json(replace(member.hello, here=False)))

    fire()
    flat(fire, 2**22)
    assert member.device.agreement.digest == terms.digest
    assert (link.said[-1]) == ("coterie/federation/presence/ward", to_json(member.hello))  # it is not gone
    hear("model/down/ward/3", *cut(sent.own))
    topic, reply = link.said[-1]
    assert topic == "coterie/federation/ack/ward/3"
    assert terms.open_answer(reply, sent.header).header.kind == "join"
    assert not [record for record in caplog.records if record.exc_info]
    assert {path.name for path in tmp_path.iterdir()} == {terms.federation[:16]}


def json_or_none(message: bytes) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


def served(data: Any) -> tuple[Agreement, bytes, bytes]:
    """Terms as a server has them, and what it says."""
    from coterie.deploy.server import network_for

    facts = Facts.of(data)
    terms = direct.agreement(toy.method("fedper"), network_for("linear", facts, 7, None), data)
    said: dict[str, bytes] = {}

    class Told:
        def announce(self, federation: str, message: bytes, start: bytes, most: int) -> None:
            said.update(brief=message, start=start)

    announce(Told(), terms, facts, Settings(rounds=3), "linear", None, {})  # type: ignore[arg-type]
    peek(said["start"], terms.start)
    return terms, said["brief"], said["start"]
