"""Save, load and import weights. Nothing in a file can run code, and a damaged file is named before it is used.

A model folder holds `model.safetensors` and `config.json`, and `calibration.json` once `veca calibrate` ran. The
safetensors file alone is enough: its metadata repeats the configuration and carries a checksum per tensor and one of
itself, so the two files can never disagree after a crash between them, and no byte that matters can change unnoticed.
What a file can make this allocate is bounded by its size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickletools
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from veca import auto
from veca.config import VecaConfig
from veca.errors import InputError
from veca.files import remove_partials, whole_file, write_json
from veca.model import Veca
from veca.official import config_of_official, is_official, tensors_of_official
from veca.remote import AUTO_MAP, PROCESSOR_MAP, write_code

BUNDLED = Path(__file__).parent / "bundled"  # one model folder per name that `veca.load` knows without a path
# What transformers notes in a config besides the model: where it was, who wrote it, which precision the file has.
INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
WEIGHTS, CONFIG, PROCESSOR = "model.safetensors", "config.json", "preprocessor_config.json"

# What weights are pickled with. PyTorch's own list also holds what allocates as much as it is told to.
HARMLESS = re.compile(
    r"collections (OrderedDict|defaultdict|Counter)|builtins set|torch (Size|device|[a-z]+\w*|\w+Storage)"
    r"|torch.storage \w+Storage|torch._utils _rebuild_(tensor|tensor_v2|parameter)|torch.serialization _get_layout"
)


def bundled_models() -> list[str]:
    """The names of trained weights that come with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{WEIGHTS}"))


def save(model: Veca, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a model folder, each file whole or not at all; `dtype` converts the weights on the way."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot save a model to {folder}: it is a file, not a folder")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    remove_partials(folder)
    about = {"format": 1, "config": model.config.to_dict(), "card": model.card}
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps({**about, "crc32": checksums})
    with whole_file(folder / WEIGHTS) as temporary:  # first: it is complete by itself
        save_file(tensors, temporary, metadata={"veca": text, "veca_crc32": seal(text, tensors), "format": "pt"})
    about = {"model_type": "veca", "auto_map": AUTO_MAP, **model.config.to_dict(), "card": model.card}
    write_json(folder / CONFIG, about)
    if model.calibration is None:  # of other weights that lay here
        (folder / auto.NAME).unlink(missing_ok=True)
    else:
        write_json(folder / auto.NAME, model.calibration.to_dict())
    if not processor_fits(folder, model.patch_size):  # what AutoImageProcessor of transformers looks for
        kind = {"image_processor_type": "VecaImageProcessor", "auto_map": PROCESSOR_MAP}
        write_json(folder / PROCESSOR, {**kind, "patch_size": model.patch_size})
    write_code(folder)


def load(
    source: str | Path,
    cores: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Veca:
    """A model ready for inference (its parameters stay trainable).

    `source` is a bundled name, a folder that `model.save` wrote, a `.safetensors` file, a checkpoint of the paper's
    authors (`.pt`), or a hub id. `cores` is the budget that `cores=None` will mean in each call.
    """
    path = find(source)
    tensors, config, card = read_checkpoint(path) if path.suffix in (".pt", ".pth") else read_safetensors(path)
    model = build(config, tensors, path, device, dtype)
    model.card = {**card, "source": str(source)}
    model.calibration = auto.read(path.parent, config.bank) if path.name == WEIGHTS else None
    if cores is not None:
        if isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= config.bank:
            raise InputError(f"cores must be a whole number from 1 to {config.bank} (this model's bank), not {cores!r}")
        model.default_cores = cores
    return model.eval()


def build(
    config: VecaConfig, tensors: dict[str, Tensor], path: Path, device: str | torch.device, dtype: torch.dtype
) -> Veca:
    """A model with these tensors in place of fresh ones; what does not fit is named."""
    with torch.device("meta"):  # no time is spent on random weights that would be overwritten
        model = Veca(config)
    expected = model.state_dict()
    for problem, names in (("lacks", expected.keys() - tensors.keys()), ("has too much:", tensors.keys() - expected)):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise InputError(f"{path} {problem} {listed}; these weights do not belong to this configuration")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            given, wanted = ("×".join(map(str, shape)) for shape in (tensor.shape, expected[name].shape))
            raise InputError(f"{path}: tensor {name} is {given}, but this configuration needs {wanted}")
        if not tensor.is_floating_point():
            raise InputError(f"{path}: tensor {name} is {tensor.dtype}, not floating point")
    # A copy: tensors of a memory-mapped file would change with the file.
    ours = {name: tensor.to(dtype=dtype, copy=True) for name, tensor in tensors.items()}
    for name, tensor in ours.items():
        if tensor.numel() and not math.isfinite(
            sum(map(float, tensor.aminmax()))
        ):  # not a number in a tensor is its minimum and maximum
            raise InputError(
                f"{path}: tensor {name} has values that are not finite in {str(dtype)[6:]}; features of it are nonsense"
            )
    model.load_state_dict({name: tensor.to(device) for name, tensor in ours.items()}, assign=True)
    return model


def find(source: str | Path) -> Path:
    """The file of weights that `source` names."""
    name = str(source)
    if name in bundled_models():
        return BUNDLED / name / WEIGHTS
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / WEIGHTS).is_file():
            return path / WEIGHTS
        raise InputError(f"the folder {path} holds no {WEIGHTS}: it was not written by model.save")
    if path.is_file():
        if path.suffix in (".safetensors", ".pt", ".pth"):
            return path
        raise InputError(f"{path} is not a model: weights are a folder, a .safetensors or a .pt file")
    if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return fetch(name)
    known = ", ".join(bundled_models()) or "none in this build"
    raise InputError(f"no model at {name!r}: not a bundled name ({known}), a folder, a .safetensors, a .pt or a hub id")


