"""ONNX files against PyTorch, in the process and in an environment that has no PyTorch; and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from environments import new_environment
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from onnx import numpy_helper

import veca
from veca.config import VecaConfig
from veca.errors import InputError
from veca.export import ExportedNetwork, Mixed, bundled_photos, export, main, open_session
from veca.model import Veca

ROOT = Path(__file__).parents[1]
SMALL = {"depth": 2, "width": 48, "heads": 2, "bank": 12}
VARIANTS = {
    "paper": {},
    "converted": {"patch_size": 14, "mlp": "gelu", "mlp_ratio": 4.0, "positions": "table", "table_size": 5},
    "projected": {"out_width": 20, "rope_zero_fraction": 1.0},
}


def small(**overrides: object) -> Veca:
    torch.manual_seed(1)
    model = Veca(VecaConfig(**{**SMALL, **overrides}))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_exported_network_computes_the_same(variant: str) -> None:
    model = small(**VARIANTS[variant])
    p = model.patch_size
    for cores in (1, 5, 12):
        images = torch.randn(2, 3, 3 * p, 4 * p)
        with torch.no_grad():
            ours = model(images, cores=cores)
            theirs = ExportedNetwork(model, cores).eval()(images)
        for name, tensor in zip(("cls", "patches", "cores", "coords"), theirs, strict=True):
            torch.testing.assert_close(tensor, getattr(ours, name), atol=2e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def written(files: Path) -> tuple[Veca, Path]:
    """A model and its float32 file for 7 cores, which takes a while to make."""
    model, path = small(), files / "written.onnx"
    export(model, path, 7, False, bundled_photos()[:1])
    return model, path


def agrees(model: Veca, path: Path, cores: int) -> None:
    """Outputs of a file at sizes and batches its export never saw."""
    session = open_session(path)
    assert [(i.name, i.shape[1]) for i in session.get_inputs()] == [("images", 3)]
    p = model.patch_size
    for batch, height, width in ((1, 1, 1), (3, 2, 9), (1, 17, 4)):
        images = torch.randn(batch, 3, height * p, width * p)
        with torch.no_grad():
            ours = model(images, cores=cores)
        results = session.run(["cls", "patches", "cores", "coords"], {"images": images.numpy()})
        for result, tensor in zip(results, (ours.cls, ours.patches, ours.cores, ours.coords), strict=True):
            np.testing.assert_allclose(result, tensor.numpy(), atol=1e-4, rtol=0)


def test_onnx_agrees_with_pytorch(written: tuple[Veca, Path]) -> None:
    model, path = written
    agrees(model, path, 7)


def test_the_callers_model_stays_as_it_is(files: Path) -> None:
    model = small(depth=1).bfloat16().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, files / "mine.onnx", 3, False, bundled_photos()[:1])
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_onnx_of_a_converted_model_agrees_too(files: Path) -> None:
    """GELU, patches of 14 pixels and an additive table, which the graph resizes as PyTorch does."""
    model = small(**VARIANTS["converted"])
    agreement = export(model, files / "converted.onnx", 1, False, bundled_photos()[:2])
    assert agreement.difference < 1e-4
    agrees(model, files / "converted.onnx", 1)


def test_onnx_at_mixed_scale_agrees_too(files: Path) -> None:
    """One size, any batch, of which every image has its own cells; a blank one, where all cells are alike, too."""
    model, path, side = small(**VARIANTS["converted"]), files / "mixed.onnx", 9 * 14
    export(model, path, 5, False, bundled_photos()[:1], Mixed(0.5, side))
    session = open_session(path)
    images = torch.randn(3, 3, side, side) * torch.rand(3, 1, 9, 9).repeat_interleave(14, 2).repeat_interleave(14, 3)
    images[1] = 0
    with torch.inference_mode():
        ours = model(images, cores=5, patches=0.5)
    assert ours.tokens == [39] * 3
    results = session.run(["cls", "patches", "cores", "coords"], {"images": images.numpy()})
    for result, tensor in zip(results, (ours.cls, ours.patches, ours.cores, ours.coords), strict=True):
        np.testing.assert_allclose(result, tensor.numpy(), atol=1e-4, rtol=0)


def weight_bytes(path: Path) -> int:
    return sum(numpy_helper.to_array(tensor).nbytes for tensor in onnx.load(path).graph.initializer)


def test_eight_bits_are_smaller_close_and_judged(
    written: tuple[Veca, Path], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = written
    monkeypatch.setattr("veca.export.write_onnx", lambda model, cores, path, mixed: shutil.copy(plain, path))
    path = files / "int8.onnx"
    agreement = export(model, path, 7, True, bundled_photos()[:2])
    assert 0.99 <= agreement.dense_cosine < 1
    integers = {node.op_type for node in onnx.load(path).graph.node if "Integer" in node.op_type}
    assert integers == {"MatMulInteger"}
    assert weight_bytes(path) < 0.6 * weight_bytes(plain)  # of so small a model the graph takes as much as the weights
    monkeypatch.setattr("veca.export.LEAST_COSINE", 1.0)
    with pytest.raises(InputError, match=r"8 bits change the dense feature too much: cosine"):
        export(model, files / "refused.onnx", 7, True, bundled_photos()[:1])
    assert not list(files.glob("*refused*"))


def test_a_file_that_disagrees_never_takes_its_place(
    written: tuple[Veca, Path], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = written
    monkeypatch.setattr("veca.export.write_onnx", lambda model, cores, path, mixed: shutil.copy(plain, path))
    target = files / "wrong.onnx"
    target.write_bytes(b"the file that was there before")
    with pytest.raises(InputError, match="differs from PyTorch by"):
        export(small(norm_eps=0.5), target, 7, False, bundled_photos()[:1])
    assert target.read_bytes() == b"the file that was there before"
    assert not list(files.glob(".wrong*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "model.pt"], "--out is an .onnx file, not model.pt"),
        ([], "give --out FILE.onnx or --triton DIR"),
        (["--out", "m.onnx", "--triton", "repository"], "give --out FILE.onnx or --triton DIR"),
        (["--triton", "model/config.json"], "--triton model/config.json is a file, not a folder"),
        (["--out", "m.onnx", "--cores", "13"], "from 1 to 12"),
        (["--out", "m.onnx", "--cores", "4", "--photos", "none.jpg"], "none.jpg: no such file"),
        (["--out", "m.onnx", "--cores", "4", "--patches", "0.5"], "--patches below 1 and --size go together"),
        (["--out", "m.onnx", "--cores", "4", "--size", "64"], "--patches below 1 and --size go together"),
        (
            ["--out", "m.onnx", "--cores", "4", "--patches", "0.5", "--size", "65"],
            "multiple of the patch size 16, not 65",
        ),
        (["--out", "m.onnx", "--cores", "4", "--patches", "0"], "patches must lie above 0"),
        (["--triton", "r", "--cores", "4", "--patches", "0.5", "--size", "64"], "--triton is for files that take"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small().save(files / "model")
    monkeypatch.chdir(files)
    with pytest.raises(InputError, match=re.escape(message)):
        main([str(files / "model"), *arguments])
    assert not (files / "m.onnx").exists()


TRITON = {  # of Triton's model_config.proto, what we write: field, its number, its kind
    "ModelTensor": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "int64*")},
    "ModelConfig": {
        "name": (1, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "ModelTensor*"),
        "output": (6, "ModelTensor*"),
        "dynamic_batching": (11, "Nothing"),
        "backend": (17, "string"),
    },
    "Nothing": {},
}


def read_triton_config(text: str) -> Any:
    """By protobuf's own parser of its text format, which refuses what the messages above do not have."""
    file = descriptor_pb2.FileDescriptorProto(name="triton.proto", package="triton", syntax="proto3")
    file.enum_type.add(name="DataType").value.extend(
        descriptor_pb2.EnumValueDescriptorProto(name=name, number=number)
        for name, number in (("TYPE_INVALID", 0), ("TYPE_FP32", 11))
    )
    field = descriptor_pb2.FieldDescriptorProto
    for message, fields in TRITON.items():
        kind = file.message_type.add(name=message)
        for name, (number, type_) in fields.items():
            plain = type_.removesuffix("*")
            one = kind.field.add(name=name, number=number, label=3 if type_ != plain else 1)
            if plain in ("string", "int32", "int64"):
                one.type = getattr(field, f"TYPE_{plain.upper()}")
            else:
                one.type_name = f".triton.{plain}"
                one.type = field.TYPE_ENUM if plain == "DataType" else field.TYPE_MESSAGE
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("triton.ModelConfig"))()
    return text_format.Parse(text, config)


