"""Attacks on our own processes on this machine: random kills, hostile messages, devices that die."""
