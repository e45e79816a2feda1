"""LoRA of the real ``peft`` on Megatron's real linear layers.

peft has a layer for them (``LoraParallelLinear``) that runs on no Megatron: test_peft.py says why. This one goes in
through peft's own door for such cases, ``LoraConfig._register_custom_module``; everything around it is peft's.
"""

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from peft import LoraConfig
from peft.tuners.lora import layer

ATTENTION_AND_MLP = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoraOnMegatronLinear(layer.Linear):
    """peft's dense adapter around a layer that returns its output and its bias, on one tensor-parallel rank."""

    def forward(self, x, *args, **kwargs):
        if self.disable_adapters and self.merged:
            self.unmerge()
        output, bias = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return output, bias
        for name in self.active_adapters:
            if name in self.lora_A:
                inner = self.lora_A[name](self.lora_dropout[name](x))
                output = output + self.lora_B[name](inner) * self.scaling[name]
        return output, bias


def lora_config(*targets, **options):
    """Adapters of rank 4 on the named layers, started at random so that they matter from the first call."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, **options)
    config._register_custom_module(dict.fromkeys((ColumnParallelLinear, RowParallelLinear), LoraOnMegatronLinear))
    return config
