"""Hostile messages, to all parsers and through a broker: none is accepted, and memory does not grow."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from coterie.deploy.certs import make_certificates
from coterie.deploy.chunks import HEAD, ChunkBuffer, to_chunks
from coterie.deploy.device import Device
from coterie.deploy.handshake import from_json, to_json
from coterie.deploy.membership import Membership
from coterie.deploy.roster import load_identity, sign
from coterie.deploy.store import Store
from coterie.deploy.wire import Refused
from tests import direct
from tests.deploy.test_attacks import ROOT, nonsense, stranger
from tests.deploy.test_hostile import bad, said_hello, same_as, top_of
from tests.deploy.test_wire import answer, make_agreement, make_request
from tests.machines import HELD, Machines, assert_same_server, simulated

MB = 2**20


class Reader(NamedTuple):
    """A parser of messages."""

    read: Callable[[bytes], Any]
    good: bytes  # the honest message, which is mutated
    top: int  # size of its header in bytes; the rest are numbers, of any value
    same: Callable[[Any], bool]  # whether the parsed content equals that of the honest message


def readers(folder: Path) -> dict[str, Reader]:
    agreement = make_agreement()
    sent = make_request(agreement)
    message, _ = answer(agreement, sent.header)
    error = agreement.error(sent.header, "it could not")
    parsed, opened = agreement.open_answer(error, sent.header), agreement.open_request(sent.own, sent.shared)
    method, model, data = direct.small("fedpac")
    agreed = direct.agreement(method, model, data)
    device, order = Device(agreed, data.pick((0, 3)), (0, 3), Store(folder / "states")), make_request(agreed)
    done = device.answer(order.own, order.shared)
    chunks, chunk = ChunkBuffer(2000), to_chunks(b"m" * 1000)[0]
    hello, register = proven(folder)

    def report(found: Any) -> bool:
        return found.header._replace(note="") == parsed.header._replace(note="") and not found.tensors

    def answered(m: bytes) -> Any:
        return agreement.open_answer(m, sent.header)

    return {
        "server: answers": Reader(answered, message, top_of(message), same_as(answered(message))),
        "server: error reports": Reader(answered, error, len(error), report),
        "server: signed hellos": Reader(register, hello, len(hello), bool),
        "device: requests": Reader(
            lambda m: agreement.open_request(m, sent.shared), sent.own, top_of(sent.own), same_as(opened)
        ),
        "device: shared weights": Reader(
            lambda m: agreement.open_request(sent.own, m), sent.shared, len(sent.shared), lambda found: False
        ),
        "device: training": Reader(
            lambda m: device.answer(m, order.shared), order.own, top_of(order.own), lambda found: bool(found == done)
        ),
        "both: chunks": Reader(chunks.add, chunk, HEAD.size, lambda found: bool(found == b"m" * 1000)),
    }


def proven(folder: Path) -> tuple[bytes, Callable[[bytes], bool]]:
    """A signed hello, and a parser that returns whether its content is the device's."""
    make_certificates(folder / "certs", ["ward"], "127.0.0.1", 8883, 30)
    certificate, key = load_identity(*(str(folder / "certs" / f"ward.{end}") for end in ("pem", "key")))
    hello = sign(replace(said_hello(), certificate=certificate), key)

    def register(message: bytes) -> bool:
        Membership(5).register("ward", message)
        found = from_json(type(hello), message)
        return replace(found, signature="") == replace(hello, signature="")

    return to_json(hello), register


def at_the_parser(count: int, seed: int) -> dict[str, Any]:
    """Equally many messages for each parser. A few are parsed first to fill caches."""
    with TemporaryDirectory() as folder:
        found, kinds = dict[str, dict[str, int]](), readers(Path(folder))
        for reader in kinds.values():
            reader.read(reader.good)  # must succeed, or the refusals below mean nothing
            tally(reader, seed, 50)
        before = resident()
        for name, reader in kinds.items():
            found[name] = tally(reader, seed + 1, -(-count // len(kinds)))
        grown = resident() - before
    total = {key: sum(row[key] for row in found.values()) for key in ("messages", "refused", "same", "accepted")}
    return {**total, "memory_mb": round(grown / MB, 1), "readers": found}


def tally(reader: Reader, seed: int, count: int) -> dict[str, int]:
    row = {"messages": 0, "refused": 0, "same": 0, "accepted": 0}
    for message in bad(reader.good, reader.top, seed, count):
        row["messages"] += 1
        try:
            row["same" if reader.same(reader.read(message)) else "accepted"] += 1
        except Refused:
            row["refused"] += 1
    return row


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live(count: int, seed: int, folder: Path, rounds: int = 30) -> dict[str, Any]:
    """Publish at a broker without TLS, on the topics of honest devices and of the server, while they train."""
    draw, sent, federations, equal, left_out, grown = random.Random(seed), 0, 0, 0, 0, 0
    flags = ("--rounds", str(rounds), "--join-ratio", "1", "--seed", "3", "--wait", "120", "--grace", "60")
    expected = simulated("fedper", rounds=rounds, join_ratio=1.0, seed=3)
    while sent < count:
        place = folder / f"live-{federations}"
        place.mkdir()
        machines = Machines(place)
        try:
            devices = machines.join_all(HELD)
            server = machines.serve("fedper", *flags)
            participants = [server, *devices.values()]
            with stranger(machines) as client:
                client.subscribe(f"{ROOT}/#", qos=1)
                server.wait_for("round 1:")
                before = [machine.memory for machine in participants]
                while server.process.is_alive() and sent < count:
                    for _ in range(min(100, count - sent)):
                        client.publish(*nonsense(draw, client.heard[-200:]), qos=1)
                        sent += 1
                    del client.heard[:-200]
                    time.sleep(0.02)
                    now = [m.memory if m.process.is_alive() else b for m, b in zip(participants, before, strict=True)]
                    grown = max(grown, *(a - b for a, b in zip(now, before, strict=True)))
                assert server.end(300) == 0, server.said[-3000:]
            for machine in participants:
                assert machine.end(60) == 0, machine.said[-3000:]
                assert "Traceback" not in machine.said, machine.said[-3000:]
            left_out += sum(map(len, machines.left_out.values()))
            assert_same_server(machines.out, expected)
            federations, equal = federations + 1, equal + 1
        finally:
            machines.close()
    return {"messages": sent, "federations": federations, "equal_to_simulation": equal, "left_out": left_out,
            "memory_mb": round(grown / MB, 1)}  # fmt: skip
