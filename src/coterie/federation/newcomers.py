"""Clients that were not in training: what the federation has to give them, and how well they do with it."""

from __future__ import annotations

from coterie.clients import Answers, Clients, Turn
from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.federation.history import Round
from coterie.federation.rounds import Settings, Told, after_training, log, settled, usable


def keep_out(data: FederatedData, share: float, seed: int) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and a random share of clients that do not."""
    out = round(share * data.clients)
    if not 0 < out < data.clients:
        raise CoterieError(f"a share of {share} of {data.clients} clients leaves none to train, or none to keep out")
    drawn = order.shuffle(order.fold(order.seed_key(seed), order.NEWCOMERS), data.clients)
    return data.pick(drawn[out:].sort().values.tolist()), data.pick(drawn[:out].sort().values.tolist())


def meet(server: object, newcomers: Clients, settings: Settings) -> Round:
    """They join, get what the server has for them, are measured, train once, and are measured again."""
    method, everyone = newcomers.method, newcomers.everyone
    newcomers.join(method.server_welcome(server))
    scores = {}
    down = method.server_greet(server)
    if down is None:
        log.warning("%s has nothing to give to clients that were not in training", method.title)
        return Round(settings.rounds, everyone)
    downs = tree.apply(lambda t: t.expand(len(everyone), *t.shape), down)
    for split in newcomers.splits:
        scores["new_pre", split] = newcomers.score(everyone, downs, split)
        shared = newcomers.score_global(server, split)
        if shared is not None:
            scores["new_global", split] = shared
    turn = Turn(settings.rounds, settings.rate(settings.rounds - 1))
    returned = newcomers.begin(everyone, downs, turn)

    def settle(answers: Answers) -> tuple[object, Told]:
        trained = {("new_post", split): of for (_, split), of in after_training(newcomers, downs, returned).items()}
        return server, Told(trained, scores)

    answers, _, told = settled(returned, turn, 1.0, settle)
    found = told.scores | usable(told.trained, answers)
    return Round(settings.rounds, everyone, answers.left_out, found, bytes_down=tree.size(downs))
