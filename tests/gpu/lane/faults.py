"""Faults that ``ci/gpu --fault`` plants in every cell: each must turn every cell red, or the lane proves nothing."""

import torch


def plant(name):
    """Plant a fault in the library of this process; an empty name plants none."""
    if name:
        {"no-kernel-launch": _no_kernel_launch, "bf16-logits": _bf16_logits}[name]()


def _no_kernel_launch():
    """The kernel is replaced by stock logits: every number stays right, only the fused kernel is gone."""
    from mcore_fused.head import fused as head

    def unfused(hidden, weight, labels, temperature=1.0, *, ignore_index=-100, scale=1.0, **_):
        return _unfused((hidden @ weight.t()).float(), labels, temperature, ignore_index, scale)

    head.linear_cross_entropy = unfused


def _bf16_logits():
    """The kernel runs, and its result is replaced by one from logits rounded to bf16: a small error, everywhere."""
    from mcore_fused.head import fused as head

    fused = head.linear_cross_entropy

    def rounded(hidden, weight, labels, temperature=1.0, *, ignore_index=-100, scale=1.0, **options):
        fused(hidden, weight, labels, temperature, ignore_index=ignore_index, scale=scale, **options)
        logits = (hidden.bfloat16() @ weight.bfloat16().t()).to(
            hidden.dtype if hidden.element_size() > 2 else torch.float32
        )
        return _unfused(logits, labels, temperature, ignore_index, scale)

    head.linear_cross_entropy = rounded


def _unfused(logits, labels, temperature, ignore_index, scale):
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[..., None].to(logits.dtype)
    log_probs = torch.log_softmax(logits * scale / temperature, -1)
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    keep = labels != ignore_index
    return torch.where(keep, chosen, 0), torch.where(keep, entropy, 0)
