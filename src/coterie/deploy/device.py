"""Some clients of a federation on a machine of their own. It answers letters; nothing else leaves it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from coterie.clients.base import Job, Turn, keys
from coterie.clients.looped import Desk, one_thread
from coterie.core import order, tree
from coterie.core.local import Data
from coterie.core.samples import FederatedData, Split
from coterie.deploy.store import Store
from coterie.network.letters import LOST, Agreement
from coterie.network.wire import Header, Refused

log = logging.getLogger("coterie")


class Trouble(Exception):
    """Why a client cannot do what it is asked to."""


class Device:
    def __init__(self, agreement: Agreement, data: FederatedData, ids: tuple[int, ...], store: Store) -> None:
        """data: of these clients only, in the order of their ids."""
        one_thread()
        self.agreement, self.data, self.ids, self.store = agreement, data, ids, store
        self.method, self.model = agreement.method, agreement.model
        self.desk = Desk(self.method, self.model, data, agreement.seed)
        self.sent: dict[int, tuple[str, bytes]] = {}  # client -> the version that it made last, and its answer
        self.measured: dict[int, tree.Tree] = {}  # client -> its scores with what it was sent last
        self.round = 0  # rounds that were trained, as far as is known here

    def answer(self, own: bytes, shared: bytes) -> tuple[bytes, bool]:
        """To a letter, and whether it tells of trouble. What is none of ours is Refused."""
        header, tensors = self.agreement.open_letter(own, shared)
        if header.client not in self.ids:
            raise Refused(f"client {header.client} is not on this device")
        if self.sent.get(header.client, ("", b""))[0] == header.made:
            return self.sent[header.client][1], False
        try:
            answer = self._act(header, tensors)
        except Trouble as trouble:
            return self.agreement.trouble(header, str(trouble)), True
        except Exception as error:  # of a network or data of the user's; the others shall go on
            log.warning("client %d could not %s: %s: %s", header.client, header.kind, type(error).__name__, error)
            return self.agreement.trouble(header, f"{type(error).__name__}: {error}"), True
        if header.kind == "train":
            self.sent[header.client] = header.made, answer
        return answer, False

    def personal(self, client: int) -> dict[str, Any] | None:
        """What the personal model of a client is made of; None as long as it has none."""
        kept = self.store.find_down(client)
        state = None if kept is None else self._state(client, kept[0])
        if kept is None or state is None:
            return None
        return {"state": state, "down": tree.fill(self.agreement.forms.down, kept[1])}

    def measure(self, client: int) -> None:
        """Its personal model, where it was measured by another process than this."""
        model = self.personal(client)
        if model is not None:
            self.measured[client] = self._scores(client, **model)

    def _act(self, header: Header, tensors: tree.Tree) -> bytes:
        client, made, turn = header.client, header.made, Turn(header.round, header.rate)
        if header.kind == "join":
            told = tree.fill(self.agreement.forms.welcome, tensors)
            self.store.keep(client, made, self._work(Job("join", told=told), client, (), ()))
            return self.agreement.answer(header, {})
        state = self._state(client, header.base)
        if state is None:
            raise Trouble(LOST)
        down = tree.fill(self.agreement.forms.down, tensors)
        if header.kind == "score":
            self.store.keep_down(client, header.base, tensors)
            self.measured[client] = self._scores(client, state, down)
            return self.agreement.answer(header, self.measured[client])
        if header.kind == "finish":
            self.store.keep(client, made, self._work(Job("finish", turn=turn), client, state, down))
            return self.agreement.answer(header, {})
        return self._train(header, state, down)

    def _train(self, header: Header, state: Any, down: Any) -> bytes:
        client, made = header.client, header.made
        after, up = self._work(Job("train", turn=Turn(header.round, header.rate)), client, state, down)
        if not all(bool(t.isfinite().all()) for t in tree.leaves((after, up)) if t.is_floating_point()):
            raise Trouble("its update is not finite")
        if not self.agreement.fits(tree.flatten(up)):
            raise Trouble(f"its update has numbers that are too large for {self.agreement.compress}")
        self.store.keep(client, made, after)
        self.store.keep_down(client, made, tree.flatten(down))  # its model, if this was the last training
        self.round = max(self.round, header.round + 1)
        found = tree.flatten({"up": up})
        if header.measure:
            found |= self._scores(client, after, tree.overlay(down, up))
        return self.agreement.answer(header, found)

    def _scores(self, client: int, state: Any, down: Any) -> tree.Tree:
        """Samples that are right, how many there are, and the mean cross entropy, on each split."""
        found = {}
        for split in self.agreement.splits:
            held: Split = getattr(self.data, split)
            total = torch.tensor(held.sizes[self.ids.index(client)])
            right, loss = self._work(Job("score", split), client, state, down)
            found[split] = torch.stack([right, total.double(), loss / total.clamp_min(1)])
        return found

    def _work(self, job: Job, client: int, state: Any, down: Any) -> Any:
        key = keys(self.agreement.seed, job.turn, torch.tensor(client))
        return self.desk.work(job, self.ids.index(client), state, down, key)

    def _state(self, client: int, base: str) -> Any | None:
        """What the client remembers in this version; None if that is not here."""
        if self.store.last.get(client, ("", None))[0] == base:
            return self.store.last[client][1]
        data = self._data(client)
        before = self.method.client_init(self.model, data, self.agreement.forms.welcome)  # only its form is of use
        if not tree.leaves(before) and not self.method.finishes:
            return before
        tensors = self.store.find(client, base)
        if tensors is None:
            return None
        known = tensors.keys() == tree.flatten(before).keys()
        form = before if known else self.method.client_finish(self.model, before, self.agreement.forms.down, data)
        self.store.last[client] = base, tree.fill(form, tensors)
        return self.store.last[client][1]

    def _data(self, client: int) -> Data:
        x, y = self.data.train.client(self.ids.index(client))
        key, rate = order.seed_key(0), torch.ones((), dtype=self.model.mean.dtype)
        return Data(x, y, key, rate, self.data.classes, self.data.transform, alone=True)
