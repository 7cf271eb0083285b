"""What a trainer's weights cost: the runs behind those that it starts from, the checkpoints that it may
go on from, and the guarantee beside those that it leaves."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import counted
from tightlip.core.files import read_json, write_json, write_text
from tightlip.core.register import OWN_RECORD, guarantee_beside, weights_in
from tightlip.core.run_folder import LEDGER
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.people import Record, composable, runs_before
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.shards import kept_parameters, local, resharded
from tightlip.training.checkpoints import BEGINS_ANEW
from tightlip.training.starting import guarantee_lines, told_of

log = logging.getLogger("tightlip")
PUBLIC = "public"
# Of a model in memory: the runs, what they trained, and all its weights as the last one left them.
_MARK, _TRAINED, _LEFT = "_tightlip_runs", "_tightlip_trained", "_tightlip_left"
_STAMP = "tightlip_run"  # in config.json, which save_pretrained() writes without a guarantee
# Random at first, and nothing while the factor beside it is zero.
_FREE = ("lora_A", "lora_embedding_B", "lora_magnitude_vector")
_AT_FIRST = {"lora_B": 0.0, "lora_embedding_A": 0.0, "ia3_l": 1.0}
_LOOKS = ("eva", "corda", "lora_ga")  # these begin at what texts activate, EVA with lora_B at zero
_STATE = "trainer_state.json"  # the last file of a checkpoint
_CARD = "---\nlibrary_name: transformers\ntags: [tightlip]\n---\n\n# A model trained privately\n"
_BEGIN, _END = "<!-- guarantee by tightlip -->", "<!-- end of the guarantee -->"
Left = list[tuple[torch.Tensor, int]]
_SECTION = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)


def runs_behind(model: Any, start: str | Path | None, ledger: Path) -> list[Record]:
    """The private runs that the weights to start from came out of, but the one that goes on in
    `ledger`: as the model's folder tells, the one that is named, and what was trained in memory.

    Holds:
        in_memory: a model that a trainer has changed brings that run along, merged or not.
        named: only 'public' costs nothing; any other start has a guarantee, or is refused.
        adapter: one that does something already, or looked at texts, is refused unless it is said where
            it is from.
        stamped: weights that save_pretrained() wrote after a private run are refused unless it is named.
        openly: weights that a run without privacy left are refused unless they are said to be public,
            in whatever private run it began; and so are those that were changed since in memory.
    """
    marks: list[Record] = getattr(_base(model), _MARK, [])
    if start is None and marks and _have_changed(getattr(_base(model), _LEFT, [])):
        raise GuaranteeError(
            "The weights have changed in memory since private training left them, so what they cost their people is not known. Load them "
            "anew from what it saved; or give start='public' where nothing but public text shaped them since."
        )
    if start is None and (_looks_at_texts(model) or _does_something(model)):
        raise GuaranteeError(
            "The adapter to start from does something already: it was trained before, or initialised from the base or from texts. "
            "PEFT does not keep where it was read from, so what it cost its people would go uncounted. Give start=DIR, its folder; "
            "or start='public' where nothing but public text shaped it."
        )
    config = getattr(model, "config", None)
    name, commit = (getattr(config, each, None) for each in ("_name_or_path", "_commit_hash"))
    record = _record_at(name, commit) if name else {}
    runs = runs_before(record)
    if start is None and record and not _is_private(record, runs):
        raise GuaranteeError(
            f"{name} was trained without privacy, as its {OWN_RECORD} says, and if it learnt from these people no noise hides it. Start "
            "from other weights; or give start='public' where nothing but public text shaped them."
        )
    if start is not None and start != PUBLIC:
        own = _record_at(start)
        if not _is_private(own, named := runs_before(own)):
            raise UsageError(
                f"start={str(start)!r} has no {OWN_RECORD} of a private run, so it does not say what the weights cost their people. Give the "
                "folder of a private run's weights; or start='public' where nothing but public text shaped them."
            )
        runs += named
    by_id = {run.get("run") or place: run for place, run in enumerate([*runs, *marks])}
    goes_on = read_ledger(ledger).get("run") if ledger.exists() else None
    stamp = getattr(config, _STAMP, None)
    if start != PUBLIC and stamp not in (None, goes_on, *by_id):
        raise GuaranteeError(
            f"The weights were saved past their trainer, as save_pretrained() does: their config.json names the private run {stamp}, and no "
            "guarantee.json beside them says what it cost. Give start=DIR, a folder that the trainer itself saved; or start='public' where "
            "nothing but public text shaped them."
        )
    by_id.pop(goes_on, None)
    return [*by_id.values()]


def _is_private(record: Record, runs: list[Record]) -> bool:
    """Whether the last of these `runs` is the one that the record is about, and not one before it."""
    return len(runs) > len(record.get("before", ()))


def leave_mark(model: Any, record: Record) -> None:
    """Let whoever trains this model object next know of the run that changed it, and of what it trained."""
    base = _base(model)
    setattr(base, _MARK, [composable(record), *record.get("before", ())])
    setattr(base, _TRAINED, getattr(base, _TRAINED, {}) | kept_parameters(model))
    if (config := getattr(base, "config", None)) is not None:
        setattr(config, _STAMP, record["run"])


def left_in(model: Any) -> Left:
    """All weights as a run leaves them, each with torch's count of changes to it; for whoever trains this
    model object next, too."""
    every = [each for each in resharded(model).parameters() if not each.is_inference()]
    left = [(each, each._version) for each in every]
    setattr(_base(model), _LEFT, left)
    return left


def _have_changed(left: Left) -> bool:
    return any(weight._version > changes for weight, changes in left)


def refuse_if_trained_on(model: Any, left: Left) -> None:
    """Refuse to vouch for weights that other code changed in place, or put in, since a run left them."""
    known = {id(weight) for weight, _ in left}
    others = (each for each in resharded(model).parameters() if not each.is_inference())
    if left and (_have_changed(left) or any(id(each) not in known for each in others)):
        raise GuaranteeError(
            "The weights have changed in memory since private training left them, so its guarantee is not theirs. Save them without "
            "this trainer; what it left itself is what it saved then, such as its last checkpoint."
        )


def _base(model: Any) -> Any:
    """What merge_and_unload() gives, too."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _record_at(where: str | Path, commit: str | None = None) -> Record:
    """The guarantee in a folder, or with a model of the hub as far as it lies in the local cache."""
    if (folder := Path(where)).is_dir():
        # Of a subfolder transformers keeps the folder above only: there a run has its ledger.
        has_ledger = (folder / LEDGER).is_file()
        return guarantee_beside(folder) or (read_ledger(folder / LEDGER) if has_ledger else {})
    try:
        found = try_to_load_from_cache(str(where), OWN_RECORD, revision=commit)
    except HFValidationError:
        return {}
    return guarantee_beside(Path(found).parent) if isinstance(found, str) else {}


