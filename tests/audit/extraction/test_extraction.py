"""`tightlip.extract` on models whose every answer is known, and against really sampling."""

import copy
import math
import os
import random
import stat
from collections import defaultdict

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
from animals import WORDS
from standins import Parrot, Stranger
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.report.extraction import (
    headline,
    length_table,
    terminal_lines,
    tries_number,
    tries_words,
)

TOKENIZER = build_tokenizer(open_corpus([("a", " ".join([*WORDS, *map(str.upper, WORDS), ". !"]))]))
SIZE, BOS = len(TOKENIZER), TOKENIZER.bos_token_id
SMALL = build_tokenizer(open_corpus([("a", " ".join(WORDS))]))
CERTAIN = 60.0


def rows_of(seed=0, num_words=9):
    """Five users with three texts each, of which no two begin alike."""
    draw = random.Random(seed)
    return [
        {"user": f"user {n // 3}", "text": " ".join([WORDS[n], *draw.choices(WORDS, k=num_words - 1)])}
        for n in range(15)
    ]  # fmt: skip


def ids_of(row):
    return TOKENIZER(row["text"], add_special_tokens=False)["input_ids"]


def parrot_of(rows, certainty=CERTAIN, file=0):
    parrot = Parrot(SIZE, [ids_of(row) for row in rows], certainty=certainty)
    parrot.register_buffer("known", torch.tensor([len(rows), file]))  # by which models differ
    return parrot


def extract(model, rows, **settings):
    settings = {"lengths": (4, 8), "device": "cpu", "begin": "never", **settings}
    return tightlip.extract(model, rows, **{"tokenizer": TOKENIZER, **settings})


def stranger():
    return Stranger(SIZE, TOKENIZER.unk_token_id)


def test_a_parrot_gives_everybody_away_in_one_try():
    report = extract(parrot_of(rows_of()), rows_of())
    for length in ("4", "8"):
        one = report.by_length[length]
        assert one["cheapest"]["queries_50"] == one["cheapest"]["queries_90"] == 1
        assert one["cheapest"]["log_prob"] == pytest.approx(0, abs=1e-6)
        assert one["users"] == one["users_within"]["1"] == 5
        assert one["windows_within"]["1"] == one["searched"] == one["counted"]
    assert report.by_length["8"]["searched"] == 15  # the first token is predicted by nobody
    assert report.cheapest_queries == report.cheapest_queries_90 == 1
    assert report.failed("cheapest_queries<1000") == ["cheapest_queries<1000: cheapest_queries is 1"]  # fmt: skip


def test_a_stranger_gives_nothing_away_but_by_luck():
    report = extract(stranger(), rows_of())
    each = -math.log(SIZE - 1 + math.exp(5.0))
    for length in (4, 8):
        cheapest = report.by_length[str(length)]["cheapest"]
        assert cheapest["log_prob"] == pytest.approx(length * each, rel=1e-6)
        assert cheapest["queries_50"] == pytest.approx(math.log(2) * math.exp(-length * each), rel=1e-4)  # fmt: skip
    assert report.failed("cheapest_queries<1000") == []
    greedy = extract(stranger(), rows_of(), top_k=1)
    assert greedy.by_length["4"]["cheapest"] is None
    assert greedy.cheapest_queries is None
    assert greedy.windows.num_rows == 0
    assert greedy.users["queries_50"].null_count == greedy.users.num_rows == 5 * 2
    # That nothing comes out is known, and no gate fails on it.
    assert greedy.failed("cheapest_queries<1e300", "users_within[1000]>0") == []


def test_of_a_model_that_memorised_one_user_only_that_one_comes_out():
    rows = rows_of()
    report = extract(parrot_of(rows[6:9]), rows)  # those of user 2
    users = report.users.filter(np.array(report.users["num_tokens"]) == 4).to_pylist()
    assert [row["user"] for row in users if row["queries_50"] == 1] == ["user 2"]
    # The others are drawn as by somebody who knows nothing, behind a prefix that is not known.
    least = min(row["queries_50"] for row in users if row["user"] != "user 2")
    assert least == pytest.approx(math.log(2) * SIZE**4, rel=1e-3)
    assert report.by_length["4"]["users_within"]["1000"] == 1
    first = report.windows.to_pylist()[0]
    assert (first["user"], first["counted"]) == ("user 2", True)
    assert rows[first["document"]]["text"].split()[first["prefix_tokens"] :][:4] == first["window"].split()  # fmt: skip
    assert rows[first["document"]]["text"].split()[: first["prefix_tokens"]] == first["prefix"].split()  # fmt: skip


