"""A run, from its first round to its last: in memory, or in a folder from which it can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coterie.api.about import describe, portrait
from coterie.api.data import load_clients
from coterie.api.execution import Execution, make_network, place
from coterie.api.methods import choose
from coterie.clients import Clients, Resident
from coterie.core import tree
from coterie.core.around import innermost, innermost_server
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.samples import FederatedData
from coterie.federation import History, Result, Round, Safety, Settings, federate
from coterie.federation.checkpoint import Checkpoints
from coterie.federation.folder import Folder, summarise
from coterie.federation.newcomers import keep_out, meet
from coterie.federation.stopping import Stopped, stoppable
from coterie.methods import AnyMethod
from coterie.protection import Protection, taken_part
from coterie.protection.encryption import Encryption
from coterie.trackers import Tracker, Tracking, make_trackers


def run(
    method: str | AnyMethod,
    model: str | nn.Module | Model | None = None,
    clients: FederatedData | None = None,
    *,
    where: Execution | str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Round], None] = lambda record: None,
    track: str | Sequence[str] = (),
    head: str | None = None,
    protocol: str = "pac",
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Train, and give back the history and everybody's model.

    method: a name or a method. model: a name, a network or a Model; the protocol's if not given. clients: their
    data, by default the shipped Fashion-MNIST. where: looped, batched, auto, or an Execution. out: a folder to
    leave the run in. resume: the folder is there, and its run goes on where it was stopped. watch: sees every round.
    track: tensorboard, wandb, mlflow, or several of them. head: name of the network's head, where it is not the last
    module. settings: rounds, seed, ... of Settings, checkpoint_every, ... of Safety, robust, dp, ... of Protection,
    encrypt and keys of Encryption, lr, epochs, ... of Sgd, and the method's own; what is not given is as in the
    protocol's paper.
    """
    if resume and out is None:
        raise CoterieError("which run is to be resumed? Give its folder as `out`")
    if track and out is None:
        raise CoterieError("what is tracked goes into the folder of the run: give one as `out`")
    trackers = make_trackers(track) if track else []
    data = clients if clients is not None else load_clients(protocol=protocol)
    protection = Protection(**{f.name: settings.pop(f.name) for f in fields(Protection) if f.name in settings})
    encryption = Encryption(**{f.name: settings.pop(f.name) for f in fields(Encryption) if f.name in settings})
    method, federation, safety, usual_model = choose(method, protocol, data.name, data.shape, settings)
    if encryption.encrypt and not encryption.keys:
        safety = replace(safety, checkpoint_every=0)  # nobody could read it: the keys end with this process
    name = None  # by which the network can be built again
    if not isinstance(model, Model):
        network = model if model is not None else usual_model
        model = make_network(network, data, federation.seed, head)
        name = network if isinstance(network, str) else None
    how = where if isinstance(where, Execution) else Execution(clients=where)
    known, strangers = (
        keep_out(data, federation.new_clients, federation.seed) if federation.new_clients else (data, None)
    )
    new = strangers.train.sizes if strangers else ()
    privacy = guarantee(protection, method, model, federation, known.train.x[:1], known.train.sizes, new)
    method = protection.around(method, model, federation.joining(known.clients), federation.seed)
    method = encryption.around(method)
    placed = place(method, model, known, federation.seed, how)
    nearby = replace(how, clients="auto") if how.clients == "ray" else how  # the cluster is taken by those who train
    newcomers = place(method, model, strangers, federation.seed, nearby) if strangers else None
    try:
        told = {**(config or {}), "network": {"name": name, "head": head}, "execution": asdict(how)}
        told["protection"] = {} if protection == Protection() else {**asdict(protection), "privacy": privacy}
        told |= encryption.about(method)
        return drive(placed, newcomers, federation, safety, out, resume, watch, told, trackers)
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Stopped):
            placed.abandon()
        raise
    finally:
        for group in (placed, newcomers):
            if group:
                group.close()


