"""`generate` against rereading everything at every step."""

import pytest
import torch
from transformers import DynamicCache

from models.small_models import (
    ALL,
    RECURRENT,
    beams_by_rereading,
    greedy_by_rereading,
    left_padded,
    next_logits,
    random_ids,
    small_model,
)
from tightlip.core.errors import UsageError
from tightlip.models import RecurrentState

PROMPTS = [[4, 9, 17, 5, 11], [7], [20, 3, 8]]


def generated(model, ids, mask=None, **settings):
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | settings
    return model.generate(ids, attention_mask=mask, **settings)


@pytest.mark.parametrize("kind", ALL)
def test_greedy_generation_agrees_with_rereading(kind):
    model = small_model(kind)
    for prompt in PROMPTS:
        assert generated(model, torch.tensor([prompt]))[0].tolist() == greedy_by_rereading(
            model, prompt, 8
        )


@pytest.mark.parametrize("kind", ALL)
def test_left_padded_rows_generate_as_if_alone(kind):
    model = small_model(kind)
    ids, mask = left_padded(PROMPTS)
    rows = generated(model, ids, mask)
    for prompt, row in zip(PROMPTS, rows.tolist(), strict=True):
        assert row[ids.shape[1] - len(prompt) :] == greedy_by_rereading(model, prompt, 8)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_beams_agree_with_rereading_every_beam(kind, prompt):
    model = small_model(kind)
    rows = generated(
        model, torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=6
    )
    assert rows.tolist() == beams_by_rereading(model, prompt, 6, 3)


@pytest.mark.parametrize("kind", ALL)
def test_beams_of_left_padded_rows_agree_with_rereading(kind):
    model = small_model(kind)
    ids, mask = left_padded(PROMPTS)
    rows = generated(model, ids, mask, num_beams=3, max_new_tokens=5)
    for prompt, row in zip(PROMPTS, rows.tolist(), strict=True):
        assert row[ids.shape[1] - len(prompt) :] == beams_by_rereading(model, prompt, 5, 3)[0]


@pytest.mark.parametrize("kind", ALL)
def test_sampled_steps_see_what_rereading_gives(kind):
    model = small_model(kind)
    ids, mask = left_padded(PROMPTS)
    torch.manual_seed(5)
    result = generated(
        model,
        ids,
        mask,
        do_sample=True,
        num_return_sequences=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, ids_of_row in enumerate(result.sequences.tolist()):
        prompt = PROMPTS[row // 2]
        sampled = ids_of_row[ids.shape[1] :]
        for step, logits in enumerate(result.logits):
            expected = next_logits(model, prompt + sampled[:step])
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ALL)
def test_sampling_draws_what_a_naive_sampler_draws(kind):
    model = small_model(kind)
    torch.manual_seed(11)
    row = generated(model, torch.tensor([PROMPTS[0]]), do_sample=True, top_k=0)[0].tolist()
    torch.manual_seed(11)
    prefix = list(PROMPTS[0])
    for _ in range(8):
        prefix.append(int(torch.multinomial(next_logits(model, prefix).softmax(-1)[None], 1)))
    assert row == prefix


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("setting", [{"use_cache": False}, {"prefill_chunk_size": 2}])
def test_generation_is_the_same_without_cache_and_with_chunked_prompts(kind, setting):
    model = small_model(kind)
    ids, mask = left_padded(PROMPTS)
    assert torch.equal(generated(model, ids, mask), generated(model, ids, mask, **setting))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_goes_on_from_a_given_state(kind, num_beams):
    model = small_model(kind)
    ids = random_ids(2, 9)
    with torch.no_grad():
        state = model(input_ids=ids[:, :6], use_cache=True).past_key_values
    before = [part.clone() for part in state.parts_LBH]
    settings = {"num_beams": num_beams}
    assert torch.equal(
        generated(model, ids, past_key_values=state, **settings), generated(model, ids, **settings)
    )
    assert all(map(torch.equal, before, state.parts_LBH)), "the caller's state was changed"


@pytest.mark.parametrize("kind", RECURRENT)
def test_generating_from_a_state_that_read_everything_is_refused(kind):
    model = small_model(kind)
    ids = random_ids(1, 4)
    state = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(UsageError, match="already read all"):
        generated(model, ids, past_key_values=state)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_key_value_cache_is_refused_by_recurrent_models(kind):
    model = small_model(kind)
    with pytest.raises(UsageError, match="DynamicCache"):
        model(input_ids=random_ids(1, 4), past_key_values=DynamicCache())
    with pytest.raises(UsageError, match="DynamicCache"):
        generated(model, random_ids(1, 4), past_key_values=DynamicCache())


def test_a_state_of_other_rows_is_refused():
    model = small_model("lstm")
    state = model(input_ids=random_ids(2, 4), use_cache=True).past_key_values
    with pytest.raises(UsageError, match="2 rows and the input 3"):
        model(input_ids=random_ids(3, 4), past_key_values=state)


def test_a_state_cannot_be_cropped():
    with pytest.raises(UsageError, match="keeps no history"):
        RecurrentState().crop(3)


def test_a_transformer_refuses_more_positions_than_it_learned():
    with pytest.raises(UsageError, match="65 positions are more than the 64"):
        small_model("transformer")(input_ids=random_ids(1, 65))
