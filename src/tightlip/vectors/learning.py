"""Robust training: extractor and classifier learn through the very noise that will be added.

Words are masked, texts extracted, vectors normalised and perturbed inside the graph, as on a
device later; the best epoch on the development texts is kept.

A killed training goes on as if nothing had happened: `checkpoint/step-N/` holds tensors.safetensors
and state.json, `checkpoint/best-N/` the weights of the best epoch so far: no pickle, so nothing in
them can run. No random state is kept: order, masks, noise and dropout are functions of the seed
and the step.
"""

import math
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tightlip.core import run_folder
from tightlip.core.checksums import checked
from tightlip.core.devices import usable_device
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import folder_written_whole, write_json
from tightlip.core.progress import Task, held_interrupts, log, stopped_after, task
from tightlip.vectors import halves
from tightlip.vectors.batches import Batch, Batches, Scores, scores_of
from tightlip.vectors.data import SPLIT, Examples, write_split
from tightlip.vectors.extractors import make_extractor, to_device
from tightlip.vectors.guarantees import BARE, VectorMechanism
from tightlip.vectors.release import normalised, training_noise
from tightlip.vectors.settings import RepresentOptions, RepresentSettings

METRICS = "metrics.json"
_OPTIMIZER = "optimizer"
WARMUP_SHARE = 0.1
LARGEST_NORM = 1.0
READERS_RATE = 2e-3


@dataclass(kw_only=True)
class Progress(run_folder.Moment):
    """How far a training of vectors is."""

    num_texts: int = 0
    best_epoch: int = 0
    best_loss_nats: float | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


class Readers(nn.Module):
    """Method adversarial (Coavoux et al. 2018): who is to be left in doubt by the vectors.

    One reader per private attribute, each an MLP of one hidden layer.
    """

    def __init__(self, dimensions: int, num_classes: Sequence[int], *, hidden: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(dimensions, hidden), nn.ReLU(), nn.Linear(hidden, num))
            for num in num_classes
        )

    def logits(self, vectors: Tensor) -> Iterable[Tensor]:
        centred = 2 * vectors - 1  # from [0, 1]
        return (reader(centred) for reader in self.each)

    def learn(
        self, vectors: Tensor, private: Sequence[Tensor], optimizer: Optimizer, num_steps: int
    ) -> None:
        """Let the readers read these vectors a little better; the extractor stays as it is."""
        vectors = vectors.detach()
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            losses = [
                functional.cross_entropy(logits, truth)
                for logits, truth in zip(self.logits(vectors), private, strict=True)
            ]
            torch.stack(losses).sum().backward()
            optimizer.step()

    def certainty(self, vectors: Tensor, frequencies: Sequence[Tensor]) -> Tensor:
        """What the extractor pays: how far the readers are from saying how frequent each class is.

        That is the cross entropy of their reading under the classes' frequencies, without its
        least value, so that it is 0 for readers who learn nothing from the vector.

        Holds:
            doubt: 0 where every reader says the frequencies, more everywhere else.
        """
        losses = [
            -(share * (logits.log_softmax(dim=1) - share.log())).sum(dim=1).mean()
            for logits, share in zip(self.logits(vectors), frequencies, strict=True)
        ]
        return torch.stack(losses).mean()


def frequencies_of(ids: Tensor, num_classes: int) -> Tensor:
    """The share of each class, none of them 0."""
    counts = torch.bincount(ids, minlength=num_classes) + 1.0
    return counts / counts.sum()