def test_a_repository_for_triton(tmp_path: Path) -> None:
    """Its configuration says of the file beside it what onnxruntime finds in it."""
    model = small(**VARIANTS["projected"])
    model.save(tmp_path / "my model")
    main([str(tmp_path / "my model"), "--cores", "6", "--triton", str(tmp_path / "repository")])
    (folder,) = (tmp_path / "repository").iterdir()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["1", "1/model.onnx", "config.pbtxt"]
    config = read_triton_config((folder / "config.pbtxt").read_text())
    assert (config.name, config.backend) == (folder.name, "onnxruntime") == ("my-model-6", "onnxruntime")
    session = open_session(folder / "1" / "model.onnx")
    images = np.random.default_rng(0).standard_normal((config.max_batch_size, 3, 32, 48), dtype=np.float32)
    found = dict(zip([each.name for each in session.get_outputs()], session.run(None, {"images": images}), strict=True))
    assert [(each.name, list(each.dims)) for each in config.input] == [("images", [3, -1, -1])]
    assert [each.name for each in config.output] == list(found)
    for each in config.output:
        assert each.data_type == 11
        assert found[each.name].dtype == np.float32
        assert all(wanted in (-1, got) for wanted, got in zip(each.dims, found[each.name].shape[1:], strict=True))
    with torch.no_grad():
        expected = model(torch.from_numpy(images), cores=6)
    np.testing.assert_allclose(found["patches"], expected.patches.numpy(), atol=1e-4)


