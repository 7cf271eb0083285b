"""A trainer's user column that holds lists of owners."""

import numpy as np
import pytest
from datasets import Dataset

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.owners import ownership_of
from tightlip.privacy.sources import LabelledRows, sampled_units
from tightlip.trainer.rows import check_same_rows, users_of

OWNERS = [["ann", "bob"], ["bob"], ["cyd", "ann"], ["dan"]]


def dataset(owners):
    return Dataset.from_dict({"user": owners, "input_ids": [[1, 2]] * len(owners)})


def test_lists_of_owners_become_documents_that_are_drawn_a_few_of_each_owner():
    users = users_of(dataset(OWNERS), "user")
    assert users == OWNERS
    check_same_rows(dataset(OWNERS), "user", users, 4)
    ids = [np.array([1, 2])] * 4
    source = LabelledRows(ids, ids, users)
    assert source.unit_of_row.tolist() == [0, 1, 2, 3]
    assert sampled_units(source, 1).tolist() == ownership_of(OWNERS).taken(1).tolist()
    assert len(sampled_units(source, None)) == 4
    with pytest.raises(GuaranteeError, match="another order"):
        check_same_rows(dataset(OWNERS[::-1]), "user", users, 4)


@pytest.mark.parametrize("owners", [[], ["ann", ""], ["ann", "ann"], ["ann", None]])
def test_a_list_that_names_nobody_or_somebody_twice_is_refused(owners):
    with pytest.raises(GuaranteeError, match="Row 1 has a user of type list"):
        users_of(dataset([["ann"], owners]), "user")
