"""`tightlip train`: a language model with snapshots, from a raw or a prepared corpus."""

from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli.options import Config

_MODEL, _LENGTH, _CORPUS, _MACHINE = "The model", "How long", "A raw corpus", "The machine"
_PRIVACY = "Private training (--mitigation dp, adaptive-dp)"
_ADAPTIVE = "Adaptive private training (--mitigation adaptive-dp)"
_REGULARISER = "Privacy regularisers (--mitigation adversarial, triplet)"


def _option(help_text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


def train(
    corpus: Annotated[
        str, typer.Argument(help="A prepared corpus, or a raw one to prepare inside the run.")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    config: Config = None,
    model: Annotated[
        str | None,
        _option("lstm (default), gru, transformer, or a model folder to go on from.", _MODEL),
    ] = None,
    mitigation: Annotated[
        str | None,
        _option(
            "none (default), dp: differentially private, adaptive-dp, adversarial or triplet.",
            _MODEL,
        ),
    ] = None,
    lora: Annotated[
        int | None, _option("Train LoRA adapters of this rank instead of the weights.", _MODEL)
    ] = None,
    embedding_size: Annotated[int | None, _option("128 unless given.", _MODEL)] = None,
    hidden_size: Annotated[int | None, _option("128 unless given.", _MODEL)] = None,
    num_layers: Annotated[int | None, _option("2 unless given.", _MODEL)] = None,
    num_heads: Annotated[int | None, _option("Of a transformer; 4 unless given.", _MODEL)] = None,
    dropout: Annotated[float | None, _option("0 unless given.", _MODEL)] = None,
    tie_word_embeddings: Annotated[
        bool | None,
        _option(
            "Input and output embeddings are one matrix.",
            _MODEL,
            "--tie-word-embeddings/--no-tie-word-embeddings",
        ),
    ] = None,
    optimizer: Annotated[
        str | None, _option("adam (default), adamw, adamax or sgd.", _MODEL)
    ] = None,
    learning_rate: Annotated[float | None, _option("1e-3 unless given.", _MODEL)] = None,
    weight_decay: Annotated[float | None, _option("0 unless given.", _MODEL)] = None,
    momentum: Annotated[float | None, _option("Of sgd; 0 unless given.", _MODEL)] = None,
    schedule: Annotated[
        str | None, _option("constant (default), linear or cosine.", _MODEL)
    ] = None,
    warmup_steps: Annotated[int | None, _option("0 unless given.", _MODEL)] = None,
    gradient_clip: Annotated[float | None, _option("Largest gradient norm.", _MODEL)] = None,
    batch_size: Annotated[
        int | None, _option("Rows per step, under dp units; 32 unless given.", _MODEL)
    ] = None,
    sequence_length: Annotated[
        int | None, _option("Most tokens per row; 128 unless given.", _MODEL)
    ] = None,
    seed: Annotated[int | None, _option("0 unless given.", _MODEL)] = None,
    epochs: Annotated[float | None, _option("5 unless given.", _LENGTH)] = None,
    steps: Annotated[int | None, _option("Instead of epochs.", _LENGTH)] = None,
    early_stop: Annotated[
        int | None,
        _option("Stop after this many epochs without a better validation perplexity.", _LENGTH),
    ] = None,
    until_perplexity: Annotated[
        float | None, _option("Stop at this validation perplexity.", _LENGTH)
    ] = None,
    snapshot: Annotated[str | None, _option("epoch (default) or none.", _LENGTH)] = None,
    snapshot_steps: Annotated[
        int | None, _option("Also a snapshot every n steps.", _LENGTH)
    ] = None,
    first_quarter: Annotated[
        bool | None,
        _option(
            "Also one after a quarter of the first epoch.",
            _LENGTH,
            "--first-quarter/--no-first-quarter",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, _option("The target: noise is set so that it is met, never passed.", _PRIVACY)
    ] = None,
    unit: Annotated[
        str | None, _option("Whom it protects: user (default) or example (a document).", _PRIVACY)
    ] = None,
    delta: Annotated[
        float | None, _option("1e-5, or 1 / (10 units) where that is less, unless given.", _PRIVACY)
    ] = None,
    noise_multiplier: Annotated[
        float | None, _option("The noise by hand, in units of the clip norm.", _PRIVACY)
    ] = None,
    clip_norm: Annotated[
        float | None, _option("Largest gradient of a unit; 1 unless given.", _PRIVACY)
    ] = None,
    per_layer: Annotated[
        bool | None, _option("Clip each layer by itself.", _PRIVACY, "--per-layer/--flat")
    ] = None,
    rows_per_unit: Annotated[
        int | None,
        _option(
            "Most rows (documents, or pieces of long ones) of a unit in a step; 4 unless given.",
            _PRIVACY,
        ),
    ] = None,
    allow_unproved: Annotated[
        bool | None,
        _option("Go on where a proof breaks; the standing says so.", _PRIVACY, "--allow-unproved"),
    ] = None,
    allow_loose_delta: Annotated[
        bool | None, _option("A delta above 1 / units.", _PRIVACY, "--allow-loose-delta")
    ] = None,
    insecure_seed: Annotated[
        int | None, _option("Known noise, for tests only: it protects nobody.", _PRIVACY)
    ] = None,
    dp_check_canaries: Annotated[
        int | None,
        _option("Plant so many canaries, for tightlip audit RUN --dp-check.", _PRIVACY),
    ] = None,
    adaptive: Annotated[
        str | None,
        _option("What weights change: clip (default), scale or as-published.", _ADAPTIVE),
    ] = None,
    least_clip: Annotated[
        float | None,
        _option("clip: share of the clip norm for a weight of 1; 0.2 unless given.", _ADAPTIVE),
    ] = None,
    gamma_floor: Annotated[
        float | None, _option("scale: least share of the noise; 0.5 unless given.", _ADAPTIVE)
    ] = None,
    release_noise: Annotated[
        float | None,
        _option("scale: noise on the released mean weight; 10 noise multipliers.", _ADAPTIVE),
    ] = None,
    averaging: Annotated[
        float | None,
        _option("scale: what the moving average keeps each step; 0.9 unless given.", _ADAPTIVE),
    ] = None,
    scale_accountant: Annotated[
        str | None,
        _option(
            "scale: filter (default), may end early; or floor, all steps at the least noise.",
            _ADAPTIVE,
        ),
    ] = None,
    privacy_weight: Annotated[
        float | None, _option("The paper's λ; 1 for adversarial, 0.03 for triplet.", _REGULARISER)
    ] = None,
    privacy_warmup_steps: Annotated[
        int | None, _option("Steps over which it rises to that; 0 unless given.", _REGULARISER)
    ] = None,
    batching: Annotated[
        str | None,
        _option("user (default): a batch holds one user's rows; or uniform.", _REGULARISER),
    ] = None,
    discriminator_size: Annotated[
        int | None, _option("Adversarial: its hidden units; 1,000 unless given.", _REGULARISER)
    ] = None,
    discriminator_steps: Annotated[
        int | None, _option("Adversarial: its steps per step; 1 unless given.", _REGULARISER)
    ] = None,
    discriminator_learning_rate: Annotated[
        float | None, _option("Adversarial: of its Adam; 1e-3 unless given.", _REGULARISER)
    ] = None,
    triplet_pairs: Annotated[
        str | None,
        _option("Triplet: auxiliary (default), a second batch; or inside the batch.", _REGULARISER),
    ] = None,
    triplet_margin: Annotated[
        float | None,
        _option("Triplet: squared distance at which one author's rows stop moving.", _REGULARISER),
    ] = None,
    user_column: Annotated[str | None, _option("user unless given.", _CORPUS)] = None,
    text_column: Annotated[str | None, _option("text unless given.", _CORPUS)] = None,
    bad_rows: Annotated[str | None, _option("error (default) or skip.", _CORPUS)] = None,
    split: Annotated[
        str | None, _option("document (default), user, text or none.", _CORPUS)
    ] = None,
    holdout: Annotated[float | None, _option("0.2 unless given.", _CORPUS)] = None,
    validation: Annotated[
        str | None,
        _option("Held-out text as a file of its own; nothing is then split off.", _CORPUS),
    ] = None,
    deduplicate: Annotated[
        str | None, _option("none (default), sentences or documents.", _CORPUS)
    ] = None,
    scrub: Annotated[
        bool | None,
        _option("Replace e-mails, phones, URLs, numbers, IPs.", _CORPUS, "--scrub/--no-scrub"),
    ] = None,
    names: Annotated[
        bool | None,
        _option("With --scrub: names too, through Presidio.", _CORPUS, "--names/--no-names"),
    ] = None,
    vocabulary: Annotated[str | None, _option("words (default) or bpe.", _CORPUS)] = None,
    vocabulary_size: Annotated[int | None, _option("10,000 unless given.", _CORPUS)] = None,
    min_users: Annotated[
        int | None, _option("Only words that at least this many users wrote.", _CORPUS)
    ] = None,
    vocabulary_noise: Annotated[
        float | None,
        _option("Release the words with this noise multiplier, private for each user.", _CORPUS),
    ] = None,
    vocabulary_words_per_user: Annotated[
        int | None, _option("With noise: most words that one user gives; 1,000.", _CORPUS)
    ] = None,
    vocabulary_delta: Annotated[
        float | None,
        _option("With noise: the chance that a user's own word gets out; 1e-7.", _CORPUS),
    ] = None,
    tokenizer: Annotated[
        str | None, _option("A model folder whose tokenizer to use.", _CORPUS)
    ] = None,
    device: Annotated[str | None, _option("auto (default), cpu or cuda.", _MACHINE)] = None,
    bf16: Annotated[
        bool | None, _option("bfloat16 on a GPU.", _MACHINE, "--bf16/--no-bf16")
    ] = None,
    compile: Annotated[
        bool | None, _option("torch.compile on a GPU.", _MACHINE, "--compile/--no-compile")
    ] = None,
    physical_rows: Annotated[
        int | None, _option("Rows in memory at once under dp; 16 on a CPU, 64 on a GPU.", _MACHINE)
    ] = None,
) -> None:
    """Train a language model; the same command goes on where it stopped."""
    given = {name: value for name, value in locals().items() if value is not None}
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress
    from tightlip.corpus.prepare_config import PrepareConfig
    from tightlip.training.config import RunOptions, TrainConfig

    kinds = {"train": TrainConfig, "prepare": PrepareConfig, "options": RunOptions}
    tables = _tables(config, kinds) if config else {}
    settings, prepare, options = (
        {**tables.get(name, {}), **_known(given, kind)} for name, kind in kinds.items()
    )
    with shown_progress():
        run = tightlip.train(
            corpus,
            out,
            prepare=prepare or None,
            options=RunOptions.from_tree(options, str(config)),
            **TrainConfig.from_tree(settings, str(config)).tree(),
        )
    last = run.metrics[-1] if run.metrics else {}
    console = Console()
    for name in ("epoch", "train_perplexity", "validation_perplexity", "validation_accuracy"):
        if last.get(name) is not None:
            console.print(f"{name.replace('_', ' '):24} {last[name]:.4g}")
    if run.stop == "privacy budget":
        console.print(f"{'stopped':24} by its privacy budget, after step {last['step']:,}")
    if run.guarantee.get("epsilon") is not None:
        from tightlip.report.terminal import print_guarantee

        print_guarantee(run.guarantee, console)
    console.print(f"The run: {run.folder}\nNext:    tightlip audit {run.folder}", soft_wrap=True)


def _names(kind: Any) -> list[str]:
    return sorted(field.name for field in fields_of(kind))


def _known(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in _names(kind)}


def _tables(path: Path, kinds: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The file's tables; a name or table that would do nothing is refused.

    A run's own config.toml may be given: what it records beyond the settings is passed over.
    """
    from tightlip.core.errors import UsageError
    from tightlip.core.registry import unknown
    from tightlip.core.settings import read_toml

    recorded = ("corpus", "start", "versions")
    tree = {name: value for name, value in read_toml(path).items() if name not in recorded}
    for table, values in tree.items():
        if table not in kinds or not isinstance(values, dict):
            raise UsageError(
                f"{path}: {unknown('table', table, list(kinds))} Settings stand under [train], "
                f"[prepare] or [options]."
            )
        for name in values:
            if name not in (fields := _names(kinds[table])):
                raise UsageError(f"{path}, [{table}]: {unknown('setting', name, fields)}")
    return tree
