"""Scans kept on disk: made once, resumed, told apart, never trusted where damaged."""

import json
import pickle
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch

import tightlip
from cli.held_out_runs import documents, make_run, prepared
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import open_run
from tightlip.corpus.tokens import TokenizedCorpus, mapped
from tightlip.engines.local import LocalEngine
from tightlip.models import LSTMForCausalLM
from tightlip.scan import models as opened_models
from tightlip.scan import store as store_module
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions
from tightlip.scan.scanner import Scanner
from tightlip.scan.scans import scans_of_run
from tightlip.scan.store import MOMENTS, PLAIN, ScanStore, Scorer, scan_store

KEY = {"model": "m", "bos": 1, "window": None, "dtype": "float32", "device": "cpu"}


def corpus_of(num_documents, *, text="text", tokenizer="tokenizer"):
    lengths = [3 + number % 4 for number in range(num_documents)]
    return TokenizedCorpus(
        tokens=np.arange(sum(lengths), dtype=np.int32),
        bounds=np.cumsum([0, *lengths]),
        users=np.zeros(num_documents, np.int32),
        user_names=["user"],
        corpus_fingerprint=text,
        tokenizer_fingerprint=tokenizer,
    )


class Watched:
    """A scan that counts: the rank of a token is its number, and it may die at a shard."""

    def __init__(self, dies_at=None):
        self.num_opened, self.scanned, self.dies_at = 0, [], dies_at

    def open(self):
        self.num_opened += 1
        return self.scan

    def scan(self, tokens, bounds):
        if len(self.scanned) == self.dies_at:
            raise KeyboardInterrupt
        self.scanned.append((int(bounds[0]), int(bounds[-1])))
        here = tokens[bounds[0] : bounds[-1]]
        return here.astype(np.int32), -here.astype(np.float32)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 10)


def scan(store, corpus, watched, **changed):
    scorer, engine = changed.pop("scorer", PLAIN), changed.pop("engine", None)
    found = store.scan(
        corpus,
        key=KEY | changed,
        open_scan=watched.open,
        description="Scanning",
        scorer=scorer,
        engine=engine,
    )
    shards = list(found.shards())
    assert np.concatenate([shard.ranks for shard in shards]).tolist() == corpus.tokens.tolist()
    assert np.concatenate([shard.log_probs for shard in shards]).tolist() == [
        -float(token) for token in corpus.tokens
    ]
    return watched


def test_a_scan_that_stands_is_not_made_again_and_asks_for_no_model(tmp_path):
    corpus = corpus_of(9)
    first = scan(ScanStore(tmp_path), corpus, Watched())
    assert first.num_opened == 1
    assert len(first.scanned) > 2
    assert scan(ScanStore(tmp_path), corpus, Watched()).num_opened == 0


def test_a_killed_scan_goes_on_at_its_shard(tmp_path):
    corpus = corpus_of(9)
    whole = scan(ScanStore(tmp_path / "whole"), corpus, Watched()).scanned
    killed = Watched(dies_at=2)
    with pytest.raises(KeyboardInterrupt):
        scan(ScanStore(tmp_path / "killed"), corpus, killed)
    assert scan(ScanStore(tmp_path / "killed"), corpus, Watched()).scanned == whole[2:]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "another"},
        {"bos": None},
        {"window": 512},
        {"dtype": "bfloat16"},
        {"device": "cuda"},
    ],
)
def test_another_key_is_another_scan_and_both_stay(tmp_path, changed):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    scan(store, corpus, Watched())
    assert scan(store, corpus, Watched(), **changed).num_opened == 1
    assert scan(store, corpus, Watched()).num_opened == 0
    assert len(list(tmp_path.iterdir())) == 2


def half_nats(name="half", **settings):
    return Scorer(
        name=name,
        columns={"halves": np.float64, "ranks": np.int32},
        score=lambda logits, targets: pytest.fail("the store computes nothing"),
        settings=settings,
    )


