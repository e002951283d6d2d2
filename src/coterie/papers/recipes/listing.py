"""Entries of `coterie recipes`: contents, amount of work, and whether the data are available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.data import is_available
from coterie.papers.recipes.recipe import Recipe


def listing(recipe: Recipe, data_dir: str | None) -> dict[str, Any]:
    """One line of `coterie recipes`."""
    sizes = sorted({recipe.plan(row, value).clients for row in recipe.rows for value in recipe.values})
    sizes = sizes or [recipe.partition["num_clients"]]
    return {
        "id": recipe.id,
        "also": list(recipe.also),
        "paper": recipe.paper,
        "place": recipe.place,
        "dataset": recipe.datasets,
        "clients": sizes,
        "methods": [row.name for row in recipe.rows],
        "values": len(recipe.values) if recipe.vary else 1,
        "steps": recipe.work,
        "available": all(is_available(dataset, data_dir) for dataset in recipe.datasets),
        "instead": recipe.instead,
    }


def matches(recipe: Recipe, words: Sequence[str]) -> bool:
    """Whether every word occurs in the names, paper, datasets or methods of a recipe."""
    about = [recipe.id, *recipe.also, recipe.paper, recipe.place, *recipe.datasets]
    about += [name for row in recipe.rows for name in (row.name, row.method)]
    return all(any(word.lower() in text.lower() for text in about) for word in words)


def terminal_row(recipe: dict[str, Any]) -> dict[str, str]:
    """Short texts for the columns of a terminal."""
    clients = [str(n) for n in recipe["clients"]]
    return {
        "id": recipe["id"],
        "where": recipe["place"],
        "dataset": "\n".join(recipe["dataset"]),
        "clients": "-".join(clients[:1] + clients[1:][-1:]),
        "methods": str(len(recipe["methods"]) or "-"),
        "steps": f"{recipe['steps'] / 1e6:.1f}M" if recipe["methods"] else "-",
        "data": "here" if recipe["available"] else "-",
    }
