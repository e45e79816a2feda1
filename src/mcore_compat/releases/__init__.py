"""Which megatron-core releases exist, and their files."""

from mcore_compat.releases.index import IndexUnreachableError, cache_directory, download, fetch_releases
from mcore_compat.releases.model import (
    PROJECT,
    NoSuchReleaseError,
    Release,
    ReleaseFile,
    find_release,
    latest,
    load_releases,
    merge,
    save_releases,
    unknown_to,
)

__all__ = [
    "PROJECT",
    "IndexUnreachableError",
    "NoSuchReleaseError",
    "Release",
    "ReleaseFile",
    "cache_directory",
    "download",
    "fetch_releases",
    "find_release",
    "latest",
    "load_releases",
    "merge",
    "save_releases",
    "unknown_to",
]
