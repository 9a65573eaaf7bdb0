"""Hostile input, made from a seed: what is tried, how it is tried, and the table of what failed."""
