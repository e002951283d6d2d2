"""The words by which the catalogue groups methods, and the situations that it suggests methods for."""

from __future__ import annotations

from collections.abc import Iterable

from coterie.core.errors import CoterieError, unknown

FAMILIES = {
    "global model": "One model for all; local training is changed so that clients do not drift apart.",
    "server optimizer": "One model for all; the step of the server is changed.",
    "fairness": "One model for all, in which clients with a large loss count more.",
    "fine-tuning": "One model for all, made to be adapted by each client after the last round.",
    "personal head": "Clients share an encoder and have heads of their own, some next to a shared head.",
    "personal layers": "Clients keep other layers of the network to themselves, or all of them.",
    "regularized": "Each client trains a whole model of its own, regularized towards a shared model or taught by it.",
    "mixture": "A client predicts with a mixture of shared and personal models.",
    "collaborators": "Each client gets its own combination of the models of other clients.",
    "clusters": "Groups of clients share a model, and the groups are found in training.",
    "hypernetwork": "A network on the server generates the models of clients, or how to combine them.",
    "prototypes": "Clients share statistics of features per class, alone or with an encoder.",
}

# Declared by a method, where its design aims at the situation: word -> reason.
DESIGNED = {
    "few clients": "the server handles each client individually, which is feasible for few clients",
    "label shift": "it is designed for clients whose class shares differ",
    "feature shift": "it is designed for clients whose inputs differ",
    "unequal sizes": "it is designed for clients with unequal samples, steps or losses",
    "new clients": "a new client adapts shared models with its own samples",
}

# Derived from what a method's class does: word -> reason.
DERIVED = {
    "many clients": "clients keep nothing between rounds, so they may take part rarely",
    "new clients": "a new client gets the global model at once",
    "little bandwidth": "it sends less than half as much as FedAvg",
    "privacy": "it allows `--dp client`, `--dp sample` and `--encrypt`",
    "no classes needed": "it uses the loss of the task only",
    "global model": "there is a global model too",
}

SITUATIONS = tuple(dict.fromkeys((*DESIGNED, *DERIVED)))


def check_words(name: str, family: str, suits: Iterable[str]) -> None:
    """Raise an error for words that are not in the lists. An empty family is allowed."""
    if family and family not in FAMILIES:
        raise CoterieError(f"{name}: {unknown('family', family, FAMILIES)}")
    if isinstance(suits, str):
        raise CoterieError(f"{name}: suits must be a tuple of situations, got the text '{suits}'")
    for word in suits:
        if word not in DESIGNED:
            raise CoterieError(f"{name}: {unknown('situation to declare', word, DESIGNED)}")