def guarantee(
    protection: Protection,
    method: AnyMethod,
    model: Model,
    federation: Settings,
    x: Tensor,
    sizes: Sequence[int],
    new: Sequence[int] = (),
) -> dict[str, Any] | None:
    """What differential privacy comes to; None where none is asked for. An error if this method cannot have it.

    x: (1, ...) any sample. sizes, new: training samples of the clients that train, and of those that come after.
    """
    protection.check(method)
    if not protection.private:
        return None
    rounds = taken_part(federation.seed, federation.rounds, len(sizes), federation.joining(len(sizes)))
    again = federation.full_last_round and federation.join_ratio < 1
    return protection.guarantee(method, model, x, (*sizes, *new), (*rounds, *(1 for _ in new)), again)


def drive(
    clients: Clients,
    newcomers: Resident | None,
    settings: Settings,
    safety: Safety,
    out: str | Path | None,
    resume: bool,
    watch: Callable[[Round], None],
    config: Mapping[str, Any],
    trackers: Sequence[Tracker] = (),
) -> Result:
    privacy = config.get("protection", {}).get("privacy")
    if out is None:
        result = train(clients, newcomers, settings, watch, max_left_out=safety.max_left_out)
        return replace(result, privacy=privacy)
    about = describe(clients, newcomers, settings, config)
    folder = Folder(out, about, clients.splits, newcomers is not None, resume)
    partition = clients.data.partition if isinstance(clients, Resident) else None
    data, counts = about["data"], clients.census.class_counts
    drawn = portrait(data["name"], partition and partition.name, counts, data["class_names"])
    checkpoints = Checkpoints(folder.path / "checkpoint", clients, about, safety.checkpoint_every)
    tracking = Tracking(trackers, folder.path, about)
    at_once = False
    try:
        with stoppable() as asked:

            def restore(server: Any) -> tuple[Any, History]:
                server, history = checkpoints.restore(server) if resume else (server, History())
                folder.begin(counts, partition, drawn, history)
                tracking.begin(history)
                return server, history

            def note(record: Round) -> None:
                folder.add(record)
                tracking.add(record)
                watch(record)

            def between(server: Any, history: History) -> None:
                stop = asked()
                checkpoints.after(server, history, now=stop > 0)
                if clients.elsewhere:
                    checkpoints.settle()  # their devices keep what the last rounds made, not more
                if stop:
                    checkpoints.close()
                    goes_on = f"goes on after round {checkpoints.saved}" if checkpoints.saved else "begins it again"
                    again = "the same command with --resume" if clients.elsewhere else f"`coterie resume {folder.path}`"
                    raise Stopped(f"stopped after round {len(history)}; {again} {goes_on}", stop)

            result = train(
                clients, newcomers, settings, note, restore=restore, between=between, max_left_out=safety.max_left_out
            )
            result = replace(result, privacy=privacy)
            folder.finish(result)
            tracking.end(summarise(result))
            checkpoints.close()
            checkpoints.remove()
            if stop := asked():
                raise Stopped(f"the run in {folder.path} was at its end, and is finished", stop)
            return result
    except CoterieError as error:
        checkpoints.close()
        kept = f"; the checkpoint of round {checkpoints.saved} is kept" if checkpoints.saved else ""
        raise CoterieError(f"{error}{kept}") from None
    except KeyboardInterrupt as stop:
        at_once = not isinstance(stop, Stopped)
        raise
    finally:
        checkpoints.close(wait=not at_once)
        tracking.close()
        folder.close()


def train(
    clients: Clients, newcomers: Resident | None, settings: Settings, note: Callable[[Round], None], **how: Any
) -> Result:
    """All rounds, and the clients that were not in training."""
    server, history = federate(clients, settings, note, **how)
    if newcomers:
        history.append(meet(server, newcomers, settings))
        note(history[-1])
    server = innermost_server(clients.method, tree.apply(lambda t: t.cpu(), server))
    model = replace(clients.model.to("cpu"), precision="fp32")
    data = clients.data if isinstance(clients, Resident) else None
    return Result(innermost(clients.method), model, data, server, clients.states, history)
