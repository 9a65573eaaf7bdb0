"""What Prometheus reads at /metrics; each service has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.requests = Counter("veca_requests", "Requests answered, by route and status", ["route", "status"], **own)
        self.rejected = Counter("veca_rejected", "Requests that got no features, by reason", ["reason"], **own)
        self.seconds = Histogram(
            "veca_request_seconds", "From the request's head to its answer", ["route"], buckets=SECONDS, **own
        )
        self.decode_seconds = Histogram("veca_decode_seconds", "Decoding one image", buckets=SECONDS, **own)
        self.wait_seconds = Histogram("veca_wait_seconds", "Waiting for the model", buckets=SECONDS, **own)
        self.model_seconds = Histogram("veca_model_seconds", "One request in the model", buckets=SECONDS, **own)
        self.queue = Gauge("veca_queue", "Requests in hand: decoding, waiting or in the model", **own)
        self.held = Gauge("veca_held_bytes", "Bytes of uploads, waiting pictures and answers held now", **own)
        self.connections = Gauge("veca_connections", "Open connections", **own)
        self.size = Gauge("veca_elastic_size", "Image size that a request without its own gets now", **own)
        self.patches = Gauge("veca_elastic_patches", "Share of the patches that such a request gets now", **own)
        self.expected = Gauge("veca_expected_seconds", "Estimated time of a request that arrives now", **own)

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))
