"""verl with torch in its kernel's place, so that its patch and its forward functions run on a CPU. For tests only."""

from support.subjects.verl import Verl, load, torch_kernel


def verl_on_torch(monkeypatch):
    """The subject, its kernel replaced for as long as ``monkeypatch`` lasts."""
    module = load()
    for name in ("fused_output_processor", "linear_cross_entropy"):
        monkeypatch.setattr(module, name, getattr(module, name))  # the subject's counting ends with the test, too
    monkeypatch.setattr(module, "linear_cross_entropy", torch_kernel)
    return Verl()
