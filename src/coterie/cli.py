"""The command line. Flags are made from the fields of the dataclasses they set."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core from those that work


def main(argv: Sequence[str] | None = None) -> None:
    from coterie.core.errors import CoterieError

    logging.getLogger("coterie").addHandler(logging.StreamHandler())
    sys.path.insert(0, os.getcwd())  # so that --model module:Class finds what lies in this folder
    try:
        parser = make_parser(list(sys.argv[1:] if argv is None else argv))
        chosen = parser.parse_args(argv)
        chosen.act(chosen)
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"coterie: {stop or 'stopped'}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    from coterie.personal.commands import add_commands
    from coterie.version import VERSION

    parser = argparse.ArgumentParser(prog="coterie", description="Personalized federated learning.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, argument_default=argparse.SUPPRESS)
        made.set_defaults(act=act)
        return made

    demo = command("demo", do_demo, "compare Local, FedAvg, FedAvg-FT and FedPAC on the shipped Fashion-MNIST")
    add_output(demo)
    run = command("run", do_run, "train with one method")
    run.add_argument("method", metavar="METHOD", help="`coterie methods` lists them")
    resume = command("resume", do_resume, "go on with a run that was stopped, as if it never had been")
    resume.add_argument("run", metavar="RUN", help="folder of the run")
    resume.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    resume.add_argument("--data-dir", metavar="FOLDER", help="where the datasets are now")
    add_watch(resume)
    compare = command("compare", do_compare, "train with several methods on the same data, and compare")
    compare.add_argument("methods", metavar="METHOD", nargs="+")
    compare.add_argument("--seeds", type=int, help="runs of each method, with seeds SEED, SEED + 1, ...")
    compare.add_argument("--against", metavar="METHOD", help="which of them the others are tested against; the last")
    add_format(compare)
    methods = command("methods", do_methods, "list the methods")
    data = command("data", do_data, "list the datasets and partition rules, or check data of your own")
    data.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    add_data_check(data, argv)
    pictures = command("pictures", do_pictures, "draw a partition, FedReG's rebalancing of it, and augmented samples")
    pictures.add_argument("--out", metavar="FOLDER", required=True, help="folder for the pictures")
    pictures.add_argument("--threshold", default="average", help="average, median, max or second-smallest")
    add_commands(command)
    report = command("report", do_report, "write a report of runs: one HTML file that works offline")
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder that a run left, or one that holds such")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the file to write (report.html)")
    recipes = command("recipes", do_recipes, "list the tables and figures of the papers that can be run again")
    recipes.add_argument("filter", metavar="WORD", nargs="*", help="only those that have all these words in them")
    recipes.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    reproduce = command("reproduce", do_reproduce, "run a recipe, and put its numbers beside the published ones")
    add_reproduce_flags(reproduce)
    methods.add_argument("--markdown", action="store_true", help="print docs/methods.md")
    for listing in (methods, data, recipes):
        listing.add_argument("--json", action="store_true", help="print JSON")
    if argv and argv[0] in ("run", "compare"):  # torch is imported only for those who need it
        add_run_flags(run if argv[0] == "run" else compare, argv[1:])
    if argv and argv[0] == "resume":
        from coterie.federation import Safety

        add_flags(resume, "safety", Safety)
    if argv and argv[0] == "reproduce":
        from coterie.api import Execution

        add_flags(reproduce, "execution", Execution)
    if argv and argv[0] == "pictures":
        from coterie.api import DataSettings

        add_flags(pictures, "data", DataSettings)
    return parser


def add_run_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    from coterie.api import DataSettings, Execution, make_method
    from coterie.core.errors import CoterieError
    from coterie.core.local import Sgd
    from coterie.federation import Safety, Settings

    add_output(parser)
    parser.add_argument(
        "--model", help="model: cnn, convnet, conv4, akd-cnn, resnet18, linear, mlp, or package.module:Class"
    )
    add_watch(parser)
    parser.add_argument("--head", metavar="NAME", help="name of the model's head, where it is not its last module")
    for title, kind in (
        ("data", DataSettings),
        ("local training", Sgd),
        ("federation", Settings),
        ("safety", Safety),
        ("execution", Execution),
    ):
        add_flags(parser, title, kind)
    for word in argv if parser.prog.endswith("run") else ():
        try:
            method = make_method(word)
        except CoterieError:
            continue  # a flag, or the value of one
        add_flags(parser, method.title, type(method))
        return


def add_data_check(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    about = "tell what is in data of your own, and what is wrong with it"
    actions = parser.add_subparsers(metavar="[check PATH]")
    check = actions.add_parser("check", help=about, description=about, argument_default=argparse.SUPPRESS)
    check.set_defaults(act=do_check)
    check.add_argument("path", metavar="PATH", help="file or folder; docs/data.md lists the forms")
    check.add_argument("--json", action="store_true", help="print JSON")
    if argv[:2] == ["data", "check"]:
        from coterie.data.own import Reading

        add_flags(check, "reading", Reading)


def add_reproduce_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a name that `coterie recipes` lists, or a YAML file")
    parser.add_argument("--methods", metavar="METHOD", nargs="+", help="only these of its methods")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with seeds 0, 1, ... (usually 3)")
    parser.add_argument("--rounds", type=int, help="other rounds than the paper's; kept apart from full runs")
    parser.add_argument("--out", metavar="FOLDER", default="runs/recipes", help="folder of results (runs/recipes)")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    parser.add_argument("--show", action="store_true", help="run nothing, only show what is there")
    parser.add_argument("--commit", help="commit of this code, where git does not say it")
    add_format(parser)


def add_format(parser: argparse.ArgumentParser) -> None:
    from coterie.tables import FORMATS

    parser.add_argument(
        "--format", choices=FORMATS, help="form of the tables; if not terminal, nothing else is printed"
    )


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", type=int, metavar="PORT", help="show it live at http://127.0.0.1:PORT")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="folder to leave the run in; must not exist")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def add_flags(parser: argparse.ArgumentParser, title: str, kind: type) -> None:
    group = parser.add_argument_group(title)
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name == "train":
            continue
        long, *short = field.metadata.get("flags", (field.name.replace("_", "-"),))
        names = [f"--{long}", *(f"-{name}" for name in short)]
        default = "" if field.default in (None, ()) else f" (usually {field.default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "help": field.metadata.get("help", "").replace("%", "%%") + default,
        }
        if kinds[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": reader(kinds[field.name]), "metavar": long.upper().replace("-", "_")}
        group.add_argument(*names, **options)


def reader(kind: Any) -> Callable[[str], Any]:
    """What turns the text of a flag into a value of this type."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return kind if kind in (int, float, str) else steps


