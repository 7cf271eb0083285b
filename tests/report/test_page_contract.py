"""What holds for every registered page; a newcomer without a sample in samples.py fails here."""

import base64
import hashlib
import re
import stat

import pytest

from report.samples import HIDDEN, SAMPLES, SHOWS_TEXT, Reader, contrast
from tightlip.core.registry import names_of
from tightlip.report.kit import render_page, write_page

PAGES = names_of("page")
MAY_LOAD = ("#", "data:,")
# What a reader has to make out, wherever a page has it.
WORDS = (
    "body", "mark", ".card p", ".legend", ".small", ".what", ".lead", ".verdicts li",
    ".compared small", ".compared .section th", ".runs small", ".runs .unproved", ".runs .section th",
    ".weighed small", ".weighed .cut", "figcaption p", "footer p", ".terms dd",
)  # fmt: skip


@pytest.fixture(scope="module", params=PAGES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def page(name, tmp_path_factory):
    return render_page(name, **SAMPLES[name](tmp_path_factory.mktemp("shown") / name))


@pytest.fixture(scope="module")
def path(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page, encoding="utf-8")
    return path


def test_it_is_one_file_that_loads_nothing(page):
    for tag, attributes in Reader(page).elements:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert "style" not in attributes  # the policy would refuse it
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith(MAY_LOAD)
    assert not re.search(r"https?:", page)
    assert not re.search(r"url\(|@import", "".join(Reader(page).blocks.get("style", "")))


def test_its_policy_lets_its_own_style_and_script_run_and_nothing_else(page):
    reader = Reader(page)
    policies = [a["content"] for _, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    rules = dict(rule.strip().split(" ", 1) for rule in policies[0].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["style-src"] == hashed(reader.blocks["style"])
    own = reader.blocks.get("script")
    assert rules["script-src"] == ("'none'" if own is None else hashed(own))
    assert [tag for tag, _ in reader.elements].count("script") == (0 if own is None else 2)


def hashed(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_it_holds_no_text_and_nobodys_name_or_says_that_it_does(name, page):
    if name in SHOWS_TEXT:
        assert "private text and names in this file" in page
    else:
        assert [secret for secret in HIDDEN if secret in page] == []
        assert re.search("no text (and no names )?in this file", page)


def test_it_has_a_headline_and_says_that_no_privacy_covers_it(page):
    elements = [tag for tag, _ in Reader(page).elements]
    assert (elements.count("h1"), elements.count("main"), elements.count("footer")) == (1, 1, 1)
    footer = page[page.index("<footer>") :]
    assert re.search("not differentially private|no guarantee covers it", footer)
    assert "asks nothing of the network" in footer


def test_it_is_written_whole_for_its_owner_only(name, page, tmp_path):
    shown = SAMPLES[name](tmp_path / "shown")
    path = write_page(name, tmp_path / "new" / "page.html", **shown)
    assert path.read_text(encoding="utf-8") == page
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_without_a_word_and_is_no_wider_than_the_screen(opened, path, width):
    shown = opened(path, width=width)  # which fails on any message and any request
    assert shown.locator("h1").is_visible()
    shown.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_its_figures_and_plots_need_no_script(opened, path):
    shown = opened(path, java_script_enabled=False)
    assert shown.locator("h1").is_visible()
    assert shown.locator("table tr").count() > 2 or shown.locator("svg").count() > 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_ground(opened, path, scheme):
    shown = opened(path, color_scheme=scheme)
    colours = shown.evaluate(
        """names => names.flatMap(name => [...document.querySelectorAll(name)].slice(0, 3))
        .map(n => [getComputedStyle(n).color, getComputedStyle(document.body).backgroundColor])""",
        list(WORDS),
    )
    assert len(colours) >= 4
    for ink, ground in colours:
        assert contrast(ink, ground) > 4.5
