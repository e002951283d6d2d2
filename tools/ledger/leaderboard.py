"""The smoke test in docs/leaderboard.md: all methods under one protocol, run by `python -m tools.leaderboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.methods import METHODS
from coterie.papers.results import load
from tools.ledger.readme import table

FILE = "leaderboard.json"
HEADER = ["method", "family", "accuracy", "SD clients", "worst client", "measured", "MB sent"]


def blocks(folder: Path) -> dict[str, str]:
    """Mark -> text. A method that is neither in the table nor refused is an error."""
    path = folder / FILE
    found: Any = load(path)
    try:
        rows, normalized = (ordered(found[name]) for name in ("outcomes", "normalized"))
        check_complete({row[0] for row in [*rows, *normalized]} | set(found["refused"]))
        about = circumstances(found, len(rows))
        again = later(found["normalized"])
        network = f"On {found['network']}, for methods that need normalization layers{again and f' ({again})'}:"
        reasons = "\n".join(f"- **{method}**: {reason}" for method, reason in found["refused"].items())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CoterieError(f"{path}: not written by `python -m tools.leaderboard`: {error!r}") from None
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    return {
        "smoke": f"{about}\n\n{table(HEADER, rows)}",
        "smoke-normalized": f"{network}\n\n{table(HEADER, normalized)}",
        "smoke-refused": f"Left out, because the data or the network do not have what they need:\n\n{reasons}"
        if reasons
        else "No method is left out.",
    }


def ordered(outcomes: list[dict[str, Any]]) -> list[list[str]]:
    """The best first."""
    return [cells(row) for row in sorted(outcomes, key=lambda row: -row["mean"])]


def cells(row: dict[str, Any]) -> list[str]:
    families = {name: kind.family for kind in METHODS.values() for name in kind.results}
    shares = (f"{100 * row[name]:.2f}" for name in ("mean", "std", "worst10"))
    return [row["method"], families[row["method"]], *shares, f"`{row['reported']}`", f"{row['megabytes']:.1f}"]


def circumstances(found: dict[str, Any], rows: int) -> str:
    machine, seeds = found["hardware"], sorted({row["seed"] for row in found["outcomes"]})
    again = later(found["outcomes"])
    return (
        f"`{found['command']}`: {rows} results on {found['clients']} clients of `{found['data']}`, "
        f"seed {', '.join(map(str, seeds))}, commit {found['commit']}{again and f' ({again})'}, {found['date']}, "
        f"{machine['cores']} cores of {machine['machine']}, torch {found['torch']}, "
        f"{found['seconds'] / 60:.0f} minutes in all."
    )


def later(outcomes: list[dict[str, Any]]) -> str:
    """Which rows are of another commit, if any."""
    commits: dict[str, list[str]] = {}
    for row in outcomes:
        if "commit" in row:
            commits.setdefault(row["commit"], []).append(row["method"])
    return "; ".join(f"{', '.join(methods)}: {commit}" for commit, methods in commits.items())


def check_complete(shown: set[str]) -> None:
    missing = [kind.title for kind in METHODS.values() if not shown & {kind.title, *kind.results}]
    if missing:
        raise CoterieError(f"{', '.join(missing)} neither ran nor was refused; run `python -m tools.leaderboard`")
