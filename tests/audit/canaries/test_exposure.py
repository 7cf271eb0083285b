"""Exposure against enumeration by hand, its law on models that never saw a canary, and its limits."""

import math
import random
from itertools import islice, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from models.small_models import greedy_by_rereading, next_logits, small_model
from standins import Parrot, Stranger
from tightlip.audit.canaries import candidates as candidates_module
from tightlip.audit.canaries import exposure as exposure_module
from tightlip.audit.canaries import tries
from tightlip.audit.canaries.candidates import Candidates, CandidateScorer, spelt_across
from tightlip.audit.canaries.exposure import (
    can_be_shown,
    estimated_exposure,
    exposure_of,
    fitted_tail,
    measure_exposures,
    samples_needed,
    share_limits_bits,
)
from tightlip.audit.canaries.tab_attack import Greedy, attacked, most_successes
from tightlip.audit.canaries.tries import PrefixReader, token_rows
from tightlip.audit.settings import ExposureConfig
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import Canary, CanaryConfig, Planted, exposed_above_bits
from tightlip.corpus.canaries import plant_in as plant_canaries
from tightlip.corpus.canary_templates import Readings, read_template
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import DIGITS, build_tokenizer, word_tokenizer
from tightlip.models import GRUConfig, GRUForCausalLM
from tightlip.scan.scanner import Scanner

