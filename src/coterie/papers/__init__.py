"""Reproduction of the papers' tables and figures: recipes, their runs, and results next to the published numbers."""
