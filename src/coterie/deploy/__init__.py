"""A federation on real machines: the server, devices, and what they tell each other before they begin."""
