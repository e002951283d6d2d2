"""Which protections a method allows, robust aggregation and differential privacy, declared on its class.

    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": refused("clients send ...")}

A protection that is not declared has a default: robust aggregation is allowed, differential privacy is refused. A
subclass inherits the declaration. Privacy that is declared as allowed is granted only if the method's behaviour does
not contradict it (`coterie.privacy.judge`), so that a wrong declaration, or one that an overridden function makes
wrong, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[Any], str | None]  # a method -> why it cannot have the protection; None: it can
Protections = Mapping[str, Rule]

# robust-median: also for krum and others where one update takes the place of all
KINDS = ("robust-clip", "robust-trimmed", "robust-median", "dp-client", "dp-sample", "dp-statistics", "dp-both")

NOTHING_SENT = "its clients send nothing"
HANDED_ON = "its server hands every client's model on to others"
OWN_ROWS = "its server uses each client's own update, and this aggregation replaces all updates by one"
WELCOME = "all clients receive a number computed from every client's number of samples, without noise"
HEADS = "without an averaged head, updates of heads have no reference, so whole weights would be clipped"
SEND_STATISTICS = "clients send class statistics of their samples; give --dp-statistics too"
STATISTICS_ONLY = "its clients send class statistics only, with zeros for classes they lack; use clip"
OWN_ENCODERS = (
    "its statistics come from an encoder that stays on the client and was trained on the same samples, so noise on "
    "them alone protects little; add --dp sample"
)
COUNTED = "--dp-statistics protects samples there"
OWN_MEANS = "where a class has no global mean, features are aligned to the client's own class means, without noise"


def ALLOWED(method: Any) -> None:
    """The protection is allowed."""


def refused(reason: str) -> Rule:
    """The protection is refused with any settings."""
    return lambda method: reason


def unless(reason: str, **settings: Any) -> Rule:
    """The protection is allowed only with these settings."""

    def rule(method: Any) -> str | None:
        if all(getattr(method, name) == value for name, value in settings.items()):
            return None
        flags = " ".join(flag(name, value) for name, value in settings.items())
        return f"{reason}; it can be had with {flags}"

    return rule


def flag(name: str, value: Any) -> str:
    word = name.replace("_", "-")
    return (f"--{word}" if value else f"--no-{word}") if isinstance(value, bool) else f"--{word} {value}"


def robust(rule: Rule, *but: str) -> dict[str, Rule]:
    """One rule for all kinds of robust aggregation, except for some."""
    return {kind: rule for kind in KINDS if kind.startswith("robust") and kind not in but}
