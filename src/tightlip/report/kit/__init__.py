"""What every page of ours is made with: one shell, one style, and a policy that lets nothing else in."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from tightlip.core.figures import count, number, percent
from tightlip.core.files import written_whole
from tightlip.core.registry import look_up
from tightlip.report.kit.table import with_flags

PACKAGE = Path(__file__).parents[2]  # tightlip/: each page keeps its files in its own folder
STYLE = "report/kit/page.css"


class Page(Protocol):
    """One HTML file: made from what it shows, it tells its template what to say.

    `files` is where the template lies, without its ending: `FILES.html.jinja` extends the shell
    in report/kit/shell.html.jinja; FILES.css and FILES.js go into the page where they exist.
    `content` has what the template needs, `headline` and `version` among it.
    """

    files: ClassVar[str]

    def content(self) -> dict[str, Any]: ...


def render_page(name: str, **shown: Any) -> str:
    """The page registered under `name`, as text; `shown` is what that page is made from.

    Holds:
        alone: it names no other file and no address, and runs no script but its own.
    """
    page: Page = look_up("page", name)(**shown)
    style = _asset(STYLE) + _asset(f"{page.files}.css")
    script = _asset(f"{page.files}.js")
    return _template(f"{page.files}.html.jinja").render(
        style=Markup(style), script=Markup(script), policy=_policy(style, script), **page.content()
    )


def write_page(name: str, path: Path, **shown: Any) -> Path:
    """Write the page registered under `name` to `path`, whole and readable by its owner only."""
    page = render_page(name, **shown)
    with written_whole(path, alone=True) as beside:
        # Half a character, which a corpus may hold, cannot be written as UTF-8.
        beside.write_bytes(page.encode("utf-8", "replace"))
    return path


@cache
def _asset(name: str) -> str:
    path = PACKAGE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, number=number, percent=percent, flags=with_flags)
    return environment.get_template(name)


def _policy(style: str, script: str) -> str:
    """A content policy that lets a page's own style and script run, and nothing else."""
    scripts = _hashed(script) if script else "'none'"
    return f"default-src 'none'; style-src {_hashed(style)}; script-src {scripts}; img-src data:; base-uri 'none'; form-action 'none'"


def _hashed(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
