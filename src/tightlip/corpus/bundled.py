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

from bisect import bisect_right
from importlib.resources import as_file, files

import pyarrow as pa
import pyarrow.parquet as pq

# The row at which each play begins; the play, and its genre as the Folio of 1623 has it.
PLAYS = {
    0: ("Coriolanus", "tragedy"),
    1100: ("Richard III", "history"),
    2170: ("Richard II", "history"),
    2721: ("Romeo and Juliet", "tragedy"),
    3548: ("Henry VI, Part 3", "history"),
    4334: ("The Winter's Tale", "comedy"),
    5069: ("Measure for Measure", "comedy"),
    5941: ("The Taming of the Shrew", "comedy"),
    6818: ("The Tempest", "comedy"),
}
WOMEN = {
    *("VOLUMNIA", "VIRGILIA", "VALERIA", "Gentlewoman"),
    *("LADY ANNE", "QUEEN ELIZABETH", "QUEEN MARGARET", "DUCHESS OF YORK", "Girl"),
    *("DUCHESS", "QUEEN", "Lady"),
    *("JULIET", "LADY CAPULET", "LADY  CAPULET", "LADY MONTAGUE", "Nurse", "NURSE"),
    *("LADY GREY", "BONA"),
    *("HERMIONE", "PAULINA", "PERDITA", "EMILIA", "MOPSA", "DORCAS", "First Lady", "Second Lady"),
    *("ISABELLA", "MARIANA", "FRANCISCA", "MISTRESS OVERDONE"),
    *("KATHARINA", "KATARINA", "BIANCA", "Widow", "Hostess"),
    "MIRANDA",
}
OF_NO_GENDER = {
    *("All", "ALL", "Both", "ANOTHER", "Children", "Chorus", "Time", "ARIEL", "Mariners"),
    *("Citizens", "Both Citizens", "All Citizens", "Both Tribunes", "All The People"),
    *("Senators", "Senators, &C", "Lords", "LORDS", "All The Lords", "All Conspirators"),
    *("GENTLEMEN", "Players", "ALL SERVING-MEN"),
}


def demo_corpus() -> pa.Table:
    """Columns `user` and `text`: 7,097 speeches by 299 speakers."""
    with as_file(files("tightlip") / "data" / "shakespeare.parquet") as path:
        return pq.read_table(path)


def demo_speeches() -> pa.Table:
    """The speeches with columns `play`, `genre` and `gender` (null of groups and spirits)."""
    table = demo_corpus()
    users = table["user"].to_pylist()
    starts = list(PLAYS)
    plays = [PLAYS[starts[bisect_right(starts, row) - 1]] for row in range(len(users))]
    genders = [
        None if user in OF_NO_GENDER else "female" if user in WOMEN else "male" for user in users
    ]
    names, genres = zip(*plays, strict=True)
    for name, values in (("play", names), ("genre", genres), ("gender", genders)):
        table = table.append_column(name, pa.array(values, pa.string()))
    return table