def steps(text: str) -> tuple[tuple[int, float], ...]:
    """Such as 50:0.2,75:0.02."""
    try:
        return tuple((int(a), float(b)) for a, b in (part.split(":") for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form ROUND:FACTOR,ROUND:FACTOR") from None


def given(chosen: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The flags of this dataclass that were set."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(chosen).items() if name in names}


def do_run(chosen: argparse.Namespace) -> None:
    runs = train_all(chosen, [chosen.method], seeds=1)
    if hasattr(chosen, "json"):
        print(json.dumps(runs, indent=2))


def do_resume(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, Execution, load_clients
    from coterie.core.errors import CoterieError
    from coterie.federation.folder import read_config

    run = Path(chosen.run).resolve()
    config = read_config(run)
    if (run / "result.json").exists():
        print(f"{chosen.run} is finished; there is nothing to continue", file=sys.stderr)
        return
    command = config.get("command")
    if not isinstance(command, dict) or not {"method", "seed", "cwd"} <= command.keys():
        raise CoterieError(
            f"{chosen.run} was not begun by a command; in Python, call coterie.run as it was called, with resume=True"
        )
    told = {name: tuples(value) for name, value in command.items() if name not in ("json", "watch", "format")}
    again = argparse.Namespace(**told | vars(chosen))
    if hasattr(chosen, "data_dir"):
        again.data_dir = os.path.abspath(chosen.data_dir)
    if os.path.isdir(again.cwd):
        os.chdir(again.cwd)  # where its relative paths begin
        sys.path.insert(0, again.cwd)
    data, quiet = load_clients(**given(again, DataSettings)), hasattr(chosen, "json")
    how = Execution(**given(again, Execution))
    with live_page(again) as page:
        rows = train_one(again, again.method, again.seed, data, how, run, quiet, page, resume=True)
    table = {"data": data.name, "clients": data.clients, "folder": str(chosen.run), "outcomes": rows}
    if quiet:
        print(json.dumps(table, indent=2))
    else:
        show(table, 1, title(again.method), "terminal")


def tuples(value: Any) -> Any:
    """As flags are read: JSON knows lists only."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def do_compare(chosen: argparse.Namespace) -> None:
    runs = train_all(chosen, chosen.methods, seeds=getattr(chosen, "seeds", 1))
    if hasattr(chosen, "json"):
        print(json.dumps(runs, indent=2))


def do_demo(chosen: argparse.Namespace) -> None:
    from coterie.demo import METHODS, SETTINGS

    vars(chosen).update({name: value for name, value in SETTINGS.items() if name not in vars(chosen)})
    do_compare(argparse.Namespace(**{"methods": METHODS, **vars(chosen)}))


def train_all(chosen: argparse.Namespace, names: list[str], seeds: int) -> dict[str, Any]:
    """Every method with every seed, each training once; the outcomes, and a table for people."""
    from coterie.api import DataSettings, Execution, load_clients, method_name
    from coterie.core.errors import CoterieError
    from coterie.methods import VARIANTS

    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, not {seeds}")
    names = [method_name(name) for name in names]  # a wrong one is told before anything is done
    against = method_name(getattr(chosen, "against", names[-1]))
    if against not in names:
        raise CoterieError(f"{against} is not among the methods that are compared, so nothing can be tested against it")
    format = getattr(chosen, "format", "terminal")
    quiet = hasattr(chosen, "json") or format != "terminal"
    data = load_clients(**given(chosen, DataSettings))
    first = getattr(chosen, "seed", 0)
    trainings = list(dict.fromkeys(VARIANTS[n][0] if n in VARIANTS and not VARIANTS[n][1] else n for n in names))
    base = Path(getattr(chosen, "out", None) or default_folder(names, data.name))
    if base.exists():
        raise CoterieError(f"{base} exists already; name another folder with --out, or remove it")
    many = len(trainings) * seeds > 1
    how = Execution(**given(chosen, Execution))
    with live_page(chosen) as page:
        rows = [
            outcome
            for name in trainings
            for seed in range(first, first + seeds)
            for out in [base / f"{name}-seed{seed}" if many else base]
            for outcome in train_one(chosen, name, seed, data, how, out, quiet, page)
        ]
    table = {"data": data.name, "clients": data.clients, "folder": str(base), "outcomes": rows}
    if many:
        (base / "compare.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    if not hasattr(chosen, "json"):
        show(table, seeds, title(against), format)
    return table


def title(name: str) -> str:
    """Of a method or variant, as in tables."""
    from coterie.methods import METHODS, VARIANTS

    return VARIANTS[name][2] if name in VARIANTS else METHODS[name].title


def live_page(chosen: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """The page that --watch asks for, or None."""
    if not hasattr(chosen, "watch"):
        return contextlib.nullcontext()
    from coterie.reports.live import LivePage

    page = LivePage(chosen.watch)
    print(f"coterie: watch it at {page.address}", file=sys.stderr, flush=True)
    return page


def default_folder(names: list[str], data: str) -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{'-'.join(names[:4])}-{data}"


def train_one(
    chosen: argparse.Namespace,
    name: str,
    seed: int,
    data: Any,
    how: Any,
    out: Path,
    quiet: bool,
    page: Any,
    resume: bool = False,
) -> list[dict[str, Any]]:
    from coterie.api import make_method, run
    from coterie.comparison import NEW
    from coterie.core.local import Sgd
    from coterie.display import watcher
    from coterie.federation import Round, Safety, Settings
    from coterie.methods import VARIANTS
    from coterie.protocols import preset

    kind = type(make_method(name))
    settings = {name: value for part in (Sgd, Settings, Safety, kind) for name, value in given(chosen, part).items()}
    settings["seed"] = seed
    command = {k: v for k, v in vars(chosen).items() if k != "act"}
    protocol = getattr(chosen, "protocol", "pac")
    rounds = settings.get("rounds") or preset(protocol, data.name).get("rounds", Settings.rounds)
    start = time.monotonic()
    if page:
        page.begin(title(name), rounds, seed)
    with watcher(title(name), rounds, quiet) as watch:

        def note(record: Round) -> None:
            watch(record)
            if page:
                page(record)

        result = run(
            name,
            getattr(chosen, "model", None),
            data,
            where=how,
            out=out,
            resume=resume,
            watch=note,
            head=getattr(chosen, "head", None),
            protocol=protocol,
            config={"command": {**command, "method": name, "seed": seed, "cwd": os.getcwd()}},
            **settings,
        )
    seconds = time.monotonic() - start
    last = next(r for r in reversed(result.history) if ("pre", "test") in r.scores)
    post = next((r for r in reversed(result.history) if ("post", "test") in r.scores), last)
    return [
        {
            "method": title(name).replace(kind.title, o.name, 1) if name in VARIANTS and VARIANTS[name][1] else o.name,
            "seed": seed,
            "reported": o.point,
            **o.last._asdict(),
            "best_on_test": o.best_on_test,
            "best_by_validation": o.by_validation,
            "pre": last.accuracy("pre"),
            "post": post.accuracy("post"),
            "global": last.accuracy("global"),
            **{p: v for r in result.history for p in NEW if (v := r.accuracy(p)) is not None},
            "megabytes": round(sum(r.bytes_up + r.bytes_down for r in result.history) / 1e6, 3),
            "seconds": round(seconds, 2),
            "clients": scores.clients[scores.total > 0].tolist(),
            "accuracies": scores.accuracy[scores.total > 0].tolist(),
        }
        for o in result.outcomes()
        for scores in [list(result.history.with_point(o.point))[-1].scores[o.point, "test"]]
    ]


def show(table: dict[str, Any], seeds: int, against: str, format: str) -> None:
    from coterie import tables
    from coterie.comparison import comparison

    tables.show(comparison(table, seeds, against), format)
    if format == "terminal":
        from coterie.display import console

        console.print(f"Everything is in {table['folder']}", soft_wrap=True, highlight=False)


def do_methods(chosen: argparse.Namespace) -> None:
    from coterie.catalogue import entries, markdown

    if hasattr(chosen, "markdown"):
        print(markdown(), end="")
        return
    listed = [e._asdict() for e in entries()]
    show_list(chosen, "Methods", listed, ("name", "about"))


def summary(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def do_data(chosen: argparse.Namespace) -> None:
    from coterie.data import DATASETS, PARTITIONS

    datasets = [{"name": name, "about": source.description, "from": source.origin} for name, source in DATASETS.items()]
    rules = [{"name": name, "about": summary(rule.__doc__)} for name, rule in PARTITIONS.items()]
    if hasattr(chosen, "json"):
        print(json.dumps({"datasets": datasets, "partitions": rules}, indent=2))
        return
    show_list(chosen, "Datasets", datasets, ("name", "about", "from"))
    show_list(chosen, "Partition rules", rules, ("name", "about"))


def do_check(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.data.own import Reading, check, lines

    with contextlib.suppress(AttributeError):  # names of files need not be text that this terminal can show
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        report = check(chosen.path, Reading(**given(chosen, Reading)))
        content, fine = report.as_json(), report.fine
        text = "\n".join(lines(report))
    except CoterieError as error:
        content, fine, text = {"path": chosen.path, "fine": False, "error": str(error)}, False, f"! {error}"
    print(json.dumps(content, indent=2) if hasattr(chosen, "json") else text)
    sys.exit(0 if fine else 1)


def do_recipes(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.recipes import listing, matches, recipes, shortened

    words = getattr(chosen, "filter", [])
    listed = [listing(r, getattr(chosen, "data_dir", None)) for r in recipes() if matches(r, words)]
    if not listed:
        raise CoterieError(f"no recipe has '{' '.join(words)}' in it; `coterie recipes` lists all")
    if not hasattr(chosen, "json"):
        listed = [{**r, **shortened(r)} for r in listed]
    show_list(chosen, "Recipes", listed, ("id", "from", "dataset", "clients", "methods", "steps", "at hand"))


def do_reproduce(chosen: argparse.Namespace) -> None:
    from coterie import tables
    from coterie.api import Execution
    from coterie.core.errors import CoterieError
    from coterie.display import watcher
    from coterie.recipes import find
    from coterie.reproduce import chosen_rows, report, reproduce
    from coterie.results import Shelf

    recipe, shelf = find(chosen.recipe), Shelf(Path(chosen.out))
    rows = chosen_rows(recipe, getattr(chosen, "methods", None))
    rounds, format = getattr(chosen, "rounds", None), getattr(chosen, "format", "terminal")
    wrong = (
        []
        if hasattr(chosen, "show")
        else reproduce(
            recipe,
            rows,
            shelf,
            seeds=chosen.seeds,
            rounds=rounds,
            how=Execution(**given(chosen, Execution)),
            data_dir=getattr(chosen, "data_dir", None),
            commit=getattr(chosen, "commit", None),
            watching=lambda title, rounds: watcher(title, rounds, format != "terminal"),
        )
    )
    tables.show(report(recipe, rows, shelf, chosen.seeds, rounds), format)
    if wrong:
        raise CoterieError("; ".join(wrong))


def do_report(chosen: argparse.Namespace) -> None:
    from coterie.reports.page import write_report

    print(write_report(chosen.runs, chosen.out))


def do_pictures(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, load_clients, portrait
    from coterie.reports.rebalancing import augmented_samples, class_pictures

    data = load_clients(**given(chosen, DataSettings))
    drawn: dict[str, str | bytes] = {"partition.svg": portrait(data), **class_pictures(data, chosen.threshold)}
    if data.train.x.ndim == 4:
        drawn["augmented.png"] = augmented_samples(data)
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
        print(out / name)


def show_list(chosen: argparse.Namespace, title: str, listed: list[dict[str, Any]], columns: Sequence[str]) -> None:
    if hasattr(chosen, "json"):
        print(json.dumps(listed, indent=2, default=str))
        return
    from coterie.display import show_table

    show_table(title, columns, [[str(entry.get(column, "")) for column in columns] for entry in listed])


if __name__ == "__main__":
    main()
