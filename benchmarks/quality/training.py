"""A small model that learned to recall: trained once, kept in a folder, and then a checkpoint like any other."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.quality.corpus import Corpus, batch
from benchmarks.quality.models import save
from benchmarks.quality.network import Pass, Shape, Weights, initial


@dataclass(frozen=True)
class Stage:
    """So many steps on batches of `size` documents of `length` tokens, their keys used so often."""

    steps: int
    size: int
    length: int
    uses: int = 1


@dataclass(frozen=True)
class Recipe:
    """How the model is trained; its digest names the folder that it is kept in.

    Attributes
    ----------
    stages : tuple of Stage
        Short documents first: recall is learned in them in a tenth of the time.
    recall : float
        Weight of a definition that is recalled in the loss, that of other tokens being 1.
    rate, warm_up, decay, betas, clip
        Of AdamW, whose rate falls along a cosine to a twentieth.
    """

    shape: Shape = field(default_factory=Shape)
    stages: tuple[Stage, ...] = (Stage(250, 32, 96, 2), Stage(300, 8, 512), Stage(50, 4, 1024))
    recall: float = 2.0
    rate: float = 4e-3
    warm_up: int = 40
    decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    seed: int = 1

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)


Watch = Callable[[int, float, float], None]
"""Told after each step: its number, nats per recalled definition and per other token."""


def train(corpus: Corpus, recipe: Recipe, watch: Watch = lambda step, recall, text: None) -> Weights:
    """Train from random weights. The same recipe, corpus and BLAS give the same weights."""
    rng = np.random.default_rng(recipe.seed)
    weights = initial(recipe.shape, rng)
    optimizer = AdamW(weights, recipe)
    for stage in recipe.stages:
        for _ in range(stage.steps):
            documents, marks = batch(rng, corpus.train, stage.size, stage.length, stage.uses)
            marks = marks[:, 1:]
            run = Pass(recipe.shape, weights, documents[:, :-1])
            _, entropy = run.loss(documents[:, 1:], np.where(marks, np.float32(recipe.recall), np.float32(1)))
            optimizer.step(run.gradients())
            watch(optimizer.steps, float(entropy[marks].mean()), float(entropy[~marks].mean()))
    return weights


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) of the matrices, on clipped gradients."""

    def __init__(self, weights: Weights, recipe: Recipe) -> None:
        self.weights, self.recipe, self.steps = weights, recipe, 0
        self._first = {name: np.zeros_like(w) for name, w in weights.items()}
        self._second = {name: np.zeros_like(w) for name, w in weights.items()}

    def rate(self) -> float:
        """Return the learning rate of this step."""
        r = self.recipe
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, self.steps / r.steps)))
        return r.rate * min(1.0, self.steps / r.warm_up) * (0.05 + 0.95 * fall)

    def step(self, gradients: Weights) -> None:
        """Change the weights in place."""
        r = self.recipe
        self.steps += 1
        norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
        clip, rate = min(1.0, r.clip / (norm + 1e-6)), self.rate()
        correct = [1 - beta**self.steps for beta in r.betas]
        for name, weight in self.weights.items():
            g, m, v = gradients[name] * np.float32(clip), self._first[name], self._second[name]
            m += (1 - r.betas[0]) * (g - m)
            v += (1 - r.betas[1]) * (g * g - v)
            change = m / correct[0] / (np.sqrt(v / correct[1]) + 1e-8)
            if weight.ndim > 1:
                change += r.decay * weight
            weight -= (rate * change).astype(np.float32)


def folder_of(cache: Path, recipe: Recipe, corpus: Corpus) -> Path:
    """Return where the trained model is kept: another recipe or another text is another folder."""
    what = json.dumps([asdict(recipe), corpus.digest], sort_keys=True)
    return cache / f"quality-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def trained(cache: Path, recipe: Recipe, corpus: Corpus, watch: Watch) -> Path:
    """Return a checkpoint in mlx-lm's form, trained now if it is not there yet. It appears whole or not at all."""
    folder = folder_of(cache, recipe, corpus)
    if (folder / "model.safetensors").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    weights = train(corpus, recipe, watch)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache))
    try:
        save(made, recipe.shape.config(), weights)
        os.replace(made, folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "model.safetensors").is_file():  # else somebody else made it meanwhile
            raise
    return folder
