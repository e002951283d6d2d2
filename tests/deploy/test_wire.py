"""Encoding of messages: they round-trip, safetensors can read them, and invalid ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from coterie.core import tree
from coterie.deploy import wire
from coterie.deploy.agreement import Agreement
from coterie.deploy.chunks import HEAD, SIZE, ChunkBuffer, to_chunks
from coterie.deploy.inbox import MAX_PARTIAL, MAX_PENDING, Inbox, Latest, Reassembler
from coterie.deploy.messages import Message
from coterie.deploy.wire import LENGTH, Header, InvalidAnswer, Refused, TensorSchema, decode, encode, read_header
from coterie.methods import METHODS
from tests import direct, toy

every_method = pytest.mark.parametrize("name", METHODS)
draw = torch.Generator().manual_seed(0)


def filled(schema: TensorSchema) -> tree.Tree:
    """Numbers of every type, none of them zero or one by chance."""
    return {name: numbers(dtype, shape) for name, dtype, shape in schema.entries}


def numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    t = torch.randn(shape, generator=draw, dtype=torch.float64) * 10
    return (t > 0) if dtype == torch.bool else t.abs().to(dtype) if dtype == torch.uint8 else t.to(dtype)


def make_agreement(name: str = "fedpac", **more: Any) -> Agreement:
    method, model, data = direct.small(name)
    return direct.agreement(method, model, data, **more)


def make_request(agreement: Agreement, kind: str = "train", **more: Any) -> Message:
    header = Header(kind, **{"client": 3, "round": 4, "rate": 0.5, "base": "ab" * 32, "measure": 1} | more)
    if kind == "join":
        return agreement.request(header, filled(agreement.welcome))
    down = filled(TensorSchema(agreement.own.entries + agreement.shared.entries))
    shared = encode(agreement._header("shared"), down, agreement.shared) if agreement.shared.entries else b""
    return agreement.request(header, down, shared)


def answer(agreement: Agreement, to: Header) -> tuple[bytes, tree.Tree]:
    tensors = filled(agreement.answer_schema(to))
    tensors |= {split: torch.tensor([3.0, 7.0, 0.25]).double() for split in agreement.splits if split in tensors}
    if "up.samples" in tensors:
        tensors["up.samples"] = torch.full_like(tensors["up.samples"], toy.TRAIN_SIZES[to.client])
    return agreement.answer(to, tensors), tensors


@every_method
def test_messages_survive_and_safetensors_reads_them(name: str) -> None:
    """The truth is the reader of safetensors itself."""
    agreement = make_agreement(name)
    sent = make_request(agreement)
    said = agreement.open_request(sent.own, sent.shared)
    assert said.header == sent.header
    read = safetensors.torch.load(sent.own) | (safetensors.torch.load(sent.shared) if sent.shared else {})
    toy.assert_same(said.tensors, read)
    message, tensors = answer(agreement, sent.header)
    toy.assert_same(agreement.open_answer(message, sent.header).tensors, tensors)
    toy.assert_same(safetensors.torch.load(message), tensors)


def test_every_type_of_numbers_survives() -> None:
    form = {str(dtype): numbers(dtype, (2, 3)) for dtype in wire.DTYPES} | {"scalar": torch.tensor(2.5)}
    schema = TensorSchema.of(form)
    message = encode(Header("train"), form, schema)
    read_header(message, schema)
    toy.assert_same(decode(message, schema), form)
    toy.assert_same(safetensors.torch.load(message), form)
    for t in decode(message, schema).values():
        assert t.data_ptr() % 64 == 0  # torch's alignment: it affects the last bit of sums


@pytest.mark.parametrize(("compress", "unit", "smallest"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 0.0)])
def test_half_the_bytes_and_how_wrong_they_are(compress: str, unit: float, smallest: float) -> None:
    """Rounded to the nearest: relative error at most half a unit in the last place."""
    plain, agreement = make_agreement(), make_agreement(compress=compress)
    to = make_request(agreement, measure=0).header
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in filled(plain.up).items()}
    message = agreement.answer(to, tensors)
    whole = sum(t.numel() * t.itemsize for t in tensors.values() if t.is_floating_point())
    assert len(plain.answer(to, tensors)) - len(message) == pytest.approx(whole / 2, rel=0.05)
    found = agreement.up_of(agreement.open_answer(message, to).tensors)
    for name, t in tree.items(found):
        sent = tensors[f"up.{name}"]
        assert t.dtype == sent.dtype
        assert bool(((t - sent).abs() <= sent.abs() * unit + smallest).all()), name


def test_too_large_for_half_a_float() -> None:
    agreement = make_agreement(compress="fp16")
    assert agreement.fits({"t": torch.tensor([65504.0])})
    assert not agreement.fits({"t": torch.tensor([1e6])})
    assert make_agreement(compress="bf16").fits({"t": torch.tensor([1e6])})


# What is refused.

Change = Callable[[Agreement, Message, bytes, tree.Tree], bytes]


def with_number(value: float, place: str = "up.") -> Change:
    def change(agreement: Agreement, to: Message, good: bytes, tensors: tree.Tree) -> bytes:
        name = next(n for n, t in tensors.items() if n.startswith(place) and t.is_floating_point())
        tensors[name].view(-1)[0] = value
        return agreement.answer(to.header, tensors)

    return change


def with_header(**words: Any) -> Change:
    def change(agreement: Agreement, to: Message, good: bytes, tensors: tree.Tree) -> bytes:
        schema = agreement.answer_schema(to.header)
        return encode(read_header(good, schema)._replace(**words), tensors, schema)

    return change


def resized(length: int) -> Change:
    return lambda agreement, to, good, tensors: length.to_bytes(LENGTH, "little") + good[LENGTH:]


WRONG: dict[str, tuple[Change, str]] = {
    "nan": (with_number(float("nan")), "not finite"),
    "infinite": (with_number(float("-inf")), "not finite"),
    "more correct than samples": (with_number(8.0, "test"), "impossible scores"),
    "nan correct": (with_number(float("nan"), "test"), "impossible scores"),
    "round": (with_header(round=5), "answer of round 6 in round 5"),
    "sender": (with_header(client=1), "answer of client 1 to a request for client 3"),
    "federation": (with_header(federation="cd" * 16), "another federation"),
    "schema": (with_header(schema="cd" * 32), "method, model or settings"),
    "request": (with_header(made="cd" * 32), "an earlier request"),
    "kind": (with_header(kind="score"), "answer of kind 'score'"),
    "unknown kind": (with_header(kind="eat"), "unknown kind"),
    "rate": (with_header(rate=2.0), "an answer must not set"),
    "note": (with_header(note="psst"), "an answer must not set"),
    "truncated": (lambda agreement, to, good, tensors: good[:-1], "truncated"),
    "longer": (lambda agreement, to, good, tensors: good + b"\0", "too long"),
    "empty": (lambda agreement, to, good, tensors: b"", "too short"),
    "foreign model": (
        lambda agreement, to, good, tensors: answer(make_agreement("fedavg"), to.header)[0],
        "for another model",
    ),
    "oversize table": (resized(2**63), "more than the"),
    "no table": (resized(0), "truncated, too long"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_with_a_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any memory is allocated, except where values must be inspected."""
    change, reason = WRONG[what]
    agreement = make_agreement()
    sent = make_request(agreement)
    good, tensors = answer(agreement, sent.header)
    bad = change(agreement, sent, good, tensors)
    if reason not in ("not finite", "impossible scores"):
        monkeypatch.setattr(wire.torch, "empty", lambda *a, **k: pytest.fail("memory was allocated"))
    with pytest.raises(Refused, match=reason):
        agreement.open_answer(bad, sent.header)


