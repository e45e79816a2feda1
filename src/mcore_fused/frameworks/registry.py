"""Which forward function serves which Hugging Face architecture; more can be registered."""

from __future__ import annotations

from typing import Any

from mcore_fused.errors import RegistryError
from mcore_fused.frameworks.forward import (
    NoPaddingForward,
    PaddedForward,
    fused_forward_model_gen,
    fused_forward_no_padding_gen,
)

__all__ = [
    "get_mcore_forward_fused_fn",
    "get_mcore_forward_fused_model_engine_fn",
    "register_architecture",
    "registered_architectures",
]

_LANGUAGE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MiMoForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MoonlightForCausalLM",
    "NemotronHForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
_VISION_LANGUAGE = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)

# Architecture name -> whether the model packs by itself after merging its images.
_vision_model: dict[str, bool] = dict.fromkeys(_LANGUAGE, False) | dict.fromkeys(_VISION_LANGUAGE, True)


def register_architecture(name: str, *, vision_model: bool = False) -> None:
    """Add an architecture; repeating the same registration changes nothing.

    Args:
        name: as in the model's ``config.json``, for example ``LlamaForCausalLM``.
        vision_model: the model takes padded ids, merges its images, and packs by itself.

    Raises:
        RegistryError: the name is empty, or registered with the other kind.
    """
    if not isinstance(name, str) or not name:
        raise RegistryError(f"{name!r} is not an architecture name.", "pass the name from config.json.")
    if _vision_model.setdefault(name, vision_model) != vision_model:
        kind = "vision-language" if _vision_model[name] else "language"
        raise RegistryError(f"{name} is already registered as a {kind} model.", "register another name for it.")


def registered_architectures() -> dict[str, bool]:
    """Every registered architecture and whether it is a vision model; a copy."""
    return dict(_vision_model)


def get_mcore_forward_fused_fn(hf_config: Any) -> PaddedForward:
    """The fused forward for padded micro-batches of a model.

    Args:
        hf_config: a Hugging Face configuration, or anything with its ``architectures``.

    An architecture that is not registered is taken for a language model; whether its head can be fused is checked on
    the model itself, when it is called.

    Raises:
        RegistryError: the configuration names no architecture, or several.
    """
    return fused_forward_model_gen(_is_vision_model(hf_config))


def get_mcore_forward_fused_model_engine_fn(hf_config: Any) -> NoPaddingForward:
    """The fused forward for jagged micro-batches of a model; see :func:`get_mcore_forward_fused_fn`."""
    return fused_forward_no_padding_gen(_is_vision_model(hf_config))


def _is_vision_model(hf_config: Any) -> bool:
    names = getattr(hf_config, "architectures", None) or []
    if isinstance(names, str) or len(names) != 1:
        raise RegistryError(
            f"the configuration names {names!r} as architectures.", "give hf_config.architectures exactly one name."
        )
    return _vision_model.get(names[0], False)
