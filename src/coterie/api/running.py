"""A run, from its first round to its last: in memory, or in a folder from which it can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coterie.api.arguments import check_arguments
from coterie.api.data import load_clients
from coterie.api.interrupting import INTERRUPTED, Interrupted, InterruptibleEnding
from coterie.api.methods import About, choose
from coterie.api.opening import opening
from coterie.api.progress import Watching, unwatched
from coterie.api.result import Result, reloaded
from coterie.core import tree
from coterie.core.batchnorm import AVERAGED, keep_norms
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.wrapper import innermost, lasting, lasting_server
from coterie.execution import Backend, LocalBackend
from coterie.execution.choice import Execution, place
from coterie.federation import Ending, History, Round, Safety, Settings, federate
from coterie.federation.finals import measure_every
from coterie.federation.newcomers import keep_out, meet
from coterie.models import make_network
from coterie.privacy import Protection, taken_part
from coterie.privacy.encryption import Encryption
from coterie.runs.checkpoint import Checkpoints
from coterie.runs.config import read_config
from coterie.runs.describe import describe, portrait, summarise
from coterie.runs.extending import extended, unfinished
from coterie.runs.folder import Folder
from coterie.runs.stopping import Stopped, stoppable
from coterie.runs.trackers import Tracker, Tracking, make_trackers

log = logging.getLogger("coterie")


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


def drive(
    backend: Backend,
    newcomers: LocalBackend | None,
    settings: Settings,
    safety: Safety,
    out: str | Path | None,
    resume: bool,
    watch: Callable[[Round], None],
    config: Mapping[str, Any],
    trackers: Sequence[Tracker] = (),
    ending: Ending = Ending(),  # noqa: B008
    show: Callable[[str], None] = lambda line: None,
    *,
    interrupted: Interrupted = lambda: 0,
) -> Result:
    """Run all rounds on a backend, and write the run folder where there is one."""
    privacy = config.get("protection", {}).get("privacy")
    backend.largest = safety.max_magnitude
    ending.check(backend.splits, backend.metric)
    about = describe(backend, newcomers, settings, {**config, "ending": asdict(ending)})
    lines = opening(backend, settings)
    if out is None:
        for line in lines:
            show(line)
        ending = InterruptibleEnding(**asdict(ending), interrupted=interrupted)
        result = train(backend, newcomers, settings, watch, max_left_out=safety.max_left_out, ending=ending)
        if result.ended and result.ended.reason == INTERRUPTED:
            log.warning("interrupted: the result has %d of %d rounds", result.ended.round, settings.rounds)
        return replace(result, privacy=privacy, config=about)
    folder = Folder(out, about, backend.splits, newcomers is not None, resume)
    try:
        if resume and not unfinished(folder, settings, ending, backend.elsewhere):
            folder.close()
            return reloaded(folder.path, backend, privacy, about)
    except CoterieError:
        folder.close()
        raise
    folder.note(lines)
    for line in lines:
        show(line)
    partition = backend.data.partition if isinstance(backend, LocalBackend) else None
    data, counts = about["data"], backend.census.class_counts
    drawn = portrait(
        data["name"], partition and partition.name, counts, data["class_names"], data.get("client_names", ())
    )
    checkpoints = Checkpoints(folder.path / "checkpoint", backend, about, safety.checkpoint_every, folder.checksums)
    tracking = Tracking(trackers, folder.path, about, partition.groups if partition else ())
    at_once = failed = False
    try:
        with stoppable() as stop_signal:

            def restore(server: Any) -> tuple[Any, History]:
                server, history = checkpoints.restore(server) if resume else (server, History())
                if resume:
                    history = extended(folder, history, settings)
                folder.begin(counts, partition, drawn, history)
                tracking.begin(history)
                return server, history

            def note(record: Round) -> None:
                folder.add(record)
                tracking.add(record)
                watch(record)

            def between(server: Any, history: History) -> None:
                stop = stop_signal()
                checkpoints.after(server, history, now=stop > 0 or (safety.keep_state and history.ended is not None))
                if backend.elsewhere:
                    checkpoints.settle()  # devices keep the state of the last rounds only
                if stop:
                    checkpoints.close()
                    then = f"continues after round {checkpoints.saved}" if checkpoints.saved else "restarts it"
                    again = "the same command with --resume" if backend.elsewhere else f"`coterie resume {folder.path}`"
                    if "command" not in config and not backend.elsewhere:
                        again = f"the same call with out='{folder.path}' and exist='resume'"
                    raise Stopped(f"stopped after round {len(history)}; {again} {then}", stop)

            result = train(
                backend, newcomers, settings, note, restore=restore, between=between,
                max_left_out=safety.max_left_out, ending=ending,
            )  # fmt: skip
            result = replace(result, privacy=privacy, config=about, folder=folder.path)
            folder.finish(result)
            tracking.end(summarise(result))
            checkpoints.seal(result.history, safety.keep_state and not backend.elsewhere)
            if stop := stop_signal():
                raise Stopped(f"the run in {folder.path} had reached its end, and is finished", stop)
            return result
    except CoterieError as error:
        failed = True
        checkpoints.close()
        kept = f"; the checkpoint of round {checkpoints.saved} is kept" if checkpoints.saved else ""
        explained = CoterieError(f"{error}{kept}")
        explained.__notes__ = getattr(error, "__notes__", [])
        raise explained from None
    except KeyboardInterrupt as stop:
        at_once = not isinstance(stop, Stopped)
        raise
    except Exception:
        failed = True
        raise
    finally:
        checkpoints.close(wait=not at_once)
        tracking.close()
        folder.close()
        if failed and not resume and not folder.records:
            folder.remove()  # nothing to resume: leave the name free for another attempt


def train(
    backend: Backend, newcomers: LocalBackend | None, settings: Settings, note: Callable[[Round], None], **how: Any
) -> Result:
    """Run all rounds, then evaluate the clients that did not train."""
    server, history = federate(backend, settings, note, **how)
    if newcomers:
        rounds = history.ended.round if history.ended else settings.rounds
        history.append(meet(server, newcomers, replace(settings, rounds=rounds)))
        note(history[-1])
    finals = measure_every(backend, server) if isinstance(backend, LocalBackend) else None
    server = lasting_server(backend.method, tree.apply(lambda t: t.cpu(), server))
    model = replace(backend.model.to("cpu"), precision="fp32")
    data = backend.data if isinstance(backend, LocalBackend) else None
    return Result(lasting(backend.method), model, data, server, backend.states, history, finals=finals)
