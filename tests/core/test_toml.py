import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightlip.core.errors import UsageError
from tightlip.core.settings import read_toml, toml_text

scalars = (
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.booleans()
)
values = scalars | st.lists(scalars, max_size=3)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
trees = st.dictionaries(
    keys, st.recursive(values, lambda inner: st.dictionaries(keys, inner, max_size=3)), max_size=4
)


@given(trees)
def test_python_reads_back_whatever_tree_was_written(tree):
    assert tomllib.loads(toml_text(tree)) == tree


def test_what_has_no_value_is_left_out():
    assert tomllib.loads(toml_text({"a": None, "b": {"c": None}, "d": 1})) == {"b": {}, "d": 1}


def test_numbers_that_are_no_numbers_come_back_as_such():
    assert math.isnan(tomllib.loads(toml_text({"a": math.nan}))["a"])


def test_a_file_that_is_not_there_or_not_toml_is_a_usage_error_that_names_it(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.toml cannot be read"):
        read_toml(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("steps: 3")
    with pytest.raises(UsageError, match=r"bad\.toml is not TOML"):
        read_toml(tmp_path / "bad.toml")