def test_booleans_must_be_0_or_1() -> None:
    schema = TensorSchema((("t", torch.bool, (2,)),))
    message = encode(Header("train"), {"t": torch.tensor([True, False])}, schema)
    with pytest.raises(Refused, match="neither 0 nor 1"):
        decode(message[:-1] + b"\2", schema)


@pytest.mark.parametrize("loss", [float("inf"), float("nan"), -0.1])
def test_a_loss_that_cannot_be_is_refused(loss: float) -> None:
    agreement = make_agreement()
    to = make_request(agreement, "score", round=-1).header
    with pytest.raises(InvalidAnswer, match=f"the loss on test must be finite and at least 0, got {loss:g}"):
        agreement.open_answer(agreement.answer(to, {"test": torch.tensor([0.0, 7.0, loss]).double()}), to)
    assert agreement.open_answer(agreement.answer(to, {"test": torch.tensor([0.0, 7.0, 1e30]).double()}), to)


def test_a_modified_request_is_refused() -> None:
    agreement = make_agreement()
    sent = make_request(agreement)
    for words in ({"round": 5}, {"rate": 1.0}, {"client": 0}, {"base": ""}, {"measure": 0}, {"kind": "finish"}):
        _, schema = agreement._request_header(sent.own)
        own = encode(sent.header._replace(**words), decode(sent.own, schema), schema)
        with pytest.raises(Refused, match="checksum of the request does not match"):
            agreement.open_request(own, sent.shared)
    with pytest.raises(Refused, match="shared part"):
        agreement.open_request(sent.own, make_request(agreement).shared)


