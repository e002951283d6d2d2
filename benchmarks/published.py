"""Networks and method of the workloads that other simulators publish, which results/published.json describes.

The layers are those of their code, whose initial weights may be others.
"""

from __future__ import annotations

from torch import nn

from coterie.core.method import Method
from coterie.methods.fedavg import FedAvg
from coterie.models import Network
from coterie.models.network import batch_norm
from coterie.models.resnet import STAGES, Block
from coterie.models.series import Hidden

Shape = tuple[int, ...]


class FedAvgWithoutTuning(FedAvg):
    """FedAvg without the final step of FedAvg-FT, which other simulators do not have."""

    client_finish = Method.client_finish


def blazefl_cnn(shape: Shape, classes: int) -> Network:
    """Two convolutions of 6 and 16 channels, then 120 and 84 units: the CNN of PyTorch's CIFAR-10 tutorial."""
    side = ((shape[1] - 4) // 2 - 4) // 2
    encoder = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * side**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
    )  # fmt: skip
    return Network(encoder, nn.Linear(84, classes))


def resnet18_imagenet(shape: Shape, classes: int) -> Network:
    """torchvision's ResNet-18: a 7 x 7 convolution with stride 2 and a pooling layer before the blocks."""
    layers = [nn.Conv2d(shape[0], 64, 7, 2, padding=3, bias=False), batch_norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for after, stride in STAGES:
        layers += [Block(channels, after, stride, batch_norm), Block(after, after, 1, batch_norm)]
        channels = after
    return Network(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(channels, classes))


def conv_dropout(shape: Shape, classes: int) -> Network:
    """Two 3 x 3 convolutions of 32 and 64 channels, one pooling layer, 128 units, dropout after both (Reddi 2021)."""
    side = (shape[1] - 4) // 2
    encoder = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * side**2, 128), nn.ReLU(), nn.Dropout(0.5),
    )  # fmt: skip
    return Network(encoder, nn.Linear(128, classes))


def char_lstm(shape: Shape, classes: int) -> Network:
    """Two LSTM layers of 256 units over embeddings of 8 numbers, with an output for every position (Reddi 2021)."""
    return Network(nn.Sequential(nn.Embedding(classes, 8), Hidden(8, 256, 2, per_token=True)), nn.Linear(256, classes))


NETWORKS = {
    "blazefl-cnn": blazefl_cnn,
    "char-lstm": char_lstm,
    "conv-dropout": conv_dropout,
    "resnet18-imagenet": resnet18_imagenet,
}
