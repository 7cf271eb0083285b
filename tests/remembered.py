"""What takes long and always comes out the same is worked out once in a run of all tests.

ε of a mechanism follows from its numbers. That nobody's row meets another's is asked of a stock model
once for each configuration and shape: a third of the time of many a private run in a test. Models with
any part of a test's own are asked each time, and so is everything in the tests of these questions.
"""

import contextlib
import hashlib
import os
import pickle
import tempfile
from pathlib import Path

STOCK = ("torch.nn.", "transformers.", "tightlip.models.", "peft.", "bitsandbytes.")
ALWAYS_ASKED = ("test_rows_alone", "test_models_that_hide", "test_neighbours", "test_clipping")
# Of one run: the first process makes it, and those that it starts are told.
FOLDER = Path(os.environ.setdefault("TESTS_REMEMBER_IN", tempfile.mkdtemp(prefix="remembered-")))

asks_always = False  # see conftest.py


def remembered(key, make, worth=lambda value: True):
    """What `make` gives, from a file if any process of this run made it before."""
    file = FOLDER / hashlib.sha256(repr(key).encode()).hexdigest()
    with contextlib.suppress(OSError):
        return pickle.loads(file.read_bytes())
    value = make()
    if worth(value):
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        # Linked, not renamed: renames are what tests of killed commands count. A disk may be full.
        with contextlib.suppress(OSError):
            beside.write_bytes(pickle.dumps(value))
            os.link(beside, file)
        with contextlib.suppress(OSError):
            beside.unlink()
    return value


def install() -> None:
    """Have this process remember, and those that it forks."""
    from tightlip.privacy import accounting, rows_alone

    if "own" in vars(rows_alone.rows_meet):
        return
    for name in ("_sampled_epsilon", "_rdp_of_a_step"):
        setattr(accounting, name, _by_numbers(getattr(accounting, name)))
    for name in ("rows_meet", "_changes"):
        setattr(rows_alone, name, _of_stock_models(getattr(rows_alone, name), rows_alone))


def _by_numbers(plain):
    def asked(*numbers):
        return remembered((plain.__name__, numbers), lambda: plain(*numbers))

    return asked


def _of_stock_models(plain, module):
    trial = module.first_change

    def asked(passes, shape, *moves):
        always = asks_always or module.first_change is not trial
        if always or not _is_stock(passes.model):
            return plain(passes, shape, *moves)
        signs = [[sign for sign, _ in each] for each in moves]
        key = (plain.__name__, _told(passes), shape, signs)
        return remembered(key, lambda: plain(passes, shape, *moves), lambda why: why is None)

    asked.own = plain
    return asked


def _is_stock(model) -> bool:
    if any(hasattr(each, "full_tensor") for each in model.parameters()):
        return False  # processes that hold a part each must all ask, or none
    return all(
        type(part).__module__.startswith(STOCK)
        and "forward" not in vars(part)
        and not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks)
        for part in model.modules()
    )


def _told(passes):
    model = passes.model
    weights = [
        (name, tuple(each.shape), each.dtype, each.requires_grad, type(each).__name__)
        for name, each in (*model.named_parameters(), *model.named_buffers())
    ]
    config = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    return repr(model), config, weights, passes.way, passes.bf16, passes.clip
