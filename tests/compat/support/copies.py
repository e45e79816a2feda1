"""Deep copies and pickles of Megatron models, whose process groups and local lambdas cannot be copied.

Stock models of 0.13 and later fail ``copy.deepcopy`` because of the process groups they hold; frameworks get
around that by sharing the groups. So does this: groups and functions travel by reference, everything else is
copied for real.
"""

import contextlib
import copy
import copyreg
import io
import pickle
import sys
import types

from torch.distributed import ProcessGroup

_shared: dict[int, object] = {}


def _by_reference(thing):
    _shared[id(thing)] = thing
    return _shared.__getitem__, (id(thing),)


@contextlib.contextmanager
def groups_by_reference():
    """For a block, copies of a model share its process groups."""
    copyreg.pickle(ProcessGroup, _by_reference)
    try:
        yield
    finally:
        del copyreg.dispatch_table[ProcessGroup]
        _shared.clear()


def deep_copy(model):
    """``copy.deepcopy`` with process groups shared."""
    with groups_by_reference():
        return copy.deepcopy(model)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        local = isinstance(obj, types.FunctionType) and "<locals>" in obj.__qualname__
        # A class that stands for one of a package which is not installed here cannot be imported by its name.
        nowhere = isinstance(obj, type) and obj.__module__ not in sys.modules
        if not (local or nowhere or isinstance(obj, ProcessGroup)):
            return None
        _shared[id(obj)] = obj
        return id(obj)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid):
        return _shared[pid]


def through_pickle(model):
    """``pickle.dumps`` and ``loads`` with process groups, local functions and classes of absent packages shared."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(model)
        buffer.seek(0)
        return _Unpickler(buffer).load()
    finally:
        _shared.clear()
