"""Members of base classes outside of Megatron that upstream's classes derive from."""

from __future__ import annotations

import importlib
import sys
import types

__all__ = ["CLASS_NAMES", "FUNCTION_NAMES", "MODULE_NAMES", "external_members"]

MODULE_NAMES = frozenset({*dir(types.ModuleType("x")), "__file__", "__path__", "__builtins__", "__cached__", "__all__"})
CLASS_NAMES = frozenset({*dir(type), *dir(object), "__annotations__", "__module__", "__dict__", "__weakref__"})
FUNCTION_NAMES = frozenset(dir(lambda: None)) | {"__wrapped__"}

# torch is not needed to read source, so the public and hook members of its base classes are listed.
_TORCH_MODULE = """
T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval
extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia
named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory
state_dict to to_empty train training type xpu zero_grad _apply _backward_hooks _backward_pre_hooks _buffers _call_impl
_compiled_call_impl _forward_hooks _forward_pre_hooks _get_name _load_from_state_dict _load_state_dict_post_hooks
_load_state_dict_pre_hooks _modules _named_members _non_persistent_buffers_set _parameters _register_state_dict_hook
_register_load_state_dict_pre_hook _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks
_state_dict_pre_hooks _version _wrapped_call_impl _is_full_backward_hook _maybe_warn_non_full_backward_hook
_infer_parameters _is_hf_initialized __call__ __getattr__ __setstate__
"""
_TORCH_FUNCTION = """
apply backward forward jvp setup_context vjp vmap generate_vmap_rule mark_dirty mark_non_differentiable
mark_shared_storage save_for_backward save_for_forward set_materialize_grads needs_input_grad saved_tensors
saved_variables materialize_grads dirty_tensors non_differentiable to_save next_functions name metadata
register_hook register_prehook maybe_clear_saved_tensors _sequence_nr _set_sequence_nr _input_metadata
_raw_saved_tensors is_traceable once_differentiable
"""
_LISTED = {
    "torch.nn.Module": frozenset(_TORCH_MODULE.split()),
    "torch.nn.modules.module.Module": frozenset(_TORCH_MODULE.split()),
    "torch.autograd.Function": frozenset(_TORCH_FUNCTION.split()),
    "torch.autograd.function.Function": frozenset(_TORCH_FUNCTION.split()),
}
_NOTHING_MORE = frozenset({"typing.Protocol", "typing.Generic", "abc.ABC", "object", "typing_extensions.Protocol"})


def external_members(dotted: str) -> frozenset[str] | None:
    """Names of a class outside of Megatron; None where they are not known.

    Only the standard library is imported to answer; anything else is listed here or unknown.
    """
    if dotted in _NOTHING_MORE:
        return CLASS_NAMES
    if dotted in _LISTED:
        return _LISTED[dotted] | CLASS_NAMES
    module, _, name = dotted.rpartition(".")
    if (module or "builtins").partition(".")[0] not in {*sys.stdlib_module_names, "builtins"}:
        return None
    try:
        found = getattr(importlib.import_module(module or "builtins"), name, None)
    except ImportError:
        return None
    if found is None:
        return None
    return frozenset(dir(found)) | CLASS_NAMES