def test_another_scorer_keeps_columns_of_its_own_in_a_scan_of_its_own(tmp_path):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    scan(store, corpus, Watched())

    def halves(tokens, bounds):
        here = tokens[bounds[0] : bounds[-1]]
        return here / 2, here.astype(np.int32)

    opened = []
    for scorer in (half_nats(), half_nats(share=3), half_nats("other"), half_nats(share=3)):
        found = store.scan(
            corpus,
            key=KEY,
            open_scan=lambda: opened.append(1) or halves,
            description="Scanning",
            scorer=scorer,
        )
        shards = list(found.shards())
        assert np.concatenate([one.columns["halves"] for one in shards]).tolist() == [
            token / 2 for token in corpus.tokens.tolist()
        ]
        assert {tuple(one.columns) for one in shards} == {("halves", "ranks")}
    assert len(opened) == 3, "the last was kept"
    assert scan(store, corpus, Watched()).num_opened == 0


def test_a_scan_with_moments_stands_for_a_plain_one_and_not_the_other_way_round(tmp_path):
    corpus, store = corpus_of(9), ScanStore(tmp_path)

    class WithMoments(Watched):
        def scan(self, tokens, bounds):
            ranks, log_probs = super().scan(tokens, bounds)
            return ranks, log_probs, log_probs - 1, log_probs + 9

    scan(store, corpus, Watched())
    with_moments = WithMoments(dies_at=2)
    with pytest.raises(KeyboardInterrupt):
        scan(store, corpus, with_moments, scorer=MOMENTS)
    assert len(with_moments.scanned) == 2
    plain, _ = sorted(tmp_path.iterdir(), key=lambda folder: len([*folder.iterdir()]))[::-1]
    shutil.rmtree(plain)
    rest = scan(store, corpus, Watched()).scanned
    assert rest[0][0] == with_moments.scanned[-1][1], "the plain scan goes on where the other ends"


def test_the_key_of_a_plain_scan_is_what_it_was_before_there_were_scorers(
    tmp_path,
):
    scan(ScanStore(tmp_path), corpus_of(2), Watched())
    (key,), (shard,) = tmp_path.glob("*/key.json"), tmp_path.glob("*/*.npz")
    assert json.loads(key.read_text()) == KEY | {
        "corpus": "text",
        "tokenizer": "tokenizer",
        "num_tokens": 7,
        "shard_tokens": 10,
        "format": 2,
    }
    assert key.parent.name == "ee3b8b81056d33534e6888f1419f0a1a"
    with np.load(shard) as stored:
        assert {name: stored[name].dtype for name in stored} == {
            "ranks": np.int32,
            "log_probs": np.float32,
            "of": np.uint8,
            "by": np.uint8,
        }


@pytest.mark.parametrize("of", [{"text": "other"}, {"tokenizer": "other"}])
def test_other_text_or_another_tokenizer_is_another_scan(tmp_path, of):
    store = ScanStore(tmp_path)
    scan(store, corpus_of(9), Watched())
    assert scan(store, corpus_of(9, **of), Watched()).num_opened == 1


def test_another_format_or_size_of_shards_is_another_scan(tmp_path, monkeypatch):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    for name in ("FORMAT", "SHARD_TOKENS"):
        scan(store, corpus, Watched())
        monkeypatch.setattr(store_module, name, 17)
        assert scan(store, corpus, Watched()).num_opened == 1


def test_what_stands_beside_is_read_and_never_written(tmp_path):
    corpus = corpus_of(9)
    scan(ScanStore(tmp_path / "beside"), corpus, Watched())
    before = {path: path.read_bytes() for path in (tmp_path / "beside").rglob("*.*")}
    store = ScanStore(tmp_path / "own", [tmp_path / "nowhere", tmp_path / "beside"])
    assert scan(store, corpus, Watched()).num_opened == 0
    assert not store.folder.exists()
    scan(store, corpus, Watched(), bos=None)
    assert {path: path.read_bytes() for path in (tmp_path / "beside").rglob("*.*")} == before


