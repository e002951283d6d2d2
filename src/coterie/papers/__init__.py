"""The papers' tables and figures: recipes, the runs they ask for, and results next to the published ones."""