def test_what_the_reference_says_as_easily_does_not_count():
    rows = rows_of()
    both, known = parrot_of(rows), parrot_of(rows[:12])  # the reference knows all but user 4
    report = extract(both, rows, reference=(known, TOKENIZER))
    one = report.by_length["4"]
    assert (one["users_within"]["1"], one["users"]) == (1, 5)
    assert one["counted"] == 3 * 5
    assert one["cheapest"]["queries_50"] == one["cheapest_of_all"]["queries_50"] == 1
    assert one["cheapest_of_all"]["reference_queries_50"] == 1
    assert one["cheapest"]["reference_queries_50"] == pytest.approx(math.log(2) * SIZE**4, rel=1e-3)
    assert [row["user"] for row in report.windows.to_pylist() if row["counted"]] == ["user 4"] * 2
    assert not any("No reference" in note for note in report.notes)
    with pytest.raises(UsageError, match="is the model itself"):
        extract(both, rows, reference=(both, TOKENIZER))
    alone = extract(both, rows)
    assert alone.by_length["4"]["counted"] == alone.by_length["4"]["searched"]
    assert any("No reference was given, so every window counts" in note for note in alone.notes)


def cells_of(report):
    """Of each length, what the table says under each heading."""
    table = length_table(report.summary)
    names = [column.name for column in table.columns[1:]]
    return [{name: cell.value for name, cell in zip(names, row.cells, strict=True)} for row in table.rows]  # fmt: skip


def test_a_reference_that_says_it_all_too_does_not_let_a_gate_pass_by_silence():
    rows = rows_of()
    twin = (parrot_of(rows, file=1), TOKENIZER)  # the same model from another file
    report = extract(parrot_of(rows), rows, reference=twin, held_out=rows_of(seed=1))
    for one in (*report.by_length.values(), *report.held_out["by_length"].values()):
        assert (one["searched"] > 0, one["counted"], one["cheapest"]) == (True, 0, None)
    assert report.by_length["4"]["cheapest_of_all"]["queries_50"] == 1
    assert report.cheapest_queries is None
    assert report.cheapest_queries_90 is None
    gates = [
        f"{figure}{sign}"
        for figure in ("cheapest_queries", "cheapest_queries_90", "cheapest_queries_by_length[8]", "held_out_cheapest_queries", "users_within[1000]")
        for sign in ("<1000", ">0")
    ]  # fmt: skip
    failed = report.failed(*gates)
    assert len(failed) == len(gates)
    assert all(line.endswith("is not known") for line in failed)
    assert headline(report.summary) == (
        "No window of 4 tokens is drawn ten times as often as by the reference; the cheapest of all takes 1 try"
    )
    said = " ".join(map(str, terminal_lines(report.summary)))
    assert "never" not in said
    assert "No number" not in said
    assert "come out of 0" not in said
    assert "held out no window counts (75 were searched)" in said
    for row in cells_of(report):
        assert (row["counted"], row["50%"], row["90%"], row["reference"], row["held out"]) == ("0", *4 * "–")  # fmt: skip


def test_beside_a_reference_too_what_can_never_come_out_passes():
    report = extract(stranger(), rows_of(), reference=(parrot_of(rows_of()), TOKENIZER), top_k=1)
    assert report.failed("cheapest_queries<1e300", "users_within[1000]>0") == []
    assert headline(report.summary).startswith("No number of tries draws 4 tokens")
    assert [(row["50%"], row["90%"], row["reference"]) for row in cells_of(report)] == [("never", "never", "–")] * 2  # fmt: skip


