"""The folder that `push_to_hub` uploads: its card says what the records say, and the models in it load."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import veca
import veca.integrations.transformers as integration
from veca.integrations.hub import push_to_hub, write_folder

SETTINGS = {"teacher": "some/teacher", "train": ["photos-000.tar", "photos-001.tar"], "student": "teacher", "lr": 3e-4,
            "steps": 6250, "budgets": [8, 64], "seed": 0, "workers": 2}  # fmt: skip
GRID = {
    "196": {
        "8": {"dense_cosine": 0.5, "global_cosine": 0.6},
        "64": {"dense_cosine": 0.71234, "global_cosine": 0.8},
    }
}
PROBE = {
    "task": "segment", "data": "voc-seg",
    "rows": [{"model": "best", "cores": 64, "pixels": 448, "metrics": {"mIoU": {"mean": 0.61234, "deviation": 0.002}}}],
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "probe").mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps(SETTINGS))
    records = [
        {"kind": "train", "step": 10, "loss": 1.0},
        {"kind": "validation", "step": 20, "loss": 0.4, "grid": GRID},
        {"kind": "validation", "step": 30, "loss": 0.5, "grid": {}},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "probe/results.json").write_text(json.dumps(PROBE))
    return run


def test_a_card_shows_the_validation_of_its_own_weights(
    plain: veca.Veca, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plain.card, "steps", 30)  # the last weights, not the best
    write_folder(plain, tmp_path / "out", run_folder)
    assert "Validation at step 30" in (tmp_path / "out/README.md").read_text()


def test_a_card_from_a_run(plain: veca.Veca, run_folder: Path, images: torch.Tensor, tmp_path: Path) -> None:
    write_folder(plain, tmp_path / "out", run_folder, "you/veca-mini")
    card = (tmp_path / "out/README.md").read_text()
    header, body = card.split("---\n")[1:]
    assert "license: apache-2.0" in header
    assert "library_name: veca" in header
    assert "# you/veca-mini" in body
    assert 'veca.load("you/veca-mini")' in body
    assert "**Teacher**: nobody" in body  # what the weights' own card says comes before the run's settings
    assert "photos-000.tar, photos-001.tar" in body
    assert "| lr | 0.0003 |" in body
    assert "workers" not in body
    assert "Validation at step 20" in body
    assert "| 196 | 64 | 0.7123 | 0.8000 |" in body
    assert "`veca probe segment` on voc-seg" in body
    assert "| best | 64 | 448 | mIoU | 0.6123 ± 0.0020 |" in body
    assert f"{sum(one.numel() for one in plain.parameters()):,} parameters" in body
    torch.testing.assert_close(veca.load(tmp_path / "out")(images).cls, plain(images).cls)
    assert integration.VecaModel.from_pretrained(tmp_path / "out").config.card == plain.card


def test_a_card_without_records_says_so(tmp_path: Path) -> None:
    write_folder(veca.create_model("veca_tiny", depth=1), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "**Teacher**: not recorded" in card
    assert "**Training images**: not recorded" in card
    assert "**Licence**: not recorded" in card
    assert "None recorded." in card
    assert "license:" not in card


def test_a_transformers_model_with_a_head(plain: veca.Veca, images: torch.Tensor, tmp_path: Path) -> None:
    model = integration.VecaForImageClassification.from_plain(plain, num_labels=3).eval()
    write_folder(model, tmp_path / "out")
    assert "veca.VecaForImageClassification.from_pretrained" in (tmp_path / "out/README.md").read_text()
    again = integration.VecaForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again(images).logits, model(images).logits, atol=1e-6, rtol=0)


def test_what_cannot_be_published(plain: veca.Veca, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot publish a Linear"):
        write_folder(torch.nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ValueError, match="no such run folder"):
        write_folder(plain, tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        write_folder(plain, tmp_path / "out", tmp_path)


class Hub(BaseHTTPRequestHandler):
    """Just enough of the hub's protocol to take a commit of small files."""

    commit: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer: dict[str, object] = {}
        if self.path.endswith("/repos/create"):
            answer = {"url": "https://huggingface.co/you/mini"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            answer = {"files": modes}
        elif "/commit/" in self.path:
            type(self).commit = [json.loads(line) for line in body.splitlines()]
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": "https://huggingface.co/you/mini/commit/0"}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def test_the_upload(plain: veca.Veca, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        push_to_hub(plain, "you/mini", run=run_folder, token="hf_none")
    finally:
        server.shutdown()
    sent = {line["value"]["path"]: line["value"] for line in Hub.commit if line["key"] == "file"}
    files = {"README.md", "config.json", "model.safetensors", "modeling_veca.py", "preprocessor_config.json"}
    assert set(sent) == files