WORDS = ["PIN", "is", "ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
TOKENIZER = word_tokenizer([*DIGITS, *WORDS])  # 23 tokens, as many as small_model has
BOS = TOKENIZER.bos_token_id
POOLS = {"digits": DIGITS, "words": ["ant", "bee", "cat"]}
TEMPLATES = ["PIN is {digits:2}", "{digits:1} {words:2} PIN", "{words:1}{digits:2}"]


def canary(template, values):
    text = read_template(template).filled(values)
    return Canary(text=text, user="u", repetitions=1, template=template, values=tuple(values))


def tab_successes(scorer, texts, prompt_tokens):
    canaries = [Canary(text=text, user="u", repetitions=1) for text in texts]
    return [attack.tab for attack in attacked(scorer, canaries, prompt_tokens)]


def scorer_of(model, tokenizer=TOKENIZER, bos=BOS):
    return CandidateScorer(Scanner(model, bos_id=bos), tokenizer)


def candidates_of(template, pools=POOLS):
    read = read_template(template)
    return Candidates(read, tuple(tuple(pools[name]) for name in read.places))


def nats_by_rereading(model, text):
    """Oracle: the text's tokens one at a time, the whole prefix read again for each."""
    ids = [BOS, *TOKENIZER.encode(text, add_special_tokens=False)]
    return sum(
        next_logits(model, ids[:end]).double().log_softmax(-1)[ids[end]].item()
        for end in range(1, len(ids))
    )


def bits_by_sorting(secret, decoys):
    """Oracle: line everyone up, the likeliest first; take the secret's last possible place."""
    line = sorted([*decoys, secret], reverse=True)
    place = len(line) - line[::-1].index(secret)
    return math.log2(len(line)) - math.log2(place), place


@given(draw=st.randoms())
def test_exposure_agrees_with_sorting(draw):
    decoys = [draw.randint(-9, 0) for _ in range(draw.randint(1, 40))]
    secret = draw.randint(-9, 0)
    found = exposure_of(secret, np.array(decoys))
    bits, place = bits_by_sorting(secret, decoys)
    assert (found.exposure_bits, found.rank) == (pytest.approx(bits), place)
    assert 0 <= found.exposure_bits <= math.log2(len(decoys) + 1)


@pytest.mark.parametrize("kind", ["lstm", "gru", "transformer"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_exposure_agrees_with_full_enumeration(kind, template):
    model = small_model(kind)
    places = read_template(template).places
    draw = random.Random(0)
    planted = [canary(template, [draw.choice(POOLS[name]) for name in places]) for _ in range(3)]
    planted = list({one.text: one for one in planted}.values())
    texts = [read_template(template).filled(v) for v in product(*(POOLS[name] for name in places))]
    nats = {text: nats_by_rereading(model, text) for text in texts}
    found = measure_exposures(
        Scanner(model, bos_id=BOS), TOKENIZER, Planted(canaries=planted, pools=POOLS)
    )
    for one in found:
        decoys = [nats[text] for text in texts if text not in {other.text for other in planted}]
        bits, place = bits_by_sorting(nats[one.text], decoys)
        assert one.exact
        assert one.space == len(texts) - len(planted) + 1
        assert one.rank == place
        assert one.exposure_bits == one.low == one.high == pytest.approx(bits)


def model_of(kind, vocabulary=23):
    """One of ours, or somebody else's of the same size."""
    torch.manual_seed(1)
    if kind == "gru" and vocabulary != 23:
        return GRUForCausalLM(GRUConfig(vocabulary, 6, 10, 2)).eval()
    if kind == "gpt2":
        shape = GPT2Config(
            vocab_size=vocabulary, n_positions=16, n_embd=12, n_layer=2, n_head=3, bos_token_id=2, eos_token_id=3
        )  # fmt: skip
        model = GPT2LMHeadModel(shape)
    elif kind == "llama":
        shape = LlamaConfig(
            vocab_size=vocabulary, hidden_size=12, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        model = LlamaForCausalLM(shape)
    else:
        return small_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model.eval()


ROOMS = {
    "plenty": (1 << 24, 1 << 30),
    "few logits": (23 * 7, 1 << 30),
    "few keys and values": (1 << 24, 20_000),
}


@pytest.mark.parametrize("kind", ["lstm", "transformer", "gpt2", "llama"])
@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("room", ROOMS)
def test_the_tree_gives_what_each_text_by_itself_gives(kind, bos, room, monkeypatch):
    logits, cache = ROOMS[room]
    monkeypatch.setitem(tries.LOGITS_AT_ONCE, "cpu", logits)
    monkeypatch.setattr(tries, "CACHE_BYTES", cache)
    scorer = scorer_of(model_of(kind), bos=bos)
    for template in [*TEMPLATES, "{digits:3}"]:
        candidates = candidates_of(template)
        assert scorer._single_tokens(candidates) is not None
        numbers = np.arange(math.prod(candidates.shape))
        by_text = scorer.score_texts(candidates.texts(candidates.places_of(numbers)))
        assert scorer.score_all(candidates) == pytest.approx(by_text, abs=1e-4)


def tokens_shown(model, action):
    """How many tokens the model is shown meanwhile, padding included."""
    shown = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: shown.append(given["input_ids"].numel()), with_kwargs=True
    )
    action()
    hook.remove()
    return sum(shown)


@pytest.mark.parametrize("kind", ["lstm", "transformer", "gpt2", "llama"])
def test_every_shared_beginning_is_read_once(kind):
    model = model_of(kind)
    candidates = candidates_of("PIN is {digits:3}")
    scorer = scorer_of(model)
    trie = scorer._trie(candidates, [])
    shown = tokens_shown(model, lambda: scorer._by_trie(trie, candidates))
    once = 1 + 1 + 1 + 10 + 100  # BOS, PIN, is, and the digits but the last
    probing = 0 if kind == "lstm" else 2 + 2 + 6  # through a cache and without one
    assert shown == once + probing


def test_a_model_whose_cache_gives_other_logits_is_read_from_the_beginning():
    model = model_of("gpt2")
    candidates = candidates_of("PIN is {digits:2}")
    expected = scorer_of(model).score_all(candidates)
    plain = model.forward

    def wrong(input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        out = plain(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)
        if past_key_values is not None:
            out.logits = out.logits.roll(1, -1)
        return out

    model.forward = wrong
    assert scorer_of(model).score_all(candidates) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["lstm", "transformer", "gpt2"])
def test_reading_on_leaves_the_memory_as_it_was(kind):
    reader = PrefixReader(Scanner(model_of(kind), bos_id=BOS))
    with torch.inference_mode():
        reader.choose_way(torch.tensor([BOS, 5]))
        _, memory = reader.read(None, torch.tensor([BOS]))
        rows = torch.zeros(3, dtype=torch.long)
        first, _ = reader.read(reader.select(memory, rows), torch.tensor([5, 6, 7]))
        again, _ = reader.read(reader.select(memory, rows), torch.tensor([5, 6, 7]))
    assert reader.caches == (kind != "lstm")
    assert torch.equal(first, again)


@pytest.fixture(scope="module")
def joining():
    """Byte pairs that join some digits, and those to the space before them."""
    corpus = [("u", "PIN is 1212 1234 1212 12 12, 2024 and 2023.")] * 9
    return build_tokenizer(open_corpus(corpus), kind="bpe", size=290)


@pytest.mark.parametrize("kind", ["gru", "gpt2", "llama"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("template", ["PIN is {digits:3}", "{digits:2}", "a {digits:2}, {words:1} {digits:1}?"])  # fmt: skip
def test_byte_pairs_that_join_digits_are_read_in_shared_beginnings(kind, bos, template, joining, caplog):  # fmt: skip
    model = model_of(kind, vocabulary=len(joining))
    scorer = scorer_of(model, joining, joining.bos_token_id if bos else None)
    candidates = candidates_of(template)
    assert scorer._single_tokens(candidates) is None
    texts = candidates.texts_of(np.arange(math.prod(candidates.shape)))
    assert len({len(ids) for ids in scorer.ids_of(texts)}) > 1
    assert scorer.score_all(candidates) == pytest.approx(scorer.score_texts(texts), abs=1e-4)
    assert "text by text" not in caplog.text
    trie = scorer._trie(candidates, [])
    by_text = sum(map(len, scorer.ids_of(texts)))
    assert tokens_shown(model, lambda: scorer._by_trie(trie, candidates)) < by_text


@pytest.mark.parametrize("may_cut", [True, False])
@pytest.mark.parametrize(
    "template", ["PIN is {digits:3}", "{digits:3}", "x{digits:3} ", "is {names}, {digits:1} {words:1}", "| ;{digits:1}"]
)  # fmt: skip
def test_tokens_of_all_candidates_are_those_of_their_texts(template, may_cut, joining, monkeypatch):
    monkeypatch.setattr(tries, "_JOINED", 7)
    pools = POOLS | {"names": ["Ann Lee", "12", "bob; jr", "Ann"]}
    candidates = candidates_of(template, pools)
    scorer = scorer_of(small_model("gru"), joining)
    rows = token_rows(candidates.template, candidates.pools, scorer.ids_of, may_cut=may_cut)
    texts = candidates.texts_of(np.arange(math.prod(candidates.shape)))
    for row, ids in zip(rows, scorer.ids_of(texts), strict=True):
        assert row[row >= 0].tolist() == ids.tolist()
        assert (row[len(ids) :] == -1).all()


def joining_tokenizer(entry):
    """Our words and one more entry, which joins digits wherever they stand so."""
    tokenizer = word_tokenizer([*DIGITS, *WORDS[:-1]])
    tokenizer.add_tokens([entry])
    return tokenizer


def test_an_entry_that_joins_digits_is_found_however_rare_it_is():
    candidates = candidates_of("PIN is {digits:5}")
    for entry in ("20", "2024", "93107", "is 3"):
        scorer = scorer_of(small_model("lstm"), joining_tokenizer(entry))
        assert scorer._single_tokens(candidates) is None, entry
    scorer = scorer_of(small_model("lstm"), joining_tokenizer("123456"))
    assert scorer._single_tokens(candidates) is not None


def test_scores_that_the_tree_gets_wrong_are_taken_text_by_text(monkeypatch, caplog):
    tokenizer = joining_tokenizer("202")
    scorer = scorer_of(small_model("lstm"), tokenizer)
    candidates = candidates_of("PIN is {digits:3}")
    blind = [np.array([token]) for token in tokenizer.encode("PIN is", add_special_tokens=False)]
    blind += [np.array(tokenizer.convert_tokens_to_ids(DIGITS))] * 3
    monkeypatch.setattr(candidates_module, "single_tokens", lambda *_: blind)
    monkeypatch.setattr(candidates_module, "_SCORES_COMPARED", 1)
    texts = candidates.texts(candidates.places_of(np.arange(1000)))
    expected = scorer.score_texts(texts)
    assert scorer.score_all(candidates, [202]) == pytest.approx(expected)
    assert "text by text" in caplog.text
    assert abs(scorer.score_all(candidates, [])[202] - expected[202]) > 1


@given(draw=st.randoms())
def test_entries_over_an_edge_are_those_that_some_text_holds_there(draw):
    options = [
        ["".join(draw.choices("ab", k=draw.randint(1, 2))) for _ in range(draw.randint(1, 2))]
        for _ in range(draw.randint(1, 4))
    ]
    entry = "".join(draw.choices("ab", k=draw.randint(2, 4)))
    found = False
    for parts in product(*options):
        edges = np.cumsum([len(part) for part in parts])
        text = "".join(parts)
        starts = [n for n in range(len(text)) if text.startswith(entry, n)]
        found |= any(start < edge < start + len(entry) for start in starts for edge in edges)
    assert spelt_across(options, entry) == found


# The law on models that never saw a canary


def test_unseen_canaries_follow_the_exponential_law_and_alarm_as_rarely_as_stated(tmp_path):
    config = CanaryConfig(templates=["PIN is {digits:5}"], repetitions=[1] * 3000)
    planted = plant_canaries(open_corpus([("u", "ant bee")]), tmp_path / "p", config)
    found = measure_exposures(Scanner(small_model("lstm"), bos_id=BOS), TOKENIZER, planted)
    bits = np.array([one.exposure_bits for one in found])
    assert bits.mean() == pytest.approx(1 / math.log(2), abs=0.1)  # 4 standard errors
    for above in range(1, 8):
        expected = 2.0**-above
        spread = math.sqrt(expected * (1 - expected) / 3000)
        assert (bits > above).mean() == pytest.approx(expected, abs=4 * spread), above
    for alpha in (0.05, 0.2):
        alarms = (bits.reshape(300, 10) > exposed_above_bits(10, alpha)).any(1).mean()
        expected = 1 - (1 - alpha / 10) ** 10
        spread = math.sqrt(expected * (1 - expected) / 300)
        assert alarms == pytest.approx(expected, abs=3 * spread)


def test_a_canary_learnt_by_heart_has_all_the_bits_there_are():
    secret = canary("PIN is {digits:3}", "472")
    model = Parrot(23, [[BOS, *TOKENIZER.encode(secret.text, add_special_tokens=False)]])
    planted = Planted(canaries=[secret], pools=POOLS)
    (found,) = measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, planted)
    assert found.exposure_bits == pytest.approx(math.log2(1000))
    assert (found.rank, found.space, found.exact, found.tab) == (1, 1000, True, True)
    assert found.prompt == "PIN"
    sampled = ExposureConfig(enumerate_up_to=10, num_samples=500)
    (found,) = measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, planted, sampled)
    assert not found.exact
    assert found.low == pytest.approx(math.log2(500 / 3), abs=0.05)
    assert found.high == pytest.approx(math.log2(1000))
    assert found.low <= found.exposure_bits <= found.high


def test_a_model_that_tells_no_two_apart_has_no_exposure():
    planted = Planted(canaries=[canary("PIN is {digits:3}", "472")], pools=POOLS)
    for config in (ExposureConfig(), ExposureConfig(enumerate_up_to=10, num_samples=500)):
        (found,) = measure_exposures(
            Scanner(Stranger(23, 22), bos_id=BOS), TOKENIZER, planted, config
        )
        assert (found.exposure_bits, found.rank, found.tab) == (0.0, 1000, False)


class Choir(Parrot):
    """Knows several texts that begin alike: any of them is as likely to go on."""

    def __init__(self, texts):
        super().__init__(23, [])
        for text in texts:
            ids = [BOS, *TOKENIZER.encode(text, add_special_tokens=False)]
            for end in range(1, len(ids)):
                self.next.setdefault(tuple(ids[:end]), set()).add(ids[end])
        self.next = {start: sorted(tokens) for start, tokens in self.next.items()}


def by_heart(canaries, config=None, others=(), pools=POOLS):
    """What a model that knows all of them shows."""
    scanner = Scanner(Choir([one.text for one in [*canaries, *others]]), bos_id=BOS)
    key = Planted(canaries=list(canaries), pools=pools)
    return measure_exposures(scanner, TOKENIZER, key, config, others)


def digit_canaries(template, num, seed=0):
    draw = random.Random(seed)
    texts = draw.sample(range(10 ** len(read_template(template).places)), num)
    width = len(read_template(template).places)
    return [canary(template, f"{number:0{width}d}") for number in texts]


SAMPLED = ExposureConfig(enumerate_up_to=10, num_samples=100)


def test_enough_candidates_are_sampled_that_what_is_known_by_heart_is_exposed():
    found = by_heart(digit_canaries("PIN is {digits:5}", 60), SAMPLED)
    bar = exposed_above_bits(60)
    for one in found:
        assert not one.exact
        assert one.num_samples < 100_000
        assert one.low > bar
        assert can_be_shown(one.to_json(), bar)


@pytest.mark.parametrize("num", [1, 2, 7, 60, 333, 10_000])
def test_a_canary_with_one_sampled_candidate_ahead_still_passes_the_bar(num):
    share = 2.0 ** -exposed_above_bits(num)
    assert stats.binom.cdf(1, samples_needed(num), share) < 0.05
    assert stats.binom.cdf(1, int(samples_needed(num) * 0.95), share) > 0.05


def test_samples_are_bounded_and_what_they_cannot_show_is_known(monkeypatch):
    monkeypatch.setattr(exposure_module, "MOST_SAMPLES", 1000)
    planted = digit_canaries("PIN is {digits:5}", 60)
    for found in by_heart(planted, SAMPLED):
        assert found.num_samples <= 1000
        assert not can_be_shown(found.to_json(), exposed_above_bits(60))
    (one, *_) = by_heart(planted, ExposureConfig(enumerate_up_to=10, num_samples=6000))
    assert can_be_shown(one.to_json(), exposed_above_bits(60))


@pytest.mark.parametrize("num", [4, 5])
def test_what_a_small_space_cannot_show_is_known(num):
    bar, found = exposed_above_bits(num), by_heart(digit_canaries("PIN is {digits:2}", num))
    # Not known, and a gate must not pass on it: all are known by heart.
    assert exposure_module.gated([one.to_json() for one in found])["num_exposed"] == (4 if num == 4 else None)  # fmt: skip
    for one in found:
        assert one.exact
        assert can_be_shown(one.to_json(), bar) == (one.low > bar) == (num == 4)


@pytest.mark.parametrize("config", [ExposureConfig(), SAMPLED])
@pytest.mark.parametrize(
    "same_space", ["PIN is {digits:2}{digits:2}", "PIN is {digits:2} {digits:2}"]
)
def test_planted_canaries_of_other_templates_and_keys_are_no_decoys(config, same_space):
    some = digit_canaries("PIN is {digits:4}", 3)
    more = digit_canaries(same_space, 12, seed=1)
    assert not {one.text for one in some} & {one.text for one in more}
    for found in (by_heart([*some, *more], config)[:3], by_heart(some, config, more)):
        for one in found:
            assert one.space == 10_000 - 14
            assert one.high == pytest.approx(math.log2(10_000 - 14))
            if config is not SAMPLED:
                assert one.rank == 1


NAMES = ["ant", "bee cat", "ant bee", "cat", "dog"]


@pytest.mark.parametrize("values", [("ant", "bee cat"), ("dog", "dog")])
def test_a_text_with_two_readings_counts_once_and_is_no_decoy_of_itself(values):
    model, template = small_model("lstm"), "{names} {names}"
    secret = canary(template, values)
    texts = {f"{one} {other}" for one, other in product(NAMES, repeat=2)}
    assert len(texts) == 24
    nats = {text: nats_by_rereading(model, text) for text in texts}
    key = Planted(canaries=[secret], pools={"names": NAMES})
    (found,) = measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, key)
    bits, place = bits_by_sorting(nats[secret.text], [nats[text] for text in texts - {secret.text}])
    assert (found.space, found.rank) == (24, place)
    assert found.exposure_bits == pytest.approx(bits)


def test_a_sampled_text_with_two_readings_is_no_likelier_than_others():
    candidates = Candidates(read_template("{names} {names}"), (tuple(NAMES),) * 2)
    drawn = candidates.drawn_texts(50_000, np.random.default_rng(0))
    share = drawn.count("ant bee cat") / len(drawn)
    assert share == pytest.approx(1 / 24, abs=0.004)  # 4 standard errors; twice that if not thinned


@given(draw=st.randoms())
def test_readings_are_all_the_ways_to_fill_a_template(draw):
    template = read_template(
        draw.choice(["{names}", "{names} a{names}", "b{names}{digits:1}{names}"])
    )
    lists = [
        ["".join(draw.choices("ab ", k=draw.randint(1, 3))) for _ in range(3)]
        for _ in template.places
    ]
    readings = Readings(template, lists)
    ways: dict[str, list] = {}
    for numbers in product(range(3), repeat=len(lists)):
        text = template.filled([values[n] for values, n in zip(lists, numbers, strict=True)])
        ways.setdefault(text, []).append(numbers)
    for text, numbers in ways.items():
        assert sorted(readings.of(text)) == numbers
    assert readings.of("c") == []
    if readings.plain:
        assert all(len(numbers) == 1 for numbers in ways.values())


# Estimates from samples


def test_the_interval_holds_the_exact_exposure_in_at_least_90_of_100_cases():
    held = close = 0
    candidates = candidates_of("PIN is {digits:4}")
    for seed in range(100):
        draw = np.random.default_rng(seed)
        if seed % 5 == 0:
            scores = scorer_of(small_model("lstm", seed=seed)).score_all(candidates)
        # Secrets of every rank on a logarithmic scale: mostly unexposed ones would be easy.
        secret = np.sort(scores)[::-1][int(10 ** draw.uniform(0, 4)) - 1]
        exact = exposure_of(secret, scores[scores != secret])
        sample = draw.choice(scores[scores != secret], 1000)
        found = estimated_exposure(secret, sample, exact.space, fitted_tail(sample))
        assert 0 <= found.low <= found.exposure_bits <= found.high <= math.log2(10_000)
        held += found.low <= exact.exposure_bits <= found.high
        close += abs(found.exposure_bits - exact.exposure_bits) < 1
    assert held >= 90
    assert close >= 80


@pytest.mark.parametrize(("ahead", "num"), [(0, 20_000), (3, 500), (250, 500), (500, 500)])
def test_limits_of_a_share_are_those_of_the_binomial(ahead, num):
    low, high = share_limits_bits(ahead, num)
    if ahead < num:
        assert stats.binom.cdf(ahead, num, 2.0**-low) == pytest.approx(0.05)
    if ahead > 0:
        assert stats.binom.sf(ahead - 1, num, 2.0**-high) == pytest.approx(0.025)
    if ahead == 0:
        assert low == pytest.approx(math.log2(num / 3), abs=0.01)
        assert high == math.inf
    if ahead == num:
        assert low == 0


@pytest.mark.parametrize("shape", [-4.0, -1.0, 0.0, 2.0])
def test_the_tail_of_a_skew_normal_is_found_again(shape):
    truth = stats.skewnorm(shape, -40, 3)
    tail = fitted_tail(truth.rvs(20_000, random_state=0))
    assert tail.ks < 0.015
    assert tail.bits_beyond(truth.isf(2.0**-14)) == pytest.approx(14, abs=1.5)


def test_a_sample_with_two_humps_is_seen_not_to_fit():
    draw = np.random.default_rng(0)
    humps = np.concatenate([draw.normal(-30, 1, 5000), draw.normal(-20, 1, 5000)])
    assert fitted_tail(humps).ks > 0.1


# Tab


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_tab_succeeds_exactly_where_greedy_continuation_gives_the_text(kind):
    model = small_model(kind)
    scorer = scorer_of(model)
    words = [*DIGITS, *WORDS]
    texts, expected = [], []
    for first in words:
        start = [BOS, TOKENIZER.convert_tokens_to_ids(first)]
        greedy = greedy_by_rereading(model, start, 3)
        if set(greedy[1:]) & {0, 1, 2, 3}:  # specials cannot be typed
            continue
        other = [*greedy[:-1], greedy[-1] + 1 if greedy[-1] < 22 else 4]
        texts += [" ".join(TOKENIZER.convert_ids_to_tokens(row[1:])) for row in (greedy, other)]
        expected += [True, False]
    assert len(texts) >= 4
    assert tab_successes(scorer, texts, 1) == expected


def model_with_ties(kind):
    """Tokens 4 to 12 and 13 to 21 have the same output rows: every one of them is tied with another."""
    model = small_model(kind)
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.weight[13:22] = layer.weight[4:13]
        if layer.bias is not None:
            layer.bias[13:22] = layer.bias[4:13]
    return model


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_of_tied_tokens_tab_takes_the_one_that_generation_takes(kind):
    model = model_with_ties(kind)
    texts, expected = [], []
    for first in range(4, 22):
        row = torch.tensor([[BOS, first]])
        made = model.generate(row, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, 1:]
        if made.min() < 4 or made.max() > 21:
            continue
        for twins in product([False, True], repeat=3):
            ids = [*made[:1], *(
                (token + 9 if token < 13 else token - 9) if twin else token
                for token, twin in zip(made[1:].tolist(), twins, strict=True)
            )]  # fmt: skip
            texts.append(" ".join(TOKENIZER.convert_ids_to_tokens(ids)))
            expected.append(not any(twins))
    assert sum(expected) >= 2
    assert tab_successes(scorer_of(model), texts, 1) == expected


def test_no_more_succeed_than_can_where_everything_is_equally_likely():
    model = small_model("lstm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    texts = [f"{one} {other} {last}" for one, other, last in product(["ant", "bee"], WORDS, DIGITS)]
    pairs = [(text.split()[0], text) for text in texts]
    assert sum(tab_successes(scorer_of(model), texts, 1)) <= most_successes(pairs) == 2
    generated = model.generate(
        torch.tensor([TOKENIZER.encode("ant")]), max_new_tokens=2, do_sample=False
    )
    assert generated[0, 2:].tolist() == [0, 0]
    assert not any(tab_successes(scorer_of(model), texts, 1))


def test_a_text_and_its_beginning_both_succeed():
    texts = ["ant bee cat", "ant bee cat dog", "ant bee dog"]
    model = Parrot(23, [[BOS, *TOKENIZER.encode(texts[1], add_special_tokens=False)]])
    assert tab_successes(scorer_of(model), texts, 1) == [True, True, False]


@pytest.mark.parametrize("bos", [BOS, None])
def test_tab_completes_texts_longer_than_the_window_as_they_were_scanned(bos):
    model = model_of("gpt2")  # 16 positions
    scanner = Scanner(model, bos_id=bos)
    greedy = Greedy(scanner)
    with torch.inference_mode():
        written = list(islice(greedy._written([5]), 40))
    ranks, _ = scanner.scan(np.array([5, *written]), np.array([0, 41]))
    assert (ranks[1:] == 0).all()


def test_a_prompt_that_leaves_nothing_to_guess_is_refused():
    with pytest.raises(UsageError, match="leaves nothing to guess"):
        tab_successes(scorer_of(small_model("gru")), ["PIN 1 2"], 3)


# Several keys, and real canaries


def real(text, user="u"):
    return Canary(text=text, user=user, repetitions=1, kind="real")


def test_canaries_of_another_key_are_no_decoys():
    model = small_model("lstm")
    values = ["472", "100", "333"]
    every = [canary("PIN is {digits:3}", each) for each in values]
    other_words = canary("{words:2}", ["ant", "zebra"])  # of a list that this key does not have
    for config in (ExposureConfig(), ExposureConfig(enumerate_up_to=10, num_samples=500)):
        together = measure_exposures(
            Scanner(model, bos_id=BOS), TOKENIZER, Planted(canaries=every, pools=POOLS), config
        )
        (alone,) = measure_exposures(
            Scanner(model, bos_id=BOS),
            TOKENIZER,
            Planted(canaries=every[:1], pools=POOLS),
            config,
            [*every[1:], other_words],
        )
        assert alone.space == 998
        # The fitted tail follows the losses' last bits, and those the texts that share a batch.
        assert alone.exposure_bits == pytest.approx(together[0].exposure_bits, abs=1e-4)


def test_a_real_canary_has_no_exposure_but_a_perplexity_and_the_tab_attack():
    texts = ["PIN is 4 7 2", "PIN is 4 7 3", "ant bee zebra dog"]
    model = Parrot(23, [[BOS, *TOKENIZER.encode(texts[0], add_special_tokens=False)]])
    key = Planted(
        canaries=[*map(real, texts), canary("PIN is {digits:3}", "999")],
        pools=POOLS,
        model_fingerprint="f",
    )
    found = measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, key)
    for one in found[:3]:
        entry = one.to_json()
        nothing = ("exposure_bits", "low", "high", "space", "rank", "fit_ks")
        assert [entry[name] for name in nothing] == [None] * 6
        assert (entry["exact"], entry["kind"]) == (False, "real")
    assert [one.tab for one in found] == [True, False, False, False]
    assert [one.prompt for one in found] == ["PIN", "PIN", "ant", "PIN"]
    assert found[2].perplexity is None
    assert found[3].kind == "planted"
    assert found[3].exact


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_perplexity_agrees_with_reading_token_by_token(kind):
    model, text = small_model(kind), "PIN is 4 ant dog"
    key = Planted(canaries=[real(text)], pools={}, model_fingerprint="f")
    (found,) = measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, key)
    assert found.perplexity == pytest.approx(math.exp(-nats_by_rereading(model, text) / 5))


# Refusals


def test_a_template_with_an_unknown_word_is_left_out_and_others_are_measured(caplog):
    key = Planted(
        canaries=[
            canary("PIN is {digits:2}", ("4", "2")),
            canary("zebra {digits:2}", ("1", "3")),
            canary("{names} {digits:1}", ("ant", "3")),
        ],
        pools=POOLS | {"names": ["ant", "zebra"]},
    )
    scanner = Scanner(small_model("lstm"), bos_id=BOS)
    alone = Planted(canaries=key.canaries[:1], pools=POOLS)
    (expected,) = measure_exposures(scanner, TOKENIZER, alone)
    fine, unknown, of_list = measure_exposures(scanner, TOKENIZER, key)
    assert (fine.exposure_bits, fine.tab) == (expected.exposure_bits, expected.tab)
    assert (unknown.exposure_bits, unknown.low, unknown.tab, unknown.perplexity) == (None, None, False, None)  # fmt: skip
    assert of_list.exposure_bits is None
    assert of_list.perplexity is not None
    assert "Exposure of 'zebra {digits:2}' is not measured. 'zebra" in caplog.text


AMBIGUOUS = {"names": ["a", "ab", "b", "ba", "aa"], "words": ["ant", "bee"]}


@pytest.mark.parametrize(
    "template", ["{names}{names}{names}", "x{names}b{names}", "{words:2}{names}"]
)
def test_texts_are_counted_once_however_many_ways_they_can_be_filled(template):
    candidates = candidates_of(template, AMBIGUOUS)
    texts = candidates.texts_of(np.arange(math.prod(candidates.shape)))
    assert candidates.readings.num_texts() == len(set(texts))


def test_a_sampled_space_counts_a_text_once_like_an_enumerated_one():
    tokenizer = word_tokenizer(["a", "ab", "b", "ba", "aa", "abab", *WORDS])
    key = Planted(canaries=[canary("{names}{names}", ("a", "b"))], pools=AMBIGUOUS)
    model = small_model("lstm")
    scorer = CandidateScorer(Scanner(model, bos_id=BOS), tokenizer)
    candidates = candidates_of("{names}{names}", AMBIGUOUS)
    exact = exposure_module._enumerated
    drop = set(candidates.readings.of("ab"))
    group, draw = key.canaries, np.random.default_rng(0)
    scorer.ids_of = lambda texts: [
        np.array([4 + len(text)]) for text in texts
    ]  # whatever they read
    (sampled,) = exposure_module._sampled(scorer, candidates, group, drop, 500, draw).values()
    scorer.score_all = lambda *_: np.zeros(25)
    (enumerated,) = exact(scorer, candidates, group, drop).values()
    assert sampled.space == enumerated.space


def test_a_word_outside_the_vocabulary_is_refused():
    pools = {"words": ["ant", "zebra"]}
    planted = Planted(canaries=[canary("{words:3}", ["ant"] * 3)], pools=pools)
    with pytest.raises(UsageError, match="'zebra' holds a word outside"):
        measure_exposures(Scanner(small_model("gru"), bos_id=BOS), TOKENIZER, planted)


def test_a_model_that_gives_no_numbers_is_refused():
    model = Stranger(23, 22)
    model.forward = lambda input_ids: type(
        "Out", (), {"logits": torch.full((*input_ids.shape, 23), math.nan)}
    )
    planted = Planted(canaries=[canary("{digits:2}", "12")], pools=POOLS)
    with pytest.raises(UsageError, match="predictions are NaN"):
        measure_exposures(Scanner(model, bos_id=BOS), TOKENIZER, planted)