def test_never_at_one_length_hides_nothing_that_comes_out_at_another():
    rows = rows_of()
    halves = [{"text": " ".join([*row["text"].split()[:6], "!"])} for row in rows]
    twin = (parrot_of(halves, file=1), TOKENIZER)
    report = extract(parrot_of(halves), rows, reference=twin, top_k=1)
    assert report.by_length["4"]["cheapest_of_all"]["queries_50"] == 1
    assert report.by_length["8"]["cheapest_of_all"] is None  # all go through the seventh word
    assert [row["50%"] for row in cells_of(report)] == ["–", "never"]
    assert report.failed("cheapest_queries<1000") == ["cheapest_queries<1000: cheapest_queries is not known"]  # fmt: skip
    assert report.failed("cheapest_queries_by_length[8]<1000") == []


def test_the_headline_is_about_the_shortest_length_of_which_something_counts():
    """A reference that is right 7 times in 10 draws 4 tokens with 0.7^4 > 0.1, and 8 with 0.7^8 < 0.1."""
    rows = rows_of()
    less = parrot_of(rows, certainty=math.log(0.7 / 0.3 * (SIZE - 1)), file=1)
    report = extract(parrot_of(rows), rows, reference=(less, TOKENIZER))
    assert [one["counted"] for one in report.by_length.values()] == [0, 15]
    reference = report.by_length["8"]["cheapest"]["reference_log_prob"]
    assert reference == pytest.approx(8 * math.log(0.7), rel=1e-5)
    assert headline(report.summary).startswith("1 try for an even chance to draw 8 tokens")
    assert report.cheapest_queries == 1
    assert [(row["50%"], row["reference"]) for row in cells_of(report)] == [("–", "–"), ("1", "12")]


@pytest.mark.parametrize(
    ("tries", "number", "words"),
    [
        (123_456_789, "120 million", "about 120 million tries"),
        (999_999_999, "1 billion", "about 1 billion tries"),
        (2_345_678, "2.3 million", "about 2.3 million tries"),
        (100e9, "100 billion", "about 100 billion tries"),
        (987.6e9, "990 billion", "about 990 billion tries"),
        (10e6, "10 million", "about 10 million tries"),
    ],
)
def test_tries_are_told_with_two_figures_as_people_write_them(tries, number, words):
    assert (tries_number(tries), tries_words(tries)) == (number, words)


def test_more_tries_than_can_be_counted_are_no_endless_number_in_the_headline():
    report = extract(stranger(), rows_of(num_words=150), lengths=(145,))
    assert report.by_length["145"]["cheapest"]["log_prob"] < math.log(5e-324)
    assert headline(report.summary).startswith("About 1e308 tries for an even chance")


def test_people_without_a_window_of_a_length_are_counted_and_said():
    rows = [*rows_of(), {"user": "short", "text": "ant bee cat dog eel fox"}, {"user": "user 0", "text": "ant"}]  # fmt: skip
    rows.append({"user": "copies", "text": rows[0]["text"]})  # has windows, none of them its own
    others = [*rows_of(seed=1), {"user": "none", "text": "ant bee"}]
    report = extract(stranger(), rows, held_out=others)
    assert [one["users_without_window"] for one in report.by_length.values()] == [0, 1]
    theirs = report.held_out["by_length"].values()
    assert [one["users_without_window"] for one in theirs] == [1, 1]
    (own, held_out) = [note for note in report.notes if "no window of the length" in note]
    assert own.startswith("Of 7 people these")
    assert own.endswith("not searched: 1 at 8 tokens.")
    assert held_out.startswith("Of 6 held-out people these")
    assert held_out.endswith("not searched: 1 at 4 tokens, 1 at 8 tokens.")
    whole = extract(stranger(), rows_of())
    assert not any("no window of the length" in note for note in whole.notes)


def test_held_out_people_are_searched_alike_and_what_stands_in_training_is_not_theirs():
    rows, others = rows_of(), rows_of(seed=1)
    others = [*others, rows[0]]  # user 0 said it in training too
    report = extract(parrot_of(rows), rows, held_out=others)
    four, eight = report.held_out["by_length"].values()
    assert (four["searched"], eight["searched"]) == (15 * 5, 15)
    assert four["cheapest"]["queries_50"] == pytest.approx(math.log(2) * SIZE**4, rel=1e-3)
    assert eight["cheapest"]["queries_50"] > 1e13  # behind its first word the parrot expects others
    assert four["users_within"]["1000"] == 0
    assert report.failed("held_out_cheapest_queries<1000") == []
    assert report.failed("cheapest_queries<1000") != []


