"""What tasks share: the contract, options, heads, views and their cached features, labels per pixel, scores."""
