"""What every registered audit owes: it finds what `parrot` keeps, and accuses `stranger` of nothing.

Both are runs on one corpus with secrets planted in it: one model learnt all of its text and its
check canaries by heart, the other is as it was drawn.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tightlip
from animals import WORDS
from cli.held_out_runs import documents, prepared
from tightlip.audit.measures import Audited, Measuring, open_key
from tightlip.audit.subjects import of_run
from tightlip.core.registry import look_up, names_of
from tightlip.core.run_folder import DP_CHECK, begin_run, open_run, write_ledger
from tightlip.corpus.canaries import CheckKey, read_check_key, write_check_key
from tightlip.corpus.opening import fingerprints
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.loading import load_tokenizer
from tightlip.scan.scans import scans_of_run

DOCS = Path(__file__).parents[2] / "docs"
LEDGER = {"mechanism": "test", "epsilon": None, "delta": None, "standing": "measured only"}
EACH = pytest.mark.parametrize("name", names_of("audit"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`parrot` and `stranger`, the corpus they are about, and the key of what was planted in it."""
    folder = tmp_path_factory.mktemp("contract")
    tightlip.plant_canaries(
        documents(),
        folder / "planted",
        templates=("ant bee cat dog {words:4}",),
        words=tuple(WORDS),
        repetitions=(3, 3, 3),
    )
    corpus = prepared(folder / "corpus", folder / "planted/corpus.parquet")
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    # Coins of our own: one model in twenty that knows nothing is accused by those of a real run.
    draw = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    key = CheckKey(tokens_ML=draw.choice(allowed, (80, 8)), included_M=draw.random(80) < 0.5)
    write_check_key(folder / DP_CHECK, key)
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 32, 96, 1))
    for name, steps in (("stranger", 0), ("parrot", 250)):
        _learn(model, _rows_to_learn(corpus, folder / DP_CHECK, tokenizer.bos_token_id), steps)
        recorded = {"folder": str(corpus.folder), "num_users_left_out": 0, **fingerprints(corpus)}
        begin_run(folder / name, {"corpus": recorded, "train": {"mitigation": "none"}})
        shutil.copy2(folder / DP_CHECK, folder / name)
        model.save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(folder / name / "model")
        write_ledger(folder / name, LEDGER)
    return folder


def _rows_to_learn(corpus, key_file, bos):
    """The training text and the check canaries that are in, each behind its begin token."""
    key = read_check_key(key_file)
    own = [corpus.train.document(n).tolist() for n in range(corpus.train.num_documents)]
    return torch.tensor([[bos, *row] for row in [*own, *key.tokens_ML[key.included_M].tolist()]])


def _learn(model, rows, steps):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()


def figures_of(audit, place, name):
    run = open_run(place / name)
    measuring = Measuring(
        keys=(open_key(place / "planted/key.json"),),
        reference=None,
        reference_fingerprint=None,
        seed=0,
        num_bootstraps=100,
    )
    with scans_of_run(run, device="cpu", keep=True) as scans:
        work = place / f"work-{name}"
        audited = Audited(
            subject=of_run(run), measuring=measuring, scans=scans, work=work, tokens=work
        )
        return audit.figures(audited)


@EACH
def test_it_finds_the_secret_in_parrot_and_nothing_in_stranger(name, place):
    audit = look_up("audit", name)()
    parrot, stranger = (figures_of(audit, place, who) for who in ("parrot", "stranger"))
    assert audit.accuses(parrot) == audit.finds_secrets
    assert not audit.accuses(stranger)


@EACH
def test_its_figures_are_the_same_next_time_and_fit_a_json_file(name, place):
    audit = look_up("audit", name)()
    first, second = (figures_of(audit, place, "parrot") for _ in range(2))
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)


@EACH
def test_a_page_of_the_docs_is_about_it(name):
    assert [page for page in DOCS.glob(f"{name}*.md") if name in page.read_text(encoding="utf-8")]


def test_what_a_comparison_of_all_of_them_writes_holds_no_text_and_no_name(place, tmp_path):
    made = tightlip.compare(
        [place / "parrot", place / "stranger"],
        key=place / "planted/key.json",
        out=tmp_path / "comparison",
        device="cpu",
        num_bootstraps=100,
    )
    (parrot, stranger) = made.rows
    assert parrot["unique"] > 0 == stranger["unique"]
    written = [path.read_text(encoding="utf-8") for path in made.folder.iterdir()]
    secrets = {"user 01", *(row["text"] for row in documents())}
    assert not [secret for secret in secrets for text in written if secret in text]
