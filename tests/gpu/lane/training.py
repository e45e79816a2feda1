"""Five policy-gradient steps on packed rows, with fp32 master weights as every framework keeps them."""

import torch
from support.models import unwrapped

STEPS = 5
_RATE = 0.05


def advantages_for(labels):
    """One advantage a slot, of both signs, and zero where there is no label."""
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(labels.shape, generator=generator).to(labels.device)
    return torch.where(labels == -100, torch.zeros_like(values), values)


def policy_loss(output, old_log_probs, advantages):
    """The clipped surrogate of PPO with an entropy bonus, averaged over the slots that have a label."""
    counted = advantages != 0
    ratio = (output.log_probs - old_log_probs).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((surrogate + 0.01 * output.entropy) * counted).sum() / counted.sum()


class MasterWeights:
    """SGD in fp32 (fp64 for the twin) on copies of the parameters; the bf16 parameters are their roundings."""

    def __init__(self, model):
        self._pairs = [(p, p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone())
                       for p in unwrapped(model).parameters()]  # fmt: skip

    @torch.no_grad()
    def step(self):
        """One step with the gradients in DDP's buffers, or in ``grad`` where there is no DDP."""
        for parameter, master in self._pairs:
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            master.sub_(gradient.to(master.dtype), alpha=_RATE)
            parameter.copy_(master)


def train(chain, batch, call, advantages):
    """The losses of :data:`STEPS` steps; ``call()`` gives the outputs of one forward.

    The old log-probs are those of the first forward, as after a rollout.
    """
    weights, losses, old = MasterWeights(chain), [], None
    for _ in range(STEPS):
        output = call()
        old = output.log_probs.detach() if old is None else old
        loss = policy_loss(output, old, advantages)
        loss.backward()
        if hasattr(chain, "finish_grad_sync"):
            chain.finish_grad_sync()
        weights.step()
        if hasattr(chain, "zero_grad_buffer"):
            chain.zero_grad_buffer()
        chain.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
