"""A client's model after a run: predict, evaluate, export, adapt."""
