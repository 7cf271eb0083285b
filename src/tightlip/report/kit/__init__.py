"""What every page of ours is made with: templates, assets, and a policy that lets nothing else in."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tightlip.core.figures import count, number, percent

PACKAGE = Path(__file__).parents[2]  # tightlip/: each page keeps its files in its own folder


@cache
def asset(name: str) -> str:
    return (PACKAGE / name).read_text(encoding="utf-8")


@cache
def template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, number=number, percent=percent)
    return environment.get_template(name)


def policy(style: str, script: str | None = None) -> str:
    """A content policy that lets a page's own style and script run, and nothing else."""
    scripts = "'none'" if script is None else _hashed(script)
    return f"default-src 'none'; style-src {_hashed(style)}; script-src {scripts}; img-src data:; base-uri 'none'; form-action 'none'"


def _hashed(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
