"""The page of a report on texts with several owners: each of them finds their own there."""

import random

import pytest

import tightlip
from report.leakage.test_in_chromium import show_all
from standins import BigramTable
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer

BETWEEN = "\u00a0· "
NAMES = ["ann", "bob", "Smith, John", "cyd", *(f"p{number}" for number in range(8))]


def mail(seed=0):
    """Short mails between people; one of them has a comma in his name."""
    draw, words = (
        random.Random(seed),
        [a + b for a in "bdfgklmn" for b in ("a", "e", "i", "o", "u")],
    )
    return [(draw.sample(NAMES, draw.choice([1, 2, 3])), " ".join(draw.choices(words, k=6))) for _ in range(60)]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    tokenizer = build_tokenizer(open_corpus(mail()))
    model = BigramTable(len(tokenizer), 0)
    folder = tmp_path_factory.mktemp("reports") / "r"
    return tightlip.audit(model, mail(), tokenizer=tokenizer, top_k=14, out=folder)


def owners_of_all(text):
    """Oracle: whoever owns every mail that the words stand in."""
    owners = [{*names} for names, mail in mail() if f" {text} " in f" {mail} "]
    return set.intersection(*owners)


def shown(page):
    show_all(page)
    texts = page.locator("#sequence-table tbody tr.row .clip").all_inner_texts()
    owners = page.locator("#sequence-table tbody tr.row td.owner").all_inner_texts()
    return dict(zip(texts, owners, strict=True))


def test_the_filter_by_a_person_shows_all_that_they_own_alone_or_with_others(opened, report):
    page = opened(report.folder / "report.html")
    assert {*page.locator("#owner option").all_inner_texts()} == {"anyone", *NAMES}
    leaks = {user["user"]: user["leaks"] for user in report.users.to_pylist()}
    assert min(leaks.values()) > 0
    for name in NAMES:
        page.locator("#owner").select_option(label=name)
        rows = shown(page)
        assert len(rows) == leaks[name], name
        assert all(name in whose.split(BETWEEN) for whose in rows.values())
        assert all(name in owners_of_all(text) for text, whose in rows.items() if BETWEEN not in whose)  # fmt: skip


def test_a_name_in_the_list_of_people_leads_to_what_they_share(opened, report):
    page = opened(report.folder / "report.html")
    page.locator("#user-table tbody tr.row", has_text="Smith, John").locator("button").click()
    assert any(BETWEEN in whose for whose in shown(page).values())
    assert "in sequences.parquet" not in page.locator("#status").inner_text()


def test_the_page_does_not_add_up_what_several_own(report):
    page = (report.folder / "report.html").read_text()
    assert "of the unique sequences." not in page
    assert "Texts have several owners here." in page


def test_a_report_names_each_owner_by_themselves(report):
    for text, named, names in zip(
        report.sequences["sequence"].to_pylist(), *report.owners.to_pydict().values(), strict=True
    ):
        assert {*names} == owners_of_all(text)
        assert (named or "") == ", ".join(names)