class Training:
    """One training under way.

    Holds:
        deterministic: on the CPU, the same settings give the same halves bit for bit.
        resumed: so does a training that was killed, however often, and started again.
        interrupted: Ctrl-C ends the step under way, saves it and stops.
        best: what is kept are the weights of the epoch with the least loss on the dev texts.
        no_noise: through noise of scale 0 it learns what it learns without.
    """

    def __init__(
        self, examples: Examples, settings: RepresentSettings, options: RepresentOptions, out: Path
    ) -> None:
        self.settings, self.options = settings, options
        self.out, self.kept = out, out / run_folder.CHECKPOINT
        self.device = torch.device(usable_device(options.device, bf16=options.bf16))
        self.examples, self.train = examples, examples.part("train")
        seed_step(settings.seed, -1, self.device)
        self.extractor = make_extractor(
            settings.extractor,
            self.train.texts,
            pooling=settings.pooling,
            max_tokens=settings.max_tokens,
            dimensions=settings.dimensions,
            vocabulary_size=settings.vocabulary_size or 0,
        )
        self.mechanism = VectorMechanism(
            mechanism=settings.mechanism or BARE,  # none at all for the baselines
            dimensions=self.extractor.dimensions,
            epsilon=settings.epsilon,
            delta=settings.delta,
            dropout=settings.dropout,
        )
        labels = examples.label.names
        self.classifier = halves.noise_classifier(labels, self.mechanism, hidden=settings.hidden)
        self.readers = self._new_readers()
        names = ("extractor", "classifier", "readers")
        self.modules = nn.ModuleDict({name: getattr(self, name) for name in names}).to(self.device)
        self.batches = Batches(
            self.extractor,
            self.train,
            batch_size=settings.batch_size,
            dropout=settings.dropout,
            seed=settings.seed,
            device=self.device,
        )
        self.num_steps = settings.epochs * self.batches.steps_per_epoch
        self.truth = torch.from_numpy(self.train.label.ids).to(self.device)
        columns = self.train.private.values()
        self.private = [torch.from_numpy(column.ids).to(self.device) for column in columns]
        by_column = zip(self.private, columns, strict=True)
        self.frequencies = [frequencies_of(ids, len(column.names)) for ids, column in by_column]
        self.optimizers = self._new_optimizers()
        # Frozen and unmasked, a text's vector is the same at every step.
        self.fixed = self._raw_once() if settings.freeze and not settings.dropout else None
        self.progress = Progress()
        self.loss = torch.zeros((), device=self.device)
        self.clock = self.saved_at = time.monotonic()

    def _new_readers(self) -> Readers:
        read = self.examples.private.values() if self.settings.method == "adversarial" else ()
        num_classes = [len(column.names) for column in read]
        hidden = self.settings.adversary_hidden or 1
        return Readers(self.extractor.dimensions, num_classes, hidden=hidden)

    def _new_optimizers(self) -> dict[str, Optimizer]:
        settings = self.settings
        rates = {self.classifier: settings.classifier_learning_rate}
        if settings.freeze:
            self.extractor.requires_grad_(False)
        else:
            rates |= {self.extractor: settings.learning_rate}
        groups = [{"params": [*each.parameters()], "full_rate": rates[each]} for each in rates]
        optimizers: dict[str, Optimizer] = {"main": torch.optim.AdamW(groups, fused=True)}
        if settings.method == "adversarial":
            readers = self.readers.parameters()
            optimizers["readers"] = torch.optim.AdamW(readers, lr=READERS_RATE, fused=True)
        return optimizers

    def _raw_once(self) -> Tensor:
        vectors = self.extractor.encode(self.train.texts, batch_size=64)
        return torch.from_numpy(vectors).to(self.device)

    def run(self) -> dict[str, Any]:
        """Train to the end and leave both halves; metrics.json comes last and marks it."""
        self.progress = self.last_saved()
        log.info(self.described())
        with task("Training", self.num_steps) as bar, held_interrupts() as interruption:
            bar.advance(self.progress.step)
            self.clock = self.saved_at = time.monotonic()
            for batch in self.batches.from_step(self.progress.step, self.num_steps):
                self.take_step(batch)
                bar.advance()
                if self.progress.step % self.batches.steps_per_epoch == 0:
                    self.end_epoch(bar)
                elif time.monotonic() - self.saved_at >= self.options.checkpoint_seconds:
                    self.save()
                if interruption.wanted:
                    self.save()
                    raise stopped_after(self.progress.step, self.num_steps)
        return self.finish()

    def take_step(self, batch: Batch) -> None:
        seed_step(self.settings.seed, self.progress.step, self.device)
        self._set_rates()
        self._set_modes()
        places = batch.places.to(self.device, non_blocking=True)
        private = [column[places] for column in self.private]
        vectors = normalised(self._raw(batch, places), self.mechanism)
        if readers := self.optimizers.get("readers"):
            self.readers.learn(vectors, private, readers, self.settings.adversary_steps or 1)
        loss = told = self._loss_through_noise(vectors, self.truth[places])
        if readers:
            weight = self.settings.adversary_weight or 0.0
            loss = loss + weight * self.readers.certainty(vectors, self.frequencies)
        self._update(loss)
        self.loss.add_(told.detach(), alpha=len(places))
        self.progress.num_texts += len(places)
        self.progress.step += 1

    def _raw(self, batch: Batch, places: Tensor) -> Tensor:
        if self.fixed is not None:
            return self.fixed[places]
        tokens = to_device(batch.tokens, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16):
            return self.extractor(**tokens).float()

    def _loss_through_noise(self, vectors: Tensor, truth: Tensor) -> Tensor:
        """The mean loss over a few draws of noise: an encoder's pass is dear, another draw is not,
        and of one draw of strong noise the gradient is mostly noise."""
        num_draws = self.settings.noise_draws
        vectors = vectors.repeat(num_draws, 1)
        seed, step = self.settings.seed, self.progress.step
        # Streams of their own: with and without noise, everything else is drawn alike.
        seed_step(seed, step, self.device, stream=1)
        noise = training_noise(vectors, self.mechanism)
        seed_step(seed, step, self.device, stream=2)
        return functional.cross_entropy(self.classifier(vectors + noise), truth.repeat(num_draws))

    def _update(self, loss: Tensor) -> None:
        optimizer = self.optimizers["main"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], LARGEST_NORM)
        optimizer.step()

    def _set_modes(self) -> None:
        """Only where one is in another mode: to tell a hundred modules takes as long as a layer."""
        # A loaded model starts in evaluation inside an extractor that starts in training.
        if self.extractor.model.training == self.settings.freeze:
            self.extractor.train(not self.settings.freeze)
        if not self.classifier.training:
            self.classifier.train()

    def _set_rates(self) -> None:
        """Up over the first tenth of the steps, then down to 0, as encoders are usually tuned."""
        step, warmup = self.progress.step, max(1, round(WARMUP_SHARE * self.num_steps))
        share = min((step + 1) / warmup, (self.num_steps - step) / max(1, self.num_steps - warmup))
        for group in self.optimizers["main"].param_groups:
            group["lr"] = group["full_rate"] * min(1.0, share)

    def end_epoch(self, bar: Task) -> None:
        """Measure on the dev texts; keep the weights if no epoch before was better."""
        progress = self.progress
        self.catch_up()
        epoch = progress.step // self.batches.steps_per_epoch
        dev = self.scores("dev")
        if not math.isfinite(dev.loss_nats):
            raise UsageError(
                f"The loss after epoch {epoch} is {dev.loss_nats}: training diverged. Use a learning_rate below "
                f"{self.settings.learning_rate:g}, and another --out."
            )
        if progress.best_loss_nats is None or dev.loss_nats < progress.best_loss_nats:
            progress.best_epoch, progress.best_loss_nats = epoch, dev.loss_nats
            self.save_best()
        line = {
            "epoch": epoch,
            "train_loss_nats": progress.loss_nats / max(1, progress.num_texts),
            "dev_loss_nats": dev.loss_nats,
            "dev_accuracy": dev.accuracy,
            "seconds": round(progress.seconds, 3),
        }
        progress.epochs.append(line)
        progress.loss_nats, progress.num_texts, progress.seconds = 0.0, 0, 0.0
        words = f"dev accuracy {dev.accuracy:.3f}, loss {dev.loss_nats:.3f}"
        bar.note(words)
        log.info("Epoch %d: %s, %.1f s.", epoch, words, line["seconds"])
        self.save()

    def scores(self, part: str) -> Scores:
        examples, seed = self.examples.part(part), self.settings.seed
        return scores_of(self.extractor, self.classifier, self.mechanism, examples, seed=seed)

    def catch_up(self) -> None:
        """Bring loss and seconds of the epoch up to the last step; on a GPU this waits for it."""
        self.progress.loss_nats += float(self.loss)
        self.loss.zero_()
        before, self.clock = self.clock, time.monotonic()
        self.progress.seconds += self.clock - before

    @property
    def best(self) -> Path:
        """Where the weights of the best epoch so far are."""
        return self.kept / f"best-{self.progress.best_epoch}"

    def save_best(self) -> None:
        """Keep the weights as they are; the ones before go with the next progress saved."""
        shutil.rmtree(self.best, ignore_errors=True)
        with folder_written_whole(self.best) as beside:
            save_file(tensors_of(self.modules), beside / run_folder.TENSORS)

    def save(self) -> None:
        """Make the checkpoint hold this moment, the best epoch's weights, and nothing else."""
        self.catch_up()
        now = self.kept / f"step-{self.progress.step}-{len(self.progress.epochs)}"
        if not now.exists():
            tensors = tensors_of(self.modules)
            for name, optimizer in self.optimizers.items():
                remembered = run_folder.optimizer_tensors(optimizer)
                tensors |= run_folder.prefixed(f"{_OPTIMIZER}.{name}", remembered)
            run_folder.write_moment(now, tensors, self.progress)
        run_folder.keep_only(self.kept, now, self.best)
        self.clock = self.saved_at = time.monotonic()

    def last_saved(self) -> Progress:
        """Bring everything back to the last moment saved; to the start where none was."""
        if not (states := run_folder.moments_in(self.kept, Progress)):
            return Progress()
        last = max(states, key=lambda path: (states[path].step, len(states[path].epochs)))
        try:
            checked(self.kept / f"best-{states[last].best_epoch}")
        except DamagedError:
            run_folder.set_aside(last)
            return Progress()
        tensors = load_file(last / run_folder.TENSORS)
        weights = {key: t for key, t in tensors.items() if not key.startswith(f"{_OPTIMIZER}.")}
        self.modules.load_state_dict(weights)
        for name, optimizer in self.optimizers.items():
            remembered = run_folder.part_of(tensors, f"{_OPTIMIZER}.{name}")
            run_folder.load_optimizer_tensors(optimizer, remembered)
        return states[last]

    def finish(self) -> dict[str, Any]:
        self.modules.load_state_dict(load_file(self.best / run_folder.TENSORS))
        metrics = self.metrics()
        record = self.mechanism.record()
        self.extractor.eval().requires_grad_(True)
        pair = halves.pair_id(self.extractor, self.classifier, record)
        halves.write_device(self.out / halves.DEVICE, self.extractor, record, pair)
        halves.write_server(self.out / halves.SERVER, self.classifier, pair)
        write_split(self.out / SPLIT, self.examples)
        write_json(self.out / METRICS, metrics)
        log.info("Done: the best epoch was %d.", metrics["best_epoch"])
        shutil.rmtree(self.kept, ignore_errors=True)
        return metrics

    def metrics(self) -> dict[str, Any]:
        dev, test = self.scores("dev"), self.scores("test")
        test_texts = self.examples.part("test")
        unseen = ~self.examples.seen_in_train()
        on_unseen = float(test.share_right[unseen].mean()) if unseen.any() else None
        usual = np.bincount(self.train.label.ids).argmax()
        return {
            "dev_accuracy": dev.accuracy,
            "dev_loss_nats": dev.loss_nats,
            "test_accuracy": test.accuracy,
            "test_loss_nats": test.loss_nats,
            "majority_accuracy": float((test_texts.label.ids == usual).mean()),
            "best_epoch": self.progress.best_epoch,
            "epochs": self.progress.epochs,
            "seconds": round(sum(line["seconds"] for line in self.progress.epochs), 3),
            "num_train": len(self.train),
            "num_dev": int((self.examples.parts == "dev").sum()),
            "num_test": len(test_texts),
            "num_dropped": self.examples.num_dropped,
            "num_seen_in_train": int((~unseen).sum()),
            "test_accuracy_unseen": on_unseen,
            "finished": True,
        }

    def described(self) -> str:
        if self.progress.step:
            return f"Going on after step {self.progress.step}."
        num = sum(parameter.numel() for parameter in self.extractor.parameters())
        return (
            f"Training {self.settings.extractor} ({num:,} parameters, method {self.settings.method}) on {self.device}: "
            f"{len(self.train):,} texts, {self.num_steps:,} steps."
        )


def tensors_of(modules: nn.Module) -> dict[str, Tensor]:
    """All weights; copies, since safetensors refuses shared memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in modules.state_dict().items()}


def seed_step(seed: int, step: int, device: torch.device, *, stream: int = 0) -> None:
    """Make what a step draws a function of seed and step, so that no state need be kept.

    torch.manual_seed would seed every kind of device, and write down a stack for each that is not
    there: 1 ms a call, three times a step.
    """
    words = np.random.SeedSequence([seed, step + 1, stream]).generate_state(1, np.uint64)
    number = int(words[0]) >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.init()
        place = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[place].manual_seed(number)