def _looks_at_texts(model: Any) -> bool:
    """Whether an adapter begins at what texts activate."""
    settings = getattr(model, "peft_config", {}).values()
    return any(getattr(each, "init_lora_weights", None) in _LOOKS for each in settings)


def _does_something(model: Any) -> bool:
    """Whether an adapter is not, or is not known to be, as a new one is; but for what a trainer trained here."""
    if not hasattr(model, "peft_config"):
        return False
    every = dict(resharded(model).named_parameters(remove_duplicate=False))
    trained = {id(weight) for weight in getattr(_base(model), _TRAINED, {}).values()}
    for name, weight in every.items():
        if id(weight) in trained:  # a name may have become another's
            continue
        own = re.sub(r"modules_to_save\.[^.]+", "original_module", name)
        known = [value for part, value in _AT_FIRST.items() if part in name]
        if own != name:
            is_new = own in every and torch.equal(local(weight), local(every[own]))
        elif known:
            is_new = bool((local(weight) == known[0]).all())
        else:
            is_new = not weight.requires_grad or any(part in name for part in _FREE)
        if not is_new:
            return True
    return False


def checkpoint_of(asked: Any, output_dir: Path) -> Path | None:
    """The checkpoint that was asked for; of several the last one that was written whole."""
    if asked is None or asked is False:
        return None
    if asked is not True:
        return Path(asked)
    if not (every := _checkpoints_in(output_dir)):
        raise UsageError(
            f"{output_dir} has no checkpoint to go on from. Leave resume_from_checkpoint out: steps that are on record in its "
            "ledger stay charged."
        )
    whole = [each for each in every if _lacks(each) is None] or every
    if whole[-1] != every[-1]:
        log.warning("%s was left half-written; training goes on from %s.", every[-1], whole[-1])
    return whole[-1]


