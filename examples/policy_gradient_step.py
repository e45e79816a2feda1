"""Three policy-gradient steps with an entropy bonus on a tiny real GPTModel, without materialising its logits.

Run it in an environment with megatron-core, on a GPU or on a CPU::

    python examples/policy_gradient_step.py

What to take into a framework are the three calls marked (1), (2) and (3).
"""

import torch

from mcore_compat.testing import install_cpu_seam

install_cpu_seam()  # Megatron asks for a GPU when it is imported; without one, this answers with the CPU

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import mcore_fused

VOCAB, BATCH, SEQ = 1024, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def start_one_rank() -> None:
    """A process group of one rank, unless the caller has one."""
    if torch.distributed.is_initialized():
        return
    backend, store = "nccl" if DEVICE == "cuda" else "gloo", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)


def build_chain() -> DistributedDataParallel:
    """The usual training chain: DDP(Float16Module(GPTModel))."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
    ).to(DEVICE)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), Float16Module(config, model))


def main() -> list[float]:
    """Run the steps; returns their losses."""
    start_one_rank()
    torch.manual_seed(0)
    chain = build_chain()
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), device=DEVICE)
    labels = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), dim=1)  # the last token predicts nothing
    positions = torch.arange(SEQ, device=DEVICE).expand(BATCH, SEQ)
    mask = torch.tril(torch.ones(1, 1, SEQ, SEQ, device=DEVICE)) < 0.5
    advantages = torch.randn(BATCH, SEQ, device=DEVICE)

    mode = mcore_fused.patch_fused_forward(chain)  # (1) once; "hook" or "legacy", whichever works on this release
    print(f"fused forward in {mode} mode")
    losses = []
    for step in range(3):
        chain.zero_grad_buffer()
        output = mcore_fused.call_fused_forward(chain, ids, positions, mask, labels=labels, temperature=0.9)  # (2)
        loss = -(advantages * output.log_probs).mean() - 0.01 * output.entropy.mean()
        loss.backward()
        with torch.no_grad():
            for parameter in chain.parameters():
                parameter.sub_(0.1 * parameter.main_grad.to(parameter.dtype))
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}")
    print(mcore_fused.fused_forward_evidence(chain))  # (3) what ran
    mcore_fused.unpatch_fused_forward(chain)
    return losses


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
