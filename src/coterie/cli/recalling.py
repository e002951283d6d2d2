"""The command that began a run, read from its folder. A folder from an untrusted source may contain any command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

NOT_KEPT = ("json", "watch", "format", "trust_code", "save_config", "exist")
CONDITIONS = ("until", "patience")
PATHS = ("dataset", "data_dir", "partition", "keys", "state_dir")
ELSEWHERE = ("ray_address", "state_dir")  # settings that name something outside the folder


def recalled(command: dict[str, Any], chosen: argparse.Namespace, run: Path) -> argparse.Namespace:
    """The flags of the command that began the run, overridden by those of the current command.

    Relative paths are relative to the working directory of that command. Code, and settings that name something outside
    the run folder, are taken from it only with --trust-code; otherwise the user passes them again. Conditions that may
    have ended the run are dropped if --rounds is given.
    """
    left_out = (*NOT_KEPT, *(CONDITIONS if hasattr(chosen, "rounds") else ()))
    flags = {name: tuples(value) for name, value in command.items() if name not in left_out and value is not None}
    check_types(flags, run)
    check_trust(flags, chosen, run)
    for name in PATHS:
        flags |= {name: placed(name, flags[name], flags["cwd"])} if isinstance(flags.get(name), str) else {}
    return argparse.Namespace(**flags | vars(chosen))


def check_types(flags: dict[str, Any], run: Path) -> None:
    """Raise an error for a damaged or forged command, before anything uses it."""
    from coterie.core.errors import CoterieError

    texts = ("cwd", "method", "model", "head", "train_only", "protocol", "track", "until", *PATHS, "ray_address")
    wrong = [name for name in texts if not isinstance(flags.get(name), str | None)]
    wrong += [name for name in ("seed", "seeds", "rounds", "patience") if type(flags.get(name, 0)) is not int]
    arguments = flags.get("model_args", ())
    if not isinstance(arguments, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in arguments
    ):
        wrong.append("model_args")
    methods = flags.get("methods", ())
    if not isinstance(methods, tuple) or not all(isinstance(method, str) for method in methods):
        wrong.append("methods")
    for name in wrong:
        raise CoterieError(f"{run}: the command that began it is damaged: {name} is {flags[name]!r:.60}")


def check_trust(flags: dict[str, Any], chosen: argparse.Namespace, run: Path) -> None:
    from coterie.core.errors import CoterieError
    from coterie.core.importing import is_code, trusted, untrusted

    trust, model = hasattr(chosen, "trust_code"), flags.get("model")
    methods = [flags.get("method"), *flags.get("methods", ())]
    named = [("model", model), *(("method", method) for method in methods)]
    for what, name in [(what, name) for what, name in named if is_code(name) and getattr(chosen, what, None) != name]:
        if not trust:
            raise untrusted(run, f"--{what}", name)
        trusted(what, name, flags)
    if hasattr(chosen, "model") and chosen.model != model:
        raise CoterieError(f"{run} began with {f'--model {model}' if model else 'no --model'}, not {chosen.model}")
    if hasattr(chosen, "method") and chosen.method not in methods:
        raise CoterieError(f"{run} began with the method {methods[0] or ', '.join(methods[1:])}, not {chosen.method}")
    for name in ELSEWHERE:
        if flags.get(name) is not None and not trust and not hasattr(chosen, name):
            flag = f"--{name.replace('_', '-')} {flags[name]}"
            raise CoterieError(f"{run} uses {flag}, which is outside the folder: pass it again if you trust it")


def placed(name: str, value: str, folder: Any) -> str:
    """A path relative to this folder as an absolute one; names of datasets and rules are unchanged."""
    from coterie.data.datasets import is_known
    from coterie.data.user import is_path

    path = os.path.join(str(folder), value)
    if name == "dataset" and not is_path(value) and (is_known(value) or not os.path.exists(path)):
        return value
    if (name == "partition" and not value.endswith(".npz")) or value.startswith("~"):
        return value
    return path


def tuples(value: Any) -> Any:
    """Lists as tuples, which flags give and JSON does not have."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
