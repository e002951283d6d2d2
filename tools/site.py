"""Hooks of mkdocs: the site asks no other host for anything."""

from __future__ import annotations

from typing import Any

THEIRS = "https://unpkg.com/iframe-worker/shim"  # what the theme loads for searching pages that are on the disk
OURS = "javascripts/worker.js"


def on_post_page(output: str, page: Any, config: Any) -> str:
    return output.replace(THEIRS, OURS)  # all pages are in one folder


def on_post_template(output: str, template_name: str, config: Any) -> str:
    return output.replace(THEIRS, OURS)
