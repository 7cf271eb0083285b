"""Small files and short numbers that ask for more memory than there is are refused before it is taken.

What could take it runs in a fork that is allowed 1 GB more than it was born with.
"""

import dataclasses
import json
import os
import resource
import signal
import typing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import tightlip
from models.small_models import small_model
from models.tiny_gguf import write_gguf
from standins import BigramTable
from tightlip.audit import settings as audit_settings
from tightlip.core.errors import UsageError
from tightlip.core.settings import Settings, bytes_from, read_toml, settings_of
from tightlip.corpus import formats
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import load_causal_lm, load_tokenizer
from tightlip.training import config as training_config
from tightlip.training.starting import starting_model
from tightlip.vectors import settings as vectors_settings

ROOM = 1_000_000_000
MEGABYTE = 1_000_000


def outcome(act):
    """What `act` said in a fork with little memory: 'fine', its refusal, or how it died."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.alarm(10)
        try:
            act()
            said = "fine"
        except UsageError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said[:4000].encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said or "died without a word"


def documents_of(path):
    return lambda: sum(len(batch) for batch in open_corpus(path).batches())


# Models


LLAMA = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    ),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=31,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            max_position_embeddings=32,
            attention_types=[[["global"], 1]],
        )
    ),
    "lstm": lambda: small_model("lstm"),
    "transformer": lambda: small_model("transformer"),
}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"vocab_size": 10**8}),
        ("llama", {"hidden_size": 2**22}),
        ("llama", {"intermediate_size": 10**8}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_hidden_layers": 9_000}),
        ("llama", {"max_position_embeddings": 10**400}),
        ("gpt2", {"n_positions": 10**7, "n_ctx": 10**7}),
        ("gpt2", {"num_labels": 10**9}),
        ("gpt_neo", {"max_position_embeddings": 60_000}),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]], "num_layers": 10**9}),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}),
        ("lstm", {"hidden_size": 20_000}),
        ("lstm", {"num_layers": 10**9}),
        ("transformer", {"vocab_size": 10**9}),
        ("transformer", {"max_position_embeddings": 10**8}),
    ],
)
def test_a_configuration_is_held_against_the_weights_before_room_is_made(tmp_path, kind, sizes):
    MODELS[kind]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    said = outcome(lambda: load_causal_lm(tmp_path))
    assert said.startswith("refused: "), said
    # And not because memory had run out.
    assert "no model has more than" in said or "are not of one model" in said, said


@pytest.mark.parametrize("kind", MODELS)
def test_an_honest_configuration_still_loads(tmp_path, kind):
    MODELS[kind]().save_pretrained(tmp_path)
    assert outcome(lambda: load_causal_lm(tmp_path)) == "fine"


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    MODELS["llama"]().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((2**40).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert outcome(lambda: load_causal_lm(tmp_path)).startswith("refused: ")


@pytest.mark.parametrize("add", ["block_count", "context_length", "feed_forward_length"])
def test_what_a_gguf_file_says_is_held_against_its_weights(tmp_path, monkeypatch, add):
    import gguf

    usual = getattr(gguf.GGUFWriter, f"add_{add}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{add}", lambda self, _: usual(self, 2**31))
    write_gguf(tmp_path / "model.gguf")
    said = outcome(lambda: load_causal_lm(tmp_path / "model.gguf"))
    assert "no model has more than" in said or "are not of one model" in said, said


@pytest.mark.parametrize("number", [2**31, 2**31 - 1, 2**32 - 1, -1])
def test_a_token_with_an_id_beyond_every_vocabulary_is_refused(tmp_path, number):
    backend = Tokenizer(WordLevel({"[UNK]": 0, "ant": 1, "bee": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    described = json.loads(backend.to_str())
    described["model"]["vocab"]["ant"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert outcome(lambda: load_tokenizer(tmp_path)).startswith("refused: ")
    if number > 0:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        with pytest.raises(UsageError, match=f"with the id {number}"):
            Encoder(tokenizer)


# Corpora


def packed(path, data):
    """`data`, a few bytes and how often, packed without ever being held."""
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pa.output_stream(str(path), compression=codec) as stream:
        for piece, times in data:
            for _ in range(times):
                stream.write(piece)
    return path


START, END = b'{"user": "ann", "text": "', b'"}\n'


@pytest.mark.parametrize("name", ["c.jsonl.zst", "c.jsonl.gz", "c.jsonl", "c.csv.zst"])
def test_an_endless_row_is_refused_and_not_held(tmp_path, name):
    start = b'user,text\nann,"' if ".csv" in name else START
    times = 40 if name == "c.jsonl" else 1_500 if name.endswith("zst") else 99
    path = packed(tmp_path / name, [(start, 1), (b"a" * MEGABYTE, times), (END, 1)])
    said = outcome(documents_of(path))
    assert said.startswith(f"refused: {path} has a row of more than 32,000,000 bytes"), said


def test_an_open_quote_over_many_lines_is_one_row(tmp_path):
    path = packed(tmp_path / "c.csv", [(b'user,text\nann,"', 1), (b"a line of it\n" * 10_000, 260)])
    assert "has a row of more than" in outcome(documents_of(path))


def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path):
    row = START + b"a" * MEGABYTE + END
    path = packed(tmp_path / "c.jsonl.zst", [(row, 300)])
    said = outcome(documents_of(path))
    assert said.startswith(f"refused: {path} has {path.stat().st_size:,} bytes and unpacks to"), (
        said
    )
    assert outcome(documents_of(packed(tmp_path / "fine.jsonl.zst", [(row, 50)]))) == "fine"


def test_a_row_with_too_many_keys_is_a_bad_row(tmp_path):
    row = {"user": "ann", "text": "ant"} | {f"k{n}": n for n in range(200_000)}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    said = outcome(documents_of(tmp_path / "c.jsonl"))
    assert said.startswith("refused: ")
    assert "row 1 has 200,002 columns" in said


def test_rows_with_keys_of_their_own_are_refused(tmp_path):
    rows = (
        {"user": "ann", "text": "ant"} | {f"k{number}-{n}": n for n in range(500)}
        for number in range(100)
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "its rows have keys of their own" in outcome(documents_of(tmp_path / "c.jsonl"))


def test_long_lists_beside_the_text_count_for_a_batch(tmp_path):
    row = json.dumps({"user": "ann", "text": "ant", "list": ["b" * 100] * 50_000})
    (tmp_path / "c.jsonl").write_text((row + "\n") * 12)
    assert [len(batch) for batch in open_corpus(tmp_path / "c.jsonl").batches()] == [1] * 12


def repeated(text, times):
    return pa.DictionaryArray.from_arrays(np.zeros(times, np.int32), pa.array([text]))


def test_a_text_that_a_parquet_file_says_a_million_times_is_never_written_out(tmp_path):
    table = {"user": repeated("ann", 500_000), "text": repeated("b" * (8 * MEGABYTE), 500_000)}
    pq.write_table(
        pa.table(table), tmp_path / "c.parquet", dictionary_pagesize_limit=2**30, compression="zstd"
    )
    said = outcome(documents_of(tmp_path / "c.parquet"))
    assert "bytes and unpacks to" in said, said


def test_repeated_texts_of_a_parquet_file_are_read_a_few_at_a_time(tmp_path):
    texts = [str(number) * 1_900_000 for number in range(4)]  # incompressible enough to be believed
    noise = np.random.default_rng(0).bytes(2 * MEGABYTE).hex()
    array = pa.DictionaryArray.from_arrays(
        np.arange(1_000, dtype=np.int32) % 5, pa.array([*texts, noise])
    )
    table = pa.table({"user": repeated("ann", 1_000), "text": array})
    pq.write_table(table, tmp_path / "c.parquet", dictionary_pagesize_limit=2**30)
    assert outcome(documents_of(tmp_path / "c.parquet")) == "fine"


def test_a_page_that_unpacks_to_far_more_is_refused_by_what_the_file_says(tmp_path):
    text = pa.array(["b" * (10 * MEGABYTE)] * 11)
    table = pa.table({"user": ["ann"] * 11, "text": text})
    pq.write_table(table, tmp_path / "c.parquet", compression="zstd", use_dictionary=False)
    opened = outcome(lambda: open_corpus(tmp_path / "c.parquet"))
    assert "bytes and unpacks to" in opened, opened


def test_a_list_of_repeated_texts_is_counted_as_it_would_be_written_out(tmp_path):
    inner = repeated(np.random.default_rng(0).bytes(MEGABYTE).hex(), 900)
    offsets = pa.array([0] * 900 + [900], pa.int32())  # one row of 900 has them all
    lists = pa.ListArray.from_arrays(offsets, inner)
    table = pa.table({"user": ["ann"] * 900, "text": ["ant"] * 900, "more": lists})
    pq.write_table(table, tmp_path / "c.parquet", dictionary_pagesize_limit=2**30)
    said = outcome(documents_of(tmp_path / "c.parquet"))
    assert "has a row of more than" in said, said


def test_whatever_parquet_holds_reads_as_before(tmp_path):
    table = pa.table(
        {
            "user": ["ann", "bo", None, "ann"],
            "tags": [["p", "q"], [], None, ["p"]],
            "map": pa.array([[("k", "v")], [], None, [("z", None)]], pa.map_("string", "string")),
            "deep": [[{"a": ["x", "y"]}]] * 4,
            "large": pa.array(["l"] * 4, pa.large_string()),
            "bytes": pa.array([b"1", b"\xff", None, b"2"]),
            "category": pa.array(["c", "d", "c", None]).dictionary_encode(),
        }
    )
    for use_dictionary in (True, False):
        pq.write_table(table, tmp_path / "c.parquet", use_dictionary=use_dictionary)
        assert [row for _, row in formats.rows_of(tmp_path / "c.parquet")] == table.to_pylist()


# Numbers


def all_settings(kind=Settings):
    for inner in kind.__subclasses__():
        yield inner
        yield from all_settings(inner)


def numbers_in(kind):
    hints = typing.get_type_hints(kind)
    for field in settings_of(kind):
        if {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}:
            yield field.name


MODULES = (audit_settings, training_config, vectors_settings)  # imported: their classes are known


@pytest.mark.parametrize("number", [10**30, 10**400, -(10**30), float("inf"), float("nan")])
def test_no_setting_takes_an_absurd_number(number):
    examined = 0
    for kind in all_settings():
        needed = {
            field.name: {"label": "team", "dimensions": 8, "epsilon": 1.0}.get(field.name)
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        for name in numbers_in(kind):
            with pytest.raises(UsageError, match=name):
                kind(**needed | {name: number})
            examined += 1
    assert examined > 40


@pytest.mark.parametrize("name", ["hidden_size", "embedding_size", "num_layers", "batch_size"])
def test_sizes_that_are_made_room_for_have_a_bound(name):
    with pytest.raises(UsageError, match=rf"{name}=1e\+09 is out of range"):
        training_config.TrainConfig(**{name: 10**9})


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_a_model_that_the_machine_cannot_hold_is_not_begun(model):
    tokenizer = build_tokenizer(open_corpus([("ann", "ant bee")]), kind="words", size=30)
    config = training_config.TrainConfig(model=model, hidden_size=65_536, num_layers=100)
    said = outcome(lambda: starting_model(config, tokenizer))
    assert said.startswith("refused: A model of these sizes takes"), said


@pytest.mark.parametrize("text", ["steps = " + "9" * 5_000, "steps = " + "[" * 100_000])
def test_toml_beyond_what_python_reads_is_a_usage_error(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=r"run\.toml is not TOML"):
        read_toml(tmp_path / "run.toml")


def test_memory_beyond_any_machine_is_refused():
    with pytest.raises(UsageError, match="more than any machine"):
        bytes_from("9" * 400 + "GB")


class Unasked(BigramTable):
    def forward(self, input_ids):
        raise AssertionError("scanned, though the counting cannot follow")


def test_too_little_memory_is_refused_before_the_scan():
    documents = [("ann", "ant bee cat " * 50), ("bo", "ant")]
    tokenizer = build_tokenizer(open_corpus(documents), kind="words", size=30)
    with pytest.raises(UsageError, match=r"Document 0 has 150 tokens.*Raise memory"):
        tightlip.audit(Unasked(len(tokenizer), 0), documents, tokenizer=tokenizer, memory="1KB")
