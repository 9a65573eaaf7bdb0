"""Saving, loading and importing weights; damaged and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import veca
from veca.config import MODELS, VecaConfig
from veca.files import whole_file
from veca.model import Veca
from veca.weights import checksum, save

TINY = VecaConfig(depth=2, width=32, heads=2, bank=8)


@pytest.fixture
def model() -> Veca:
    return Veca(TINY).eval()


@pytest.fixture
def folder(model: Veca, tmp_path: Path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


def same(a: Veca, b: Veca) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_of_every_size(name: str, tmp_path: Path) -> None:
    """Every tensor of every size comes back, in float16 to keep the large one small on disk."""
    with torch.device("meta"):
        model = veca.create_model(name)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-99, 99, parameter.shape, dtype=torch.int8))  # exact in float16
    save(model, tmp_path / name, dtype=torch.float16)
    loaded = veca.load(tmp_path / name)
    assert loaded.config == MODELS[name]
    assert same(model, loaded)


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention": "dense"},
        {"out_width": 12},
        {"mlp": "gelu", "mlp_ratio": 4.0, "positions": "table", "table_size": 3, "patch_size": 14},
    ],
)
def test_round_trip_of_every_option(overrides: dict[str, object], tmp_path: Path) -> None:
    config = VecaConfig(**{**TINY.to_dict(), **overrides})
    model = Veca(config).eval()
    model.save(tmp_path)
    loaded = veca.load(tmp_path)
    images = torch.randn(1, 3, 2 * config.patch_size, 3 * config.patch_size)
    assert loaded.config == config
    assert torch.equal(model(images).patches, loaded(images).patches)


def test_a_single_file_is_enough(folder: Path, model: Veca, tmp_path: Path) -> None:
    shutil.copy(folder / "model.safetensors", tmp_path / "alone.safetensors")
    assert same(veca.load(tmp_path / "alone.safetensors"), model)


def test_a_folder_written_by_others_needs_its_config(folder: Path, model: Veca) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # drops our metadata
    assert same(veca.load(folder), model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0", "dtype": "float32"}))
    assert same(veca.load(folder), model)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "dinov2"}))
    with pytest.raises(ValueError, match=r"not describe a VECA model.*dinov2"):
        veca.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        veca.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        veca.load(folder)


def test_load_options(folder: Path) -> None:
    loaded = veca.load(folder, cores=3, dtype=torch.bfloat16)
    assert loaded.bank.tokens.dtype == torch.bfloat16
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    out = loaded(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16))
    assert out.cores.shape[1] == 3
    assert loaded.num_prefix_tokens == 3
    with pytest.raises(ValueError, match="1 to 8"):
        veca.load(folder, cores=9)


def test_loaded_weights_do_not_follow_the_file(folder: Path, model: Veca) -> None:
    loaded = veca.load(folder)
    size = (folder / "model.safetensors").stat().st_size
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))
    assert same(loaded, model)


def test_the_card_travels_with_the_weights(model: Veca, tmp_path: Path) -> None:
    model.card = {"teacher": "somebody's ViT", "licence": "Apache-2.0"}
    model.save(tmp_path)
    assert veca.load(tmp_path).card["teacher"] == "somebody's ViT"
    assert json.loads((tmp_path / "config.json").read_text())["card"]["licence"] == "Apache-2.0"


# The authors' checkpoints.


def test_official_names_and_shapes_load_unchanged(shared: Path, tmp_path: Path) -> None:
    """Every name and shape of their small model has a place, and nothing of ours stays unfilled."""
    shapes = json.loads((shared / "reference/official_state_dicts.json").read_text())["small"]["shapes"]
    student = {f"module.{name}": torch.full(shape, 0.5) for name, shape in shapes.items()}
    torch.save({"student": student, "epoch": 3}, tmp_path / "small.pt")
    model = veca.load(tmp_path / "small.pt")
    assert model.config == MODELS["veca_small"]
    assert all((tensor == 0.5).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("theirs", ["splus", "base", "large"])
def test_official_shapes_of_the_other_sizes(shared: Path, theirs: str) -> None:
    from veca.official import config_of_official, tensors_of_official

    shapes = json.loads((shared / "reference/official_state_dicts.json").read_text())[theirs]["shapes"]
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = config_of_official(tensors, None)
    name = {"splus": "veca_small_plus", "base": "veca_base", "large": "veca_large"}[theirs]
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in veca.create_model(name).state_dict().items()}
    assert {name: tensor.shape for name, tensor in tensors_of_official(tensors).items()} == expected
    assert (config.depth, config.width, config.heads) == (
        MODELS[name].depth,
        MODELS[name].width,
        MODELS[name].heads,
    )
    assert config.hidden_width == MODELS[name].hidden_width


def test_official_config_is_honoured(shared: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(shared / "reference/tiny_official.pt", weights_only=True)
    assert veca.load(shared / "reference/tiny_official.pt").config.heads == 2  # 64 wide: a guess would say 1

    def with_config(**changes: object) -> Path:
        path = tmp_path / "changed.pt"
        torch.save({**checkpoint, "config": {**checkpoint["config"], **changes}}, path)
        return path

    assert veca.load(with_config(rope_p_zero_freqs=0.5)).config.rope_zero_fraction == 0.5
    with pytest.raises(ValueError, match="patch_embed_use_ln=True"):
        veca.load(with_config(patch_embed_use_ln=True))
    with pytest.raises(ValueError, match="num_layers = 7, but its tensors say 4"):
        veca.load(with_config(num_layers=7))


def test_official_projection_to_another_width(shared: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(shared / "reference/tiny_official.pt", weights_only=True)
    checkpoint["student"]["distill_proj.weight"] = torch.randn(10, 64)
    checkpoint["student"]["distill_proj.bias"] = torch.randn(10)
    checkpoint["config"]["distill_output_dim"] = 10
    torch.save(checkpoint, tmp_path / "projected.pt")
    out = veca.load(tmp_path / "projected.pt")(torch.zeros(1, 3, 32, 32))
    assert out.patches.shape == (1, 4, 10)
    del checkpoint["config"]["distill_output_dim"]  # the tensor itself tells
    torch.save(checkpoint, tmp_path / "projected.pt")
    assert veca.load(tmp_path / "projected.pt").config.out_width == 10


def test_import_command(shared: Path, tmp_path: Path) -> None:
    official = shared / "reference/tiny_official.pt"
    done = run("import", str(official), str(tmp_path / "ours"))
    assert done.returncode == 0, done.stderr
    assert "250,553 parameters" in done.stdout
    assert same(veca.load(tmp_path / "ours"), veca.load(official))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "veca.cli", *arguments], capture_output=True, text=True, timeout=120)


# The hub, by its local cache layout.


def test_hub_id_from_the_local_cache(
    folder: Path, model: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, commit = tmp_path / "hub", "0" * 40
    repository = cache / "models--someone--veca-mini"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        shutil.copy(file, snapshot / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert same(veca.load("someone/veca-mini"), model)
    with pytest.raises(ValueError, match=r"no local file 'someone/other'.*hub") as caught:
        veca.load("someone/other")
    assert "\n" not in str(caught.value)


# Files that are damaged, hostile or simply something else: one line that says which tensor or why.


def refused(source: Path, message: str) -> None:
    with pytest.raises(veca.InputError, match=message) as caught:
        veca.load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "not a readable safetensors file")


def test_every_flipped_byte_is_noticed(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    for position in (0, 3, 9, 40, header // 2, header, header + 1, (header + len(content)) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            loaded = veca.load(path)
        except veca.InputError as error:
            assert "\n" not in str(error)
            if position >= header:
                assert "tensor" in str(error)
                assert "checksum" in str(error)
        else:  # a flip inside a human-readable remark of the header may change nothing
            assert position < header
            path.write_bytes(content)
            assert same(loaded, veca.load(path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_any_damage_is_an_input_error_or_harmless(folder: Path, damage: list[tuple[float, int]], head: bool) -> None:
    """Bytes overwritten anywhere, or all in the header: never another kind of exception, never a hang."""
    path = folder / "model.safetensors"
    if not (folder / "original").is_file():
        shutil.copy(path, folder / "original")
    content = bytearray((folder / "original").read_bytes())
    reach = int.from_bytes(content[:8], "little") + 8 if head else len(content)
    for where, value in damage:
        content[min(int(where * reach), reach - 1)] = value
    path.write_bytes(content)
    try:
        veca.load(path)
    except veca.InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", ["[]", "3", '{"config": []}', '{"config": {"depth": "x"}}', '{"crc32": 3}', "{"])
def test_hostile_metadata(folder: Path, value: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"veca": value})
    with pytest.raises(veca.InputError):
        veca.load(folder / "model.safetensors")


def test_wrong_shape_missing_and_surplus_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"
    save_file({**tensors, "norm.weight": torch.ones(33)}, path)
    refused(folder, r"norm\.weight is 33, but this configuration needs 32")
    save_file({name: tensor for name, tensor in tensors.items() if name != "blocks.1.fc2.bias"}, path)
    refused(folder, r"lacks blocks\.1\.fc2\.bias")
    save_file({**tensors, "extra.weight": torch.ones(3)}, path)
    refused(folder, r"has too much: extra\.weight")
    save_file({**tensors, "norm.weight": torch.ones(32, dtype=torch.int64)}, path)
    refused(folder, r"norm\.weight is torch\.int64, not floating point")


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    refused(tmp_path / "photo.jpg", "is not a model")
    (tmp_path / "text.safetensors").write_text("hello, this is not a model at all")
    refused(tmp_path / "text.safetensors", "not a readable safetensors file")
    (tmp_path / "text.pt").write_text("hello")
    refused(tmp_path / "text.pt", "cannot be read as weights")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"holds no model\.safetensors")
    refused(tmp_path / "absent", "no model at")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", "holds a list")
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", "not a VECA checkpoint")


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/veca-test-code-ran",)


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, by: str) -> None:
    marker = Path("/tmp/veca-test-code-ran")
    marker.unlink(missing_ok=True)
    path = tmp_path / "evil.pt"
    if by == "torch":
        torch.save({"student": Payload()}, path)
    else:
        path.write_bytes(pickle.dumps({"student": Payload()}))
    refused(path, "cannot be read as weights")
    assert not marker.exists()


def test_damaged_checkpoint(shared: Path, tmp_path: Path) -> None:
    content = (shared / "reference/tiny_official.pt").read_bytes()
    path = tmp_path / "theirs.pt"
    path.write_bytes(content[: len(content) // 2])
    refused(path, "cannot be read as weights")
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    path.write_bytes(damaged)
    refused(path, r"damaged: the content of its record .* does not match its checksum")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", None, "num_heads = None, which is not a number"),
        ("mlp_ratio", "four", "mlp_ratio = 'four', which is not a number"),
        ("patch_embed.proj.weight", torch.zeros(64, 768), "has 2 axes"),
        ("query_token_chunks.1", torch.zeros(8), "has 1 axes"),
        ("query_token_chunks.1", torch.zeros(1, 8, 3), "different widths"),
    ],
)
def test_malformed_official_checkpoints(shared: Path, tmp_path: Path, name: str, value: object, message: str) -> None:
    checkpoint = torch.load(shared / "reference/tiny_official.pt", weights_only=True)
    checkpoint["student" if isinstance(value, torch.Tensor) else "config"][name] = value
    torch.save(checkpoint, tmp_path / "theirs.pt")
    refused(tmp_path / "theirs.pt", message)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_quota_is_the_disk_saying_no(tmp_path: Path, kind: str) -> None:
    """The writers hide what the disk said; `whole_file` says it, and leaves nothing behind."""

    def write(path: Path) -> None:
        with whole_file(path) as temporary:
            {"safetensors": save_file, "pt": torch.save}[kind]({"x": torch.zeros(100_000)}, temporary)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="the disk did not take all of it") as caught:
            write(tmp_path / f"big.{kind}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / f"big.{kind}")
    assert list(tmp_path.iterdir()) == []


def test_saving_over_a_file_is_refused(model: Veca, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(veca.InputError, match="it is a file"):
        model.save(tmp_path / "file")


def test_the_processors_settings_follow_the_patch_size_and_are_otherwise_left_alone(tmp_path: Path) -> None:
    def stored() -> dict[str, object]:
        return json.loads((tmp_path / "model/preprocessor_config.json").read_text())

    Veca(TINY).save(tmp_path / "model")
    (tmp_path / "model/preprocessor_config.json").write_text(json.dumps({**stored(), "size": {"shortest_edge": 96}}))
    Veca(TINY).save(tmp_path / "model")
    assert stored()["size"] == {"shortest_edge": 96}
    Veca(replace(TINY, patch_size=14)).save(tmp_path / "model")
    assert stored()["patch_size"] == 14


def test_a_failed_save_leaves_the_old_model(folder: Path, model: Veca, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Veca(TINY)

    def full_disk(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("veca.weights.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        other.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "modeling_veca.py",
        "preprocessor_config.json",
    ]
    assert same(veca.load(folder), model)


def test_killed_while_saving_leaves_a_whole_model(tmp_path: Path) -> None:
    """A process that saves again and again is killed at a random moment: what is there loads."""
    script = (
        "import sys, torch, veca\n"
        "from veca.config import VecaConfig\n"
        "model = veca.Veca(VecaConfig(depth=4, width=128, heads=2))\n"
        "model.save(sys.argv[1]); print('saved', flush=True)\n"
        "while True: model.save(sys.argv[1])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert veca.load(tmp_path / "m").config.width == 128


def test_checksum_is_of_the_stored_bytes() -> None:
    import zlib

    tensor = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    assert checksum(tensor) == zlib.crc32(b"\x80\x3f\x20\xc0")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, model: Veca, value: float) -> None:
    with torch.no_grad():
        model.blocks[1].fc2.weight[3, 5] = value
    model.save(folder)
    refused(folder, r"tensor blocks\.1\.fc2\.weight has values that are not finite")


def test_weights_too_large_for_the_type_they_are_loaded_in_are_refused(folder: Path, model: Veca) -> None:
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    model.save(folder)
    assert veca.load(folder).norm.weight[0] == 1e6
    with pytest.raises(veca.InputError, match=r"tensor norm\.weight has values that are not finite in float16"):
        veca.load(folder, dtype=torch.float16)


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_norm_that_is_none_is_refused(eps: float) -> None:
    with pytest.raises(veca.InputError, match="norm_eps must lie in"):
        VecaConfig(norm_eps=eps)
    with pytest.raises(veca.InputError, match="leaves no MLP"):
        VecaConfig(mlp_ratio=1e-9)


def test_configuration_and_types_are_under_a_checksum(folder: Path) -> None:
    """A changed setting, a missing checksum or another type of the same size: each loads as a whole file otherwise."""
    path = folder / "model.safetensors"
    save(veca.load(folder), folder, dtype=torch.float16)
    content = path.read_bytes()
    for old, new in [
        (rb"\"norm_eps\": 1e-05", rb"\"norm_eps\": 1e-03"),
        (rb"\"norm.weight\": ", rb"\"norm.weighs\": "),
        (b'"norm.weight":{"dtype":"F16"', b'"norm.weight":{"dtype":"BF16"'),
    ]:
        assert content.count(old) == 1
        changed = content.replace(old, new)
        start = int.from_bytes(content[:8], "little") + len(new) - len(old)
        path.write_bytes(start.to_bytes(8, "little") + changed[8:])
        refused(path, "its configuration or list of tensors does not match its checksum")
    path.write_bytes(content)
    veca.load(path)


def test_files_without_checksums_load(folder: Path, model: Veca) -> None:
    """Those of earlier editions have one per tensor; those of others none."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        text = file.metadata()["veca"]
    for metadata in ({"veca": text}, {}):
        save_file(load_file(path), path, metadata=metadata)
        assert same(veca.load(folder), model)


