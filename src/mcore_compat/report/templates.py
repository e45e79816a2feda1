"""How every HTML page of this package is made from its Jinja template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2

__all__ = ["load_template"]


def load_template(path: Path, filters: Mapping[str, Callable[..., object]] | None = None) -> jinja2.Template:
    """Compile a template; texts are escaped, and a name that the template does not get is an error.

    Args:
        path: the template's file.
        filters: filters of the template's own, by name.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(path.name)
