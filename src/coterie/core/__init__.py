"""The vocabulary: methods, models, batches, optimizers, losses, trees of tensors. No GPU code."""
