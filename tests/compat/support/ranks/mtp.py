"""What upstream logs of MTP, on a tensor-parallel rank."""

import torch

from support.models import Shape, batch_for, build
from support.subjects import load_subject, patched


def mtp_metrics(shape: Shape, modes):
    """The tracker's tensors after one training forward, by mode; "stock" is unpatched."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    subject, model, batch, found = load_subject(), build(shape), batch_for(shape.vocab, 3, 8), {}
    model.train()
    arguments = {"labels": batch.labels, "loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}
    with torch.no_grad():
        for mode in modes:
            MTPLossLoggingHelper.tracker.clear()
            if mode == "stock":
                model(*batch.inputs, **arguments)
            else:
                with patched(subject, model, mode):
                    subject.call(model, *batch.inputs, **arguments)
            found[mode] = {
                name: value.clone()
                for name, value in MTPLossLoggingHelper.tracker.items()
                if isinstance(value, torch.Tensor)
            }
    return found
