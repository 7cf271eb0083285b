"""Scrubbing: what has to go goes, what only looks like it stays."""

import sys
from types import ModuleType, SimpleNamespace

import phonenumbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phonenumbers import PhoneNumberFormat

from tightlip.core.errors import UsageError
from tightlip.corpus import cleaning as scrubbing
from tightlip.corpus.cleaning import presidio_names, scrub

GOES = [
    ("Mail ann.o'neil+x@mail.example.org, please.", "Mail <EMAIL>, please."),
    ("<bob@example.com>", "<<EMAIL>>"),
    ("jürgen@münchen.de", "<EMAIL>"),
    ("mailto:a@b.com", "mailto:<EMAIL>"),
    ("see https://example.org/a?m=bob@example.com#x.", "see <URL>."),
    ("(http://example.org)", "(<URL>)"),
    ("ftp://me:secret@host.example/file", "<URL>"),
    ("www.example.org/path, or WWW.EXAMPLE.ORG", "<URL>, or <URL>"),
    ("at example.com or news.example.co.uk/today!", "at <URL> or <URL>!"),
    ("from 192.168.0.1.", "from <IP>."),
    ("10.0.0.255:8080", "<IP>:8080"),
    ("ping ::1 and fe80::1ff:fe23:4567:890a.", "ping <IP> and <IP>."),
    ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "<IP>"),
    ("::ffff:192.0.2.128", "<IP>"),
    ("card 4111 1111 1111 1111, exp 12/25", "card <CARD>, exp 12/25"),
    ("5500-0000-0000-0004", "<CARD>"),
    ("378282246310005 and 3782 822463 10005", "<CARD> and <CARD>"),
    ("DE89 3704 0044 0532 0130 00 AND MORE", "<ACCOUNT> AND MORE"),
    ("GB82WEST12345698765432.", "<ACCOUNT>."),
    ("account 123456789", "account <ACCOUNT>"),
    ("No.12345678; ID12345678", "No.<ACCOUNT>; <ACCOUNT>"),
    ("SSN 078-05-1120.", "SSN <ACCOUNT>."),
    ("call 713-853-1234 or (713) 853-1234", "call <PHONE> or <PHONE>"),
    ("1-800-555-0199, 713.853.1234", "<PHONE>, <PHONE>"),
    ("+49 (0)89 1234567 / +1 415 555 2671", "<PHONE> / <PHONE>"),
    ("+442079460958.", "<PHONE>."),
    ("020 7946 0958, 089/1234567", "<PHONE>, <PHONE>"),
    ("01 23 45 67 89", "<PHONE>"),
    ("my desk is 345-7896", "my desk is <PHONE>"),
    ("films: 555-123-4567 or (555) 123-4567", "films: <PHONE> or <PHONE>"),
    ("ring 98765 43210, (11) 91234-5678 or 612 34 56 78", "ring <PHONE>, <PHONE> or <PHONE>"),
    ("8 (912) 345-67-89; 089/12 34 567", "<PHONE>; <PHONE>"),
    ("+1 415 555 2671 2003 was the year", "<PHONE> 2003 was the year"),
]

STAYS = [
    "in 1999, from 1999-2004 and 2003/04",
    "on 2003-05-01, 01.02.2003, 1/2/2003, 01-02-2003 and 20030501",
    "at 10:30, 10:30:45, 2003-05-01T10:30:45",
    "3.14 and 3.14159265358979, 0.123456789",
    "$1,000,000, $12345678, €500-1000 and 12,345,678",
    "500-1000 people, pages 100-2000",
    "version 1.2.3 and v1.2.3.4",
    "300.400.500.600",
    "std::vector and a::b, f :: Int",
    "1234 5678 9012 3456 is no card",
    "2 + 2 = 4, +5 points, C++ 11",
    "e.g. this, i.e. that. End.Net gain @ home @ann",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    "ISBN 0-306-40615-2, section 4.2.1, act 3, scene 2",
    "deadbeef12345678abc is a hash",
    "1234567 is short",
    "the score was 21-14, ratio 16:9, 100%",
    "612 345 678 people, 1.234.567.890 in all",
    "01-02-2003 1430 and 2003-05-01 1030, 0 2011-01-01",
    "21 22 23 24 25 26, 100 200 300 400",
    "(0.58310768) 55.71654452 0.608477 0.0125 24.42244057",
    "",
]


@pytest.mark.parametrize(("text", "scrubbed"), GOES)
def test_personal_details_go(text, scrubbed):
    assert scrub(text)[0] == scrubbed


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_it_stays(text):
    assert scrub(text) == (text, {})


