"""The same model class written otherwise is no break; one that may behave otherwise is never "nothing changed"."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_upstream import FILES, edited

from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.rules.compare import FindingState, compare_contracts, expected_modes
from mcore_compat.contract.rules.rule import load_rules

RULES = load_rules(Path(__file__).parents[3] / "compat_matrix" / "rules")
BASE = edited()
OLD = extract(BASE, "old")
GPT = "megatron/core/models/gpt/gpt_model.py"
IMPL = "megatron/core/models/gpt/gpt_impl.py"
PATCHES = "megatron/core/models/gpt/patches.py"
TEXT = FILES[GPT]
RENAMED = TEXT.replace("class GPTModel(", "class _GPTModel(")
IMPORTS, _, CLASS = TEXT.partition("class GPTModel")
INDENTED = "\n".join(f"    {line}" if line else line for line in f"class GPTModel{CLASS}".splitlines()) + "\n"
OTHER = "\n\ndef _other(self, hidden_states, labels=None, **kwargs):\n    return self.lm_head(hidden_states)\n\n\n"
HOOK_CALL = TEXT[
    TEXT.index("            return output_processor(") : TEXT.index("        logits, _ = self.output_layer(")
]
OVERRIDE = "    def _postprocess(self, hidden_states, labels, **kwargs):\n        return self.lm_head(hidden_states)\n"

HARMLESS = {
    "alias at the end of the module": {GPT: f"{RENAMED}\n\nGPTModel = _GPTModel\n"},
    "moved and re-exported": {IMPL: TEXT, GPT: "from megatron.core.models.gpt.gpt_impl import GPTModel\n"},
    "moved and re-exported relatively": {IMPL: TEXT, GPT: "from .gpt_impl import GPTModel\n\n__all__ = ['GPTModel']\n"},
    "re-exported under another name": {IMPL: RENAMED, GPT: "from .gpt_impl import _GPTModel as GPTModel\n"},
    "alias of a re-export": {IMPL: RENAMED, GPT: "from . import gpt_impl\n\nGPTModel = gpt_impl._GPTModel\n"},
    "moved and star-imported": {IMPL: TEXT, GPT: "from .gpt_impl import *\n"},
    "thin subclass of the moved class": {
        IMPL: RENAMED,
        GPT: "from .gpt_impl import _GPTModel\n\n\nclass GPTModel(_GPTModel):\n    pass\n",
    },
    "subclass with another method": {
        GPT: f"{RENAMED}\n\nclass GPTModel(_GPTModel):\n    def extra(self):\n        return 1\n"
    },
    "class with a decorator": {GPT: TEXT.replace("class GPTModel(", "@deprecated('use HybridModel')\nclass GPTModel(")},
    "class under a condition": {GPT: f"{IMPORTS}if True:\n{INDENTED}"},
    "class under try": {GPT: f"{IMPORTS}try:\n{INDENTED}\nexcept ImportError:\n    GPTModel = None\n"},
    "made by the module's __getattr__": {
        IMPL: TEXT,
        GPT: "def __getattr__(name):\n    from .gpt_impl import GPTModel\n    return GPTModel\n",
    },
    "method that is an alias of another": {
        GPT: TEXT.replace("def _postprocess(", "def _finish(").replace(
            "    def build_schedule_plan", "    _postprocess = _finish\n\n    def build_schedule_plan"
        )
    },
    "the hook's call in a method of its own": {
        GPT: TEXT.replace(
            TEXT[
                TEXT.index("            return output_processor(") : TEXT.index(
                    "        logits, _ = self.output_layer("
                )
            ],
            "            return self._processed(output_processor, hidden_states, labels, output_processor_context, "
            "output_weight, runtime_gather_output)\n",
        )
        + """
    def _processed(self, processor, hidden_states, labels, context, output_weight, runtime_gather_output):
        return processor(
            hidden_states=hidden_states, output_layer=self.output_layer, output_weight=output_weight,
            labels=labels, context=context, runtime_gather_output=runtime_gather_output,
            scale_logits=self._scale_logits, config=self.config,
        )
"""
    },
    "head and loss in methods of their own": {
        GPT: TEXT.replace(
            """        logits, _ = self.output_layer(
            hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        logits = self._scale_logits(logits)
""",
            "        logits = self._logits(hidden_states, output_weight, gather=runtime_gather_output)\n",
        ).replace("loss = self.compute_language_model_loss(labels, logits)", "loss = self._loss(logits, labels)")
        + """
    def _logits(self, hidden, weight, *, gather=None):
        scores, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=gather)
        return self._scale_logits(scores)

    def _loss(self, logits, targets):
        return self.compute_language_model_loss(targets, logits)
