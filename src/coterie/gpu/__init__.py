"""The machine room: fused operations, CUDA-graph recording, optimistic execution."""
