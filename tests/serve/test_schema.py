"""schemathesis on the running service: whatever its description allows or forbids, no server error."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.schemas import BaseSchema

from .process import Server, picture

IMAGES = st.sampled_from([picture(seed, 40, 30, kind) for seed, kind in enumerate(("PNG", "JPEG", "GIF", "WEBP"))])
schemathesis.openapi.media_type("application/octet-stream", st.binary(max_size=200) | IMAGES)
schemathesis.openapi.format("binary", st.binary(max_size=200) | IMAGES)


@pytest.fixture
def api(start: Callable[..., Server], request: pytest.FixtureRequest) -> BaseSchema:
    server: Server = request.getfixturevalue("server")
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_server_error(case: schemathesis.Case) -> None:
    # Bytes that are "an image" to the description need not be one, so a refusal of valid data is no failure here.
    case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance], timeout=60)