def test_half_a_scan_beside_is_gone_on_with_in_the_own_folder(tmp_path):
    corpus, killed = corpus_of(9), Watched(dies_at=1)
    with pytest.raises(KeyboardInterrupt):
        scan(ScanStore(tmp_path / "beside"), corpus, killed)
    store = ScanStore(tmp_path / "own", [tmp_path / "beside"])
    rest = scan(store, corpus, Watched())
    assert rest.scanned[0] != killed.scanned[0]
    assert scan(store, corpus, Watched()).num_opened == 0


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path):
    path.write_bytes(b"")


def shorter(path):
    np.savez(path, ranks=np.zeros(2, np.int32), log_probs=np.zeros(2, np.float32))


def of_another_kind(path):
    with np.load(path) as stored:
        size = len(stored["ranks"])
    np.savez(path, ranks=np.zeros(size, np.int64), log_probs=np.zeros(size, np.float32))


def without_ranks(path):
    np.savez(path, log_probs=np.zeros(12, np.float32))


@pytest.mark.parametrize("damage", [cut_off, emptied, shorter, of_another_kind, without_ranks])
@pytest.mark.parametrize("place", ["own", "beside"])
def test_a_damaged_shard_is_scanned_anew(tmp_path, damage, place):
    corpus = corpus_of(9)
    whole = scan(ScanStore(tmp_path / place), corpus, Watched()).scanned
    (second,) = (tmp_path / place).glob("*/000001.npz")
    damage(second)
    store = ScanStore(tmp_path / "own", [tmp_path / "beside"])
    assert scan(store, corpus, Watched()).scanned == [whole[1]]
    assert scan(store, corpus, Watched()).num_opened == 0


def test_wherever_a_bit_is_flipped_the_values_are_right(tmp_path):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    whole = scan(store, corpus, Watched()).scanned
    (second,) = tmp_path.glob("*/000001.npz")
    content, num_found = second.read_bytes(), 0
    for place in range(0, len(content), 7):
        second.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        )
        again = scan(store, corpus, Watched()).scanned
        assert again in ([], [whole[1]])
        num_found += bool(again)
    assert num_found > len(content) / 7 / 2


@pytest.mark.parametrize("moved", ["000000.npz", "another key"])
def test_a_whole_shard_of_other_text_or_another_model_is_scanned_anew(tmp_path, moved):
    """Both are as long as the one they stand for: only what the shard says of itself tells."""
    store = ScanStore(tmp_path / "own")
    five_each = {"bounds": np.arange(0, 41, 5), "tokens": np.arange(40, dtype=np.int32)}
    corpus = replace(corpus_of(8), **five_each)
    whole = scan(store, corpus, Watched()).scanned
    other = ScanStore(tmp_path / "other")
    scan(other, corpus, Watched(), model="other")
    (second,) = store.folder.glob("*/000001.npz")
    (source,) = (
        store.folder.glob(f"*/{moved}") if "." in moved else other.folder.glob("*/000001.npz")
    )
    shutil.copy2(source, second)
    assert scan(store, corpus, Watched()).scanned == [whole[1]]


def test_tokens_that_were_changed_behind_our_back_are_scanned_anew(tmp_path):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    scan(store, corpus, Watched())
    corpus.tokens[-1] += 1
    assert len(scan(store, corpus, Watched()).scanned) == 1


def test_what_is_not_kept_is_gone_at_the_end_however_it_ends_and_the_rest_stays(tmp_path):
    corpus, folder = corpus_of(9), tmp_path / "scan"
    with scan_store(folder, keep=True) as store:
        scan(store, corpus, Watched())
    kept = sorted(tmp_path.rglob("*"))

    def interrupted():
        with scan_store(folder, keep=False) as store:
            assert scan(store, corpus, Watched()).num_opened == 0
            scan(store, corpus, Watched(dies_at=2), bos=None)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(tmp_path.rglob("*")) == kept


