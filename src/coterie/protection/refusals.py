"""Which methods cannot have which protection, and why. By the name of their class; reasoned from what each sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], str | None]  # a method -> why it cannot have it; None: it can


def because(reason: str) -> Rule:
    return lambda method: reason


def unless(reason: str, **settings: Any) -> Rule:
    """Refused but with these settings."""

    def rule(method: Any) -> str | None:
        if all(getattr(method, name) == value for name, value in settings.items()):
            return None
        flags = " ".join(flag(name, value) for name, value in settings.items())
        return f"{reason}; it can be had with {flags}"

    return rule


def flag(name: str, value: Any) -> str:
    word = name.replace("_", "-")
    return (f"--{word}" if value else f"--no-{word}") if isinstance(value, bool) else f"--{word} {value}"


def every(reason: str, *names: str) -> dict[str, Rule]:
    return {name: because(reason) for name in names}


def fine(*names: str) -> dict[str, Rule]:
    return {name: lambda method: None for name in names}


def verdict(rules: dict[str, Rule], method: Any, unknown: str | None) -> str | None:
    rule = rules.get(type(method).__name__)
    return unknown if rule is None else rule(method)


NOT_CHECKED = "nobody has checked what of a client its messages tell; only Coterie's own methods can have it"
NOTHING_SENT = "its clients send nothing"
HANDED_ON = "its server hands every client's model on to others"
OWN_ROWS = "its server treats every client by what this client sent, and with the median all have sent the same"
CLUSTERS = "its clients train different models, so being far from the others is no sign of a fault"
WELCOME = "all clients are told a number that is made of everybody's numbers of samples, without noise"
HEADS = "without them there is nothing to compare the clients' heads with, and their whole length would be clipped"

# Robust aggregation. Methods that are not here can have it.
ROBUST: dict[str, Rule] = {
    "Local": because(NOTHING_SENT),
    "FedProto": unless(NOTHING_SENT, prototypes="global"),
    "FedFomo": because(f"{HANDED_ON}, who judge it themselves on their own samples"),
    "HypCluster": because(CLUSTERS),
}
TRIMMED: dict[str, Rule] = {
    **ROBUST,
    "FedProto": because("it sends class statistics only, in which clients without a class have zeros; take clip"),
}
MEDIAN: dict[str, Rule] = {**TRIMMED, **every(OWN_ROWS, "FedPAC", "FedPACProto", "pFedHN")}

# Noise on the mean of all clients: for methods whose server needs nothing but means.
CLIENT: dict[str, Rule] = {
    **fine("FedAvg", "FedProx", "SCAFFOLD", "LGFedAvg", "FedBABU", "FedRoD", "KNNPer", "APFL", "pFedMe", "Ditto"),
    **fine("FedEM", "FedCRC", "PFAKD"),
    **{name: unless(HEADS, average_heads=False) for name in ("FedPer", "FedRep", "GPFL")},
    "FedReG": unless(WELCOME, rebalance=False),
    "FedDyn": because(WELCOME),
    "Local": because(f"{NOTHING_SENT}, so nothing of them can leak"),
    "FedFomo": because(f"{HANDED_ON}, not a mean of many"),
    "pFedHN": because("its server learns an embedding of every client from what this client sent, not from a mean"),
    "HypCluster": because("its server averages those who chose the same model, and that choice gets no noise"),
    **every(
        "its server weights every class by how many samples each client has of it, which would need noise of its own; "
        "--dp-statistics protects samples there",
        "FedProto",
    ),
    **every(
        "its server combines for every client the heads of others by their class statistics, not a mean of all; "
        "--dp-statistics protects samples there",
        "FedPAC", "FedPACProto",
    ),
}  # fmt: skip

# Noise in every step of training: for methods in which samples act through gradients only.
SAMPLE: dict[str, Rule] = {
    **fine("Local", "FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedPer", "FedRep", "LGFedAvg", "FedBABU", "KNNPer"),
    **fine("APFL", "pFedMe", "Ditto", "pFedHN", "FedCRC", "PFAKD"),
    "FedRoD": unless("the class counts of a client are in its loss, without noise", balance=0.0),
    "FedReG": unless(
        "a rebalanced set holds several copies of a sample, so that it has several gradients in a step", rebalance=False
    ),
    "FedFomo": because("clients send how much each model is worth on their held-out samples, without noise"),
    "HypCluster": because("clients send which model fits their samples best, without noise"),
    "FedEM": because("every sample's weight follows from the mixture of all samples of the client, without noise"),
    "GPFL": because("features are steered by the client's class shares, without noise"),
    **every("clients send class statistics of their samples; give --dp-statistics too", "FedPAC", "FedPACProto"),
    "FedProto": because("clients send class statistics of their samples; give --dp-statistics too"),
}
OWN_MEANS = "features are drawn to the client's own class means where nobody has sent any, without noise"
WITH_STATISTICS: dict[str, Rule] = {
    "FedPAC": unless(OWN_MEANS, align=0.0),
    "FedPACProto": unless(OWN_MEANS, align=0.0),
    "FedProto": unless("features are drawn to the client's own class means, without noise", prototypes="global"),
}

# Noise on class statistics alone.
STATISTICS: dict[str, Rule] = {
    **fine("FedPAC", "FedPACProto"),
    "FedProto": because(
        "its statistics are of an encoder that does not travel and was trained on the same samples, so noise on them "
        "alone covers little; give --dp sample too"
    ),
}
NO_STATISTICS = "it sends no class statistics that noise could be put on"
