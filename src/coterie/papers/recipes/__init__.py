"""The papers' tables and figures, one YAML file each: what to run, and the numbers that were published."""

from coterie.papers.recipes.inferences import READINGS, Inference, RowReading
from coterie.papers.recipes.listing import listing, matches, terminal_row
from coterie.papers.recipes.reading import RECIPES, find, read_recipe, recipes
from coterie.papers.recipes.recipe import (
    ROUNDS,
    WEIGHTS,
    Plan,
    Published,
    Recipe,
    RecipeRow,
    SettingsCase,
    Value,
)

__all__ = [
    "READINGS",
    "RECIPES",
    "ROUNDS",
    "WEIGHTS",
    "Inference",
    "Plan",
    "Published",
    "Recipe",
    "RecipeRow",
    "RowReading",
    "SettingsCase",
    "Value",
    "find",
    "listing",
    "matches",
    "read_recipe",
    "recipes",
    "terminal_row",
]
