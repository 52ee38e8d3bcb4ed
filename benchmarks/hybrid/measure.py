"""Which model meets which trace, at which bytes, under which policies, and what each of them finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hybrid import peers
from benchmarks.replay import read_trace, replay
from benchmarks.replay.shapes import HybridShape, hybrid_shape
from benchmarks.replay.trace import paths_of, shareable_blocks, unique_blocks

DIVISORS = (1, 2, 4, 8)
"""Of U, the bytes of the full attention of all different tokens of a trace."""

POOL, FULL, BOUND, VLLM = "kvpool", "full attention, LRU", "full attention, clairvoyant", "vLLM 0.33"


@dataclass(frozen=True)
class Setting:
    """One model on the first requests of one trace.

    `block_size` is that of the pool; the blocks of the trace are a multiple of it.
    """

    model: str
    trace: str
    requests: int
    concurrency: int
    block_size: int


SETTINGS = (
    Setting("qwen3_5", "agentic_a", 1500, 4, 64),
    Setting("qwen3_5", "mooncake_conversation", 5000, 16, 64),
    Setting("gemma4", "agentic_a", 1500, 4, 32),
    Setting("gpt_oss", "agentic_a", 1500, 4, 32),
    Setting("gpt_oss", "mooncake_conversation", 3000, 16, 32),
)

PEERS: dict[str, dict[str, tuple[peers.Policy, ...]]] = {
    "state": {
        VLLM: (peers.vllm(768, 3),),
        "SGLang 0.5.23, best split": tuple(peers.sglang(share) for share in (0.05, 0.1, 0.25, 0.47)),
        "state every N tokens, best N": tuple(peers.every(tokens) for tokens in (2048, 4096, 8192)),
    },
    "window": {VLLM: (peers.vllm_windows,)},
}
"""Policies for recurrent states and for windows, each with the settings of which the best one counts. vLLM: a page has
768 tokens, a third of the state of Qwen3.5 27B."""


@dataclass(frozen=True)
class Found:
    """What one policy found at one budget.

    Attributes
    ----------
    setting : Setting
    policy : str
    divisor : int
        The budget is U / `divisor`.
    nbytes : int
    hit_tokens, shareable_tokens, prompt_tokens : int
    """

    setting: Setting
    policy: str
    divisor: int
    nbytes: int
    hit_tokens: int
    shareable_tokens: int
    prompt_tokens: int

    @property
    def share(self) -> float:
        """Hit tokens over shareable tokens."""
        return self.hit_tokens / self.shareable_tokens

    @property
    def avoidable_tokens(self) -> int:
        """Tokens computed beyond what no cache can avoid."""
        return self.shareable_tokens - self.hit_tokens


def measure(
    folder: Path, models: tuple[str, ...], divisors: tuple[int, ...], say: Callable[[str], None]
) -> Iterator[Found]:
    """Play every setting of some models at every budget."""
    for setting in SETTINGS:
        if setting.model in models:
            yield from _measure_setting(folder, setting, divisors, say)


def _measure_setting(
    folder: Path, setting: Setting, divisors: tuple[int, ...], say: Callable[[str], None]
) -> Iterator[Found]:
    trace = read_trace(folder / f"{setting.trace}.npz").head(setting.requests)
    shape = hybrid_shape(setting.model, setting.block_size, setting.concurrency)
    paths = paths_of(trace, shape.grain)
    shareable = sum(shareable_blocks(trace, paths, shape.grain)) * shape.grain
    unique = unique_blocks(paths) * shape.grain * shape.token_nbytes
    windows = [layers for layers in shape.layers if layers.kind == "window"]
    case = peers.Case(
        *(trace, paths, shape.grain, setting.concurrency, shape.token_nbytes, shape.state_nbytes),
        window=max((layers.size or 0 for layers in windows), default=0),
        window_nbytes=sum(layers.token_nbytes for layers in windows),
    )
    for divisor in divisors:
        nbytes = unique // divisor
        for name, hits in _policies(setting, shape, case, nbytes):
            say(f"{setting.model} on {setting.trace}, U/{divisor}: {name}")
            found = max(hits)
            yield Found(setting, name, divisor, nbytes, found, shareable, int(trace.prompts.sum()))


def _policies(
    setting: Setting, shape: HybridShape, case: peers.Case, nbytes: int
) -> Iterator[tuple[str, Iterator[int]]]:
    """Name a policy, and give the hit tokens of each of its settings."""
    blocks = nbytes // shape.block_nbytes

    def pool() -> Iterator[int]:
        result = replay(case.trace, shape=shape, num_blocks=blocks, concurrency=setting.concurrency)
        yield result.counters["first_hit_tokens"]

    yield POOL, pool()
    yield FULL, (policy(case, nbytes) for policy in (peers.full_attention,))
    yield BOUND, (policy(case, nbytes) for policy in (peers.clairvoyant,))
    for name, policies in PEERS["window" if case.window else "state"].items():
        yield name, (policy(case, nbytes) for policy in policies)