def test_what_a_killed_command_would_not_have_kept_is_gone_on_with_and_goes(tmp_path, monkeypatch):
    corpus, folder = corpus_of(9), tmp_path / "scan"
    dead = tmp_path / ".scan"
    whole = scan(ScanStore(tmp_path / "whole"), corpus, Watched()).scanned
    with pytest.raises(KeyboardInterrupt):
        scan(ScanStore(dead), corpus, Watched(dies_at=1))
    with scan_store(folder, keep=False) as store:
        assert scan(store, corpus, Watched()).scanned == whole[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", None])
def test_a_folder_whose_key_is_not_its_own_is_scanned_anew(tmp_path, content):
    store, corpus = ScanStore(tmp_path), corpus_of(9)
    whole = scan(store, corpus, Watched()).scanned
    (key,) = tmp_path.glob("*/key.json")
    key.unlink() if content is None else key.write_text(content)
    assert scan(store, corpus, Watched()).scanned == whole
    assert scan(store, corpus, Watched()).num_opened == 0


def test_all_of_it_is_for_its_owner_only_and_takes_eight_bytes_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 100_000)
    store, corpus = ScanStore(tmp_path / "scan"), corpus_of(10_000)
    scan(store, corpus, Watched())
    for path in (store.folder, *store.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (shard,) = store.folder.rglob("*.npz")
    assert 8 * corpus.num_tokens < shard.stat().st_size < 8 * corpus.num_tokens + 1500


# What keeps scans, and what does not


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scans")
    corpus = prepared(folder / "corpus", documents())
    make_run(folder / "run", corpus, steps=5)
    return folder


@pytest.fixture
def run(place, tmp_path):
    return shutil.copytree(place / "run", tmp_path / "run")


@pytest.fixture
def counted(monkeypatch):
    """How often a model was loaded, and how many tokens were scanned, by model."""
    counts = {"loads": [], "tokens": 0}
    plain_load, plain_scan = opened_models.load_causal_lm, Scanner.begun

    def load(folder, **options):
        counts["loads"].append(str(folder))
        return plain_load(folder, **options)

    def scan(self, tokens, bounds, *scorer):
        counts["tokens"] += int(bounds[-1] - bounds[0])
        return plain_scan(self, tokens, bounds, *scorer)

    monkeypatch.setattr(opened_models, "load_causal_lm", load)
    monkeypatch.setattr(Scanner, "begun", scan)
    return counts


FEW = {"num_bootstraps": 100, "device": "cpu"}


def num_tokens(place):
    corpus = tightlip.corpus.prepare.open_prepared(place / "corpus")
    return corpus.train.num_tokens, corpus.validation.num_tokens


def test_measures_and_reports_of_a_run_read_each_others_scans(place, run, counted):
    train, held = num_tokens(place)
    tightlip.measure_membership(run, **FEW)
    assert counted == {"loads": [str(run / "model")], "tokens": train + held}
    tightlip.measure_groups(run, **FEW)
    tightlip.audit(run, out=run / "audit", device="cpu")
    tightlip.audit(run, device="cpu")
    assert counted == {"loads": [str(run / "model")], "tokens": train + held}
    assert sorted(path.name for path in run.glob("*/*/key.json")) == ["key.json"] * 2


def test_measures_read_the_scans_of_the_report_but_for_membership_which_wants_more(run, counted):
    tightlip.audit(run, out=run / "audit", device="cpu")
    assert len(counted["loads"]) == 1
    tightlip.measure_groups(run, **FEW)
    assert len(counted["loads"]) == 1
    assert not (run / "scan").exists()
    tightlip.measure_membership(run, **FEW)
    assert len(counted["loads"]) == 2, "a report's scan has no moments"


@pytest.mark.parametrize(
    "measure",
    [
        lambda run, **how: tightlip.measure_membership(run, **FEW, **how),
        lambda run, **how: tightlip.measure_groups(run, **FEW, **how),
        lambda run, **how: tightlip.audit(run, out=run / "audit", device="cpu", **how),
    ],
)
def test_nothing_is_kept_where_nobody_wants_it_kept(run, measure):
    measure(run, keep_scan=False)
    assert not list(run.rglob("scan"))
    measure(run)
    assert len(list(run.rglob("scan"))) == 1


def test_each_run_keeps_its_own_scan_where_two_are_set_side_by_side(place, run, tmp_path, counted):
    other = shutil.copytree(place / "run", tmp_path / "other")
    tightlip.measure_groups(run, against=other, **FEW)
    num_loads = len(counted["loads"])
    for each in (run, other):
        tightlip.measure_groups(each, **FEW)
    assert len(counted["loads"]) == num_loads


def test_a_refused_measure_keeps_nothing_either(run, tmp_path):
    other = shutil.copytree(run / "model", tmp_path / "reads-otherwise")
    file = other / "tokenizer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )
    with pytest.raises(UsageError, match="other tokens"):
        tightlip.measure_membership(run, reference=other, keep_scan=False, **FEW)
    assert not list(run.rglob("*.npz"))


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "merges.txt", "model.safetensors.index.json"]
)
def test_whatever_decides_how_a_model_reads_makes_another_scan(place, run, counted, file):
    tightlip.measure_groups(run, **FEW)
    path = run / "model" / file
    path.write_text(path.read_text().rstrip() + "\n\n" if path.exists() else "{}")
    tightlip.measure_groups(run, **FEW)
    assert len(counted["loads"]) == 2


