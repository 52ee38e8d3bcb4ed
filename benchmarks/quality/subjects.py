"""Who is asked: the model that is trained here, or a checkpoint, and the documents that each can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.quality import corpus, documents
from benchmarks.quality.corpus import Corpus
from benchmarks.quality.settings import Settings
from benchmarks.quality.tables import Bench
from benchmarks.quality.training import Recipe, folder_of, trained
from kvpool.cli.console import progress

SAID_EVERY = 25
"""Steps of training."""


@dataclass
class Told:
    """A bench, and who is asked."""

    name: str
    bench: Bench
    model: Any

    def check(self) -> None:
        """Raise ValueError if some policy that is asked for is none for this model."""
        asked = [question.policy for questions in self.bench.tables.values() for question in questions]
        self.model.check(dict.fromkeys(asked))


def make(s: Settings, *, quiet: bool, recipe: Recipe | None = None, text: Corpus | None = None) -> Told:
    """Load the model that is to be asked; train it first if it is the one of this bench and is not there yet."""
    from benchmarks.quality.models import Model

    text = corpus.read() if text is None else text
    if s.model is not None:
        model = Model(s.model)
        bench = Bench(s, model, lambda *drawn: documents.written(text, model.tokenizer, *drawn))
        return Told(s.model, bench, model)
    recipe = Recipe() if recipe is None else recipe
    folder = train(s, recipe, text, quiet=quiet)
    model = Model(str(folder), has_tokenizer=False)
    bench = Bench(s, model, lambda *drawn: documents.planted(text, *drawn))
    of = recipe.shape
    name = f"llama of {of.layers} layers, {of.heads} heads over {of.kv_heads} of K and V, {of.head_dim} wide"
    return Told(f"{name}, {recipe.steps} steps", bench, model)


def train(s: Settings, recipe: Recipe, text: Corpus, *, quiet: bool) -> Any:
    """Return the folder of the trained model; what is learned is said every `SAID_EVERY` steps."""
    if (folder_of(s.cache, recipe, text) / "model.safetensors").is_file():
        quiet = True
    sums = [0.0, 0.0]
    with progress(recipe.steps // SAID_EVERY + 1, quiet) as say:
        say(f"training {recipe.steps} steps, kept in {s.cache}")

        def watch(step: int, recall: float, other: float) -> None:
            sums[0] += recall
            sums[1] += other
            if step % SAID_EVERY == 0:
                nats = [total / SAID_EVERY for total in sums]
                say(f"step {step}: {nats[0]:.3f} nats per recall, {nats[1]:.3f} per byte of code")
                sums[:] = [0.0, 0.0]

        return trained(s.cache, recipe, text, watch)
