"""Everybody's model after a run: read from the folder that the run left, used, measured, written for other programs."""
