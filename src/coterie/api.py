"""The parts joined: names become data, models and methods, and a run becomes a result."""

from __future__ import annotations

import inspect
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.clients import Batched, Clients, Looped, Ray, Resident
from coterie.clients.batched import has_dropout
from coterie.clients.states import check_folder
from coterie.core import tree
from coterie.core.around import innermost, innermost_server
from coterie.core.errors import CoterieError, unknown
from coterie.core.local import Sgd
from coterie.core.model import Model, make_model
from coterie.core.samples import FederatedData
from coterie.data import PARTITIONS, Dataset, Partition, divide, load, normalised, picture, transform
from coterie.data import federate as gather
from coterie.data.own import Reading, is_path, read_own
from coterie.federation import History, Result, Round, Safety, Settings, federate
from coterie.federation.checkpoint import Checkpoints, checksum
from coterie.federation.folder import Folder, summarise
from coterie.federation.newcomers import keep_out, meet
from coterie.federation.stopping import Stopped, stoppable
from coterie.methods import METHODS, VARIANTS, AnyMethod
from coterie.models import build
from coterie.protection import Protection, taken_part
from coterie.protection.encryption import Encryption
from coterie.protocols import method_preset, preset
from coterie.trackers import Tracker, Tracking, make_trackers
from coterie.version import VERSION


@dataclass(frozen=True)
class DataSettings(Reading):
    """Which data, and how they come to the clients. What a partition rule does not ask for must stay unset."""

    dataset: str = field(
        default="fashion-mnist-small",
        metadata={"help": "dataset (`coterie data` lists them), or the path of data of your own"},
    )
    data_dir: str | None = field(default=None, metadata={"help": "folder with datasets (or set COTERIE_DATA)"})
    protocol: str = field(default="pac", metadata={"help": "defaults as in a paper: pac, reg, crc or akd"})
    partition: str | None = field(default=None, metadata={"help": "partition rule, or a partition.npz of a run"})
    num_clients: int | None = field(
        default=None, metadata={"help": "number of clients", "flags": ("num-clients", "nc")}
    )
    alpha: float | None = field(default=None, metadata={"help": "Dirichlet parameter; smaller is more uneven"})
    noniid_s: float | None = field(
        default=None, metadata={"help": "percent of a client's samples that are spread evenly over classes"}
    )
    local_size: int | None = field(default=None, metadata={"help": "training samples of a client"})
    test_size: int | None = field(default=None, metadata={"help": "test samples of a client"})
    min_size: int | None = field(default=None, metadata={"help": "smallest client that a Dirichlet partition may have"})
    partition_seed: int | None = field(default=None, metadata={"help": "seed of the partition, where it is random"})
    validation: float = field(default=0.0, metadata={"help": "share of the training samples set aside for validation"})
    normalise: str | None = field(
        default=None,
        metadata={"help": "auto: by the training samples' mean and deviation; none; usually the protocol's"},
    )


