"""From images to features: one `Extractor` for folders, probes, the service and clusters, and `veca features` on it."""
