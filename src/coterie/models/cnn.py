"""The small convolutional networks of the papers."""

from __future__ import annotations

from torch import nn

from coterie.core.errors import CoterieError
from coterie.models.network import (
    Conv,
    Network,
    Shape,
    check_image,
    conv_layers,
    flat_size,
    smallest_side,
)

GREY = (Conv(16, 5), Conv(32, 5, 1))  # for one channel
COLOUR = (Conv(16, 5), Conv(32, 5, 1), Conv(64, 3, 1))
AKD_COLOUR = (Conv(16, 3), Conv(32, 4), Conv(64, 3))
CONVNET = (Conv(64, 5), Conv(64, 5))
CONV4 = (Conv(64, 3, 1),) * 4


def cnn(shape: Shape, classes: int) -> Network:
    """FedPAC's networks: two convolutions for one channel, three for more; d = 128."""
    convs, leaky = _by_channels(shape, COLOUR), nn.LeakyReLU(0.01)
    check_image("cnn", shape, smallest_side(convs))
    encoder = nn.Sequential(
        *conv_layers(shape[0], convs, leaky), nn.Flatten(), nn.Linear(flat_size(shape, convs), 128), leaky
    )
    return Network(encoder, nn.Linear(128, classes))


def convnet(shape: Shape, classes: int) -> Network:
    """FedReG's network, first used by FedDyn: two convolutions of 64 channels, then 384 and 192 units; d = 192."""
    check_image("convnet", shape, smallest_side(CONVNET))
    relu = nn.ReLU()
    encoder = nn.Sequential(
        *conv_layers(shape[0], CONVNET, relu),
        nn.Flatten(),
        nn.Linear(flat_size(shape, CONVNET), 384),
        relu,
        nn.Linear(384, 192),
        relu,
    )
    return Network(encoder, nn.Linear(192, classes))


def conv4(shape: Shape, classes: int, bn: str = "nostats") -> Network:
    """FedCRC's network, as in FedBABU: four convolutions of 64 channels; d = 256 for 32 x 32 pixels.

    bn: none | nostats (BatchNorm with batch statistics only) | stats (with running statistics).
    """
    if bn not in ("none", "nostats", "stats"):
        raise CoterieError(f"bn of model 'conv4' must be none, nostats or stats, got '{bn}'")
    check_image("conv4", shape, smallest_side(CONV4))
    encoder = nn.Sequential(*conv_layers(shape[0], CONV4, nn.ReLU(), bn), nn.Flatten())
    return Network(encoder, nn.Linear(flat_size(shape, CONV4), classes))


def akd_cnn(shape: Shape, classes: int, head_depth: str | None = None) -> Network:
    """PFAKD's networks: two convolutions and 128 units for one channel, three and 64 units for more.

    head_depth: last (the last layer) | all_fc (both linear layers). The paper says last; its code uses all_fc
    for color images, and so does the default.
    """
    convs = _by_channels(shape, AKD_COLOUR)
    check_image("akd-cnn", shape, smallest_side(convs))
    grey = shape[0] == 1
    head_depth = head_depth or ("last" if grey else "all_fc")
    if head_depth not in ("last", "all_fc"):
        raise CoterieError(f"head_depth of model 'akd-cnn' must be last or all_fc, got '{head_depth}'")
    units = 128 if grey else 64
    body = [*conv_layers(shape[0], convs, nn.ReLU()), nn.Flatten()]
    hidden = [nn.Linear(flat_size(shape, convs), units), nn.ReLU()]
    last = nn.Linear(units, classes)
    if head_depth == "last":
        return Network(nn.Sequential(*body, *hidden), last)
    return Network(nn.Sequential(*body), nn.Sequential(*hidden, last))


def akd_cnn_text(shape: Shape, classes: int) -> Network:
    """The network of PFAKD's text, which its code has for color images only: three convolutions, two linear layers and
    the last one as the head, for any number of channels; d = 64."""
    check_image("akd-cnn-text", shape, smallest_side(AKD_COLOUR))
    body = [*conv_layers(shape[0], AKD_COLOUR, nn.ReLU()), nn.Flatten()]
    hidden = [nn.Linear(flat_size(shape, AKD_COLOUR), 64), nn.ReLU()]
    return Network(nn.Sequential(*body, *hidden), nn.Linear(64, classes))


def _by_channels(shape: Shape, colour: tuple[Conv, ...]) -> tuple[Conv, ...]:
    return GREY if shape[:1] == (1,) else colour