def refuse_to_begin_anew(model: Any, private: PrivateTraining, output_dir: Path) -> None:
    """Refuse weights that the steps on record did not give, where those are there or none is left."""
    has_budget, ledger = private.has_budget(), private.ledger
    marks: list[Record] = getattr(_base(model), _MARK, [{}])
    if has_budget and (not ledger.steps or marks[0].get("run") == ledger.record()["run"]):
        return  # nothing is on record, or the model in memory goes on
    whole = [each for each in _checkpoints_in(output_dir) if _lacks(each) is None]
    if has_budget and not whole:
        log.warning(BEGINS_ANEW, ledger.steps, ledger.path)
        return
    raise GuaranteeError(
        f"{ledger.path} has {ledger.steps} steps on record, of {private.spec.steps} planned, with {counted(len(whole), 'checkpoint')} "
        "beside it, and training would begin anew. Give train(resume_from_checkpoint=True), which goes on from the last checkpoint; "
        "or another output_dir, with a model that is loaded anew."
    )


def _checkpoints_in(output_dir: Path) -> list[Path]:
    found = [each for each in output_dir.glob("checkpoint-*") if each.name[11:].isdecimal()]
    return sorted(found, key=lambda each: int(each.name[11:]))


def _lacks(checkpoint: Path) -> str | None:
    names = (OWN_RECORD, _STATE)
    return next((name for name in names if not (checkpoint / name).is_file()), None)


def check_checkpoint(folder: Path, ledger: Path) -> None:
    """Refuse to go on from weights of which this ledger does not know what they cost."""
    there, lacking = read_ledger(ledger), _lacks(folder)
    held = {} if lacking else guarantee_beside(folder)
    if "weights" not in held or held.get("run") is None or held["run"] != there.get("run"):
        half = f", or was left half-written ({lacking} is missing)" if lacking else ""
        raise GuaranteeError(
            f"{folder} is not a checkpoint of the run in {ledger}{half}, so it may hold what was learnt without privacy, or charged "
            "elsewhere. Give a checkpoint of this run, or another output_dir; with resume_from_checkpoint=True the last whole one is "
            "taken."
        )
    if there["steps"] < held["steps"]:
        raise GuaranteeError(
            f"{ledger} has {there['steps']} steps on record and {folder} holds {held['steps']}: steps would go uncounted. Put the "
            "ledger of this run back, or train again with another output_dir."
        )


def copy_weights(checkpoint: Path, folder: Path) -> None:
    """As a push from a checkpoint does, so that the guarantee can be told before it."""
    for name in guarantee_beside(checkpoint).get("weights", ()):
        if "/" not in name and "fsdp" not in name:
            shutil.copy(checkpoint / name, folder / name)


def take_back(output_dir: Path, record: Record) -> None:
    """Tell of a promise that was lost wherever it was told of before."""
    for each in (output_dir, *_checkpoints_in(output_dir)):
        path = each / OWN_RECORD
        if path.is_file() and read_json(path).get("run") == record["run"]:
            tell(each, record, weights_in(each))


def tell(folder: Path, record: Record, before: dict[str, str] | None = None) -> None:
    """The guarantee beside weights and in their card, in the place of an earlier one. It is about the
    files that are not as they were `before`, and about what it was about and is still there."""
    path, card, now = folder / OWN_RECORD, folder / "README.md", weights_in(folder)
    earlier = read_json(path) if path.is_file() else {}
    own = earlier.get("weights", {}) if earlier.get("run") == record["run"] else {}
    others = now if before is None else before
    weights = {name: one for name, one in now.items() if own.get(name) == one or others.get(name) != one}  # fmt: skip
    write_json(path, told_of(record) | {"weights": weights}, alone=True)
    text = card.read_text(encoding="utf-8") if card.is_file() else _CARD
    lines = [_BEGIN, "## Guarantee", "", *guarantee_lines(record), _END, ""]
    told = "\n".join([_SECTION.sub("", text).rstrip(), "", *lines])
    write_text(card, told, alone=True)
