"""FedReG: the method, its rebalanced sets, and the augmentations that fill them."""

from coterie.methods.fedreg.method import FedReG

__all__ = ["FedReG"]