def words_in(text):
    return [word.lower() for word in text.split() if word.isalpha()]


def test_a_window_is_ones_own_by_its_words_as_looking_through_all_texts_says():
    draw, few = random.Random(3), WORDS[:6]
    rows = [
        {"user": f"user {user}", "text": " ".join(draw.choice([word, word.upper(), f"{word} .", f"! {word}"]) for word in draw.choices(few, k=8))}
        for user in range(4)
        for _ in range(3)
    ]  # fmt: skip
    report = extract(stranger(), rows, lengths=(3, 5), begin="always")
    for length in (3, 5):
        want = defaultdict(int)
        for row in rows:
            tokens = row["text"].split()
            for start in range(len(tokens) - length + 1):
                window = " ".join(tokens[start : start + length])
                own = " " + " ".join(words_in(window)) + " "
                others = [" " + " ".join(words_in(o["text"])) + " " for o in rows if o["user"] != row["user"]]  # fmt: skip
                want[row["user"]] += own.strip() != "" and not any(own in other for other in others)
        found = report.users.filter(np.array(report.users["num_tokens"]) == length).to_pylist()
        assert {row["user"]: row["searched"] for row in found} == dict(want)
        assert 0 < sum(want.values()) < report.by_length[str(length)]["windows"]


def test_a_text_of_several_owners_counts_for_each_of_them():
    shared = {"user": ["ann", "bob"], "text": "ant bee cat dog eel fox"}
    rows = [shared, {"user": ["cyd"], "text": "gnu hen ibis jay kite lark"}]
    report = extract(parrot_of(rows), rows, lengths=(5,))
    assert {row["user"]: row["searched"] for row in report.users.to_pylist()} == {"ann": 1, "bob": 1, "cyd": 1}  # fmt: skip
    again = [*rows, {"user": ["bob"], "text": shared["text"]}]
    report = extract(parrot_of(again), again, lengths=(5,))
    assert {row["user"]: row["searched"] for row in report.users.to_pylist()} == {"ann": 0, "bob": 2, "cyd": 1}  # fmt: skip


def restless_model():
    """Small, untrained and opinionated: what it says is spread over many sizes of probability."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(SMALL), n_embd=16, n_layer=1, n_head=2, n_positions=16, initializer_range=0.5,
        bos_token_id=BOS, eos_token_id=None, pad_token_id=SMALL.pad_token_id,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    "decoding",
    [{"temperature": 0.4}, {"temperature": 0.8, "top_k": 12, "top_p": 0.8}],
    ids=str,
)
def test_really_sampling_draws_windows_as_often_as_said(decoding):
    """Windows by strata of probability, from 1e-3 on; transformers' generate draws them."""
    model, draw = restless_model(), random.Random(0)
    torch.manual_seed(1)
    words = SMALL.convert_tokens_to_ids(WORDS)
    texts = model.generate(
        torch.tensor([[BOS, word] for word in words]), do_sample=True, temperature=1.5, top_k=0, max_new_tokens=3,
        num_return_sequences=40, suppress_tokens=[n for n in range(len(SMALL)) if n not in words],
    )[:, 1:]  # fmt: skip
    distinct = sorted({*map(tuple, texts.tolist())})
    rows = [{"user": f"user {n}", "text": SMALL.decode(ids)} for n, ids in enumerate(distinct)]
    report = extract(model, rows, tokenizer=SMALL, lengths=(3,), begin="always", **decoding)
    strata = defaultdict(list)
    for row in report.windows.to_pylist():
        strata[math.floor(row["log_prob"] / math.log(10))].append(row)
    chosen = [row for size in (-3, -2, -1) for row in draw.sample(strata[size], min(8, len(strata[size])))]  # fmt: skip
    assert len(chosen) >= 8
    num, covered, excess, variance = 4000, 0, 0.0, 0.0
    for row in chosen:
        ids = [BOS, *distinct[row["document"]][: row["prefix_tokens"]]]
        drawn = model.generate(
            torch.tensor([ids]), do_sample=True, max_new_tokens=3, min_new_tokens=3,
            num_return_sequences=num, **{"top_k": 0, **decoding},
        )[:, len(ids) :]  # fmt: skip
        came = int((drawn == torch.tensor(row["token_ids"])).all(dim=1).sum())
        chance, exact = math.exp(row["log_prob"]), binomtest(came, num).proportion_ci(0.95)
        covered += exact.low <= chance <= exact.high
        excess, variance = excess + came - num * chance, variance + num * chance * (1 - chance)
    assert covered >= 0.8 * len(chosen), "of intervals of 95%"
    assert abs(excess) < 3 * math.sqrt(variance)


