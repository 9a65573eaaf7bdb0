"""What the guarded connections lean on inside uvicorn is there, in the versions that were tried."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import uvicorn
from packaging.specifiers import SpecifierSet
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

TRY = (
    f"uvicorn {uvicorn.__version__} was not tried: veca/serve/protocol.py leans on its inside. Run "
    "tests/serve/test_bounds.py, test_hostile.py and test_load.py with it; then widen the range in pyproject.toml"
)


def test_this_uvicorn_was_tried() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"uvicorn([^"]+)"', text)
    assert found is not None
    tried = SpecifierSet(found[1])
    assert uvicorn.__version__ in tried, TRY
    assert "1000" not in tried, "the range must have an end: a new uvicorn is tried before it is let in"


def test_what_is_overridden_and_read_is_there() -> None:
    async def app(*_: object) -> None: ...

    async def attributes() -> set[str]:
        config = uvicorn.Config(app, http=H11Protocol, ws="none", lifespan="off", interface="asgi3")
        config.load()
        return set(vars(H11Protocol(config, ServerState(), {})))

    state = asyncio.run(attributes())
    assert {"cycle", "flow", "conn", "transport", "connections", "loop", "scope"} <= state, TRY
    for name in ("on_response_complete", "send_400_response", "pause_writing", "resume_writing", "eof_received"):
        assert callable(getattr(H11Protocol, name, None)), f"{name}: {TRY}"
    cycle = set(re.findall(r"self\.(\w+)", inspect.getsource(RequestResponseCycle.__init__)))
    assert {"disconnected", "message_event", "more_body", "response_started", "response_complete"} <= cycle, TRY
    assert "write_paused" in inspect.getsource(FlowControl), TRY
    assert "sockets" in inspect.signature(Server.shutdown).parameters, TRY
