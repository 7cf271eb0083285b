"""Models in GGUF files load as what they were written from, or are refused with a reason."""

import shutil

import pytest
import torch

import tightlip.models.loading as loading
from models.tiny_gguf import TOKENS, write_gguf
from tightlip.core.errors import UsageError
from tightlip.models import load_causal_lm, load_tokenizer, model_fingerprint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file)


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_gguf_file_loads_as_the_model_it_was_written_from(by, written):
    file, model = written
    loaded = load_causal_lm(file if by == "file" else file.parent)
    ids = torch.randint(3, len(TOKENS), (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
    assert loaded.dtype == torch.float32
    assert not loaded.training


def test_its_tokenizer_merges_as_the_file_says_and_loses_nothing(written):
    tokenizer = load_tokenizer(written[0])
    text = "the land\tund é 7"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [TOKENS[each] for each in ids][:4] == ["the", "Ġ", "l", "and"]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("said", "bos"), [(None, 1), (True, 1), (False, None)])
def test_a_text_begins_with_bos_only_where_the_file_says_so(said, bos, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", begins_with_bos=said)
    assert load_tokenizer(tmp_path).bos_token_id == bos


def test_saved_again_it_is_an_ordinary_folder(written, tmp_path):
    load_causal_lm(written[0]).save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path)
    for name, value in written[1].state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_the_fingerprint_is_the_files_whatever_its_name(written, tmp_path):
    copy = tmp_path / "copy" / "other-name.gguf"
    copy.parent.mkdir()
    shutil.copyfile(written[0], copy)
    write_gguf(tmp_path / "other.gguf", seed=1)
    own = model_fingerprint(written[0])
    assert own == model_fingerprint(copy) == model_fingerprint(copy.parent)
    assert own != model_fingerprint(tmp_path / "other.gguf")


def test_a_missing_weight_is_not_made_up(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", without=["blk.1.ffn_up.weight"])
    with pytest.raises(UsageError, match=r"lacks.*up_proj"):
        load_causal_lm(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_what_is_no_whole_gguf_file_is_refused(load, written, tmp_path):
    file = tmp_path / "tiny.gguf"
    with pytest.raises(UsageError, match="does not exist"):
        load(file)
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(UsageError, match="no GGUF file"):
        load(file)
    file.write_bytes(written[0].read_bytes()[:3_000])
    with pytest.raises(UsageError, match=r"cannot be loaded.*again"):
        load(file)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer, model_fingerprint])
def test_a_folder_of_two_is_refused(load, written, tmp_path):
    for name in ("one.gguf", "two.gguf"):
        shutil.copyfile(written[0], tmp_path / name)
    with pytest.raises(UsageError, match=r"2 GGUF files \(one.gguf, two.gguf\).*path of one"):
        load(tmp_path)


def test_a_hugging_face_folder_stays_one_with_a_gguf_file_beside_it(written, tmp_path):
    written[1].save_pretrained(tmp_path)
    before = model_fingerprint(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"anything")
    assert model_fingerprint(tmp_path) == before
    load_causal_lm(tmp_path)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_without_the_extra_it_says_what_to_install(load, written, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs gguf and accelerate.*tightlip\[gguf\]"):
        load(written[0])
