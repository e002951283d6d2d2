"""Commands that train: demo, run, compare."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from coterie.cli.configuring import add_config, configured, configured_method
from coterie.cli.flags import (
    METHOD_HELP,
    MakeCommand,
    add_exist,
    add_flags,
    add_format,
    add_model_args,
    add_output,
    add_track,
    add_train_only,
    add_watch,
    asked_for,
)
from coterie.cli.training import train_all

DEMO_METHODS = ["local", "fedavg", "fedpac"]  # FedAvg-FT comes from FedAvg's run
DEMO_SETTINGS: dict[str, Any] = {
    "dataset": "fashion-mnist-small",
    "num_clients": 20,
    "noniid_s": 20.0,
    "local_size": 150,
    "test_size": 150,
    "rounds": 8,
    "batch_size": 25,
    "evaluate_every": 2,
}


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    demo = command("demo", do_demo, "compare Local, FedAvg, FedAvg-FT and FedPAC on the shipped Fashion-MNIST")
    add_output(demo)
    run = command("run", do_run, "train one method")
    run.add_argument("method", metavar="METHOD", nargs="?", help=METHOD_HELP)
    compare = command("compare", do_compare, "train several methods on the same data, and compare them")
    compare.add_argument("methods", metavar="METHOD", nargs="*", help=f"{METHOD_HELP}; all: every method")
    compare.add_argument("--seeds", type=int, help="runs of each method, with seeds SEED, SEED + 1, ...; default: 1")
    compare.add_argument(
        "--against", metavar="METHOD", help="method that the others are tested against; default: the best by the metric"
    )
    compare.add_argument(
        "--over",
        nargs="+",
        metavar="NAME=VALUES",
        help="settings to vary, such as lr=0.01,0.1 local_epochs=1,5: every combination is an entry of the table",
    )
    add_format(compare)
    if asked_for(argv, "run", "compare"):
        add_run_flags(run if argv[0] == "run" else compare, argv[1:])


def add_run_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    from coterie.federation import Ending

    add_output(parser)
    add_exist(parser)
    add_config(parser)
    add_watch(parser)
    add_track(parser)
    add_setting_flags(parser)
    add_flags(parser, "ending", Ending)
    if parser.prog.endswith("run"):
        add_method_flags(parser, [*argv, *configured_method(argv)])


def add_setting_flags(
    parser: argparse.ArgumentParser, leave_out: Collection[str] = (), protections: bool = True
) -> None:
    """Flags of model, data, training, federation, safety, protections and execution."""
    from coterie.api import DataSettings, Execution
    from coterie.api.protocols import presets
    from coterie.core.training import LocalTraining
    from coterie.federation import Safety, Settings
    from coterie.privacy import Protection
    from coterie.privacy.encryption import Encryption

    parser.add_argument(
        "--model",
        help="images: cnn, convnet, conv4, akd-cnn, resnet18, resnet18-gn, mobilenet, vit-tiny; segmentation: unet; "
        "series: cnn1d, lstm, transformer; tokens: lstm, transformer; tables: linear, mlp; or package.module:Class; "
        "default: set by --protocol",
    )
    add_model_args(parser)
    parser.add_argument("--head", metavar="NAME", help="name of the model's head; default: the last layer that runs")
    add_train_only(parser)
    for title, kind in (
        ("data", DataSettings),
        ("local training", LocalTraining),
        ("federation", Settings),
        ("safety", Safety),
        *((("protection", Protection), ("encryption", Encryption)) if protections else ()),
        ("execution", Execution),
    ):
        add_flags(parser, title, kind, leave_out, presets(DataSettings.dataset))


def add_method_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Flags of the method that is named."""
    from coterie.analysis.lookup import parts
    from coterie.api import make_method, method_name
    from coterie.api.protocols import method_presets
    from coterie.core.errors import CoterieError

    for word in argv:
        try:
            method = make_method(word)
        except CoterieError:
            continue  # a flag, or the value of one
        base, changes = parts(method_name(word))
        add_flags(parser, method.title, type(method), presets=[own | changes for own in method_presets(base)])
        return


def do_run(chosen: argparse.Namespace) -> None:
    chosen = configured(chosen, "run")
    train_all(chosen, [chosen.method], seeds=1)


def do_compare(chosen: argparse.Namespace) -> None:
    chosen = configured(chosen, "compare")
    train_all(chosen, chosen.methods, seeds=getattr(chosen, "seeds", 1))


def do_demo(chosen: argparse.Namespace) -> None:
    do_compare(argparse.Namespace(**{"methods": DEMO_METHODS, **DEMO_SETTINGS, **vars(chosen)}))
