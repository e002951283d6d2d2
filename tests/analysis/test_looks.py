"""Looks of methods: the same everywhere, different from each other, also for color-blind readers and in the dark."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.analysis.looks import COLORS, FIRST, looks, numbered
from coterie.analysis.plots import DASHES, MARKERS, line_styles
from coterie.methods import METHODS, VARIANTS

# Machado, Oliveira, Fernandes (2009), severity 1: what a reader sees, of linear RGB.
SEEN = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
GROUNDS = {"light": ("#ffffff", "#fdfdfc"), "dark": ("#14171b", "#1a1e23")}


def linear(color: str) -> NDArray[np.float64]:
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIELAB, D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", GROUNDS)
def test_colors_are_visible_and_color_blind_readers_tell_them_apart(mode: str) -> None:
    """Okabe and Ito's palette with gray for yellow has a least distance of 9.7."""
    colors = [getattr(color, mode) for color in COLORS]
    assert min(contrast(color, ground) for color in colors for ground in GROUNDS[mode]) >= 3
    for sight in SEEN.values():
        seen = [lab(np.array(sight) @ linear(color)) for color in colors]
        assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 10


def test_a_method_looks_the_same_by_id_and_title_and_unlike_all_others() -> None:
    for name, kind in METHODS.items():
        assert looks([name])[name] == looks([kind.title])[kind.title]
    names = [*METHODS, *VARIANTS]
    assert len(set(looks(names).values())) == len(names)
    assert all(looks([name])[name] == look for name, look in looks(names).items())
    assert len({look.color for look in looks(FIRST).values()}) == len(FIRST) == len(COLORS)
    styles = line_styles(["fedpac", "ditto"])
    assert styles["fedpac"] == (COLORS[0].light, "-", "o")


def test_variants_of_a_method_have_its_color_and_other_dashes() -> None:
    found = looks(["FedPAC, lr 0.1", "Ditto", "FedPAC, lr 0.2", "FedPAC (again)", "mine", "mine, lr 1"])
    assert found["FedPAC, lr 0.1"] == looks(["fedpac"])["fedpac"]
    assert found["Ditto"] == looks(["ditto"])["ditto"]
    own = [look for label, look in found.items() if label.startswith("FedPAC")]
    assert {look.color for look in own} == {0}
    assert len({look.dashes for look in own}) == 3
    assert found["mine"].color == found["mine, lr 1"].color
    assert looks(["FedPAC, lr 0.1", "FedPAC"])["FedPAC"] == looks(["fedpac"])["fedpac"]
    many = looks([f"FedPAC, lr {i}" for i in range(40)] + list(METHODS))
    assert len(set(many.values())) == 40 + len(METHODS)
    assert many["fedavg"] == looks(["fedavg"])["fedavg"]


def test_looks_differ_without_color() -> None:
    shapes = {(look.dashes, look.marker) for look in map(numbered, range(56))}
    assert len(shapes) == 56
    assert max(dashes for dashes, _ in shapes) < len(DASHES)
    assert max(marker for _, marker in shapes) < len(MARKERS)
