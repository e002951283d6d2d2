"""A short script that predicts with an exported ONNX model, written next to it. It needs onnxruntime and numpy only."""

from __future__ import annotations

ENDING = ".predict.py"
SCRIPT = '''"""Predict with the model NAME.onnx next to this file. Needs onnxruntime and numpy.

python NAME.predict.py FILE: a .npy array of raw samples or, for a table, a .csv with named columns
"""
import csv, json, sys

try:
    import numpy as np, onnxruntime
except ImportError as error:
    sys.exit(f"{error}: pip install onnxruntime")
if len(sys.argv) != 2:
    sys.exit(__doc__)
session = onnxruntime.InferenceSession(__file__.removesuffix(".predict.py") + ".onnx")
about = json.loads(session.get_modelmeta().custom_metadata_map["about"])  # shape, columns, classes, ...


def number(column, text):  # categories by position; only columns with a `fill` may have gaps
    if text == "" and column["fill"] is not None:
        return np.nan
    return column["categories"].index(text) if column["categories"] else float(text)


if sys.argv[1].endswith(".csv"):
    rows = csv.DictReader(open(sys.argv[1], newline="", encoding="utf-8"))
    x = np.array([[number(c, row[c["name"]]) for c in about["columns"]] for row in rows], about["input"]["dtype"])
else:
    x = np.load(sys.argv[1])
if about["padding"] is not None and x.ndim > 1 and (short := about["input"]["shape"][1] - x.shape[1]) > 0:
    x = np.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), constant_values=about["padding"])
if x.dtype != about["input"]["dtype"] or list(x.shape[1:]) != about["input"]["shape"][1:]:
    sys.exit(f"samples are {x.dtype} {x.shape}; the model takes {about['input']['dtype']} {about['input']['shape']}")
y = session.run(None, {about["input"]["name"]: x})[0]
if y.ndim == 2 and "softmax" in about["output"]["meaning"]:
    y = np.exp(y - y.max(1, keepdims=True))
    for p in y / y.sum(1, keepdims=True):
        print(about["classes"][p.argmax()], round(float(p.max()), 4))
else:
    y = 1 / (1 + np.exp(-y)) if "sigmoid" in about["output"]["meaning"] else y
    print(*y.tolist(), sep="\\n")
'''


def predict_script(name: str) -> str:
    """The script for the model in NAME.onnx."""
    return SCRIPT.replace("NAME", name)