# Chunks.


def test_chunks_in_any_order_and_twice() -> None:
    message = torch.randint(0, 256, (3 * SIZE + 17,), generator=draw, dtype=torch.uint8).numpy().tobytes()
    chunks, parts = ChunkBuffer(len(message)), to_chunks(message)
    assert len(parts) == 4
    found = [chunks.add(parts[i]) for i in (3, 0, 0, 2, 1)]
    assert found == [None] * 4 + [message]
    assert ChunkBuffer(1).add(to_chunks(b"")[0]) == b""


def test_interleaved_chunks_of_two_messages() -> None:
    """As when a device subscribes again while the next message is being published."""
    old, new = (bytes([i]) * (2 * SIZE + 1) for i in (1, 2))
    a, b = to_chunks(old), to_chunks(new)
    inbox, reassembler = Inbox(), Reassembler(3 * SIZE)
    order = (b[0], a[1], b[1], a[2], a[0], b[2])
    assert [reassembler.add(chunk) for chunk in order] == [None] * 4 + [old, new]
    assert [inbox.add(7, chunk, 3 * SIZE) for chunk in order] == [False] * 4 + [True, True]
    assert [inbox.take(7) for _ in range(3)] == [old, new, None]


def test_what_waits_is_bounded() -> None:
    """No sender can make us store more than a few messages, partial or complete."""
    inbox, reassembler, latest = Inbox(), Reassembler(2 * SIZE), Latest(10)
    for i in range(100):
        message = bytes([i]) * (SIZE + 1)
        reassembler.add(to_chunks(message)[0])
        inbox.add(0, to_chunks(message[:5])[0], 2 * SIZE)
        latest.put("device", message[:10])
    assert len(reassembler.partial) == MAX_PARTIAL
    assert sum(inbox.take(0) is not None for _ in range(100)) == MAX_PENDING
    assert latest.take("device") == bytes([99]) * 10
    assert latest.bytes == 0
    with pytest.raises(Refused, match="no room for"):
        latest.put("device", b"x" * 11)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (b"abc", "not a chunk"),
        (HEAD.pack(b"d" * 32, 0, 2**32 - 1) + b"x", "longer than the limit"),
        (HEAD.pack(b"d" * 32, 5, 2) + b"x", "longer than the limit"),
        (HEAD.pack(b"d" * 32, 0, 0) + b"x", "longer than the limit"),
        (HEAD.pack(b"d" * 32, 0, 2) + b"x", "incomplete"),
        (HEAD.pack(b"d" * 32, 0, 1) + b"x", "checksum mismatch"),
        (HEAD.pack(b"d" * 32, 0, 1) + b"x" * (SIZE + 1), "longer than the limit"),
    ],
)
def test_invalid_chunks_are_refused(chunk: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        ChunkBuffer(2 * SIZE).add(chunk)
