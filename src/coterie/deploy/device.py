"""A device with some clients of a federation: it answers requests, and sends nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.wrapper import innermost
from coterie.deploy.agreement import Agreement
from coterie.deploy.messages import STATE_LOST
from coterie.deploy.privacy_record import COUNTED, PrivacyRecord, RequestFailed
from coterie.deploy.store import Store
from coterie.deploy.wire import Header, Refused
from coterie.execution.looped import ClientRunner
from coterie.execution.process import one_thread
from coterie.execution.requests import Request, Turn, keys
from coterie.execution.scoring import weighed
from coterie.privacy.accountant import Spent
from coterie.privacy.noise import check_secret, layers
from coterie.privacy.private_sgd import SampleNoise
from coterie.privacy.statistics_noise import StatisticsNoise

log = logging.getLogger("coterie")
FAILED = "it failed; see the log of its device"
SUCCESS, FAILURE = b"+", b"-"  # first byte of an answer in the privacy record


class Device:
    def __init__(
        self,
        agreement: Agreement,
        data: FederatedData,
        ids: tuple[int, ...],
        store: Store,
        record: PrivacyRecord | None = None,
        tell_scores: bool = True,
    ) -> None:
        """data: of these clients only, in the order of their ids. record: required if this device adds noise.

        tell_scores: send the scores of models on this device's samples to the server.
        """
        one_thread()
        check_secret(agreement.method)
        self.agreement, self.data, self.ids, self.store = agreement, data, ids, store
        self.method, self.model = agreement.method, agreement.model
        self.runner = ClientRunner(self.method, self.model, data, agreement.seed)
        self.record, self.tell_scores = record, tell_scores
        if record is None and any(isinstance(layer, SampleNoise | StatisticsNoise) for layer in layers(self.method)):
            raise CoterieError("a device that adds noise needs a privacy record")
        self.costs = dict[str, Callable[[int], list[Spent]]]()  # kind of request -> the cost of its answer
        self.sent: dict[int, tuple[str, bytes]] = {}  # client -> its latest version, and the answer that was sent
        self.measured: dict[int, tree.Tree] = {}  # client -> scores of its last model
        self.round = 0  # number of rounds trained so far

    def answer(self, own: bytes, shared: bytes) -> tuple[bytes, bool]:
        """Process a request; returns the answer, and whether it is an error report.

        Raises `Refused` for an invalid request.
        """
        header, tensors = self.agreement.open_request(own, shared)
        if header.client not in self.ids:
            raise Refused(f"client {header.client} is not on this device")
        if self.sent.get(header.client, ("", b""))[0] == header.made:
            return self.sent[header.client][1], False
        try:
            if self.record is not None and header.kind in COUNTED:
                stored = self.record.once(header, self._cost(header), lambda: self._attempt(header, tensors))
                answer, failed = stored[1:], stored[:1] == FAILURE
            else:
                answer, failed = self._process(header, tensors), False
        except RequestFailed as reason:
            return self.agreement.error(header, str(reason)), True
        except Exception as error:  # in the user's network or data; other clients continue
            return self._report(header, error), True
        if header.kind == "train" and not failed:
            self.sent[header.client] = header.made, answer
        return answer, failed

    def _attempt(self, header: Header, tensors: tree.Tree) -> bytes:
        """An answer that draws noise. A failure depends on the draw, too, so it is recorded in the same way."""
        try:
            return SUCCESS + self._process(header, tensors)
        except RequestFailed as reason:
            if str(reason) == STATE_LOST:  # no noise was drawn
                raise
            return FAILURE + self.agreement.error(header, str(reason))
        except Exception as error:
            return FAILURE + self._report(header, error)

    def _report(self, header: Header, error: Exception) -> bytes:
        """An error message may quote samples: where they are protected, the server gets a fixed text."""
        log.warning("client %d failed to %s: %s: %s", header.client, header.kind, type(error).__name__, error)
        return self.agreement.error(header, FAILED if self.record else f"{type(error).__name__}: {error}")

    def personal(self, client: int) -> dict[str, Any] | None:
        """State and last download of a client, which form its personal model; None if it has none yet."""
        kept = self.store.load_down(client)
        state = None if kept is None else self._state(client, kept[0])
        if kept is None or state is None:
            return None
        return {"state": state, "down": tree.fill(self.agreement.templates.down, kept[1])}

    def measure(self, client: int) -> None:
        """Evaluate the personal model of a client, if it has one."""
        model = self.personal(client)
        if model is not None:
            self.measured[client] = self._scores(Request("score"), client, **model)

    def _process(self, header: Header, tensors: tree.Tree) -> bytes:
        client, made, turn = header.client, header.made, Turn(header.round, header.rate)
        if header.kind == "join":
            welcome = tree.fill(self.agreement.templates.welcome, tensors)
            self.store.save(client, made, self._work(Request("join", shared=welcome), client, (), ()))
            return self.agreement.answer(header, {})
        if header.kind == "score_global":
            request = Request("score_global", shared=self.agreement.server_of(tensors))
            return self._report_scores(header, self._scores(request, client, (), ()))
        state = self._state(client, header.base)
        if state is None:
            raise RequestFailed(STATE_LOST)
        down = tree.fill(self.agreement.templates.down, tensors)
        if header.kind == "score":
            self.store.save_down(client, header.base, tensors)
            self.measured[client] = self._scores(Request("score"), client, state, down)
            return self._report_scores(header, self.measured[client])
        if header.kind == "finish":
            self.store.save(client, made, self._work(Request("finish", turn=turn), client, state, down))
            return self.agreement.answer(header, {})
        return self._train(header, state, down)

    def _train(self, header: Header, state: Any, down: Any) -> bytes:
        client, made = header.client, header.made
        after, up = self._work(Request("train", turn=Turn(header.round, header.rate)), client, state, down)
        if not all(bool(t.isfinite().all()) for t in tree.leaves((after, up)) if t.is_floating_point()):
            raise RequestFailed("its update is not finite")  # nan or inf
        if not self.agreement.fits(tree.flatten(up)):
            raise RequestFailed(f"its update has values too large for --compress {self.agreement.compress}")
        self.store.save(client, made, after)
        self.store.save_down(client, made, tree.flatten(down))  # the final model, if this was the last training
        self.round = max(self.round, header.round + 1)
        found = tree.flatten({"up": up})
        if header.measure:
            found |= self._reported(self._scores(Request("score"), client, after, tree.overlay(down, up)))
        return self.agreement.answer(header, found)

    def _scores(self, request: Request, client: int, state: Any, down: Any) -> tree.Tree:
        """Split -> (3,): correct samples, all samples, mean cross-entropy."""
        found = {}
        for split in self.agreement.splits:
            held: Split = getattr(self.data, split)
            total = torch.tensor(held.sizes[self.ids.index(client)])
            sums = self._work(request._replace(split=split), client, state, down)
            right, loss = weighed(self.model.task, sums, total)
            found[split] = torch.stack([right, total.double(), loss])
        return found

    def _report_scores(self, header: Header, scores: tree.Tree) -> bytes:
        reported = self._reported(scores)
        if not all(bool(row[-1].isfinite()) for row in reported.values()):
            raise RequestFailed("the loss is not finite")
        return self.agreement.answer(header, reported)

    def _reported(self, scores: tree.Tree) -> tree.Tree:
        """The scores as sent to the server; all zero unless the user shares them."""
        return scores if self.tell_scores else {split: torch.zeros_like(t) for split, t in scores.items()}

    def _cost(self, header: Header) -> list[Spent]:
        assert self.record is not None
        if header.kind not in self.costs:
            protection, x = self.record.budget.protection, self.data.train.x[:1]
            train = header.kind == "train"
            self.costs[header.kind] = protection.answer_cost(innermost(self.method), self.model, x, train)
        return self.costs[header.kind](self.data.train.sizes[self.ids.index(header.client)])

    def _work(self, request: Request, client: int, state: Any, down: Any) -> Any:
        key = keys(self.agreement.seed, request.turn, torch.tensor(client))
        return self.runner.work(request, self.ids.index(client), state, down, key)

    def _state(self, client: int, base: str) -> Any | None:
        """This version of the client's state; None if it is not stored."""
        if self.store.last.get(client, ("", None))[0] == base:
            return self.store.last[client][1]
        data = self._data(client)
        before = self.method.client_init(self.model, data, self.agreement.templates.welcome)  # as a template
        if not tree.leaves(before) and not self.method.finishes:
            return before
        tensors = self.store.load(client, base)
        if tensors is None:
            return None
        known = tensors.keys() == tree.flatten(before).keys()
        shape = before if known else self.method.client_finish(self.model, before, self.agreement.templates.down, data)
        self.store.last[client] = base, tree.fill(shape, tensors)
        return self.store.last[client][1]

    def _data(self, client: int) -> Data:
        x, y = self.data.train.client(self.ids.index(client))
        key, rate = random.seed_key(0), torch.ones((), dtype=self.model.mean.dtype)
        return Data(x, y, key, rate, self.data.classes, self.data.transform, alone=True)
