"""A run: its parts made from what a user gives, then all rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coterie.api.arguments import check_arguments
from coterie.api.data import load_clients
from coterie.api.driving import drive
from coterie.api.interrupting import Interrupted
from coterie.api.methods import About, choose
from coterie.api.progress import Watching, unwatched
from coterie.api.result import Result
from coterie.core.batchnorm import AVERAGED, keep_norms
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.wrapper import innermost
from coterie.execution.choice import Execution, place
from coterie.execution.process import restored
from coterie.federation import Ending, Round, Settings
from coterie.federation.newcomers import keep_out
from coterie.models import make_network
from coterie.privacy import Protection, taken_part
from coterie.privacy.encryption import Encryption
from coterie.runs.config import read_config
from coterie.runs.stopping import Stopped
from coterie.runs.trackers import make_trackers


@restored()
def execute(
    method: str | AnyMethod,
    data: FederatedData | None = None,
    model: str | nn.Module | Model | None = None,
    *,
    backend: Execution | str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Round], None] = lambda record: None,
    watching: Watching = unwatched,
    show: Callable[[str], None] = lambda line: None,
    track: str | Sequence[str] = (),
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    protocol: str = "pac",
    config: Mapping[str, Any] | None = None,
    interrupted: Interrupted = lambda: 0,
    **settings: Any,
) -> Result:
    """Train one federation. `coterie.run` is this with documented settings, a progress bar and Ctrl-C.

    watching: called with the method's title and the number of rounds, returns a context whose value sees every round.
    show: gets the first lines, which say how data, network, method and settings were interpreted; log.txt has them too.
    model_args: arguments of the constructor of a model given by name. config: entries to add to config.json.
    interrupted: called after every round of a run without `out`, which ends if it returns a signal.
    resume: continue the run in `out`, which exists.
    settings: fields of Settings, Safety, Ending, Protection, Encryption, LocalTraining and of the method.
    """
    check_arguments(method, data, model)
    if track and out is None:
        raise CoterieError("track needs a run folder: pass one as `out`")
    trackers = make_trackers(track) if track else []
    data = data if data is not None else load_clients(protocol=protocol)
    if resume and out is not None:
        settings = {"dp_accountant": recorded_accountant(Path(out)), **settings}
    protection = Protection(**{f.name: settings.pop(f.name) for f in fields(Protection) if f.name in settings})
    encryption = Encryption(**{f.name: settings.pop(f.name) for f in fields(Encryption) if f.name in settings})
    ending = Ending(**{f.name: settings.pop(f.name) for f in fields(Ending) if f.name in settings})
    about = About(data.name, data.shape, data.num_clients)
    method, federation, safety, usual_model = choose(method, protocol, about, settings)
    if encryption.encrypt and not encryption.keys:
        safety = replace(safety, checkpoint_every=0)  # unreadable later: the keys are not stored
    name = None  # by which the network can be built again
    if isinstance(model, Model) and train_only is not None:
        raise CoterieError("train_only needs a network or its name; a Model already defines what is trained")
    if not isinstance(model, Model):
        network = model if model is not None else usual_model
        model = make_network(network, data, federation.seed, head, model_args, train_only)
        name = network if isinstance(network, str) else None
    how = backend if isinstance(backend, Execution) else Execution(backend=backend)
    known, strangers = (
        keep_out(data, federation.new_clients, federation.seed) if federation.new_clients else (data, None)
    )
    new = strangers.train.sizes if strangers else ()
    privacy = guarantee(protection, method, model, federation, known.train.x[:1], known.train.sizes, new)
    if encryption.encrypt and federation.batchnorm != AVERAGED:
        raise CoterieError(f"encrypt and batchnorm={federation.batchnorm} cannot be combined; use batchnorm=averaged")
    method = keep_norms(method, federation.batchnorm, model)
    method = protection.around(method, model, federation.joining(known.num_clients), federation.seed)
    method = encryption.around(method)
    placed = place(method, model, known, federation.seed, how)
    nearby = replace(how, backend="auto") if how.backend == "ray" else how  # the training clients occupy the cluster
    newcomers = place(method, model, strangers, federation.seed, nearby) if strangers else None
    try:
        about_run = {
            **(config or {}),
            "network": {"name": name, "head": head, "args": dict(model_args or {}), "train_only": train_only},
            "execution": asdict(how),
        }
        about_run["protection"] = {} if protection == Protection() else {**asdict(protection), "privacy": privacy}
        about_run |= encryption.about(method)
        with watching(innermost(method).title, federation.rounds) as shown:

            def note(record: Round) -> None:
                shown(record)
                watch(record)

            return drive(
                placed, newcomers, federation, safety, out, resume, note, about_run, trackers, ending, show,
                interrupted=interrupted,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Stopped):
            placed.abandon()
        raise
    finally:
        for group in (placed, newcomers):
            if group:
                group.close()


def recorded_accountant(folder: Path) -> str | None:
    """The accountant that a run started with: its ε is not mixed with that of another one."""
    protection = read_config(folder).get("protection")
    name = protection.get("dp_accountant") if isinstance(protection, dict) else None
    return name if isinstance(name, str) else None


def guarantee(
    protection: Protection,
    method: AnyMethod,
    model: Model,
    federation: Settings,
    x: Tensor,
    sizes: Sequence[int],
    new: Sequence[int] = (),
) -> dict[str, Any] | None:
    """The differential-privacy guarantee; None without noise. Raises an error if the method does not allow it.

    x: (1, ...) any sample. sizes, new: training samples of the clients that train, and of the new clients.
    """
    protection.check(method)
    if not protection.private:
        return None
    if federation.aggregate_last_round:
        raise CoterieError(
            "aggregate_last_round cannot be combined with differential privacy, whose noise is for the "
            "participants of an ordinary round"
        )
    rounds = taken_part(federation.seed, federation.rounds, len(sizes), federation.joining(len(sizes)))
    again = federation.full_last_round and federation.join_ratio < 1
    return protection.guarantee(method, model, x, (*sizes, *new), (*rounds, *(1 for _ in new)), again)
