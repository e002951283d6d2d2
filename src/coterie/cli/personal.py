"""The commands about personal models: their flags, and what they print. Torch is imported only by those who act."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coterie.cli.flags import MakeCommand

if TYPE_CHECKING:
    from coterie.personal.run import Run
    from coterie.personal.use import Evaluation

FORMS = ("onnx", "torch", "safetensors")
MEASURED = {
    "pre": "in the last round",
    "kept": "after the last training of all clients, with what the server sends",
    "finished": "after the final step of the method",
    "new_post": "of the new client, after its training",
}


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    models = command("models", do_models, "list the personal models that a run left")
    predict = command("predict", do_predict, "what a client's model says of images, or of rows of numbers")
    evaluate = command("evaluate", do_evaluate, "how well personal models do on their own test samples, or on others")
    export = command("export", do_export, "write a client's model for programs that know nothing of Coterie")
    adapt = command("adapt", do_adapt, "make a personal model for a client that was not in training")
    for made in (models, predict, evaluate, export, adapt):
        made.add_argument("run", metavar="RUN", help="folder that a run left")
    for made in (predict, evaluate, export, adapt):
        made.add_argument("--model", metavar="package.module:Class", help="the network, where the run cannot name it")
    for made in (predict, export):
        made.add_argument("--client", type=int, required=True, metavar="NUMBER", help="whose model")
    predict.add_argument("files", metavar="FILE", nargs="+", help="images, .csv (a sample in each row), or .npz with x")
    predict.add_argument("--top", type=int, default=3, help="classes to show (usually 3)")
    predict.add_argument("--resize", action="store_true", help="make images as large as the model needs")
    evaluate.add_argument("--client", metavar="all|3,5", default="all", help="whose models (usually all)")
    evaluate.add_argument(
        "--data", help="name of a dataset, or .npz with x and y; usually everybody's own test samples"
    )
    evaluate.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    export.add_argument("--to", choices=FORMS, required=True, help="what to write")
    export.add_argument("--out", metavar="FILE", help="the file to write; usually client-NUMBER in this folder")
    adapt.add_argument("--data", required=True, metavar="FILE.npz", help="the new client's x and y (x_test, y_test)")
    adapt.add_argument("--epochs", type=int, help="epochs of its training; usually as in the run")
    adapt.add_argument("--out", metavar="FOLDER", help="folder to leave it in; usually RUN-FILE")
    for made in (models, predict, evaluate, adapt):
        made.add_argument("--json", action="store_true", help="print JSON")


def run_of(chosen: argparse.Namespace) -> Run:
    from coterie.personal.run import load_run

    return load_run(chosen.run, getattr(chosen, "model", None))


def do_models(chosen: argparse.Namespace) -> None:
    run = run_of(chosen)
    if hasattr(chosen, "json"):
        print(json.dumps([{**vars(c), "file": str(c.file)} for c in run.clients], indent=2))
        return
    rows = [
        [str(c.number), str(c.samples), str(c.classes), percent(c.accuracy), c.file.name, f"{c.size / 1e6:.2f} MB"]
        for c in run.clients
    ]
    note = f"accuracy: {MEASURED[run.point]}" if run.point else ""
    show(f"Models in {run.path}", ("client", "samples", "classes", "accuracy", "file", "size"), rows, note)


def do_predict(chosen: argparse.Namespace) -> None:
    from coterie.personal.samples import read_samples
    from coterie.personal.use import predict

    run = run_of(chosen)
    found = predict(run, chosen.client, read_samples(run, chosen.files, hasattr(chosen, "resize")), chosen.top)
    if hasattr(chosen, "json"):
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    rows = [[p["sample"], *(f"{c['name']} {percent(c['probability'])} %" for c in p["classes"])] for p in found]
    header = ["sample", *map(ordinal, range(len(found[0]["classes"])))]
    show(f"Client {chosen.client}", header, rows)


def do_evaluate(chosen: argparse.Namespace) -> None:
    from coterie.personal.use import evaluate, together

    run = run_of(chosen)
    clients = chosen_clients(chosen.client, run)
    found = evaluate(run, clients, getattr(chosen, "data", None), getattr(chosen, "data_dir", None))
    if hasattr(chosen, "json"):
        print(json.dumps({"classes": run.class_names, "clients": [e.told() for e in found]}, indent=2))
        return
    tested = [e.accuracy for e in found if e.accuracy is not None]
    mean = f"mean over clients: {percent(sum(tested) / len(tested))}" if tested else ""
    rows = [[str(e.client), str(e.samples), percent(e.accuracy), f"{e.loss:.4f}"] for e in found]
    show("Clients", ("client", "samples", "accuracy", "loss"), rows, mean)
    show_classes(run, together(found))


def show_classes(run: Run, every: Evaluation) -> None:
    """Accuracy and confusion by class, of all clients together."""
    rows = [
        [name, percent(accuracy), *map(str, counts)]
        for name, accuracy, counts in zip(run.class_names, every.class_accuracy, every.confusion.tolist(), strict=True)
    ]
    names = [str(k) for k in range(run.classes)]
    show(
        "Classes", ("class", "accuracy", *names), rows, "right of the accuracy: how many were taken for class 0, 1, ..."
    )


def do_export(chosen: argparse.Namespace) -> None:
    from coterie.personal.export import export

    for path in export(run_of(chosen), chosen.client, chosen.to, getattr(chosen, "out", None)):
        print(path)


def do_adapt(chosen: argparse.Namespace) -> None:
    from pathlib import Path

    from coterie.personal.adapt import adapt

    run = run_of(chosen)
    out = getattr(chosen, "out", None) or f"{run.path}-{Path(chosen.data).stem}"
    record = adapt(run, chosen.data, out, getattr(chosen, "epochs", None))
    before, after = record.accuracy("new_pre"), record.accuracy("new_post")
    if hasattr(chosen, "json"):
        print(json.dumps({"folder": str(out), "before": before, "after": after}, indent=2))
        return
    print(f"accuracy on its own test samples: {percent(before)} before, {percent(after)} after")
    print(f"its model is client 0 of {out}")


def chosen_clients(text: str, run: Run) -> list[int]:
    from coterie.core.errors import CoterieError

    if text == "all":
        return list(run.numbers)
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise CoterieError(f"--client is all, or numbers such as 3,5; not '{text}'") from None


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    from coterie.display import show_table

    show_table(title, header, rows, note)


def percent(value: Any) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def ordinal(place: int) -> str:
    return "most probable" if place == 0 else f"{place + 1}."