def test_a_redacted_report_holds_no_scan_and_is_not_written_where_text_stood(run, tmp_path):
    tightlip.audit(run, out=tmp_path / "with-text", device="cpu")
    with pytest.raises(UsageError, match="holds a report with text"):
        tightlip.audit(run, out=tmp_path / "with-text", redact=True, device="cpu")
    (tmp_path / "with-text/summary.json").unlink()  # as a killed audit leaves it
    with pytest.raises(UsageError, match="holds a report with text"):
        tightlip.audit(run, out=tmp_path / "with-text", redact=True, device="cpu")
    out = tmp_path / "redacted"
    for _ in range(2):
        report = tightlip.audit(run, out=out, redact=True, device="cpu")
    assert not list(out.rglob("*.npz"))
    assert not {"scan", ".work"} & {path.name for path in out.iterdir()}
    assert report.corpus_fingerprint is None, "a hash of the text would let one guess it"
    with pytest.raises(UsageError, match="holds a report with no text"):
        tightlip.audit(run, out=out, device="cpu")
    (out / "summary.json").unlink()
    assert tightlip.audit(run, out=out, redact=True, device="cpu").folder == out


def test_a_model_in_memory_is_read_anew_for_its_code_has_no_fingerprint(
    place, run, tmp_path, counted
):
    model = LSTMForCausalLM.from_pretrained(run / "model")
    for times in (1, 2):
        tightlip.audit(
            model, place / "corpus", tokenizer=run / "model", out=tmp_path / "r", device="cpu"
        )
        assert counted["tokens"] == times * num_tokens(place)[0]
    assert not (tmp_path / "r/scan").exists()


def test_a_report_that_is_refused_leaves_no_scan_it_made(run, tmp_path, counted):
    broken = shutil.copytree(run / "model", tmp_path / "broken")
    model = LSTMForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(broken)
    with pytest.raises(UsageError, match="NaN"):
        tightlip.audit(run, out=tmp_path / "r", public_model=broken, device="cpu")
    assert counted["tokens"], "the model itself was scanned before"
    assert not (tmp_path / "r").exists()


def test_of_a_run_that_may_only_be_read_nothing_is_kept(run, monkeypatch):
    monkeypatch.setattr(store_module.os, "access", lambda folder, how: False)
    tightlip.measure_membership(run, **FEW)
    assert not (run / "scan").exists()


