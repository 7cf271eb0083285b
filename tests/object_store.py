"""A real S3 server on loopback (moto), which can be told to fail, and what lies on it."""

import logging
import threading
from contextlib import contextmanager

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from werkzeug.serving import make_server

from animals import WORDS

ROWS = [
    {"user": f"person-{n % 4}", "text": " ".join(WORDS[(n * n + k) % 9] for k in range(3 + n % 5))}
    for n in range(40)
]


_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Store:
    """`requests` are (method, path) of all that came; `fails(number, method, path)` says of a
    request that it is answered with "503" or "403", or by hanging up ("drop")."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.port}"
        # At the end of an address it names this server, whatever the environment says.
        self.here = f"?endpoint_override={self.url[7:]}&scheme=http&region=us-east-1"
        self.requests, self.fails = [], lambda number, method, path: None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        self.client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        how = self.fails(len(self.requests), method, path)
        if how == "drop":
            environ["werkzeug.socket"].close()
        if how is not None:
            status = "403 Forbidden" if how == "403" else "503 Slow Down"
            start_response(status, [("Content-Type", "application/xml")])
            return [_DENIED if how == "403" else b""]
        return self._app(environ, start_response)

    @contextmanager
    def failing(self, fails):
        self.fails = fails
        try:
            yield
        finally:
            self.fails = lambda number, method, path: None

    def put(self, folder, bucket, prefix=""):
        """All files of a folder, below `prefix`."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.client.upload_file(
                    str(path), bucket, f"{prefix}{path.relative_to(folder).as_posix()}"
                )

    def names(self, bucket, prefix=""):
        listed = self.client.list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [each["Key"] for each in listed.get("Contents", ())]

    def get(self, bucket, key):
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def close(self):
        self._server.shutdown()


def every_tenth(how):
    return lambda number, method, path: how if number % 10 == 0 else None


def write_files(folder):
    """The rows in five Parquet files, and in one."""
    (folder / "mails").mkdir()
    for number in range(5):
        part = pa.Table.from_pylist(ROWS[8 * number : 8 * number + 8])
        pq.write_table(part, folder / "mails" / f"{number}.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "all.parquet")


def write_model(folder, *, seed=0):
    import torch

    torch.manual_seed(seed)
    words = {word: number for number, word in enumerate(["[UNK]", "<s>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>", pad_token="<s>"
    )
    fast.save_pretrained(folder)
    config = GPT2Config(vocab_size=len(words), n_layer=1, n_embd=8, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"a pickle that nobody opens")
