"""FedPAC: the method, its head weights, and the GPU kernel that finds them."""

from coterie.methods.fedpac.method import FedPAC

__all__ = ["FedPAC"]
