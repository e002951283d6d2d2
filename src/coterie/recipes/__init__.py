"""The papers' tables and figures, one YAML file each: what to run, and the numbers that were published."""

from coterie.recipes.listing import listing, matches, shortened
from coterie.recipes.reading import RECIPES, find, read_recipe, recipes
from coterie.recipes.recipe import ROUNDS, WEIGHTS, Case, Plan, Published, Recipe, Row, Value

__all__ = [
    "RECIPES",
    "ROUNDS",
    "WEIGHTS",
    "Case",
    "Plan",
    "Published",
    "Recipe",
    "Row",
    "Value",
    "find",
    "listing",
    "matches",
    "read_recipe",
    "recipes",
    "shortened",
]
