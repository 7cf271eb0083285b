"""`tightlip prepare`: read, check, clean, split, tokenise."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli.options import BadRows, Device, TextColumn, UserColumn


def prepare(
    corpus: Annotated[
        str, typer.Argument(help="Parquet, JSON Lines, CSV, or a saved datasets folder.")
    ],
    out: Annotated[Path, typer.Option(help="The prepared corpus' folder.")],
    user_column: UserColumn = "user",
    text_column: TextColumn = "text",
    bad_rows: BadRows = "error",
    split: Annotated[
        str | None,
        typer.Option(
            help="Hold out by 'document' within each user (default), by 'user', by each 'text' itself, or 'none'."
        ),
    ] = None,
    holdout: Annotated[float, typer.Option(help="The share held out for validation.")] = 0.2,
    validation: Annotated[
        str | None,
        typer.Option(help="Held-out text as a file of its own; nothing is then split off."),
    ] = None,
    deduplicate: Annotated[
        str, typer.Option(help="Remove repeated 'sentences' or 'documents', or 'none'.")
    ] = "none",
    scrub: Annotated[
        bool,
        typer.Option(
            "--scrub", help="Replace e-mails, phones, URLs, card and account numbers, IPs."
        ),
    ] = False,
    names: Annotated[
        bool, typer.Option("--names", help="With --scrub: people's names too, through Presidio.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model folder whose tokenizer to use.")
    ] = None,
    vocabulary: Annotated[
        str, typer.Option(help="Otherwise build one: 'words' or 'bpe'.")
    ] = "words",
    vocabulary_size: Annotated[int, typer.Option(help="Most tokens in it.")] = 10_000,
    min_users: Annotated[
        int | None, typer.Option(help="Only words that at least this many users wrote.")
    ] = None,
    vocabulary_noise: Annotated[
        float | None,
        typer.Option(help="Release the words with this noise multiplier, private for each user."),
    ] = None,
    vocabulary_words_per_user: Annotated[
        int, typer.Option(help="With noise: most words that one user gives.")
    ] = 1000,
    vocabulary_delta: Annotated[
        float, typer.Option(help="With noise: the chance that a user's own word gets out.")
    ] = 1e-7,
    seed: Annotated[int, typer.Option(help="Decides what is held out.")] = 0,
    privacy_weights: Annotated[
        bool,
        typer.Option(
            "--privacy-weights", help="Weigh each training document by its rarity, for adaptive DP."
        ),
    ] = False,
    public_model: Annotated[
        Path | None,
        typer.Option(
            help="With weights: a public causal language model, a folder or a .gguf file."
        ),
    ] = None,
    public_corpus: Annotated[
        Path | None, typer.Option(help="With weights: public text that says what is ordinary.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(help="'public' or 'public-rank'; 'minmax' or 'rank' for as-published only."),
    ] = "public",
    least_weight: Annotated[float, typer.Option(help="No weight is below this.")] = 0.05,
    device: Device = "auto",
) -> None:
    """Check a corpus and make it ready for training."""
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress
    from tightlip.report.terminal import statistics_table

    weighing = _weighing(
        privacy_weights,
        device,
        public_model=public_model,
        public_corpus=public_corpus,
        weights=weights,
        least_weight=least_weight,
    )
    with shown_progress():
        prepared = tightlip.prepare(
            corpus,
            out,
            user_column=user_column,
            text_column=text_column,
            bad_rows=bad_rows,
            split=split,
            holdout=holdout,
            validation=validation,
            deduplicate=deduplicate,
            scrub=scrub,
            names=names,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            vocabulary_size=vocabulary_size,
            min_users=min_users,
            vocabulary_noise=vocabulary_noise,
            vocabulary_words_per_user=vocabulary_words_per_user,
            vocabulary_delta=vocabulary_delta,
            seed=seed,
        )
        weighed = None if weighing is None else tightlip.weigh(prepared, **weighing)
    console = Console()
    console.print(statistics_table(prepared.statistics))
    for release in prepared.releases:
        console.print(
            f"Released: the {release['name']}, noise multiplier {release['noise_multiplier']:g} for each "
            f"{release['unit']}, δ {release['delta']:g}. Preparing anew spends anew.",
            soft_wrap=True,
        )
    console.print(f"Prepared: {prepared.folder}", soft_wrap=True)
    if weighed is not None:
        from tightlip.report.weights import lines_about

        for line in lines_about(weighed.info, weighed.rho, weighed.log_perplexities):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        console.print(f"Weights: {prepared.folder / 'weights' / 'weights.html'}", soft_wrap=True)


def _weighing(wanted: bool, device: str, **settings: Any) -> dict[str, Any] | None:
    """What to weigh with, refused before any text is read; None where nothing is to be weighed."""
    from tightlip.core.errors import UsageError
    from tightlip.corpus.privacy_weights import WeightsConfig

    if wanted:
        WeightsConfig(**settings)
        return settings | {"device": device}
    plain = {name: getattr(WeightsConfig, name) for name in settings} | {"device": "auto"}
    for name, value in (settings | {"device": device}).items():
        if value != plain[name]:
            raise UsageError(
                f"{name}={str(value)!r} is for weighing documents, which is off. Add --privacy-weights, or leave it out."
            )
    return None