def test_everything_is_counted_by_kind():
    _, counts = scrub(
        "a@b.org c@d.org 10.0.0.1 https://x.y +442079460958 4111111111111111 123456789"
    )
    assert counts == {"EMAIL": 2, "IP": 1, "URL": 1, "PHONE": 1, "CARD": 1, "ACCOUNT": 1}


PARTS = [text for text, _ in GOES] + STAYS + ["\n", "(", "<EMAIL>", "7", "a@b", "::"]


@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=4).map(" ".join) | st.text(max_size=60))
def test_scrubbing_twice_is_scrubbing_once(text):
    once, _ = scrub(text)
    assert scrub(once) == (once, {})


def printed_by(region, form):
    """The example number of a country as its numbering plan prints it."""
    return phonenumbers.format_number(phonenumbers.example_number(region), form)


@pytest.mark.parametrize("region", sorted(phonenumbers.SUPPORTED_REGIONS))
def test_a_number_with_its_country_code_goes_whichever_the_country(region):
    number = printed_by(region, PhoneNumberFormat.INTERNATIONAL)
    # Shorter ones, of three islands, may be anything.
    goes = sum(map(str.isdigit, number)) >= 8
    assert scrub(f"call {number}.")[0] == f"call {'<PHONE>' if goes else number}."


@pytest.mark.parametrize("region", ["US", *scrubbing._REGIONS])
def test_a_national_number_goes_where_its_country_is_among_those_asked(region):
    number = printed_by(region, PhoneNumberFormat.NATIONAL)
    assert scrub(f"call {number}.")[0] == "call <PHONE>."


def with_luhn_digit(digits):
    """Oracle: try the ten last digits against the sum as the standard words it."""
    for last in range(10):
        total = 0
        for place, digit in enumerate(reversed([*digits, last])):
            doubled = digit * 2 if place % 2 else digit
            total += doubled - 9 if doubled > 9 else doubled
        if total % 10 == 0:
            return "".join(map(str, [*digits, last]))
    raise AssertionError


@given(draw=st.randoms())
def test_a_card_number_is_told_from_one_with_a_wrong_digit(draw):
    card = with_luhn_digit([4, *(draw.randrange(10) for _ in range(14))])
    wrong = card[:-1] + str((int(card[-1]) + draw.randrange(1, 10)) % 10)
    grouped = [" ".join(number[at : at + 4] for at in range(0, 16, 4)) for number in (card, wrong)]
    assert scrub(grouped[0])[0] == "<CARD>"
    assert scrub(grouped[1])[0] == grouped[1]


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "1" * 300_000, "a." * 150_000, "1-" * 150_000, ":" * 300_000]
)
def test_long_runs_take_no_long_time(text):
    scrub(text + " 4111")


def test_names_are_replaced_beside_the_rules_placeholders():
    def finder(text):
        return [
            (text.index("Ann"), text.index("Ann") + 3),
            (text.index("EMAIL"), text.index("EMAIL") + 5),
        ]

    assert scrub("Ann is a@b.org", names=finder) == ("<NAME> is <EMAIL>", {"EMAIL": 1, "NAME": 1})


def test_a_missing_presidio_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr(scrubbing, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'tightlip\[presidio\]'"):
        presidio_names()


class FakeEngine:
    """Stands in for Presidio: every "Ann" is a person."""

    def __init__(self, **_):
        pass

    def analyze(self, *, text, language, entities):
        assert (language, entities) == ("en", ["PERSON"])
        starts = [at for at in range(len(text)) if text.startswith("Ann", at)]
        return [SimpleNamespace(start=at, end=at + 3) for at in starts]


@pytest.fixture
def presidio(monkeypatch):
    """Presidio's modules as far as we call them; returns the set of installed models."""
    installed = set()
    provider = SimpleNamespace(create_engine=lambda: None)
    for name, content in {
        "presidio_analyzer": {"AnalyzerEngine": FakeEngine},
        "presidio_analyzer.nlp_engine": {"NlpEngineProvider": lambda nlp_configuration: provider},
        "spacy": {"util": SimpleNamespace(is_package=installed.__contains__)},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(scrubbing, "find_spec", lambda name: True)
    return installed


def test_a_missing_spacy_model_is_named_with_its_install_line(presidio):
    with pytest.raises(UsageError, match="python -m spacy download en_core_web_lg"):
        presidio_names()


def test_presidio_is_asked_piece_by_piece(presidio):
    presidio.add("en_core_web_sm")
    text = "Ann " + "said word " * 20_000 + "Ann"
    assert presidio_names()(text) == [(0, 3), (len(text) - 3, len(text))]
