"""Clients that were not in training: what the server sends them, and how well they do with it."""

from __future__ import annotations

from coterie.core import random, tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.names import client_number, separated
from coterie.execution import Backend, Turn
from coterie.federation.history import Round
from coterie.federation.rounds import Measurements, after_training, log, settled, usable
from coterie.federation.settings import Settings


def keep_out(data: FederatedData, share: float | str, seed: int) -> tuple[FederatedData, FederatedData]:
    """The data of clients that train and of those that do not: a random share, or named ones such as s22,s23."""
    if isinstance(share, str):
        names = separated(share)
        named = {client_number(name, data.client_names, range(data.num_clients)) for name in names}
        if not 0 < len(named) < data.num_clients:
            raise CoterieError(f"new clients '{share}' of {data.num_clients} leave none to train, or none to keep out")
        return data.pick([i for i in range(data.num_clients) if i not in named]), data.pick(sorted(named))
    out = round(share * data.num_clients)
    if not 0 < out < data.num_clients:
        raise CoterieError(
            f"a share of {share} of {data.num_clients} clients leaves none to train, or none to keep out"
        )
    drawn = random.shuffle(random.derive(random.seed_key(seed), random.NEWCOMERS), data.num_clients)
    return data.pick(drawn[out:].sort().values.tolist()), data.pick(drawn[:out].sort().values.tolist())


def meet(server: object, newcomers: Backend, settings: Settings) -> Round:
    """New clients join, download, are evaluated, train once, and are evaluated again."""
    method, everyone = newcomers.method, newcomers.everyone
    newcomers.join(method.server_welcome(server))
    scores = {}
    down = method.server_greet(server)
    if down is None:
        log.warning("%s has no model for clients that were not in training", method.title)
        return Round(settings.rounds, everyone, metric=newcomers.metric)
    downs = tree.apply(lambda t: t.expand(len(everyone), *t.shape), down)
    for split in newcomers.splits:
        scores["new_pre", split] = newcomers.score(everyone, downs, split)
        shared = newcomers.score_global(server, split)
        if shared is not None:
            scores["new_global", split] = shared
    turn = Turn(settings.rounds, method.train.rates.over_rounds(settings.rounds - 1, settings.rounds))
    returned = newcomers.begin(everyone, downs, turn)

    def measure(after: object) -> Measurements:
        trained = {("new_post", split): of for (_, split), of in after_training(newcomers, downs, returned).items()}
        return Measurements(trained, scores)

    answers, _, measured = settled(returned, turn, 1.0, lambda answers: server, measure)
    found = measured.scores | usable(measured.trained, answers)
    sent = tree.size(downs)
    return Round(settings.rounds, everyone, answers.left_out, found, bytes_down=sent, metric=newcomers.metric)
