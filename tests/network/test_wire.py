"""Messages as bytes: what is sent arrives, other readers read it, and what is not as it must be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from coterie.core import tree
from coterie.methods import METHODS
from coterie.network import wire
from coterie.network.chunks import HEAD, SIZE, Pieces, cut
from coterie.network.inbox import BESIDE, PENDING, Inbox, Latest, Parcels
from coterie.network.letters import Agreement, Letter
from coterie.network.wire import LENGTH, Header, Refused, Schema, peek, seal, unseal
from tests import direct, toy

every_method = pytest.mark.parametrize("name", METHODS)
draw = torch.Generator().manual_seed(0)


def filled(schema: Schema) -> tree.Tree:
    """Numbers of every type, none of them zero or one by chance."""
    return {name: numbers(dtype, shape) for name, dtype, shape in schema.entries}


def numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    t = torch.randn(shape, generator=draw, dtype=torch.float64) * 10
    return (t > 0) if dtype == torch.bool else t.abs().to(dtype) if dtype == torch.uint8 else t.to(dtype)


def deal(name: str = "fedpac", **more: Any) -> Agreement:
    method, model, data = direct.small(name)
    return direct.agreement(method, model, data, **more)


def letter(terms: Agreement, kind: str = "train", **more: Any) -> Letter:
    header = Header(kind, **{"client": 3, "round": 4, "rate": 0.5, "base": "ab" * 32, "measure": 1} | more)
    if kind == "join":
        return terms.letter(header, filled(terms.welcome))
    down = filled(Schema(terms.own.entries + terms.shared.entries))
    shared = seal(terms._header("shared"), down, terms.shared) if terms.shared.entries else b""
    return terms.letter(header, down, shared)


def answer(terms: Agreement, to: Header) -> tuple[bytes, tree.Tree]:
    tensors = filled(terms.answer_schema(to))
    tensors |= {split: torch.tensor([3.0, 7.0, 0.25]).double() for split in terms.splits if split in tensors}
    return terms.answer(to, tensors), tensors


@every_method
def test_messages_survive_and_safetensors_reads_them(name: str) -> None:
    """The truth is the reader of safetensors itself."""
    terms = deal(name)
    sent = letter(terms)
    said = terms.open_letter(sent.own, sent.shared)
    assert said.header == sent.header
    read = safetensors.torch.load(sent.own) | (safetensors.torch.load(sent.shared) if sent.shared else {})
    toy.assert_same(said.tensors, read)
    message, tensors = answer(terms, sent.header)
    toy.assert_same(terms.open_answer(message, sent.header).tensors, tensors)
    toy.assert_same(safetensors.torch.load(message), tensors)


def test_every_type_of_numbers_survives() -> None:
    form = {str(dtype): numbers(dtype, (2, 3)) for dtype in wire.DTYPES} | {"scalar": torch.tensor(2.5)}
    schema = Schema.of(form)
    message = seal(Header("train"), form, schema)
    peek(message, schema)
    toy.assert_same(unseal(message, schema), form)
    toy.assert_same(safetensors.torch.load(message), form)
    for t in unseal(message, schema).values():
        assert t.data_ptr() % 64 == 0  # as torch gives memory, which decides about the last bit of sums


@pytest.mark.parametrize(("compress", "unit", "smallest"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 0.0)])
def test_half_the_bytes_and_how_wrong_they_are(compress: str, unit: float, smallest: float) -> None:
    """Rounded to the nearest: relative error at most half a unit in the last place."""
    plain, terms = deal(), deal(compress=compress)
    to = letter(terms, measure=0).header
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in filled(plain.up).items()}
    message = terms.answer(to, tensors)
    whole = sum(t.numel() * t.itemsize for t in tensors.values() if t.is_floating_point())
    assert len(plain.answer(to, tensors)) - len(message) == pytest.approx(whole / 2, rel=0.05)
    found = terms.up_of(terms.open_answer(message, to).tensors)
    for name, t in tree.items(found):
        sent = tensors[f"up.{name}"]
        assert t.dtype == sent.dtype
        assert bool(((t - sent).abs() <= sent.abs() * unit + smallest).all()), name


def test_too_large_for_half_a_float() -> None:
    terms = deal(compress="fp16")
    assert terms.fits({"t": torch.tensor([65504.0])})
    assert not terms.fits({"t": torch.tensor([1e6])})
    assert deal(compress="bf16").fits({"t": torch.tensor([1e6])})


# What is refused.

Change = Callable[[Agreement, Letter, bytes, tree.Tree], bytes]


def with_number(value: float, place: str = "up.") -> Change:
    def change(terms: Agreement, to: Letter, good: bytes, tensors: tree.Tree) -> bytes:
        name = next(n for n, t in tensors.items() if n.startswith(place) and t.is_floating_point())
        tensors[name].view(-1)[0] = value
        return terms.answer(to.header, tensors)

    return change


def with_header(**words: Any) -> Change:
    def change(terms: Agreement, to: Letter, good: bytes, tensors: tree.Tree) -> bytes:
        schema = terms.answer_schema(to.header)
        return seal(peek(good, schema)._replace(**words), tensors, schema)

    return change


def resized(length: int) -> Change:
    return lambda terms, to, good, tensors: length.to_bytes(LENGTH, "little") + good[LENGTH:]


WRONG: dict[str, tuple[Change, str]] = {
    "nan": (with_number(float("nan")), "not finite"),
    "infinite": (with_number(float("-inf")), "not finite"),
    "more right than there are": (with_number(8.0, "test"), "cannot be"),
    "nobody counted": (with_number(float("nan"), "test"), "cannot be"),
    "round": (with_header(round=5), "it is of round 6, and this is round 5"),
    "sender": (with_header(client=1), "it is of client 1, and client 3 was asked"),
    "federation": (with_header(federation="cd" * 16), "another federation"),
    "schema": (with_header(schema="cd" * 32), "method, model or settings"),
    "letter": (with_header(made="cd" * 32), "another letter"),
    "kind": (with_header(kind="score"), "answers to 'score'"),
    "unknown kind": (with_header(kind="eat"), "a kind that does not exist"),
    "rate": (with_header(rate=2.0), "says what an answer does not say"),
    "note": (with_header(note="psst"), "says what an answer does not say"),
    "truncated": (lambda terms, to, good, tensors: good[:-1], "cut off"),
    "longer": (lambda terms, to, good, tensors: good + b"\0", "too long"),
    "empty": (lambda terms, to, good, tensors: b"", "no message"),
    "foreign model": (lambda terms, to, good, tensors: answer(deal("fedavg"), to.header)[0], "of another model"),
    "oversize table": (resized(2**63), "more than the"),
    "no table": (resized(0), "cut off, too long"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_with_a_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any memory is taken, but for numbers that must be looked at."""
    change, reason = WRONG[what]
    terms = deal()
    sent = letter(terms)
    good, tensors = answer(terms, sent.header)
    bad = change(terms, sent, good, tensors)
    if reason not in ("not finite", "cannot be"):
        monkeypatch.setattr(wire.torch, "empty", lambda *a, **k: pytest.fail("memory was taken"))
    with pytest.raises(Refused, match=reason):
        terms.open_answer(bad, sent.header)


