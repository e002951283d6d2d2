"""The walkthrough is what its script makes: text, commands and pictures. Commands: tests/test_commands_in_docs.py."""

from __future__ import annotations

import html
import re

import pytest

from tools import walkthrough


def test_the_page_is_the_scripts() -> None:
    """If this fails: python -m tools.walkthrough"""
    assert walkthrough.PAGE.read_text(encoding="utf-8") == walkthrough.page()


@pytest.mark.parametrize("step", walkthrough.STEPS, ids=lambda step: step.picture)
def test_a_picture_is_of_its_command(step: walkthrough.Step) -> None:
    picture = (walkthrough.PICTURES / f"{step.picture}.svg").read_text(encoding="utf-8")
    shown = " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", picture, flags=re.S)).split())
    assert f"$ coterie {step.command}" in shown
    assert step.shows in shown
    assert "Traceback" not in shown
    assert re.findall(r"https?://(?!www\.w3\.org)[^\"]*|/tmp/|/home/", picture) == []


def test_a_progress_bar_is_shown_once() -> None:
    lines = [
        "first",
        "FedRep ━━╸   1/3 0:00:01 x",
        "between",
        "FedRep ━━━━━ 3/3 0:00:02 y",
        "Local ━━ 3/3 0:00:02",
        "last",
    ]
    assert walkthrough.settled(lines) == ["first", *lines[2:]]
