"""Megatron's own vision-language model, tiny: vision transformer, projector, language model."""

import copy

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules

from support.models import DEVICE, config_for, layer_spec

IMAGE = -200  # LLaVA's own mark of an image among the token ids
PATCH = 4


def _vision_layer():
    """The local layer with every patch seen by every other; upstream's own spec needs Transformer Engine up to 0.12."""
    layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec())
    layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return layer


def build_llava(shape, patches=1):
    """A fresh model; one image takes ``patches`` squared positions of the language model."""
    torch.manual_seed(shape.seed)
    language, vision = config_for(shape), config_for(shape)
    vision.vision_model_type = "internvit"  # the one kind without a norm that needs Transformer Engine or Apex
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=layer_spec(shape),
        language_vocab_size=shape.vocab,
        language_max_sequence_length=128,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=_vision_layer(),
        drop_vision_class_token=True,
        vision_projection_config=config_for(shape),
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        share_embeddings_and_output_weights=shape.tied,
        language_position_embedding_type="rope",
        img_h=patches * PATCH,
        img_w=patches * PATCH,
        patch_dim=PATCH,
    )
    with torch.no_grad():  # spread the logits and make images matter
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight", "encoder.linear_fc2.weight")):
                parameter.mul_(20)
    return model.to(device=DEVICE, dtype=shape.dtype)


def images_for(shape, count, patches=1, seed=0):
    """Random images ``[count, 3, height, width]``."""
    generator = torch.Generator().manual_seed(seed)
    side = patches * PATCH
    return torch.randn(count, 3, side, side, generator=generator, dtype=shape.dtype).to(DEVICE)
