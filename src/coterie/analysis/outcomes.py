"""What runs report: names of their results, one row for each number, and their place in a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.analysis.lookup import method_class, method_name, parts, training
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.federation import History
from coterie.federation.finals import reported_model
from coterie.federation.history import Outcome
from coterie.methods import VARIANTS

NEW = {"new_pre": "new: before", "new_post": "new: after", "new_global": "new: global"}  # columns for new clients


def title(name: str) -> str:
    """The title of a method or variant, as in tables."""
    return VARIANTS[name][2] if name in VARIANTS else method_class(name).title


def reported(name: str) -> str:
    """The name under which the run that trains a method or variant reports its number."""
    base, changes = parts(name)
    return method_class(base).title if changes else title(name)


def label(method: str | AnyMethod, outcome: str, called: str | None = None) -> str:
    """The name of an outcome in tables. called: what the user calls the method; default: its title."""
    own = method_class(parts(method)[0]).title if isinstance(method, str) else method.title
    if called is not None:
        return called if outcome == own else f"{called} ({outcome})"
    return title(method).replace(own, outcome, 1) if isinstance(method, str) and parts(method)[1] else outcome


def rows_of(
    labels: Mapping[str, str],
    seed: int,
    history: History,
    outcomes: Sequence[Outcome],
    seconds: float,
    privacy: Mapping[str, Any] | None,
    content: str,
    finals: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """One row for each number that a run reports.

    labels: outcome -> its name in tables. content: checksum of the clients' samples. finals: all metrics after the
    last round, as in result.json; a number has those of its model.
    """
    last = next(r for r in reversed(history) if ("pre", "test") in r.scores)
    finished = any(history.with_point("finished"))
    post = next((r for r in reversed(history) if ("post", "test") in r.scores), last)
    return [
        {
            "method": labels[o.name],
            "seed": seed,
            "reported": o.point,
            **o.last._asdict(),
            "best_on_test": o.best_on_test,
            "best_by_validation": o.by_validation,
            "pre": last.score("pre"),
            "post": post.score("post"),
            "global": last.score("global"),
            **{p: v for r in history for p in NEW if (v := r.score(p)) is not None},
            "megabytes": round(sum(r.bytes_up + r.bytes_down for r in history) / 1e6, 6),  # exactly
            "seconds": round(seconds, 2),
            "metrics": {} if model is None else {name: v["mean"] for name, v in (finals or {})[model].items()},
            "privacy": privacy,
            "content": content,
            "clients": scores.clients[scores.defined].tolist(),
            "scores": scores.value[scores.defined].tolist(),
        }
        for o in outcomes
        for scores in [list(history.with_point(o.point))[-1].scores[o.point, "test"]]
        for model in [reported_model(finals or {}, last.metric.name, o.point, o.last.mean, finished)]
    ]


def place(command: Mapping[str, Any]) -> int:
    """The position of this run's method in the comparison that began it. command: of the run's config.json."""
    if isinstance(command.get("place"), int):
        return int(command["place"])
    trained = [training(name) for name in compared(command)]
    return trained.index(command["method"]) if command.get("method") in trained else 0


def reference(command: Mapping[str, Any]) -> str:
    """The outcome of this run that the user named to test the others against; empty if none."""
    if "place" in command:
        return str(command.get("reference") or "")
    against = known(command["against"]) if compared(command) and "against" in command else ""
    return reported(against) if against and training(against) == command.get("method") else ""


def compared(command: Mapping[str, Any]) -> list[str]:
    """The methods that were named; none if the run is not part of a comparison."""
    methods = command.get("methods")
    return [name for name in map(known, methods) if name] if isinstance(methods, list) else []


def known(name: Any) -> str:
    try:
        return method_name(str(name))
    except CoterieError:  # a method of another version
        return ""
