"""A short script that predicts with an exported ONNX model, written next to it. It needs onnxruntime and numpy only."""

from __future__ import annotations

from coterie.data.user.frames import NOTHING

ENDING = ".predict.py"
SCRIPT = '''"""Predict with the model NAME.onnx next to this file. Needs onnxruntime and numpy.

python NAME.predict.py FILE: a .npy array of raw samples or, for a table, a .csv with named columns
"""
import csv, json, sys

try:
    import numpy as np, onnxruntime
except ImportError as error:
    sys.exit(f"{error}: pip install onnxruntime")

MISSING = SPELLINGS


def number(column, text):  # a category as its position, a missing value as nan
    text, known = text.strip(), column["categories"]
    if text.lower() in MISSING and not (known and text.lower() == "none"):  # which may be a category
        return np.nan
    if known and text not in known:  # 2.0 may be there as 2
        text = f"{float(text):g}"
    return known.index(text) if known else float(text)


def read_csv(path, columns):  # rows of numbers, and the line of each
    x, places = [], []
    with open(path, newline="", encoding="utf-8-sig") as file:
        delimiter = max(",;\\t", key=file.readline().count)
        file.seek(0)
        rows = csv.reader(file, delimiter=delimiter)
        header = [name.strip() for name in next(rows, [])]
        for column in columns:
            if header.count(column["name"]) != 1:
                sys.exit(f"line 1: column {column['name']!r} must be there once; found: {', '.join(header)}")
        for row in filter(None, rows):
            places.append(f"line {rows.line_num}")
            if len(row) != len(header):
                sys.exit(f"{places[-1]}: {len(row)} values for {len(header)} columns")
            cells = dict(zip(header, row))
            x.append([])
            for column in columns:
                text = cells[column["name"]]
                try:
                    x[-1].append(number(column, text))
                except ValueError:
                    wanted = f"one of {', '.join(column['categories'])}" if column["categories"] else "a number"
                    sys.exit(f"{places[-1]}: column {column['name']!r}: {text!r} is not {wanted}")
    return x, places


def read(path, about):  # samples, and the place of each
    try:
        if path.lower().endswith(".csv") and about["columns"]:
            x, places = read_csv(path, about["columns"])
            return np.array(x, about["input"]["dtype"]), places
        with open(path, "rb") as file:
            x = np.lib.format.read_array(file)
        return x, [f"sample {i}" for i in range(len(x))]
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except (ValueError, TypeError, EOFError, MemoryError, csv.Error):
        sys.exit(f"{path}: cannot be read; give {'a .csv table in UTF-8 or ' if about['columns'] else ''}a .npy array")


def check(x, places, columns):  # only columns with a `fill` may have gaps; categories are whole numbers
    fine = np.isfinite(x) | (np.isnan(x) & [column["fill"] is not None for column in columns] if columns else False)
    for at, column in enumerate(columns):
        if column["categories"]:
            fine[:, at] &= np.isnan(x[:, at]) | np.isin(x[:, at], range(len(column["categories"])))
    for i, *at in np.argwhere(~fine)[:1]:
        where = f"{places[i]}: column {columns[at[0]]['name']!r}" if columns else places[i]
        value = "a missing value" if np.isnan(x[(i, *at)]) else x[(i, *at)]
        sys.exit(f"{where}: {value}, which training did not have")


def main(path):
    np.seterr(all="ignore")  # what overflows is refused below
    model = __file__.removesuffix(".predict.py") + ".onnx"
    try:
        session = onnxruntime.InferenceSession(model)
    except Exception as error:
        sys.exit(f"{model}: {error}".splitlines()[0])
    about = json.loads(session.get_modelmeta().custom_metadata_map["about"])  # shape, columns, classes, ...
    x, places = read(path, about)
    dtype, shape = about["input"]["dtype"], about["input"]["shape"]
    if about["padding"] is not None and x.ndim > 1 and (short := shape[1] - x.shape[1]) > 0:
        x = np.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), constant_values=about["padding"])
    if not len(x) or x.dtype != dtype or list(x.shape[1:]) != shape[1:]:
        sys.exit(f"{path}: samples are {x.dtype} {x.shape}; the model takes {dtype} {shape}")
    check(x, places, about["columns"])
    try:
        y = session.run(None, {about["input"]["name"]: x})[0]
    except Exception as error:
        sys.exit(f"{path}: the model cannot use these samples: {error}".splitlines()[0])
    for i in np.argwhere(~np.isfinite(y))[:1, 0]:
        sys.exit(f"{places[i]}: the model's output is not finite")
    if y.ndim == 2 and "softmax" in about["output"]["meaning"]:
        y = np.exp(y - y.max(1, keepdims=True))
        for p in y / y.sum(1, keepdims=True):
            print(about["classes"][p.argmax()], round(float(p.max()), 4))
    else:
        y = 1 / (1 + np.exp(-y)) if "sigmoid" in about["output"]["meaning"] else y
        print(*y.tolist(), sep="\\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
'''


def predict_script(name: str) -> str:
    """The script for the model in NAME.onnx."""
    return SCRIPT.replace("NAME", name).replace("SPELLINGS", str(sorted(NOTHING)))
