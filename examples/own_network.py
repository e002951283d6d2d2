"""Your own network: any torch module that takes a batch of samples and returns one tensor.

python examples/own_network.py

On the command line: coterie run fedper --model examples.own_network:SmallNet
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import coterie


class SmallNet(nn.Module):
    """Depthwise and pointwise convolutions for gray images of 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.Conv2d(16, 32, 1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
        )
        self.out = nn.Linear(32 * 9, 10)  # the head: what FedPer keeps on each client

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))  # (B, 10) logits


def main() -> None:
    data = coterie.load_clients("fashion-mnist-small", num_clients=6, local_size=80, test_size=40)
    network = SmallNet()
    result = coterie.run("fedper", data, network, rounds=5, local_epochs=2, lr=0.05, progress=False)
    print(result)
    print(f"head: {result.model.head_name}")  # found by Coterie; head="..." names another layer

    # What a client has is your network with its own weights, in a module that also preprocesses raw images.
    model = result.personal_model(3)
    images, _ = data.test.client(3)
    own = SmallNet().eval()
    own.load_state_dict(model.network_state_dict())
    with torch.no_grad():
        torch.testing.assert_close(own(model.preprocess(images)), model(images))
    torch.save(own.state_dict(), "client3.pt")
    print("client 3's weights are in client3.pt")


if __name__ == "__main__":
    main()
