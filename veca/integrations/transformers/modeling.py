"""`VecaModel` and `VecaBackbone`: a `veca.Veca` behind the face of `transformers`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from veca.block import AttentionMaps
from veca.cores import CoreBank, spread_points
from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.processing import VecaImageProcessor
from veca.model import Veca
from veca.tasks.masks.head import MaskHead
from veca.weights import processor_fits


class Seen(NamedTuple):
    """What every model here makes its output of."""

    tokens: Tensor  # B×(C+N)×D′, normalised; cores first
    cores: int  # C
    grid: tuple[int, int]
    hidden_states: tuple[Tensor, ...] | None  # the embedding, then the stream after each block: B×(C+N)×D
    attentions: tuple[Tensor, ...] | None  # one a layer, B×H×(C+N)×(C+N)

    @property
    def patches(self) -> Tensor:  # B×N×D′
        return self.tokens[:, self.cores :]


class VecaPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What all share: the plain model as `self.veca`, initialisation, saving, checkpointing of activations.

    Models without a head are saved with the tensor names of `veca.Veca`, so that the folder is an ordinary model
    folder; in models with a head these names begin with `veca.`, and `veca.load` reads the backbone out of them.
    """

    config_class = VecaConfig
    base_model_prefix = "veca"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ("Block",)
    headless = False

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.veca = Veca(config.plain())
        self.veca.card = config.card

    @classmethod
    def from_plain(cls, model: Veca, **more: Any) -> Any:
        """A model of this class around the weights of a plain one (shared, not copied); `more` as in the config."""
        wrapped = cls(VecaConfig.from_plain(model, **more))
        wrapped.veca = model
        return wrapped.train(model.training)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: it would make `save_pretrained` copy the package's files into each folder."""

    def get_input_embeddings(self) -> nn.Module:
        return self.veca.patch_embed

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """docs/research/mathematics.md; called for what a checkpoint does not hold."""
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, CoreBank):
            size, width = module.tokens.shape
            init.normal_(module.tokens, std=width**-0.5)
            init.copy_(module.states, torch.atanh(spread_points(size)))
            init.constant_(module.alpha, 0.01)
        elif isinstance(module, MaskHead):
            init.normal_(module.queries, std=module.queries.shape[1] ** -0.5)
        elif isinstance(module, Veca) and module.config.positions == "table":
            init.trunc_normal_(module.table, std=0.02)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] | None = None, **_: Any
    ) -> None:
        self.gradient_checkpointing = enable
        self.veca.set_grad_checkpointing(enable)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """As in `transformers`, with the tensor names that `veca.load` knows, and the image processor's settings."""
        if self.headless:
            state_dict = {
                name.removeprefix("veca."): tensor for name, tensor in (state_dict or self.state_dict()).items()
            }
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process and not processor_fits(Path(save_directory), self.config.patch_size):
            VecaImageProcessor(patch_size=self.config.patch_size).save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, run: str | Path | None = None, **kwargs: Any) -> str:
        """Upload with a model card made from the weights' own records; `run` is the folder of the training run."""
        from veca.integrations.hub import push_to_hub

        return push_to_hub(self, repo_id, run=run, **kwargs)

    def see(
        self,
        pixel_values: Tensor,  # B×3×H×W
        cores: int | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> Seen:
        """Run the plain model; what is not asked for is not kept."""
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        plain, budget = self.veca, self.config.cores if cores is None else cores
        pixel_values = pixel_values.to(plain.patch_embed.proj.weight.dtype)
        layers = plain.forward_layers(
            pixel_values,
            budget,
            return_attention=bool(attentions),
            last_only=not hidden,
            joined=bool(hidden) and torch.is_grad_enabled(),  # gradients of the states can be asked for
        )
        count = layers.coords[-1].shape[1]
        tokens, states = layers.tokens, None
        if hidden:
            states = (torch.cat(layers.start, dim=1), *tokens)
        return Seen(
            tokens=plain.project(plain.norm(tokens[-1])),
            cores=count,
            grid=layers.grid,
            hidden_states=states,
            attentions=tuple(square(maps) for maps in layers.attention) if attentions else None,
        )


def square(maps: AttentionMaps) -> Tensor:
    """B×H×(C+N)×(C+N), zero where no patch reads: what `transformers` users expect, at the N² they ask for."""
    missing = maps.cores.shape[-1] - maps.patches.shape[-1]
    return torch.cat((maps.cores, nn.functional.pad(maps.patches, (0, missing))), dim=-2)


class VecaModel(VecaPreTrainedModel):
    """The backbone alone. `pooler_output` is the first core, `last_hidden_state` the cores and then the patches."""

    headless = True
    _keys_to_ignore_on_load_unexpected = (r"^classifier\.", r"^head\.")

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        seen = self.see(pixel_values, cores, output_hidden_states, output_attentions)
        return BaseModelOutputWithPooling(
            last_hidden_state=seen.tokens,
            pooler_output=seen.tokens[:, 0],
            hidden_states=seen.hidden_states,
            attentions=seen.attentions,
        )


class VecaBackbone(BackboneMixin, VecaPreTrainedModel):  # type: ignore[misc]
    """Feature maps of chosen layers (`out_features`, `out_indices`) for detectors and decoders.

    Decoders of tokens (DPT, Depth-Anything) want `reshape_hidden_states=False`: B×(1+N)×D, the first core where they
    look for the class token.
    """

    headless = True
    _keys_to_ignore_on_load_unexpected = VecaModel._keys_to_ignore_on_load_unexpected

    def __init__(
        self, config: VecaConfig, out_features: list[str] | None = None, out_indices: Sequence[int] | None = None
    ) -> None:
        if out_features is not None or out_indices is not None:
            config = copy.deepcopy(config)  # the caller's stays what it is
            indices = None if out_indices is None else list(out_indices)
            config.set_output_features_output_indices(out_features=out_features, out_indices=indices)
        super().__init__(config)
        self.num_features = [config.width] * (config.depth + 1)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        pixel_values: Tensor,  # B×3×H×W
        cores: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BackboneOutput:
        seen = self.see(pixel_values, cores, True, output_attentions)
        assert seen.hidden_states is not None
        maps = []
        for name, state in zip(self.stage_names, seen.hidden_states, strict=True):
            if name in self.out_features:
                state = self.veca.norm(state) if self.config.apply_layernorm else state
                patches = state[:, seen.cores :]
                if self.config.reshape_hidden_states:
                    maps.append(patches.transpose(1, 2).unflatten(-1, seen.grid).contiguous())
                else:
                    maps.append(torch.cat((state[:, :1], patches), dim=1))
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BackboneOutput(
            feature_maps=tuple(maps), hidden_states=seen.hidden_states if hidden else None, attentions=seen.attentions
        )