"""
    },
}

TOLD = {
    "forward under a decorator": {GPT: TEXT.replace("    def forward(", "    @rewrite_arguments\n    def forward(")},
    "_postprocess under a decorator": {
        GPT: TEXT.replace("    def _postprocess(", "    @without_hook\n    def _postprocess(")
    },
    "_postprocess set at the end": {GPT: f"{TEXT}{OTHER}GPTModel._postprocess = _other\n"},
    "_postprocess set by setattr": {GPT: f"{TEXT}{OTHER}setattr(GPTModel, '_postprocess', _other)\n"},
    "_postprocess set to a wrapper": {GPT: f"{TEXT}\n\nGPTModel._postprocess = wrap(GPTModel._postprocess)\n"},
    "_postprocess set under a condition": {GPT: f"{TEXT}{OTHER}if FAST:\n    GPTModel._postprocess = _other\n"},
    "_postprocess set by a function": {
        GPT: f"{TEXT}{OTHER}def patch():\n    GPTModel._postprocess = _other\n\n\npatch()\n"
    },
    "_postprocess set by another module": {
        PATCHES: f"from .gpt_model import GPTModel\n{OTHER}GPTModel._postprocess = _other\n"
    },
    "a computed name set": {GPT: f"{TEXT}{OTHER}for name in NAMES:\n    setattr(GPTModel, name, _other)\n"},
    "_postprocess defined twice": {GPT: f"{TEXT}\n{OVERRIDE}"},
    "_postprocess defined again under a condition": {
        GPT: TEXT + "\n    if FAST:\n" + "".join(f"    {line}\n" for line in OVERRIDE.splitlines())
    },
    "_postprocess wrapped in the class": {
        GPT: TEXT.replace(
            "    def build_schedule_plan",
            "    _postprocess = without_hook(_postprocess)\n\n    def build_schedule_plan",
        )
    },
    "_postprocess is another name's value": {
        GPT: TEXT.replace("    def build_schedule_plan", "    _postprocess = make()\n\n    def build_schedule_plan")
    },
    "subclass that drops the hook": {GPT: f"{RENAMED}\n\nclass GPTModel(_GPTModel):\n{OVERRIDE}"},
    "rebound to another class": {
        GPT: TEXT
        + "\n\nclass Other(LanguageModule):\n    def forward(self, x):\n        return x\n\n\nGPTModel = Other\n"
    },
    "rebound to a wrapper": {GPT: f"{TEXT}\n\nGPTModel = wrap(GPTModel)\n"},
    "rebound by a star import": {
        IMPL: f"class GPTModel:\n{OVERRIDE}",
        GPT: f"{TEXT}\n\nfrom .gpt_impl import *\n",
    },
    "a metaclass": {GPT: TEXT.replace("class GPTModel(LanguageModule)", "class GPTModel(LanguageModule, metaclass=M)")},
    "the loss under a decorator": {
        "megatron/core/models/common/language_module/language_module.py": FILES[
            "megatron/core/models/common/language_module/language_module.py"
        ].replace("    def compute_language", "    @capped\n    def compute_language")
    },
}


def judged(files):
    new = extract(dataclasses.replace(BASE, files={**BASE.files, **files}), "new")
    found = [f for f in compare_contracts(OLD, new, RULES) if f.state is FindingState.NEW and f.level != "info"]
    return expected_modes(new), found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_behaves_the_same_is_no_break(name):
    modes, found = judged(HARMLESS[name])
    assert modes == {"gpt": "hook"}
    assert [f.rule.id for f in found if f.level == "break"] == []


@pytest.mark.parametrize("name", TOLD)
def test_what_may_behave_otherwise_is_reported(name):
    modes, found = judged(TOLD[name])
    assert found or modes != {"gpt": "hook"}


FOLLOWED = (
    "alias at the end of the module",
    "the hook's call in a method of its own",
    "head and loss in methods of their own",
    "method that is an alias of another",
)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_can_be_followed_is_not_even_drift(name):
    assert judged(HARMLESS[name])[1] == []


def test_a_break_inside_of_a_followed_method_is_found():
    text = HARMLESS["head and loss in methods of their own"][GPT]
    capped = text.replace("return self._scale_logits(scores)", "return torch.tanh(scores)")
    assert "logits-operation-unknown" in {f.rule.id for f in judged({GPT: capped})[1]}
    text = HARMLESS["the hook's call in a method of its own"][GPT]
    ignored = text.replace("        return processor(\n", "        return dict(\n")
    assert "hook-ignored" in {f.rule.id for f in judged({GPT: ignored})[1]}
    handed = text.replace("        return processor(\n", "        return call_later(processor, \n")
    assert "hook-handed-on" in {f.rule.id for f in judged({GPT: handed})[1]}
