"""Your own task: a heart rate that 90 % of patients stay below, by the pinball loss, with metrics of its own.

python examples/own_task.py

On the command line, with your own table: coterie run fedper --dataset TABLE.csv --task examples.own_task:Quantile

A task is a loss per sample, metrics, and what to make of an output. Methods do not know it, so all that need no classes
work: `coterie methods --suits "no classes needed"` lists them.
"""

from __future__ import annotations

from torch import Tensor

import coterie

LEVEL = 0.9


def pinball(output: Tensor, y: Tensor) -> Tensor:
    """The loss whose minimum is the quantile: an answer that is too low costs nine times as much as one too high."""
    short = y - output
    return (LEVEL * short).maximum((LEVEL - 1) * short)


def mean_pinball(output: Tensor, y: Tensor) -> Tensor:
    return pinball(output.double(), y.double()).mean()


def coverage(output: Tensor, y: Tensor) -> Tensor:
    """Share of labels that are not above the answer; right if close to LEVEL."""
    return (y <= output).double().mean()


class Quantile(coterie.Regression):  # standardizes labels in training, and answers in their units
    name = "quantile"
    more_metrics = (
        coterie.OutputMetric("pinball", mean_pinball, higher=False, share=False),
        coterie.OutputMetric("coverage", coverage),
    )

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (pinball(output, y) / self.std).mean(1)  # (B,)


def main() -> None:
    # maximum heart rate of patients of four hospitals
    data = coterie.load_clients("heart-rate", task=Quantile, metric="pinball")
    result = coterie.run("fedper", data, "mlp", rounds=15, progress=False)
    print(result)
    print(result.clients)  # every metric of every hospital


if __name__ == "__main__":
    main()