def test_brackets_in_brackets_are_one_line(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"veca": 100_000 * "["})
    refused(folder, "not a readable safetensors file")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(100_000 * "[")
    refused(folder, "is not readable JSON")


def archive(path: Path, program: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive of torch.save with another program in it."""
    torch.save({"student": torch.zeros(8)}, path)
    with zipfile.ZipFile(path) as file:
        records = {record.filename: file.read(record) for record in file.infolist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in records.items():
            file.writestr(name, program if program and name.endswith("data.pkl") else content)
    return path


def memory_to_refuse(path: Path, message: str) -> float:
    """Megabytes that a process grows by while it refuses the file."""
    script = (
        "import resource, sys, veca\n"
        "veca.create_model('veca_tiny', depth=1)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "before = peak()\n"
        "try: veca.load(sys.argv[1])\n"
        "except veca.InputError as error: print(peak() - before, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=120)
    grown, _, said = done.stdout.partition(" ")
    assert message in said, done.stdout + done.stderr
    return float(grown)


@pytest.mark.end_to_end
def test_a_small_checkpoint_cannot_ask_for_much(tmp_path: Path) -> None:
    gigabyte = b"(J\x00\x00\x00\x40tR."
    for program in (b"\x80\x02cbuiltins\nbytearray\n", b"\x80\x02ctorch\nFloatTensor\n"):
        path = archive(tmp_path / "small.pt", program + gigabyte)
        assert memory_to_refuse(path, "cannot be read as weights: it calls") < 100
        path.write_bytes(program + gigabyte)  # as before PyTorch 1.6
        assert memory_to_refuse(path, "is not an archive as torch.save writes it") < 100
    torch.save({f"blocks.{n}.fc2.weight": torch.zeros(1).expand(4096, 4096) for n in range(12)}, path)
    assert path.stat().st_size < 30_000
    assert memory_to_refuse(path, "bytes of weights but holds") < 100
    archive(path, b"\x80\x02" + 10**8 * b"0", zipfile.ZIP_DEFLATED)
    assert memory_to_refuse(path, "it is compressed") < 100


def test_a_setting_that_never_ends_is_cut_short(shared: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(shared / "reference/tiny_official.pt", weights_only=True)
    endless: list[object] = []
    for _ in range(64):
        endless = [endless, endless]
    torch.save({**checkpoint, "config": {**checkpoint["config"], "mlp_ratio": endless}}, tmp_path / "theirs.pt")
    refused(tmp_path / "theirs.pt", "mlp_ratio = .* is not a number")
