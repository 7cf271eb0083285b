"""The demo corpus that comes with tightlip: speeches from Shakespeare's plays, by speaker.

Made once from the public-domain "tiny Shakespeare" text (7,222 blocks of a
"Speaker:" line and a speech, a blank line between): one row per block in the order
of the text, `user` the speaker without the colon, `text` the speech with its line
breaks. The 125 blocks without a speech are left out, which leaves 7,097 speeches by
299 of the 309 speakers. The code, run once:

    rows = []
    for block in Path("input.txt").read_text().strip("\\n").split("\\n\\n"):
        speaker, _, speech = block.strip("\\n").partition("\\n")
        if speech.strip():
            rows.append({"user": speaker.removesuffix(":"), "text": speech})
    schema = pa.schema({"user": pa.string(), "text": pa.string()})
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, "shakespeare.parquet", compression="zstd", compression_level=19)
"""

from importlib.resources import as_file, files

import pyarrow as pa
import pyarrow.parquet as pq


def demo_corpus() -> pa.Table:
    """Columns `user` and `text`: 7,097 speeches by 299 speakers."""
    with as_file(files("tightlip") / "data" / "shakespeare.parquet") as path:
        return pq.read_table(path)
