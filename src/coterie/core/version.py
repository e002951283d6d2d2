"""The version of the package; pyproject.toml reads it from here."""

VERSION = "2.0.0.dev0"
