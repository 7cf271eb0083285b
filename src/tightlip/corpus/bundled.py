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

import json
from bisect import bisect_right
from importlib.resources import as_file, files

import pyarrow as pa
import pyarrow.parquet as pq

_DATA = files("tightlip") / "data"


def demo_corpus() -> pa.Table:
    """Columns `user` and `text`: 7,097 speeches by 299 speakers."""
    with as_file(_DATA / "shakespeare.parquet") as path:
        return pq.read_table(path)


def demo_speeches() -> pa.Table:
    """The speeches with columns `play`, `genre` and `gender` (null of groups and spirits)."""
    table = demo_corpus()
    # The row at which each play begins, the play, and its genre as the Folio of 1623 has it.
    about = json.loads((_DATA / "plays.json").read_text(encoding="utf-8"))
    starts, plays, genres_of = zip(*about["plays"], strict=True)
    users = table["user"].to_pylist()
    gender_of = dict.fromkeys(about["women"], "female") | dict.fromkeys(about["of_no_gender"])
    genders = [gender_of.get(user, "male") for user in users]
    place_of = [bisect_right(starts, row) - 1 for row in range(len(users))]
    names, genres = ([of[place] for place in place_of] for of in (plays, genres_of))
    for name, values in (("play", names), ("genre", genres), ("gender", genders)):
        table = table.append_column(name, pa.array(values, pa.string()))
    return table
