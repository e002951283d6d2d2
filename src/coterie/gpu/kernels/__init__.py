"""Triton kernels, one file for each module of `coterie.gpu`. Imported on first use: Triton is needed on GPUs only."""
