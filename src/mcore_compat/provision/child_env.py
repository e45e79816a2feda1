"""The environment variables that children get: an allow-list, so that no token of the caller reaches them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_compat.matrix.cells import Cell

__all__ = ["cell_environment", "installer_environment"]

# What a compiler, a GPU driver or a numeric library needs to find itself.
_HOST = (
    "CC",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "PATH",
    "TZ",
)
# What the installer needs to reach the index; none of these is a secret by its purpose.
_INSTALLER = (
    "ALL_PROXY",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "PYENV_ROOT",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "UV_CACHE_DIR",
    "UV_DEFAULT_INDEX",
    "UV_FIND_LINKS",
    "UV_HTTP_TIMEOUT",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_NATIVE_TLS",
    "UV_NO_CACHE",
    "UV_OFFLINE",
    "UV_PYTHON_INSTALL_DIR",
    "UV_SYSTEM_CERTS",
    "UV_TORCH_BACKEND",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
_COMMON = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1"}
# megatron.core asks git for a hash to append to its version; inside any checkout it would find that one's.
_CELL = {"NO_VCS_VERSION": "1", "OMP_NUM_THREADS": "1"}


def installer_environment(host: Mapping[str, str]) -> dict[str, str]:
    """Variables for uv: the host's tools, the way to the index, nothing else."""
    return {**_taken(host, (*_HOST, *_INSTALLER)), **_COMMON, "NO_COLOR": "1"}


def cell_environment(
    host: Mapping[str, str], cell: Cell, *, home: Path, temporary: Path, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for a process inside a cell.

    Args:
        host: the caller's own environment.
        cell: its ``env`` is added last, so that it wins.
        home: a home of its own, so that no file of the user's home is read and compiled kernels stay per cell.
        temporary: where it may write temporary files.
        extra: what the runner tells the suite.
    """
    return {
        **_taken(host, _HOST),
        **_COMMON,
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONPYCACHEPREFIX": str(home / "bytecode"),
        **_CELL,
        **(extra or {}),
        **{variable.name: variable.value for variable in cell.env},
    }


def _taken(host: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: host[name] for name in names if name in host}
