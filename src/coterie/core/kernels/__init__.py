"""Triton kernels, a file for each kind of layer. They are imported where they run: on GPUs, and by tests."""
