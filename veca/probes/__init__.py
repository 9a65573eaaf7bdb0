"""Linear probes: what frozen features are worth, as tables anyone can reproduce (DESIGN section 4)."""
