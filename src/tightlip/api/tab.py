"""`tightlip tab` as calls: what a model writes behind a text, and whose words that is."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.core.files import read_json
from tightlip.core.run_folder import is_run

if TYPE_CHECKING:
    from tightlip.audit.tab import Completer, Ghost
    from tightlip.audit.tab_marks import Mark, UniqueTexts


class Tab:
    """A model ready to complete lines, with a report's unique texts to watch for where there is one.

    `notes` says what a user should know before typing.
    """

    def __init__(
        self, completer: "Completer", unique: "UniqueTexts | None", notes: Sequence[str] = ()
    ) -> None:
        self.completer, self.unique, self.notes = completer, unique, tuple(notes)

    def complete(self, text: str, **how: Any) -> "Ghost":
        """What the model would write behind `text`."""
        return self.completer.complete(text, **how)

    def marks(self, text: str, accepted: list[bool]) -> list["Mark"]:
        """Whose unique texts stand in `text`; `accepted` tells the model's characters from yours."""
        assert len(accepted) == len(text)
        if self.unique is None or not any(accepted):
            return []
        return self.unique.marks(text, *self.completer.encode(text), accepted)


def open_tab(
    model: str | Path,
    *,
    report: str | Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> Tab:
    """A model's folder, or a finished run with the report beside it; `settings` are TabConfig's."""
    import torch

    from tightlip.api.audit import usable_device
    from tightlip.api.canaries import model_folder
    from tightlip.audit.report import LeakageReport
    from tightlip.audit.tab import Completer, TabConfig
    from tightlip.audit.tab_marks import unique_texts
    from tightlip.models.loading import load_causal_lm, load_tokenizer

    config = TabConfig(**settings)
    folder = model_folder(Path(model))
    tokenizer = load_tokenizer(folder)
    found, notes = (Path(report), []) if report is not None else _report_of(Path(model))
    unique = unique_texts(LeakageReport(found), tokenizer) if found else None
    loaded = load_causal_lm(folder, device=usable_device(device), dtype=torch.float32)
    return Tab(Completer(loaded, tokenizer, config), unique, notes)


def _report_of(model: Path) -> tuple[Path | None, list[str]]:
    """The report that a run keeps beside its model, if there is one that can be used."""
    folder = model / "audit"
    if not is_run(model):
        return None, ["No report: nothing is marked. Give one that tightlip audit wrote: --report"]
    if not (folder / "summary.json").is_file():
        return None, [f"No report: nothing is marked. To have one: tightlip audit {model}"]
    if read_json(folder / "summary.json").get("redacted"):
        return None, [f"{folder} is redacted, so nothing is marked. Give another: --report"]
    return folder, []


def complete(
    model: str | Path | Tab,
    texts: str | Sequence[str],
    *,
    report: str | Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> list[dict[str, Any]]:
    """What a model writes behind each text and whose unique words it completes thereby.

    A text's last word is taken as whole unless the vocabulary lacks it. Many calls for one model
    are faster with what `open_tab` returns.
    """
    tab = (
        model
        if isinstance(model, Tab)
        else open_tab(model, report=report, device=device, **settings)
    )
    return [_completed(tab, text) for text in ([texts] if isinstance(texts, str) else texts)]


def _completed(tab: Tab, text: str) -> dict[str, Any]:
    ghost = tab.complete(text, whole=True)
    accepted = [False] * len(text) + [True] * len(ghost.text)
    return {
        "typed": text,
        "ghost": ghost.text,
        "perplexity": ghost.perplexity,
        "confidence": ghost.confidence,
        "marks": [asdict(mark) for mark in tab.marks(text + ghost.text, accepted)],
    }