def fetch(repository: str) -> Path:
    """Weights from the hub, or from its local cache when they are there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        weights = Path(hf_hub_download(repository, WEIGHTS))
        with contextlib.suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError):  # our own files need no other
            hf_hub_download(repository, CONFIG)  # lies beside it, where transformers wrote the weights
        return weights
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = one_line(error)
        raise InputError(
            f"no local file {repository!r}, and the hub did not give its {WEIGHTS} ({type(error).__name__}: {reason})"
        ) from error


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    """Tensors, configuration and card of a safetensors file, checksums verified."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            about = json.loads(metadata.get("veca", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: also brackets in brackets
        raise InputError(f"{path} is not a readable safetensors file: {one_line(error)}") from error
    card, checksums = (about.get(key) or {} for key in ("card", "crc32")) if isinstance(about, dict) else (None, None)
    if not isinstance(card, dict) or not isinstance(checksums, dict):
        raise InputError(f"{path}: its metadata is damaged (not a table of settings)")
    if "veca_crc32" in metadata and metadata["veca_crc32"] != seal(metadata.get("veca", ""), tensors):
        raise InputError(f"{path} is damaged: its configuration or list of tensors does not match its checksum")
    for name, expected in checksums.items():
        if name in tensors and checksum(tensors[name]) != expected:
            raise InputError(f"{path} is damaged: the content of tensor {name} does not match its checksum")
    if any(name.startswith("veca.") for name in tensors):  # a transformers model with a head: the backbone is inside it
        tensors = {name.removeprefix("veca."): value for name, value in tensors.items() if name.startswith("veca.")}
    if "config" in about:
        return tensors, VecaConfig.from_dict(about["config"]), card
    if is_official(tensors):
        return tensors_of_official(tensors), config_of_official(tensors, None), {"origin": "the authors' checkpoint"}
    return tensors, *read_config(path.with_name(CONFIG))


def read_config(path: Path) -> tuple[VecaConfig, dict[str, Any]]:
    """Configuration and card from a config.json; other libraries may have added settings of their own."""
    if not path.is_file():
        raise InputError(f"{path.parent} has weights but no {CONFIG}, so their configuration is unknown")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON: {one_line(error)}") from error
    if not isinstance(values, dict) or values.get("model_type") != "veca":
        kind = values.get("model_type") if isinstance(values, dict) else type(values).__name__
        raise InputError(f"{path} does not describe a VECA model (its model_type is {kind!r})")
    own = {name: value for name, value in values.items() if name in VecaConfig.__dataclass_fields__}
    card = values.get("card")
    return VecaConfig.from_dict(own), card if isinstance(card, dict) else {}


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], VecaConfig, dict[str, Any]]:
    """Tensors and configuration of an authors' checkpoint, renamed to ours; no code in it is run."""
    try:
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # torch.load raises many kinds; the first line says what it refused
        raise InputError(f"{path} cannot be read as weights: {one_line(error)}") from error
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}, not a dictionary of tensors")
    tensors = next((checkpoint[key] for key in ("student", "model", "state_dict") if key in checkpoint), checkpoint)
    tensors = {
        re.sub(r"^(module\.|student\.|_orig_mod\.)+", "", str(name)): tensor
        for name, tensor in (tensors.items() if isinstance(tensors, dict) else ())
        if isinstance(tensor, Tensor)
    }
    asked, held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()), path.stat().st_size
    if asked > held:  # one number can be stretched to a tensor of any shape
        raise InputError(f"{path} asks for {asked} bytes of weights but holds {held}: it is damaged, or made to harm")
    if not is_official(tensors):
        raise InputError(f"{path} is not a VECA checkpoint: it has no patch_embed.proj.weight and query_token_chunks.0")
    config = config_of_official(tensors, checkpoint.get("config"))
    return tensors_of_official(tensors), config, {"origin": f"the authors' checkpoint {path.name}"}


def check_archive(path: Path) -> None:
    """Refuse an archive of torch.save whose content is damaged, or larger than itself once it is unpacked."""
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} cannot be read as weights: it is not an archive as torch.save writes it since 1.6")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if packed or sum(record.file_size for record in records) > path.stat().st_size:
            raise InputError(f"{path} cannot be read as weights: it is compressed, which torch.save never does")
        if (damaged := archive.testzip()) is not None:
            raise InputError(f"{path} is damaged: the content of its record {damaged} does not match its checksum")
        for record in records:
            if record.filename.endswith("data.pkl"):
                for operation, name, _ in pickletools.genops(archive.read(record)):
                    if operation.name == "GLOBAL" and not HARMLESS.fullmatch(str(name)):
                        raise InputError(f"{path} cannot be read as weights: it calls {str(name)[:80]!r}")


def seal(text: str, tensors: dict[str, Tensor]) -> str:
    """CRC-32 of our metadata and of the names, types and shapes of all tensors; their content has its own."""
    listed = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return str(zlib.crc32("\n".join([text, *listed]).encode()))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def processor_fits(folder: Path, patch_size: int) -> bool:
    """Whether the folder has an image processor's settings for such patches, which then stay as they are."""
    try:
        stored = json.loads((folder / PROCESSOR).read_text(encoding="utf-8"))
        return bool(stored["patch_size"] == patch_size)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def weights_digest(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """SHA-256 over the names, shapes and values (as `dtype` has them, or as they are) of all weights, and over the
    configuration that gives them meaning.
    """
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    settings = {name: value for name, value in settings.items() if name not in INCIDENTAL}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.to(dtype or tensor.dtype)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