@dataclass(frozen=True)
class Execution:
    """Where and how fast. But for the precision and the last digits, never what comes out."""

    clients: str = field(default="auto", metadata={"help": "looped, batched, ray, or auto: what is faster here"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ... or auto"})
    deterministic: bool = field(
        default=False, metadata={"help": "the same numbers every time on a GPU too; slower. On a CPU they always are"}
    )
    precision: str = field(
        default="fp32", metadata={"help": "of matrix products: fp32; tf32 or bf16 are faster and less precise"}
    )
    processes: int | None = field(default=None, metadata={"help": "processes of looped clients; one for each core"})
    cohort: int | None = field(default=None, metadata={"help": "clients batched at a time; as many as fit"})
    state_dir: str | None = field(
        default=None, metadata={"help": "folder to keep what clients remember in; it needs no memory then"}
    )
    ray_address: str | None = field(
        default=None, metadata={"help": "HOST:PORT of a Ray cluster, or auto; usually one is started on this machine"}
    )
    ray_workers: int | None = field(default=None, metadata={"help": "Ray workers; one for each GPU, or for each core"})

    def __post_init__(self) -> None:
        for name in ("processes", "cohort", "ray_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CoterieError(f"{name.replace('_', ' ')} must be at least 1, not {value}")


SMALL = 200_000  # numbers of a network that a CPU computes faster side by side
FEW = 8  # clients that are too few for that
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
RULE_SETTINGS = ("num_clients", "alpha", "noniid_s", "local_size", "test_size", "min_size")


def load_clients(dataset: str = "fashion-mnist-small", **settings: Any) -> FederatedData:
    """The data of a federation, by the names of DataSettings."""
    known = [f.name for f in fields(DataSettings)]
    for name in settings:
        if name not in known:
            raise unknown("data setting", name, known)
    wanted = DataSettings(dataset, **settings)
    source = find_data(wanted)
    usual = preset(wanted.protocol, source.name, tuple(source.x_train.shape[1:]))
    rule = wanted.partition or ("natural" if source.owners else usual["partition"])
    if rule.endswith(".npz"):
        partition = Partition.load(Path(rule))
    else:
        partition = divide(source, rule, **rule_settings(wanted, rule, usual))
    data = gather(source, partition, wanted.validation, wanted.partition_seed or 0)
    return normalised(data, source.transform, wanted.normalise)


def find_data(wanted: DataSettings) -> Dataset:
    """A dataset by its name, or the user's own by its path."""
    if is_path(wanted.dataset):
        return read_own(wanted.dataset, wanted)
    source = load(wanted.dataset, wanted.data_dir)
    return replace(source, transform=transform(source.name, wanted.protocol))


def rule_settings(wanted: DataSettings, rule: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said, then what the protocol says; the rule checks the names and knows the rest."""
    given = {name: value for name in RULE_SETTINGS if (value := getattr(wanted, name)) is not None}
    if rule in PARTITIONS:
        takes = inspect.signature(PARTITIONS[rule]).parameters
        for name in RULE_SETTINGS:
            if name in takes and name in usual and (wanted.partition is None or rule == usual["partition"]):
                given.setdefault(name, usual[name])
        if wanted.partition_seed is not None and "seed" in takes:
            given["seed"] = wanted.partition_seed
    return given


def method_name(name: str) -> str:
    """The name of a method or variant, whichever way it is spelled: FedPAC, fed_pac, Fed-RoD."""

    def letters(word: str) -> str:
        return "".join(letter for letter in word.lower() if letter.isalnum())

    known = {letters(word): word for word in (*METHODS, *VARIANTS)}
    if letters(name) not in known:
        raise unknown("method", name, known.values())
    return known[letters(name)]


def make_method(name: str, **settings: Any) -> AnyMethod:
    """A method by name; settings are fields of the method or of its local training."""
    name = method_name(name)
    base, changes, _ = VARIANTS.get(name, (name, {}, ""))
    kind = METHODS[base]
    own = {f.name for f in fields(kind)} - {"train"}
    training = {f.name for f in fields(Sgd)}
    for setting in settings:
        if setting not in own | training:
            raise unknown(f"setting of {name}", setting, own | training)
    train = Sgd(**{k: v for k, v in settings.items() if k in training})
    return kind(train=train, **changes | {k: v for k, v in settings.items() if k in own})


def make_network(model: str | nn.Module, data: FederatedData, seed: int, head: str | None = None) -> Model:
    network = build(model, data.shape, data.classes, seed) if isinstance(model, str) else model
    return make_model(network, data.shape, data.classes, data.transform, head)


def place(method: AnyMethod, model: Model, data: FederatedData, seed: int, how: Execution) -> Resident:
    """The clients, where they are asked to run or where they run fastest."""
    model = replace(model, precision=how.precision)
    if how.state_dir is not None:
        check_folder(how.state_dir)
    if how.deterministic:
        be_deterministic(how)
    if how.clients == "ray":
        there = (how.device, how.cohort, how.ray_workers, how.ray_address)
        return Ray(method, model, data, seed, *there, how.state_dir)
    device = how.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise CoterieError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from None
    where = how.clients if how.clients != "auto" else fastest(method, model, data, device, how)
    if where == "looped":
        return Looped(method, model, data, seed, device, how.processes, how.state_dir)
    if where == "batched":
        return Batched(method, model, data, seed, device, how.cohort, how.state_dir)
    raise unknown("kind of clients", where, ("auto", "looped", "batched", "ray"))


def be_deterministic(how: Execution) -> None:
    """For all of this process: no operation whose sums come in another order each time."""
    if how.clients == "ray":
        raise CoterieError("deterministic is for clients of this process, not for workers of a Ray cluster")
    if torch.cuda.is_initialized() and CUBLAS not in os.environ:  # type: ignore[no-untyped-call]
        raise CoterieError(f"deterministic must be known before the GPU is used: start with {CUBLAS}=:4096:8 set")
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def fastest(method: AnyMethod, model: Model, data: FederatedData, device: str, how: Execution) -> str:
    """Side by side on a GPU; on a CPU only small networks without convolutions, which are 3 to 5 times as fast so."""
    if not method.batched or has_dropout(model):
        return "looped"
    if not device.startswith("cpu"):
        return "batched"
    convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.encoder.modules())
    small = sum(t.numel() for t in tree.leaves(model.start)) <= SMALL
    return "batched" if small and not convolutions and data.clients >= FEW and how.processes is None else "looped"


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


def choose(
    method: str | AnyMethod, protocol: str, data: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[AnyMethod, Settings, Safety, str]:
    """Method, federation, safety and the usual model, from what was said and what the protocol says."""
    usual = preset(protocol, data, shape)
    federation_names = {f.name for f in fields(Settings)}
    federation = Settings(**{k: v for k, v in {**usual, **settings}.items() if k in federation_names})
    safety_names = {f.name for f in fields(Safety)}
    safety = Safety(**{k: v for k, v in settings.items() if k in safety_names})
    own = {k: v for k, v in settings.items() if k not in federation_names | safety_names}
    if isinstance(method, str):
        training = {f.name for f in fields(Sgd)}
        method = method_name(method)
        base, changes, _ = VARIANTS.get(method, (method, {}, ""))
        presets = {k: v for k, v in usual.items() if k in training} | method_preset(protocol, base)
        method = make_method(method, **presets | changes | own)
    elif own:
        raise CoterieError(f"{', '.join(own)}: settings of a method that is made already; give them when making it")
    return method, federation, safety, usual["model"]


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


def portrait(name: str, rule: str | None, counts: Tensor, names: Sequence[str]) -> str:
    """An SVG of the classes on each client, (m, K)."""
    title = f"{name}{f', {rule}' if rule else ''}: {len(counts)} clients, {int(counts.sum())} training samples"
    return picture(title, counts.numpy(), tuple(names) or tuple(map(str, range(counts.shape[1]))))


def fingerprint(data: FederatedData) -> str:
    """SHA-256 of all samples, and of who has them."""
    held = {name: split for name in ("train", "test", "validation") if (split := getattr(data, name)) is not None}
    sizes = {name: list(split.sizes) for name, split in held.items()}
    return checksum({f"{name}.{part}": getattr(split, part) for name, split in held.items() for part in "xy"}, sizes)


def describe(
    clients: Clients, newcomers: Resident | None, settings: Settings, config: Mapping[str, Any]
) -> dict[str, Any]:
    """All that is needed to know, or do again, what was run. config: what to add, or put in the place of it."""
    method, cuda = innermost(clients.method), clients.device.type == "cuda"
    told: dict[str, Any] = {
        "method": {"name": method.title, **asdict(method)},
        "model": {
            "encoder": str(clients.model.encoder),
            "head": str(clients.model.head),
            "parameters": sum(t.numel() for part in clients.model.start for t in part.values()),
            "start": checksum(tree.flatten(clients.model.start), {}),
        },
        "federation": asdict(settings),
        "ran": {
            "clients": type(clients).__name__,
            "device": clients.device.type,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "coterie": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        },
    }
    if isinstance(clients, Resident):
        told["data"] = facts(clients.data) | {"new_content": newcomers and fingerprint(newcomers.data)}
    return {**told, **config}


def facts(data: FederatedData) -> dict[str, Any]:
    """What config.json says of the data."""
    partition = data.partition
    return {
        "name": data.name,
        "clients": data.clients,
        "classes": data.classes,
        "class_names": list(data.class_names),
        "shape": list(data.shape),
        "dtype": str(data.train.x.dtype).removeprefix("torch."),
        "train_sizes": list(data.train.sizes),
        "test_sizes": list(data.test.sizes),
        "content": fingerprint(data),
        "transform": asdict(data.transform),
        "partition": partition and {"name": partition.name, "hash": partition.hash, **partition.settings},
    }
