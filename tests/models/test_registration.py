"""Our models are known to transformers in either order of import, at no cost before."""

import subprocess
import sys

import pytest

from models.small_models import small_model

pytestmark = pytest.mark.slow

REGISTER = "from tightlip.models import register_when_transformers_loads as r; r()"
LOAD = "print(type(AutoModelForCausalLM.from_pretrained(FOLDER)).__name__)"


def in_a_new_process(*lines, folder=None):
    code = "\n".join([f"FOLDER = {str(folder)!r}", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lstm")
    small_model("lstm").save_pretrained(path)
    return path


def test_importing_models_and_waiting_loads_neither_torch_nor_transformers():
    heavy = "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert in_a_new_process(
        "import sys, tightlip.models", REGISTER, "dir(tightlip.models)", heavy
    ) == ["[]"]


def test_transformers_imported_after_us_knows_our_models(folder):
    lines = [REGISTER, REGISTER, "from transformers import AutoModelForCausalLM", LOAD]
    assert in_a_new_process(*lines, folder=folder) == ["LSTMForCausalLM"]


def test_transformers_imported_before_us_knows_our_models(folder):
    lines = ["from transformers import AutoModelForCausalLM", REGISTER, REGISTER, LOAD]
    assert in_a_new_process(*lines, folder=folder) == ["LSTMForCausalLM"]


def test_a_model_library_that_was_half_imported_knows_our_models(folder):
    """Importing one model first loads transformers' modules in another order."""
    lines = [
        "import transformers",
        REGISTER,
        "from transformers import GPT2LMHeadModel, AutoModel, AutoConfig",
        "print(AutoConfig.from_pretrained(FOLDER).model_type, type(AutoModel.from_pretrained(FOLDER)).__name__)",
    ]
    assert in_a_new_process(*lines, folder=folder) == ["tightlip_lstm", "LSTMModel"]


def test_waiting_costs_tokenizers_nothing_and_leaves_no_trace():
    lines = [
        REGISTER,
        "import sys, transformers.models.auto.configuration_auto as table",
        "from transformers import AutoTokenizer",
        "print('transformers.modeling_utils' in sys.modules)",
        "print(type(table.__loader__).__name__, type(table.__spec__.loader).__name__)",
        "print(any('Watcher' in type(finder).__name__ for finder in sys.meta_path))",
    ]
    assert in_a_new_process(*lines) == ["False", "SourceFileLoader", "SourceFileLoader", "False"]


def test_an_unknown_name_is_an_attribute_error():
    import tightlip.models

    with pytest.raises(AttributeError, match="no attribute 'RNNConfig'"):
        tightlip.models.RNNConfig  # noqa: B018
    assert "LSTMConfig" in dir(tightlip.models)
