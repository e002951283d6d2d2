"""Your own data: one CSV file with rows of several clients, and a personal model for each of them.

python examples/own_data.py                  writes an example table, machines.csv, and trains on it
python examples/own_data.py TABLE.csv --client-column hospital --label-column diagnosis

`coterie data check TABLE.csv` shows first what Coterie understands of a table and what is wrong with it.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import coterie


def write_example(path: Path) -> None:
    """Machines of five plants: does one fail within a month? Each plant runs its machines at its own temperature."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["temperature", "vibration", "kind", "plant", "state"])
        for plant, usual in {"Essen": 45, "Lyon": 55, "Porto": 65, "Turin": 75, "Graz": 85}.items():
            for _ in range(60):
                temperature, vibration = draw.gauss(usual, 8), draw.gauss(2, 0.5)
                fails = temperature - usual + 10 * (vibration - 2) + draw.gauss(0, 3) > 0
                measured = "" if draw.random() < 0.05 else f"{vibration:.2f}"  # sensors have gaps
                kind = draw.choice(["pump", "press"])
                table.writerow([f"{temperature:.1f}", measured, kind, plant, "fails" if fails else "runs"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=Path("machines.csv"))
    parser.add_argument("--client-column", default="plant")
    parser.add_argument("--label-column", default="state")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args(argv)
    if chosen.table == Path("machines.csv") and not chosen.table.exists():
        write_example(chosen.table)

    data = coterie.load_clients(
        chosen.table,
        client_column=chosen.client_column,
        label_column=chosen.label_column,
        missing="median",  # fill gaps with the median of the training rows, and mark them for the network
        normalise="auto",  # standardize columns by the training rows of all clients
    )
    print(data)

    compared = coterie.compare(
        ["local", "fedavg", "fedper"], data, "mlp", rounds=chosen.rounds, seeds=1, progress=False
    )
    print(compared)

    result = coterie.run("fedper", data, "mlp", rounds=chosen.rounds, progress=False)
    client = data.client_names[0]
    model = result.personal_model(client)  # a torch module: raw rows in, logits out
    rows, labels = data.test.client(0)
    for row, label, answer in zip(rows[:3].tolist(), labels[:3], model(rows[:3]).argmax(1), strict=True):
        print(f"{client}: {row} is '{data.class_names[label]}', the model says '{data.class_names[answer]}'")


if __name__ == "__main__":
    main()