def test_neither_true_nor_false() -> None:
    schema = Schema((("t", torch.bool, (2,)),))
    message = seal(Header("train"), {"t": torch.tensor([True, False])}, schema)
    with pytest.raises(Refused, match="neither true nor false"):
        unseal(message[:-1] + b"\2", schema)


def test_a_loss_may_be_infinite() -> None:
    """The model is bad then, but its client has done what it was asked to."""
    terms = deal()
    to = letter(terms, "score", round=-1).header
    message = terms.answer(to, {"test": torch.tensor([0.0, 7.0, float("inf")]).double()})
    assert terms.open_answer(message, to).tensors["test"].tolist() == [0.0, 7.0, float("inf")]


def test_a_letter_that_was_changed_is_refused() -> None:
    terms = deal()
    sent = letter(terms)
    for words in ({"round": 5}, {"rate": 1.0}, {"client": 0}, {"base": ""}, {"measure": 0}, {"kind": "finish"}):
        _, schema = terms._which(sent.own)
        own = seal(sent.header._replace(**words), unseal(sent.own, schema), schema)
        with pytest.raises(Refused, match="not what it says it is"):
            terms.open_letter(own, sent.shared)
    with pytest.raises(Refused, match="all are sent alike"):
        terms.open_letter(sent.own, letter(terms).shared)


# Pieces.


def test_pieces_in_any_order_and_twice() -> None:
    message = torch.randint(0, 256, (3 * SIZE + 17,), generator=draw, dtype=torch.uint8).numpy().tobytes()
    pieces, parts = Pieces(len(message)), cut(message)
    assert len(parts) == 4
    found = [pieces.add(parts[i]) for i in (3, 0, 0, 2, 1)]
    assert found == [None] * 4 + [message]
    assert Pieces(1).add(cut(b"")[0]) == b""


def test_two_messages_whose_pieces_come_mixed() -> None:
    """As when a device listens again while the next message is being said."""
    old, new = (bytes([i]) * (2 * SIZE + 1) for i in (1, 2))
    a, b = cut(old), cut(new)
    inbox, parcels = Inbox(), Parcels(3 * SIZE)
    order = (b[0], a[1], b[1], a[2], a[0], b[2])
    assert [parcels.add(piece) for piece in order] == [None] * 4 + [old, new]
    assert [inbox.add(7, piece, 3 * SIZE) for piece in order] == [False] * 4 + [True, True]
    assert [inbox.take(7) for _ in range(3)] == [old, new, None]


def test_what_waits_is_bounded() -> None:
    """Nobody can make us keep more than a few messages, begun or whole."""
    inbox, parcels, latest = Inbox(), Parcels(2 * SIZE), Latest(10)
    for i in range(100):
        message = bytes([i]) * (SIZE + 1)
        parcels.add(cut(message)[0])
        inbox.add(0, cut(message[:5])[0], 2 * SIZE)
        latest.put("device", message[:10])
    assert len(parcels.begun) == BESIDE
    assert sum(inbox.take(0) is not None for _ in range(100)) == PENDING
    assert latest.take("device") == bytes([99]) * 10
    assert latest.bytes == 0
    with pytest.raises(Refused, match="more than there is room for"):
        latest.put("device", b"x" * 11)


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"abc", "no piece"),
        (HEAD.pack(b"d" * 32, 0, 2**32 - 1) + b"x", "longer than"),
        (HEAD.pack(b"d" * 32, 5, 2) + b"x", "longer than"),
        (HEAD.pack(b"d" * 32, 0, 0) + b"x", "longer than"),
        (HEAD.pack(b"d" * 32, 0, 2) + b"x", "not whole"),
        (HEAD.pack(b"d" * 32, 0, 1) + b"x", "checksum is wrong"),
        (HEAD.pack(b"d" * 32, 0, 1) + b"x" * (SIZE + 1), "longer than"),
    ],
)
def test_bad_pieces_are_refused(piece: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Pieces(2 * SIZE).add(piece)
