"""Linear probes: what frozen features are worth, as tables anyone can reproduce (docs/probes.md)."""
