"""Commands for personal models: models, predict, evaluate, export, adapt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.cli.flags import MakeCommand, add_trust
from coterie.cli.parser import Listed
from coterie.core.printable import printable

if TYPE_CHECKING:
    from coterie.personal.labelled import LabelledReading
    from coterie.personal.use import Evaluation
    from coterie.runs.stored_run import StoredRun

FORMS = ("onnx", "torch", "torchscript", "safetensors", "state_dict", "peft")
MOST_COLUMNS = 3  # metrics next to each other for every client
MEASURED = {
    "pre": "in the last round",
    "kept": "after the last training of all clients, as downloaded",
    "finished": "after the final step of the method",
    "new_post": "of the new client, after its training",
}


INTERVAL = "95 %: interval by the number of test samples (Wilson)"


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    models = command("models", do_models, "list the personal models of a run")
    predict = command("predict", do_predict, "predict with a client's model: images, rows of a table, arrays")
    evaluate = command("evaluate", do_evaluate, "evaluate personal models on their own test samples, or on others")
    export = command(
        "export", do_export, "write a client's model as ONNX, torch program, TorchScript, weights or peft adapter"
    )
    adapt = command("adapt", do_adapt, "make a personal model for a client that was not in training")
    for made in (models, predict, evaluate, export, adapt):
        made.add_argument("run", metavar="RUN", help="folder of a run")
    for made in (predict, evaluate, export, adapt):
        made.add_argument("--model", metavar="package.module:Class", help="the network, if it is not built in")
        for what in ("method", "task"):
            about = f"the {what}, if it is not built in"
            made.add_argument(f"--{what}", metavar="package.module:Class", help=about)
        add_trust(made)
    for made in (predict, export):
        made.add_argument("--client", required=True, metavar="NAME|NUMBER", help="client whose model is used")
    predict.add_argument(
        "files", metavar="FILE", nargs="+", help="images, .csv or .parquet (columns are matched by name), .npz with x"
    )
    predict.add_argument("--top", type=int, default=3, help="classes to show; default: 3")
    for made in (predict, evaluate, adapt):
        made.add_argument(
            "--resize", action="store_true", help="resize and crop images to the size that the model takes"
        )
        made.add_argument("--label-column", metavar="NAME", help="tables: the column with the label")
        made.add_argument("--drop-column", metavar="NAMES", help="tables: columns to ignore, separated by commas")
    adapt.add_argument(
        "--group-column", metavar="NAME", help="tables: rows with the same value stay on one side of the test split"
    )
    for made in (evaluate, adapt):
        made.add_argument(
            "--labels",
            metavar="0=healthy,1=disease|in-order",
            help="what the labels in --data mean; default: they are names of the run's classes",
        )
    evaluate.add_argument(
        "--client", action=Listed, metavar="all|3,5|NAME", default="all", help="whose models; default: all"
    )
    evaluate.add_argument(
        "--data",
        help="name of a dataset, or a path to labelled samples in any form that adapt takes; default: the client's own "
        "test samples",
    )
    evaluate.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    export.add_argument("--to", choices=FORMS, required=True, help="format to write")
    export.add_argument("--merge", action="store_true", help="fold adapters (LoRA) into the weights that they adapt")
    export.add_argument(
        "--out", metavar="FILE", help="the file to write; default: client-NUMBER in the working directory"
    )
    adapt.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="the new client's labelled samples: .csv, .parquet, .npz with x and y, a folder of tables, or a folder "
        "with one folder of images for each class",
    )
    adapt.add_argument("--epochs", type=int, help="epochs of its training; default: as in the run")
    adapt.add_argument("--out", metavar="FOLDER", help="folder for the model; default: RUN-NAME")
    for made in (models, predict, evaluate, adapt):
        made.add_argument("--json", action="store_true", help="print JSON")


def run_of(chosen: argparse.Namespace) -> StoredRun:
    from coterie.api.saved_run import load_run

    own = {name: getattr(chosen, name, None) for name in ("model", "method", "task")}
    return load_run(chosen.run, trust_code=hasattr(chosen, "trust_code"), **own)


def reading_of(chosen: argparse.Namespace, run: StoredRun, *unused: str) -> LabelledReading:
    """How to read tables like the one that the run was given. unused: which other columns of it to ignore."""
    from coterie.personal.labelled import LabelledReading
    from coterie.personal.labels import LabelMapping

    own = run.config.get("command")
    own = own if isinstance(own, dict) else {}
    dropped = [str(own[name]) for name in ("drop_column", *unused) if own.get(name)]
    return LabelledReading(
        labels=LabelMapping.parse(getattr(chosen, "labels", None)),
        label_column=getattr(chosen, "label_column", None),
        usual_label=own.get("label_column"),
        group_column=getattr(chosen, "group_column", None),
        drop_column=",".join([*dropped, getattr(chosen, "drop_column", "")]),
        resize=hasattr(chosen, "resize"),
    )


def do_models(chosen: argparse.Namespace) -> None:
    run = run_of(chosen)
    if hasattr(chosen, "json"):
        called = {"score": run.metric.name}
        listed = [
            {called.get(name, name): v for name, v in vars(c).items()} | {"file": str(c.file)} for c in run.members
        ]
        print(json.dumps(listed, indent=2))
        return
    rows = [
        [
            *client_cells(run, c.number),
            str(c.samples),
            str(c.classes),
            run.metric.number(c.score),
            percents(c.interval),
            str(c.tested),
            f"{c.size / 1e6:.2f}",
        ]
        for c in run.members
    ]
    interval = f"; {INTERVAL}" if run.metric.counts else ""
    note = f"{run.metric.words}: {MEASURED[run.point]}{interval}" if run.point else ""
    header = (*client_header(run), "samples", "classes", run.metric.words, "95 %", "tested", "MB")
    show(f"Models in {run.folder}", header, rows, note)


def do_predict(chosen: argparse.Namespace) -> None:
    from coterie.personal.samples import read_samples
    from coterie.personal.use import predict

    run = run_of(chosen)
    run.client_number(chosen.client)
    how = reading_of(chosen, run, "client_column", "group_column")
    samples = read_samples(run, chosen.files, how.resize, (how.label_column, how.usual_label), how.dropped)
    found = predict(run, chosen.client, samples, chosen.top)
    if hasattr(chosen, "json"):
        print(printable(json.dumps(found, indent=2, ensure_ascii=False), keep="\n"))
        return
    label = ["label"] if any("label" in p for p in found) else []
    said = [spoken(p) for p in found]
    rows = [
        [p["sample"], *(p.get(key, "") for key in label), *cells.values()] for p, cells in zip(found, said, strict=True)
    ]
    header = ["sample", *label, *said[0]]
    show(f"Client {run.client_name(run.client_number(chosen.client))}", header, rows)


def spoken(prediction: Mapping[str, Any]) -> dict[str, str]:
    """Heading -> text of one prediction, by the entries of `Task.answer`."""
    if ranked := prediction.get("classes") or prediction.get("next"):
        last = "next: " if "next" in prediction else ""
        texts = (f"{one['name']} {percent(one['probability'])} %" for one in ranked)
        return {f"{last}{ordinal(place)}": text for place, text in enumerate(texts)}
    if "labels" in prediction:
        return {one["label"]: f"{percent(one['probability'])} %" for one in prediction["labels"]}
    if "values" in prediction:
        return {name: f"{value:.6g}" for name, value in prediction["values"].items()}
    if "pixels" in prediction:
        return {f"pixels of {name}": str(count) for name, count in prediction["pixels"].items()}
    return {"output": json.dumps(prediction["output"])[:60]}


def do_evaluate(chosen: argparse.Namespace) -> None:
    from coterie.core.task import Classification
    from coterie.core.tasks import Regression
    from coterie.federation.history import worst_tenth
    from coterie.personal.use import evaluate, merged_confusion

    run = run_of(chosen)
    clients = chosen_clients(chosen.client, run)
    data, folder = getattr(chosen, "data", None), getattr(chosen, "data_dir", None)
    found = evaluate(run, clients, data, folder, reading_of(chosen, run, "group_column"))
    if hasattr(chosen, "json"):
        clients_found = [{"name": run.client_name(e.client), **e.as_dict()} for e in found]
        print(json.dumps({"task": run.task.name, "classes": run.class_names, "clients": clients_found}, indent=2))
        return
    scales, classes = [metric.scale for metric in found[0].metrics], bool(run.classes)
    columns = scales if len(scales) <= MOST_COLUMNS else [run.metric]
    header = (*client_header(run), "samples", *(c.words for c in columns), *["95 %"] * classes, "loss")
    rows = [
        [
            *client_cells(run, e.client),
            str(e.samples),
            *(c.number(e.scores[c.name]) for c in columns),
            *([percents(e.interval)] if classes else []),
            f"{e.loss:.4f}" if e.samples else "",
        ]
        for e in found
    ]
    show("Clients", header, rows, f"{INTERVAL}, of the accuracy" if classes else "")
    each = [scale.from_worst(v for e in found if (v := e.scores[scale.name]) is not None) for scale in scales]
    means = [
        [s.heading, s.number(mean(values)), s.number(mean(values[: worst_tenth(len(values))])), str(len(values))]
        for s, values in zip(scales, each, strict=True)
    ]
    positive = run.task.positive if len(run.class_names) == 2 and isinstance(run.task, Classification) else None
    targets = run.class_names if isinstance(run.task, Regression) and len(run.class_names) > 1 else ()
    note = ", ".join(f"target {k}: {name}" for k, name in enumerate(targets))
    if positive is not None:
        note = f"sensitivity, average precision: of class '{run.class_names[positive]}'"
    show("All metrics", ("metric", "mean over clients", "worst 10 %", "clients"), means, note)
    if classes:
        show_classes(run, merged_confusion(found))


def show_classes(run: StoredRun, every: Evaluation) -> None:
    """Print accuracy, F1 and confusion by class, over all clients."""
    assert every.confusion is not None
    by_class = zip(run.class_names, every.class_accuracy, every.class_f1, every.confusion.tolist(), strict=True)
    rows = [[name, percent(accuracy), percent(f1), *map(str, counts)] for name, accuracy, f1, counts in by_class]
    names = [str(k) for k in range(run.classes)]
    note = "accuracy and F1 in percent; right of them: how many were classified as class 0, 1, ..."
    show("Classes", ("class", "accuracy", "F1", *names), rows, note)


def do_export(chosen: argparse.Namespace) -> None:
    from coterie.personal.export import export

    out, merge = getattr(chosen, "out", None), hasattr(chosen, "merge")
    for path in export(run_of(chosen), chosen.client, chosen.to, out, merge):
        print(path)


def do_adapt(chosen: argparse.Namespace) -> None:
    from pathlib import Path

    from coterie.personal.adapt import adapt

    run = run_of(chosen)
    out = getattr(chosen, "out", None) or f"{run.folder}-{Path(chosen.data).stem}"
    record = adapt(run, chosen.data, out, getattr(chosen, "epochs", None), reading_of(chosen, run))
    before, after = record.score("new_pre"), record.score("new_post")
    if hasattr(chosen, "json"):
        print(json.dumps({"folder": str(out), "before": before, "after": after}, indent=2))
        return
    shown = [record.metric.number(score) for score in (before, after)]
    print(f"{record.metric.words} on its own test samples: {shown[0]} before, {shown[1]} after")
    print(f"its model is client 0 of {out}")


def chosen_clients(text: str, run: StoredRun) -> list[int]:
    """The clients of --client: all, or names and numbers separated by commas. A name may contain commas."""
    if text == "all" and text not in run.client_names:
        return list(run.client_ids)
    if text in run.client_names:
        return [run.client_number(text)]
    return [run.client_number(client.strip()) for client in text.split(",")]


def client_header(run: StoredRun) -> tuple[str, ...]:
    return ("client", "name") if run.client_names else ("client",)


def client_cells(run: StoredRun, number: int) -> tuple[str, ...]:
    return (str(number), run.client_name(number)) if run.client_names else (str(number),)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    from coterie.analysis.terminal import show_table

    show_table(title, header, rows, note)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def percents(interval: tuple[float, float] | None) -> str:
    """Such as 64-95."""
    return "" if interval is None else f"{100 * interval[0]:.0f}-{100 * interval[1]:.0f}"


def percent(value: Any) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def ordinal(place: int) -> str:
    return "most probable" if place == 0 else f"{place + 1}."
