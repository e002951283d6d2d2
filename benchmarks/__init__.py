"""Speed and memory, measured against a plain loop over modules and against the limits of the machine, in one run."""
