"""What VECA costs: FLOPs, latency and memory, next to a DINOv3 of the same size."""
