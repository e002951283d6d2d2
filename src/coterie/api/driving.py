"""All rounds of a run on a backend: in memory, or in a folder from which it can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coterie.api.interrupting import Interrupted, InterruptibleEnding
from coterie.api.opening import opening
from coterie.api.result import Result, reloaded
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.wrapper import lasting, lasting_server
from coterie.execution import Backend, LocalBackend
from coterie.federation import Ending, History, Round, Safety, Settings, federate
from coterie.federation.finals import measure_every
from coterie.federation.newcomers import meet
from coterie.runs.checkpoint import Checkpoints
from coterie.runs.describe import describe, portrait, summarise
from coterie.runs.extending import extended, unfinished
from coterie.runs.folder import Folder
from coterie.runs.stopping import Stopped, stoppable
from coterie.runs.trackers import Tracker, Tracking

log = logging.getLogger("coterie")


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
    lines = opening(backend, settings, config.get("network", {}).get("name"))
    if out is None:
        for line in lines:
            show(line)
        ending = InterruptibleEnding(**asdict(ending), interrupted=interrupted)
        result = train(backend, newcomers, settings, watch, max_left_out=safety.max_left_out, ending=ending)
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
