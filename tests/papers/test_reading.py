"""Recipes of one's own: what is wrong in one is told with file and key."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import CoterieError
from coterie.core.validation import load_yaml
from coterie.papers.recipes import Published, find, listing, read_recipe
from coterie.papers.recipes.reading import parse

GOOD = """\
id: mine
paper: Ours
place: Table 1
protocol: pac
dataset: fashion-mnist-small
partition: {rule: dominant, num_clients: 4, local_size: 40, test_size: 20}
model: linear
settings: {rounds: 2, join_ratio: 1.0, local_epochs: 1, batch_size: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}
vary: {noniid_s: [20, 50], local_epochs: [1, 2]}
cases:
  - {when: {local_epochs: 2}, set: {lr: 0.05}}
report: last
average: clients
inferences:
  guess: {what: align is a half, fitted_on: {P1-T1-CIFAR10-20: [FedPAC, FedPer]}, tried: 3}
rows:
  - {name: Alone, method: local}
  - name: Together
    method: fedpac
    reading: {fitted: [guess]}
    settings: {align: 0.5}
    published:
      - {noniid_s: 20, local_epochs: 1, accuracy: 61.5}
      - {noniid_s: 50, local_epochs: 2, accuracy: {mean: 70, std: 1.5}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_says_what_to_train(tmp_path: Path) -> None:
    recipe = find(str(written(tmp_path, GOOD)))
    assert recipe.against == "Together"
    assert len(recipe.values) == 4
    together, last = recipe.rows[1], recipe.values[3]
    assert last == (("noniid_s", 50.0), ("local_epochs", 2))
    plan = recipe.plan(together, last)
    assert (plan.partition["noniid_s"], plan.method.train.local_epochs, plan.method.train.lr) == (50.0, 2, 0.05)
    assert plan.method.align == 0.5  # type: ignore[attr-defined]
    assert recipe.plan(together, recipe.values[0]).method.train.lr == 0.1
    assert recipe.rows[0].reading.kind == "default"  # it has no published number
    assert (together.reading.kind, together.reading.tried) == ("fitted", 3)
    assert together.reading.fitted_on == {("P1-T1-CIFAR10-20", "FedPAC"), ("P1-T1-CIFAR10-20", "FedPer")}
    assert together.published == {
        recipe.values[0]: {"accuracy": Published(61.5)},
        last: {"accuracy": Published(70.0, 1.5)},
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("place: Table 1\n", "", "place is missing"),
        ("    reading: {fitted: [guess]}\n", "", "row Together: reading is missing"),
        ("{fitted: [guess]}", "quoted", "row Together: reading 'quoted'"),
        ("{fitted: [guess]}", "fitted", "must name its inferences"),
        ("{fitted: [guess]}", "{fitted: []}", "fitted is empty"),
        ("{fitted: [guess]}", "{fitted: [guesss]}", "did you mean 'guess'?"),
        ("{fitted: [guess]}", "{fitted: [guess], tried: 2}", "'tried'"),
        ("tried: 3", "tried: 1", "tried of at least 2"),
        ("{P1-T1-CIFAR10-20: [FedPAC, FedPer]}", "{}", "at least one cell in fitted_on"),
        ("what: align is a half, ", "", "what is missing"),
        ("method: local}", "method: local, reading: fited}", "did you mean 'fitted'?"),
        ("place:", "plaice:", "unknown key 'plaice': did you mean 'place'?"),
        ("partition:", "partitoin:", "unknown key 'partitoin': did you mean 'partition'?"),
        ("name: Alone", "nam: Alone", "unknown key in rows[0] 'nam': did you mean 'name'?"),
        ("id: mine", "id: mine\ncolour: red", "unknown key 'colour'"),
        ("id: mine", "id: yours", "the file is named mine"),
        ("id: mine", "id: mine\nid: mine", "'id' is there twice"),
        ("id: mine", "id: [mine", "not YAML, line"),
        ("report: last", "report: first", "report 'first'"),
        ("average: clients", "average: client", "did you mean 'clients'"),
        ("average: clients", "average: {accuracy: client}", "average: accuracy 'client': did you mean 'clients'"),
        ("average: clients", "average: {}", "average: accuracy is missing"),
        ("average: clients", "average: {accuracy: clients, G: samples}", "unknown key in average 'G'"),
        ("protocol: pac", "protocol: pack", "did you mean 'pac'"),
        ("dataset: fashion-mnist-small", "dataset: fashion", "dataset 'fashion'"),
        ("model: linear", "model: liner", "did you mean 'linear'"),
        ("rule: dominant", "rule: dominent", "did you mean 'dominant'"),
        ("local_size: 40", "local_sise: 40", "did you mean 'local_size'"),
        ("local_size: 40", "local_size: forty", "partition: local_size is 'forty': it must be a whole number"),
        ("batch_size: 20", "batch_size: 20.5", "settings: batch_size is 20.5: it must be a whole number"),
        ("batch_size: 20", "batch_size: true", "settings: batch_size is True"),
        ("batch_size: 20", "batch_size: 0", "batch_size must be at least 1"),
        ("lr: 0.1", "lr: 1e-1", "write 0.0005"),
        ("vary:", "differs: {lr: 3}\nvary:", "differs: lr must say in words why"),
        ("vary:", "differs: {lrr: because}\nvary:", "unknown key in differs 'lrr': did you mean 'lr'?"),
        ("rounds: 2", "round: 2", "did you mean 'rounds'"),
        ("rounds: 2", "rounds: 2, seed: 3", "settings: seed is a setting of a run, not of a recipe"),
        ("method: fedpac", "method: fedpca", "did you mean 'fedpac'"),
        ("align: 0.5", "aline: 0.5", "unknown key in row Together: settings 'aline': did you mean 'align'"),
        ("align: 0.5", "align: strong", "row Together: settings: align is 'strong'"),
        ("name: Together", "name: Alone", "duplicate name 'Alone'"),
        ("method: local}", "method: local, read: yesterday}", "row Alone: read"),
        ("accuracy: 61.5", "accuracy: 615", "in percent"),
        ("accuracy: 61.5", "acuracy: 61.5", "'acuracy'"),
        (
            "noniid_s: 20, local_epochs: 1, acc",
            "noniid_s: 30, local_epochs: 1, acc",
            "noniid_s 30 is not a value of vary",
        ),
        ("noniid_s: 50, local_epochs: 2, acc", "noniid_s: 20, local_epochs: 1, acc", "duplicate entry for"),
        ("noniid_s: [20, 50]", "noniid_s: 20", "vary: noniid_s must be a list"),
        ("vary: {noniid_s", "vary: {noniid", "unknown key in vary 'noniid'"),
        ("when: {local_epochs: 2}", "when: {lr: 2}", "cases[0].when"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert GOOD.count(old) >= 1
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(CoterieError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words", "1: 2", "rows: 3", "\x00", "id: mine\nrows: [3]"])
def test_files_that_are_no_recipes(tmp_path: Path, text: str) -> None:
    with pytest.raises(CoterieError, match=r"mine\.yaml"):
        read_recipe(written(tmp_path, text))


def test_names() -> None:
    assert find("p1-t4-cifar10-20").id == "P1-T1-CIFAR10-20"
    with pytest.raises(CoterieError, match="did you mean P1-T10"):
        find("P1-T11")
    with pytest.raises(CoterieError, match=r"nowhere\.yaml: cannot be read"):
        find("nowhere.yaml")


def test_hospitals(tmp_path: Path) -> None:
    """Clients that are given by nature: 693 patients of four hospitals, 173.25 each."""
    text = GOOD.split("vary:")[0] + "report: last\naverage: clients\nrows: [{name: Alone, method: local}]\n"
    text = text.replace("fashion-mnist-small", "heart-disease").replace("model: linear", "model: mlp")
    partition = next(line for line in text.splitlines() if line.startswith("partition"))
    recipe = read_recipe(written(tmp_path, text.replace(partition, "partition: {rule: natural}")))
    assert recipe.work == 2 * 4 * 9
    assert listing(recipe, None)["clients"] == [4]


JUNK = [None, True, -1, 3, 0.5, float("nan"), "", "fedpac", [], [1], [[1, 2]], {}, {"a": 1}, {1: 2}, {"when": {}}]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def with_junk(node: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    changed = node.copy()
    changed[path[0]] = with_junk(node[path[0]], path[1:], junk)
    return changed


def test_junk_anywhere_gives_an_error_or_a_recipe() -> None:
    """Every value of a recipe replaced by everything it is not."""
    document = load_yaml(GOOD) | {"records": {"head_weights": [1]}, "measures": {"accuracy": "pre"}, "notes": ["a"]}
    outcomes = Counter()
    for path in places(document):
        for junk in JUNK:
            try:
                parse(with_junk(document, path, junk), "mine")
                outcomes["fine"] += 1
            except CoterieError:
                outcomes["told"] += 1
    assert outcomes["told"] > 5 * outcomes["fine"]
