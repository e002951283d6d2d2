"""Methods beside each other: accuracies over seeds, and paired tests over clients and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import unknown
from coterie.federation import History
from coterie.federation.history import Outcome
from coterie.methods import METHODS, VARIANTS, parts
from coterie.significance import Spread, holm, wilcoxon
from coterie.tables import Table

Accuracies = Mapping[tuple[int, int], float]  # (seed, client) -> accuracy, 0..1
NEW = {"new_pre": "new: before", "new_post": "new: after", "new_global": "new: global"}  # columns for new clients
COLUMNS = {"± clients": "std", "worst 10 %": "worst10", "before": "pre", "after": "post", "global": "global"}
COLUMNS |= {"by validation": "best_by_validation", **{name: key for key, name in NEW.items()}}


def title(name: str) -> str:
    """Of a method or variant, as in tables."""
    return VARIANTS[name][2] if name in VARIANTS else METHODS[name].title


def reported(name: str) -> str:
    """What the run that is trained for a method or variant calls its number."""
    base, changes = parts(name)
    return METHODS[base].title if changes else title(name)


def rows_of(
    name: str,
    seed: int,
    history: History,
    outcomes: Sequence[Outcome],
    seconds: float,
    privacy: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """What a run of this method or variant comes to, one row for each number that it reports."""
    base, changes = parts(name)
    last = next(r for r in reversed(history) if ("pre", "test") in r.scores)
    post = next((r for r in reversed(history) if ("post", "test") in r.scores), last)
    return [
        {
            "method": title(name).replace(METHODS[base].title, o.name, 1) if changes else o.name,
            "seed": seed,
            "reported": o.point,
            **o.last._asdict(),
            "best_on_test": o.best_on_test,
            "best_by_validation": o.by_validation,
            "pre": last.accuracy("pre"),
            "post": post.accuracy("post"),
            "global": last.accuracy("global"),
            **{p: v for r in history for p in NEW if (v := r.accuracy(p)) is not None},
            "megabytes": round(sum(r.bytes_up + r.bytes_down for r in history) / 1e6, 6),  # exactly
            "seconds": round(seconds, 2),
            "privacy": privacy,
            "clients": scores.clients[scores.total > 0].tolist(),
            "accuracies": scores.accuracy[scores.total > 0].tolist(),
        }
        for o in outcomes
        for scores in [list(history.with_point(o.point))[-1].scores[o.point, "test"]]
    ]


def paired_tests(samples: Mapping[str, Accuracies], against: str, title: str) -> Table:
    """One line for every other method: how much better it is than `against`, and whether that is more than chance."""
    if against not in samples:
        raise unknown("method to test against", against, samples)
    reference = samples[against]
    shared = {name: [k for k in own if k in reference] for name, own in samples.items() if name != against}
    differences = {name: [samples[name][k] - reference[k] for k in keys] for name, keys in shared.items() if keys}
    found = {name: wilcoxon(values) for name, values in differences.items()}
    corrected = dict(zip(found, holm([test.p for test in found.values()]), strict=True))
    rows = []
    for name, test in found.items():
        mean = 100 * sum(differences[name]) / len(differences[name])
        sure = corrected[name] < 0.05
        verdict = ("better" if test.up else "worse") if sure else "no difference shown"
        rows.append(
            [name, f"{mean:+.2f}", str(len(differences[name])), p_value(test.p), p_value(corrected[name]), verdict]
        )
    return Table(
        title,
        ["method", f"against {against}", "pairs", "p", "p (Holm)", "at 5 %"],
        rows,
        "Wilcoxon signed-rank test of the accuracies that a client has in the last round, paired by client and seed, "
        f"two-sided, which says better or worse by ranks; corrected by Holm for {len(rows)} "
        f"comparison{'s' if len(rows) != 1 else ''}.",
    )


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" if p > 0 else "0"


def comparison(table: Mapping[str, Any], seeds: int, against: str | None = None) -> list[Table]:
    """What `coterie compare` ends with."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for outcome in table["outcomes"]:
        rows.setdefault(outcome["method"], []).append(outcome)
    used = {name: key for name, key in COLUMNS.items() if any(o.get(key) is not None for o in table["outcomes"])}
    many, private = seeds > 1, any(o.get("privacy") for o in table["outcomes"])
    tables = [
        Table(
            f"Accuracy on {table['clients']} clients of {table['data']}, percent",
            ["method", "accuracy", *(["95 %"] if many else []), *used, *(["ε"] if private else []), "MB sent"],
            [
                [
                    name,
                    cell(group, "mean"),
                    *([interval(group)] if many else []),
                    *(cell(group, key) for key in used.values()),
                    *([privacy(group)] if private else []),
                    cell(group, "megabytes", 1),
                ]
                for name, group in rows.items()
            ],
            "accuracy: mean over clients after the last round, measured where the method's paper does; before and "
            "after: personal model before and after local training"
            + (f"; mean ± standard deviation of {seeds} seeds, and the 95 % interval (Student's t)" if many else ""),
        )
    ]
    if len(rows) > 1:
        samples = {
            name: {(o["seed"], c): a for o in group for c, a in zip(o["clients"], o["accuracies"], strict=True)}
            for name, group in rows.items()
        }
        tables.append(paired_tests(samples, against or list(rows)[-1], "Paired tests, difference in points"))
    return tables


def cell(group: Sequence[dict[str, Any]], key: str, scale: float = 100) -> str:
    values = [scale * o[key] for o in group if o.get(key) is not None]
    return spread_text(values) if values else "-"


def privacy(group: Sequence[dict[str, Any]]) -> str:
    """The largest ε of its runs."""
    found = [o["privacy"]["epsilon"] for o in group if o.get("privacy")]
    return f"{max(found):.4g}" if found else "-"


def interval(group: Sequence[dict[str, Any]]) -> str:
    half = Spread.of([100 * o["mean"] for o in group]).half
    return "-" if half is None else f"±{half:.2f}"


def spread_text(values: Sequence[float]) -> str:
    found = Spread.of(values)
    return f"{found.mean:.2f}" if found.std is None else f"{found.mean:.2f} ± {found.std:.2f}"
