"""Chaos tests of local processes: random kills, hostile messages, failing devices."""