def test_a_model_is_loaded_when_a_scan_is_missing_and_not_before(place, run, counted):
    record = open_run(run)
    with scans_of_run(record, device="cpu", keep=True) as scans:
        model = scans.opened(record.model_folder)
        assert scans.opened(run / "model") is model
        assert counted["loads"] == []
        assert model.model is model.model
        assert len(counted["loads"]) == 1


def test_what_cannot_be_loaded_is_refused_before_anything_is_scanned(run):
    (run / "model/model.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        open_model(run / "model", ScanOptions(device="cpu"))


class OfKind(LocalEngine):
    """An engine on a device of some kind."""

    def __init__(self, *kinds):
        super().__init__(1)
        self.of_kinds = list(kinds)

    def kinds(self, device):
        return self.of_kinds


def test_a_scan_goes_on_where_the_device_is_of_the_same_kind_and_else_begins_anew(
    tmp_path, monkeypatch
):
    corpus, whole = corpus_of(9), scan(ScanStore(tmp_path / "whole"), corpus_of(9), Watched())
    for kind, left in (("A", whole.scanned[2:]), ("B", whole.scanned)):
        store = ScanStore(tmp_path / kind)
        monkeypatch.setattr(store_module, "kind_of_device", lambda device: "A")
        with pytest.raises(KeyboardInterrupt):
            scan(store, corpus, Watched(dies_at=2), engine=OfKind("A"))
        monkeypatch.setattr(store_module, "kind_of_device", lambda device, kind=kind: kind)
        assert scan(store, corpus, Watched(), engine=OfKind(kind)).scanned == left
        assert scan(store, corpus, Watched(), engine=OfKind("C")).scanned == [], "it stands"


def test_a_mapped_corpus_goes_to_another_process_by_its_path(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(100_000, dtype=np.int32))
    plain = corpus_of(9)
    corpus = replace(plain, tokens=mapped(tmp_path / "tokens.npy"), bounds=np.array([0, 100_000]), users=plain.users[:1])  # fmt: skip
    sent = pickle.dumps(corpus)
    assert len(sent) < 2000
    assert pickle.loads(sent).tokens.tolist() == corpus.tokens.tolist()
    assert pickle.loads(pickle.dumps(plain)).tokens.tolist() == plain.tokens.tolist()
    part = replace(corpus, tokens=corpus.tokens[:50], bounds=np.array([0, 50]))
    assert pickle.loads(pickle.dumps(part)).tokens.tolist() == [*range(50)]


def test_a_shard_that_cannot_be_written_is_told_and_those_before_it_stay(tmp_path, monkeypatch):
    plain = store_module._write_shard

    def full_at_the_third(path, *what):
        if path.name == "000002.npz":
            raise OSError("No space left on device")
        plain(path, *what)

    monkeypatch.setattr(store_module, "_write_shard", full_at_the_third)
    corpus = corpus_of(20)
    with pytest.raises(OSError, match="No space left"):
        scan(ScanStore(tmp_path), corpus, Watched())
    there = sorted(path.name for path in tmp_path.glob("*/*.npz"))
    assert there[:2] == ["000000.npz", "000001.npz"]
    assert "000002.npz" not in there
    monkeypatch.setattr(store_module, "_write_shard", plain)
    again, whole = Watched(), Watched()
    scan(ScanStore(tmp_path), corpus, again)
    scan(ScanStore(tmp_path / "whole"), corpus, whole)
    done = [int(name[:6]) for name in there]
    assert again.scanned == [
        each for number, each in enumerate(whole.scanned) if number not in done
    ]


def test_the_last_shard_that_cannot_be_written_is_told_too(tmp_path, monkeypatch):
    def full(*shard):
        raise OSError("No space left on device")

    monkeypatch.setattr(store_module, "_write_shard", full)
    with pytest.raises(OSError, match="No space left"):
        scan(ScanStore(tmp_path), corpus_of(2), Watched())
