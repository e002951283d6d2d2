"""The parts of a report, each from runs to markup. A part that has nothing to show is empty."""