@pytest.mark.end_to_end
def test_the_page_s_ten_lines_run_without_torch(files: Path, tmp_path: Path) -> None:
    """docs/deploy.md, in an environment with onnxruntime, numpy and pillow only."""
    from PIL import Image

    model = small()
    model.save(tmp_path / "model")
    main(
        [
            str(tmp_path / "model"),
            "--cores",
            "6",
            "--out",
            str(tmp_path / "model.onnx"),
            "--photos",
            str(bundled_photos()[1]),
        ]
    )
    Image.open(bundled_photos()[1]).save(tmp_path / "photo.jpg", quality=95)
    code = re.search(r"```python\n(import json, numpy, onnxruntime.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    python = new_environment(tmp_path / "clean", ["onnxruntime", "numpy", "pillow"])
    script = code[1] + "import importlib.util\nassert importlib.util.find_spec('torch') is None\n"
    script += "numpy.savez('out.npz', dense=dense, cls=cls, cores=cores, coords=coords)\n"
    subprocess.run([python, "-c", script], cwd=tmp_path, check=True)
    images = veca.preprocess(tmp_path / "photo.jpg", size=448, patch_size=16)
    with torch.no_grad():
        ours = model(images, cores=6)
    theirs = np.load(tmp_path / "out.npz")
    assert theirs["dense"].shape[:2] == ours.grid
    np.testing.assert_allclose(theirs["dense"].reshape(1, -1, 48), ours.patches.numpy(), atol=1e-4)
    np.testing.assert_allclose(theirs["cls"], ours.cls.numpy(), atol=1e-4)
