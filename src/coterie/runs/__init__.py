"""A run on disk: everything that reads or writes a run folder."""
