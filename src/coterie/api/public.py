"""`coterie.run`: every setting by name, a progress bar, and Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie.api.existing import prepared
from coterie.api.interrupting import INTERRUPTED, interruptible
from coterie.api.progress import progress_bar, unwatched
from coterie.api.result import Result
from coterie.api.running import execute
from coterie.api.settings import GROUPS, SETTINGS, check_internal, merged
from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.training import LocalTraining
from coterie.execution.choice import Execution
from coterie.federation import Ending, Round, Safety, Settings
from coterie.privacy import Protection
from coterie.privacy.encryption import Encryption

log = logging.getLogger("coterie")


def run(
    method: str | AnyMethod,
    data: FederatedData | None = None,
    model: str | nn.Module | Model | None = None,
    *,
    # the federation
    rounds: int | None = None,
    join_ratio: float | None = None,
    full_last_round: bool | None = None,
    aggregate_last_round: bool | None = None,
    new_clients: float | str | None = None,
    evaluate_every: int | None = None,
    batchnorm: str | None = None,
    seed: int | None = None,
    # local training
    local_epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    momentum: float | None = None,
    nesterov: bool | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    drop_last: bool | None = None,
    clip_gradient: float | None = None,
    keep_momentum: bool | None = None,
    # when to end earlier
    until: str | None = None,
    patience: int | None = None,
    max_time: str | float | None = None,
    # safety
    checkpoint_every: int | None = None,
    keep_state: bool | None = None,
    max_left_out: float | None = None,
    max_magnitude: float | None = None,
    # protection
    robust: str | None = None,
    robust_norm: float | None = None,
    robust_share: float | None = None,
    dp: str | None = None,
    dp_clip: float | None = None,
    dp_noise: float | None = None,
    dp_delta: float | None = None,
    dp_accountant: str | None = None,
    dp_statistics: float | None = None,
    dp_statistics_clip: float | None = None,
    encrypt: str | None = None,
    keys: str | None = None,
    # the same, by group
    settings: Settings | None = None,
    train: LocalTraining | None = None,
    ending: Ending | None = None,
    safety: Safety | None = None,
    protection: Protection | None = None,
    encryption: Encryption | None = None,
    # where it runs and what it leaves
    protocol: str = "pac",
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    backend: Execution | str = "auto",
    out: str | Path | None = None,
    exist: str = "error",
    progress: bool = True,
    watch: Callable[[Round], None] | None = None,
    show: Callable[[str], None] | None = None,
    track: str | Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    **method_settings: Any,
) -> Result:
    """Train a federation, and return its history and a model for every client.

    Settings that are not given are those of the protocol's paper, or else the defaults. Give each setting by name, or a
    whole group of them as a dataclass (`train=coterie.LocalTraining(lr=0.1)`), not both.

    Ctrl-C ends the run after the current round. Without `out`, the result of the finished rounds is returned; with
    `out`, the run can be resumed.

    Parameters
    ----------
    method: a name (`coterie methods` lists them), an import path package.module:Class, or a Method.
    data: the clients' samples, from `load_clients` or `clients_from`. Default: the shipped Fashion-MNIST subset.
    model: a name, a torch module or a Model. Names for images: cnn, convnet, conv4, akd-cnn, resnet18, resnet18-gn,
        mobilenet, vit-tiny; for segmentation: unet; for series: cnn1d, lstm, transformer; for tokens: lstm,
        transformer; for tables: linear, mlp. Default: the protocol's.

    rounds: communication rounds.
    join_ratio: share of clients in a round.
    full_last_round: all clients train once more after the last round.
    aggregate_last_round: all clients take part in the last round.
    new_clients: clients that do not train and are evaluated at the end: their share, or names such as "s22,s23".
    evaluate_every: rounds between evaluations; the last round is always evaluated.
    batchnorm: "averaged", "local-statistics" (running statistics stay with each client) or "local" (whole layers stay).
    seed: seed of all randomness.

    local_epochs, batch_size: epochs of a round, and samples of a batch.
    optimizer: "sgd", "adam", "adamw" or "adagrad". The protocol's rates are for sgd; others start from torch's.
    lr, weight_decay: learning rate, and weight decay.
    schedule: factor on the learning rate, such as "steps:50=0.2:75=0.02", "exponential:0.99", "cosine:0.01", "linear",
        "warmup:5+cosine"; over a client's steps in a round: "local-cosine".
    momentum, nesterov: of sgd.
    beta1, beta2, eps: of adam and adamw; adagrad has eps, too.
    drop_last: skip the last batch of an epoch if it is smaller.
    clip_gradient: largest norm of a gradient; 0: no limit.
    keep_momentum: keep a client's optimizer state between rounds.

    until: end when a metric reaches a value, such as "accuracy>0.9" or "rmse<2.5".
    patience: end after this many evaluated rounds without a better validation score.
    max_time: end after this time, such as "2h" or "90m".

    checkpoint_every: rounds between checkpoints in `out`; 0: none.
    keep_state: keep the last checkpoint of a finished run, so that it can be extended.
    max_left_out: share of a round's clients that may be left out because their update is missing or refused.
    max_magnitude: largest magnitude in an update; a client that exceeds it is left out.

    robust: robust aggregation: "clip", "trimmed" or "median".
    robust_norm: largest norm of an update, for clip. Default: the median norm.
    robust_share: share of clients winsorized at either end, for trimmed.
    dp: differential privacy: "client" or "sample".
    dp_clip, dp_noise, dp_delta: clipping norm C, noise multiplier z and δ.
    dp_accountant: "pld" (tighter; needs coterie[dp], default if installed) or "renyi".
    dp_statistics, dp_statistics_clip: noise on class statistics, and the largest norm of their features.
    encrypt: "ckks": the server adds up weights that it cannot read.
    keys: folder of keys for `encrypt`. Default: new keys for the run.

    settings, train, ending, safety, protection, encryption: the groups above as dataclasses (Settings, LocalTraining,
        Ending, Safety, Protection, Encryption).

    protocol: paper whose settings are the defaults: pac, reg, crc or akd; quick: a first look.
    head: name of the network's head. Default: the last layer that runs.
    model_args: arguments of the constructor, for a model given by name.
    train_only: parameters or modules that are trained, such as "head|blocks.11.*"; all others are frozen, and are not
        sent in a round. Default: parameters with requires_grad=True.
    backend: where clients run: looped, stacked, streams, ray, auto, or an Execution with device, precision and so on.
    out: a new folder for the run: settings, metrics, checkpoints and models.
    exist: what to do where `out` exists: "error"; "resume": continue its run, extend it if `rounds` is larger, or
        return its result if it is finished, or start it if `out` does not exist; "replace": train again, and replace
        it at the end. Only run folders are ever replaced.
    progress: show a progress bar, in terminals and notebooks only.
    watch: called with every Round when it ends.
    show: called with the first lines, which say how data, network, method and settings were interpreted.
    track: log to tensorboard, wandb or mlflow; needs `out`.
    config: entries to add to config.json in `out`.
    method_settings: hyper-parameters of the method, such as align=0.5 for FedPAC.

    Returns
    -------
    Result: `.scores`, `.metrics`, `.clients`, `.personal_model(client)`, `.plot()`, `.report(path)`, `.save(path)`.

    Examples
    --------
    >>> import coterie
    >>> data = coterie.load_clients("fashion-mnist-small", num_clients=4, local_size=40, test_size=20)
    >>> result = coterie.run("fedpac", data, "linear", rounds=2, lr=0.05, align=0.5, progress=False)
    >>> [number for number, score in result.history.curve("pre")]
    [1, 2]
    """
    given = {name: value for name, value in locals().items() if value is not None}
    named = {name: value for name, value in given.items() if name in SETTINGS}
    groups = {name: value for name, value in given.items() if name in GROUPS}
    check_internal(method_settings)
    with prepared(out, exist, track) as place, interruptible(out is None) as interrupted:
        result = execute(
            method,
            data,
            model,
            backend=backend,
            out=place.folder,
            resume=place.resume,
            watch=watch or (lambda record: None),
            watching=progress_bar if progress else unwatched,
            track=track,
            show=show or (lambda line: None),
            head=head,
            model_args=model_args,
            train_only=train_only,
            protocol=protocol,
            config=config,
            interrupted=interrupted,
            **merged(groups, named),
            **method_settings,
        )
    if result.config is not None and result.ended and result.ended.reason == INTERRUPTED:
        planned = result.config["federation"]["rounds"]
        log.warning("interrupted: the result has %d of %d rounds", result.ended.round, planned)
    return result if out is None else replace(result, folder=Path(out))
