"""Which checks apply to a subject: a check about something that it lacks is not run and counts as "does not apply"."""

from mcore_compat.subjects.protocol import CAPABILITIES

_RELEASE = "release"


def capabilities(subject, release):
    """The capabilities that count in this cell: none in a release before the subject's first."""
    since = getattr(subject, "since", None)
    if since is not None and _key(release) < _key(since):
        return frozenset()
    return frozenset(subject.capabilities)


def lacks(subject, offered):
    """What the subject lacks here, each with the consequence in words."""
    if not offered:
        return {_RELEASE: f"it supports megatron-core from {subject.since} on, so nothing is judged here"}
    return {name: consequence for name, consequence in CAPABILITIES.items() if name not in offered}


def missing(item, offered):
    """The capabilities that one collected case is about and that are not offered here."""
    if not offered:
        return {_RELEASE}
    needs = {name for mark in item.iter_markers("needs") for name in mark.args}
    unknown = needs - CAPABILITIES.keys()
    assert not unknown, f"{item.nodeid} needs unknown capabilities {sorted(unknown)}"
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("mode") in {"legacy", "hook"}:
        needs.add("legacy")  # a case that forces a mode
    return needs - offered


def _key(release):
    """Numbers of a version, as far as they are numbers: ``0.18.0rc1`` is 0.18."""
    numbers = []
    for part in str(release).split(".")[:3]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
