"""The reader of High School and Beyond, on a small table in the publishers' form, and on damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.core.preprocess import Preprocess
from coterie.core.task import Task
from coterie.data import load

PUPILS = """"rownames","School","Minority","Sex","SES","MathAch","MEANSES"
"1","1224","No","Female",-1.528,5.876,-0.428
"2","1224","No","Female",-0.588,19.708,-0.428
"3","1224","Yes","Male",-0.528,20.349,-0.428
"4","1224","No","Male",-0.668,8.781,-0.428
"5","1288","No","Male",-0.788,17.898,0.128
"6","1288","Yes","Female",0.022,4.583,0.128
"""
SCHOOLS = """"rownames","School","Size","Sector","PRACAD","DISCLIM","HIMINTY","MEANSES"
"1224","1224",842,"Public",0.35,1.597,0,-0.428
"1288","1288",1855,"Catholic",0.27,0.174,1,0.128
"1296","1296",1719,"Public",0.32,-0.137,1,-0.42
"""


def write(folder: Path, pupils: str = PUPILS, schools: str = SCHOOLS) -> None:
    (folder / "MathAchieve.csv").write_text(pupils, encoding="utf-8")
    (folder / "MathAchSchool.csv").write_text(schools, encoding="utf-8")


def test_pupils_of_schools(tmp_path: Path) -> None:
    write(tmp_path)
    schools = load("schools", tmp_path)
    assert schools.client_names == ("1224", "1288")
    assert schools.owners is not None
    assert [owner.tolist() for owner in schools.owners] == [[0, 0, 0, 1, 1], [0]]  # every fourth pupil of a school
    names = [column.name for column in schools.transform.columns]
    assert names[:4] == ["female", "minority", "ses", "size"]
    expected = [1, 0, -1.528, 842, 0, 0.35, 1.597, 0, -0.428]
    torch.testing.assert_close(schools.x_train[0], torch.tensor(expected))
    assert schools.x_train[4].tolist()[3:5] == [1855, 1]
    targets = np.array([5.876, 19.708, 20.349, 17.898, 4.583])
    np.testing.assert_allclose(schools.y_train[:, 0], targets, rtol=1e-6)
    assert schools.y_test.tolist() == [[pytest.approx(8.781)]]
    assert isinstance(schools.task, Task)
    assert schools.task.options["mean"] == pytest.approx([targets.mean()])
    assert schools.task.options["std"] == pytest.approx([targets.std()])
    inputs = Preprocess(schools.transform)(schools.x_train)
    torch.testing.assert_close(inputs.mean(0), torch.zeros(9), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("pupils", "schools", "says"),
    [
        (PUPILS.replace("SES", "ses", 1), SCHOOLS, "MathAchieve.csv: column 'SES' is missing"),
        (PUPILS.splitlines()[0], SCHOOLS, "MathAchieve.csv: no rows"),
        ("", SCHOOLS, "MathAchieve.csv: column 'School' is missing"),
        (PUPILS[:-9], SCHOOLS, "MathAchieve.csv, line 7: not as many cells as columns"),
        (PUPILS.replace("17.898", "NA"), SCHOOLS, "MathAchieve.csv, school 1288: MathAch is 'NA'"),
        (PUPILS.replace('"Male"', '"M"', 1), SCHOOLS, "MathAchieve.csv, school 1224: Sex is 'M'"),
        (PUPILS, SCHOOLS.replace("1288", "1289"), "MathAchSchool.csv: school 1288 of MathAchieve.csv is missing"),
        (PUPILS, SCHOOLS.replace("1855", "inf"), "MathAchSchool.csv, school 1288: Size is 'inf'"),
    ],
)
def test_damaged_tables(tmp_path: Path, pupils: str, schools: str, says: str) -> None:
    write(tmp_path, pupils, schools)
    with pytest.raises(CoterieError, match=says):
        load("schools", tmp_path)


def test_not_text(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "MathAchieve.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CoterieError, match=r"MathAchieve\.csv: cannot be read as a CSV file"):
        load("schools", tmp_path)