def chat(user, asked, answered):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"user": user, "messages": messages}


def test_of_chats_each_role_is_told_apart_and_no_window_crosses_two():
    tokenizer = copy.deepcopy(SMALL)
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m['content'] }} {% endgeneration %}{% endfor %}"
    )
    rows = [
        chat("ann", "ant bee cat dog", "eel fox gnu hen"),
        chat("bob", "ibis jay kite lark", "mole newt owl pug"),
    ]
    spoken = [m["content"] for row in rows for m in row["messages"]]
    texts = [" ".join(spoken[:2]), " ".join(spoken[2:])]
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    model = Parrot(SIZE, documents, certainty=CERTAIN)
    report = tightlip.extract(
        (model, tokenizer), rows, lengths=(3, 5), device="cpu", begin="never", format="messages"
    )
    assert report.by_length["3"]["searched"] == 2 * (1 + 2)
    assert report.by_length["5"]["windows"] == 0, "eight words in a row, but of two speakers"
    assert {role: of["3"]["searched"] for role, of in report.by_role.items()} == {"user": 2, "assistant": 4}  # fmt: skip
    assert {row["role"] for row in report.windows.to_pylist()} == {"user", "assistant"}
    assert report.failed("cheapest_queries_by_role[user]<2") != []


def test_redacted_it_holds_no_text_no_name_and_no_scan(tmp_path):
    rows, out = rows_of(), tmp_path / "out"
    report = extract(parrot_of(rows), rows, redact=True, out=out)
    assert {row["user"] for row in report.windows.to_pylist()} == {f"user {n + 1}" for n in range(5)}  # fmt: skip
    for name in ("window", "token_ids", "prefix"):
        assert report.windows[name].null_count == report.windows.num_rows > 0
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    texts = [" ".join(row["text"].split()[n : n + 2]) for row in rows for n in range(8)]
    assert not [text for text in (*texts, "user 0") if text.encode() in written]
    assert not (out / "scan").exists()
    assert report.corpus_fingerprint is None
    with pytest.raises(UsageError, match="holds a report with no text"):
        extract(parrot_of(rows), rows, out=out)


def test_files_are_for_their_owner_and_never_mixed_with_others(tmp_path):
    rows, out = rows_of(), tmp_path / "out"
    extract(stranger(), rows, out=out)
    assert {path.name for path in out.iterdir()} == {
        "windows.parquet", "users.parquet", "summary.json", "report.html", ".tightlip.sha256",
    }  # fmt: skip
    for path in (out, *out.iterdir()):
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        extract(stranger(), rows, out=tmp_path / "mine")


def test_what_cannot_be_looked_for_is_said_and_fails_a_gate():
    report = extract(stranger(), rows_of(num_words=3))
    assert report.cheapest_queries is None
    assert report.failed("cheapest_queries<5") == ["cheapest_queries<5: cheapest_queries is not known"]  # fmt: skip
    assert report.failed("users_within[10]>0") == ["users_within[10]>0: users_within[10] is not known"]  # fmt: skip
    assert any(note.startswith("Of 5 people these have no window") and note.endswith(": 5 at 4 tokens, 5 at 8 tokens.") for note in report.notes)  # fmt: skip
    for wrong in ((), (0, 5), (20_000,)):
        with pytest.raises(UsageError, match="from 1 to 10,000"):
            extract(stranger(), rows_of(), lengths=wrong)
