"""This project's own library as a subject."""

from mcore_compat.subjects.protocol import CAPABILITIES, COUNTERS


class McoreFused:
    """This project's own library."""

    name = "mcore_fused"
    capabilities = frozenset(CAPABILITIES)

    def patch(self, model, mode="auto"):
        import mcore_fused

        mcore_fused.patch_fused_forward(model, mode)

    def unpatch(self, model):
        import mcore_fused

        mcore_fused.unpatch_fused_forward(model)

    def mode(self, model):
        import mcore_fused

        return mcore_fused.fused_forward_mode(model)

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        import mcore_fused

        return mcore_fused.call_fused_forward(model, *inputs, labels=labels, temperature=temperature, **kwargs)

    def jagged_forward(self, mode="auto"):
        from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

        return fused_forward_no_padding_gen(mode=mode)

    def evidence(self):
        from mcore_fused import evidence

        seen = evidence.process_evidence()
        return {name: getattr(seen, name) for name in COUNTERS}
