"""Write the data of a federation as files: tables or images of each client, or one .npz file."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.data import Column, FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.packing import unpack

CHANNELS = (1, 3)  # grey, RGB


def export_clients(data: FederatedData, folder: Path) -> list[Path]:
    """Write every client's samples into a new folder that `--dataset` reads; returns the files.

    Tables become train/CLIENT.csv and test/CLIENT.csv, images CLIENT/SPLIT/CLASS/00000.png, other arrays data.npz.
    """
    if folder.exists():
        raise CoterieError(f"{folder} already exists; choose another folder, or remove it")
    if data.transform.columns:
        return [path for split in splits(data) for path in write_tables(data, split, folder / split)]
    if data.classes and data.train.x.dtype == torch.uint8 and len(data.shape) == 3 and data.shape[0] in CHANNELS:
        return [path for split in splits(data) for path in write_images(data, split, folder)]
    return [write_arrays(data, folder)]


def splits(data: FederatedData) -> dict[str, Split]:
    return {"train": data.train, "test": data.test}


def name_of(data: FederatedData, client: int) -> str:
    """The client's name, safe for file names."""
    name = data.client_names[client] if data.client_names else f"client-{client}"
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or f"client-{client}"


def label_header(data: FederatedData) -> list[str]:
    """The label columns of a table: one for classes, one for each target otherwise."""
    if data.classes:
        return ["label"]
    return list(data.class_names) or [f"label {k}" for k in range(data.label_shape[0])]


def label_cells(data: FederatedData, label: int | list[float]) -> list[str]:
    if isinstance(label, int):
        return [class_name(data, label)]
    return [np.format_float_positional(np.float32(value), trim="-") for value in label]


def class_name(data: FederatedData, label: int) -> str:
    return data.class_names[label] if data.class_names else str(label)


def write_tables(data: FederatedData, split: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    columns, written = data.transform.columns, []
    for client in range(data.num_clients):
        x, y = splits(data)[split].client(client)
        path = folder / f"{name_of(data, client)}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([*(column.name for column in columns), *label_header(data)])
            for row, label in zip(x.tolist(), y.tolist(), strict=True):
                cells = [cell(value, column) for value, column in zip(row, columns, strict=True)]
                table.writerow([*cells, *label_cells(data, label)])
        written.append(path)
    return written


def cell(value: float, column: Column) -> str:
    if value != value:  # NaN: missing
        return ""
    if column.categories:
        return column.categories[int(value)]
    return np.format_float_positional(np.float32(value), trim="-")  # 2.3, not 2.29999995


def write_images(data: FederatedData, split: str, folder: Path) -> list[Path]:
    try:
        from PIL import Image
    except ImportError:
        raise CoterieError("writing images needs Pillow: pip install 'coterie[images]'") from None
    written = []
    for client in range(data.num_clients):
        for number, (x, label) in enumerate(zip(*splits(data)[split].client(client), strict=True)):
            place = folder / name_of(data, client) / split / re.sub(r"[/\\]", "-", class_name(data, int(label)))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(x)).save(place / f"{number:05}.png")
            written.append(place / f"{number:05}.png")
    return written


def pixels(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(C, H, W) to (H, W) or (H, W, 3)."""
    return (x[0] if len(x) == 1 else x.movedim(0, 2)).contiguous().numpy()


def write_arrays(data: FederatedData, folder: Path) -> Path:
    folder.mkdir(parents=True)
    arrays: dict[str, Any] = {}
    for split, held in splits(data).items():
        owners = [name_of(data, client) for client in held.owners().tolist()]
        named = unpack(data.transform.inputs, held.x) if data.transform.inputs else {}
        arrays |= {f"{split}_x.{name}": values.numpy() for name, values in named.items()}
        arrays |= {} if named else {f"{split}_x": held.x.numpy()}
        arrays |= {f"{split}_y": held.y.numpy(), f"{split}_client": np.array(owners)}
    if data.class_names:
        arrays["classes"] = np.array(data.class_names)
    np.savez_compressed(folder / "data.npz", allow_pickle=False, **arrays)
    return folder / "data.npz"
