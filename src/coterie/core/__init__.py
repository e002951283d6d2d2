"""The vocabulary: pure functions on tensors, and what a method, a model and a client's data are."""
