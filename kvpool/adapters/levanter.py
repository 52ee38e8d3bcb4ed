"""Levanter's text generation on a kvpool pool: its models, requests and sampler, without its page table.

`Engine` stands in for Levanter's ``InferenceEngine``; docs/embedding.md says in what the two differ. `kvpool.Scheduler`
decides which tokens the next step computes, the pool says where their KV goes, and Levanter's ``model.decode`` computes
them over its own page cache. Prompts longer than ``max_prefill_size`` are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from kvpool import Output, Pool, Scheduler, Step
from kvpool import Request as PoolRequest
from kvpool.adapters import importing, warn_if_untested
from kvpool.errors import UnknownRequest

RELEASES = ("0.2.20", "0.2.21")  # of marin-levanter: the one that the tests run, and the first that they do not
RELEASE = version("marin-levanter")
with importing("marin-levanter", RELEASE, ">= {}, < {}".format(*RELEASES)):
    import haliax as hax
    import jax.numpy as jnp
    from levanter.inference.engine import (
        GenerationResult,
        InferenceEngineConfig,
        Request,
        TokenSequenceLogprobs,
        _infer_max_pages_from_hbm,
        score_token_sequence_logprobs,
    )
    from levanter.inference.page_table import PageBatchInfo, PageTableSpec
    from levanter.inference.utils import INVALID
    from levanter.layers.sampler import Sampler
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens", "positions", "slot_ids")


class Engine:
    """Continuous batching of Levanter's requests to its own models.

    Parameters
    ----------
    model : LmHeadModel
        With ``decode`` and ``initial_cache``, such as ``LlamaLMHeadModel``.
    tokenizer
        Kept for callers that ask the engine for it.
    config : InferenceEngineConfig
        ``max_seqs`` sequences run at a time, one token each in a step. Steps that compute prompts have 2, 4, 8, ...
        times as many tokens, up to ``max_prefill_size``: static shapes, each compiled once. Without ``max_pages``
        Levanter measures how many there may be. Rounds, queues and stop tokens have no limits here.
    axis_resources : optional
        Of the cache, see ``haliax.named_jit``.
    prefix_cache : bool, default True
        Prompts with a common beginning share its pages, those of earlier calls too.

    Raises
    ------
    ValueError
        A size that `Pool` or `Scheduler` refuses.

    Notes
    -----
    One thread at a time. What a request samples depends on its prompt and its key, not on what runs beside it. A stop
    sequence is looked for in the tokens generated, where Levanter also looks across the end of the prompt.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: InferenceEngineConfig, axis_resources: Any = None, *,
        prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        warn_if_untested("Engine", "marin-levanter", RELEASE, *RELEASES)
        self.tokenizer, self.config = tokenizer, config
        pages = _infer_max_pages_from_hbm(model, config) if config.max_pages is None else config.max_pages
        self.pool = Pool(
            pages, config.page_size, reserved_blocks=0, max_seqs=config.max_seqs,
            max_blocks_per_seq=config.max_pages_per_seq, prefix_cache=prefix_cache,
        )  # fmt: skip
        self.scheduler = self._new_scheduler()
        spec = PageTableSpec(num_pages=pages, page_size=config.page_size)
        initial_cache = hax.named_jit(model.initial_cache, axis_resources=axis_resources)
        self._new_cache = lambda: jax.tree.flatten(initial_cache(spec, dtype=config.compute_dtype))
        self._pages, self._layout = self._new_cache()
        self._copy = jax.jit(partial(_copy, self._layout), donate_argnums=0)
        self._choose = jax.jit(partial(_choose, Sampler(model.Vocab)))
        self._structure = jax.tree.structure(None)
        self._use(model)

    @classmethod
    def from_model_with_config(cls, *args: Any, **options: Any) -> Engine:
        return cls(*args, **options)

    @property
    def model(self) -> Any:
        """The model. Another one with a cache of the same shape may be set, such as one that was trained further."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self.reset()
        self._use(model)

    def generate(self, requests: Sequence[Request], step_callback: Any = None) -> GenerationResult:
        """Run requests to their end.

        Parameters
        ----------
        requests : sequence of Request
            Any number, with different ids.
        step_callback : callable, optional
            Gets the number of each step before it.

        Returns
        -------
        GenerationResult
            Tokens and log-probabilities of each sample, in the order of the requests.

        Raises
        ------
        ValueError
            A request that can never run, see `add`. No request has run then.
        RuntimeError
            Requests that `add` was given have not ended.
        Exception
            What the model or the callback raised. The requests are dropped, and the engine can be used again.
        """
        if (stats := self.scheduler.stats()).waiting + stats.prefilling + stats.decoding:
            raise RuntimeError("[generate] other requests run: call step until they have ended, or reset")
        samples = [(request.request_id, k) for request in requests for k in range(request.n_generations)]
        outputs: dict[Any, Output] = {}
        try:
            for request in requests:
                self.add(request)
            for number in count():
                if len(outputs) == len(samples):
                    break
                if step_callback is not None:
                    step_callback(number)
                outputs |= {(output.id, output.index): output for output in self.step()}
        except BaseException:
            for request in requests:
                with suppress(UnknownRequest):  # not added, or ended
                    self.scheduler.cancel(request.request_id)
            raise
        tokens, logprobs = ([getattr(outputs[k], name).tolist() for k in samples] for name in ("tokens", "logprobs"))
        return GenerationResult(tokens, logprobs, sum(map(len, tokens)))

    def add(self, request: Request) -> None:
        """Add a request beside those that run. Its id names the outputs of `step`.

        ``max_num_tokens`` counts the prompt, as in Levanter. It is bounded by ``max_seq_len``.

        Raises
        ------
        ValueError
            An empty prompt, or an id that runs. `kvpool.errors.RequestRejected`: the prompt is longer than
            ``max_seq_len``, a sequence does not fit into all pages, or the request has too many samples.
        """
        params, prompt = request.decode_params, request.prompt_tokens
        most = min(int(params.max_num_tokens), self.config.max_seq_len) - len(prompt)
        rows = () if params.stop_tokens is None else np.asarray(params.stop_tokens.array)  # padded
        stop = [kept for row in rows if len(kept := row[(row >= 0) & (row != INVALID)])]
        user = float(params.temperature), float(params.top_p), np.asarray(params.key, np.uint32)
        options = {"id": request.request_id, "n": request.n_generations, "stop": stop, "user": user}
        try:
            self.scheduler.add(PoolRequest(prompt, max(most, 1), **options))
        except ValueError as error:
            error.add_note(f"request_id {request.request_id}")
            raise

    def step(self) -> list[Output]:
        """Compute one step. Returns the samples that ended with it. If the model raises, the engine is reset."""
        step = self.scheduler.schedule()
        try:
            return [] if step is None else self.scheduler.update(step, *self._run(step))
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget all requests and all cached prefixes. No page is zeroed."""
        self.pool.reset()
        self.scheduler = self._new_scheduler()
        if any(page.is_deleted() for page in self._pages):  # donated to a step that failed
            self._pages, self._layout = self._new_cache()

    def score_token_logprobs(self, token_ids: Sequence[int], top_k: int) -> TokenSequenceLogprobs:
        return score_token_sequence_logprobs(self.model, token_ids, top_k)

    def _new_scheduler(self) -> Scheduler:
        config, rows = self.config, self.config.max_seqs
        tokens = max(rows, config.max_prefill_size or config.max_pages_per_seq * config.page_size)
        return Scheduler(
            self.pool, max_running=rows, max_step_tokens=tokens, prefill_chunk=tokens, formats=FORMATS,
            max_model_len=config.max_seq_len,
            pad_to=lambda _, size: (rows, min(rows << (-(-size // rows) - 1).bit_length(), tokens)),
        )  # fmt: skip

    def _use(self, model: Any) -> None:
        self._model = model
        self._weights, structure = jax.tree.flatten(model)  # once: a step may take less time
        if structure != self._structure:
            self._structure = structure
            self._decode = jax.jit(partial(_decode, structure, self._layout, self.config), donate_argnums=1)

    def _run(self, step: Step) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Compute the tokens of a step. Returns the tokens that are sampled, and their log-probabilities."""
        plan, rows = step.plan, self.config.max_seqs
        if num := len(plan.copies):  # of a row its last page at most
            copies = np.zeros((2, rows), np.int32)
            copies[:, :num] = plan.copies[:, :2].T
            self._pages = self._copy(self._pages, copies, num)
        ends, at = np.unique(step.sample_at, return_inverse=True)  # samples of one prompt have the same logits
        packed = np.concatenate([
            np.pad(step.tokens, (0, len(plan.positions) - len(step.tokens))), plan.positions, plan.slot_mapping,
            plan.block_tables.ravel(), plan.seq_lens, plan.slot_ids, plan.cu_q_lens,
            np.pad(ends, (0, rows - len(ends))), [len(step.handles)],
        ], dtype=np.int32)  # fmt: skip
        logits, self._pages = self._decode(self._weights, self._pages, packed)
        of = np.stack([at, step.sample_index, plan.positions[step.sample_at]])
        found: list[Any] = [(np.empty(0, np.int32), np.empty(0, np.float32))]
        for first in range(0, len(at), rows):  # a prompt may end with more samples than rows
            chosen = np.minimum(np.arange(first, first + rows), len(at) - 1)
            knobs = map(np.array, zip(*(step.requests[i].user for i in chosen), strict=True))
            found.append(jax.device_get(self._choose(logits, of[:, chosen], *knobs)))
        tokens, logprobs = map(np.concatenate, zip(*found, strict=True))
        return tokens[: len(at)], logprobs[: len(at)]


def _decode(
    structure: Any, layout: Any, config: InferenceEngineConfig, weights: list[Any], pages: list[Any], packed: jax.Array
) -> tuple[Any, list[Any]]:
    """Run the model over one step. Returns the logits of the tokens that are sampled from, and the pages."""
    rows, width = config.max_seqs, config.max_pages_per_seq
    size = (len(packed) - rows * (width + 4) - 2) // 3
    sizes = [size, size, size, rows * width, rows, rows, rows + 1, rows, 1]
    tokens, positions, dests, table, lens, slots, cu_q_lens, ends, num_seqs = jnp.split(packed, np.cumsum(sizes)[:-1])
    info = PageBatchInfo(
        slot_ids=hax.named(slots, "seq"),
        page_indices=hax.named(jnp.maximum(table, 0).reshape(rows, width), ("seq", "page")),  # padding may be fetched
        seq_lens=hax.named(lens, "seq"),
        cu_q_lens=hax.named(cu_q_lens, "seq"),
        num_seqs=num_seqs[0],
        new_token_dests=hax.named(dests, "position"),
        page_size=config.page_size,
    )
    model, cache = jax.tree.unflatten(structure, weights), jax.tree.unflatten(layout, pages)
    logits, cache = model.decode(hax.named(tokens, "position"), cache, info, hax.named(positions, "position"))
    return logits["position", hax.named(ends, "position")], jax.tree.leaves(cache)


def _choose(
    sampler: Sampler, logits: Any, of: jax.Array, temperatures: jax.Array, top_ps: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sample ``of``: rows of the logits, numbers of the samples and positions. Each has the key that Levanter uses."""
    row, index, position = of
    keys = jnp.where(index[:, None] > 0, jax.vmap(jax.random.fold_in)(keys, index), keys)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    logits = logits["position", hax.named(row, "position")]
    temperatures, top_ps = hax.named(temperatures, "position"), hax.named(top_ps, "position")
    tokens, logprobs = hax.vmap(sampler, "position")(logits, temperatures, top_ps=top_ps, key=keys)
    return tokens.array, logprobs.array


def _copy(layout: Any, pages: list[Any], copies: jax.Array, num: int) -> list[Any]:
    """Copy pages, ``copies = (sources, targets)``, as wholes: what was not written there is masked in both."""
    cache = jax.tree.unflatten(layout, pages)
    cache = jax.lax.fori_loop(0, num, lambda i, cache: cache.copy_page(copies[0, i], copies[1, i]), cache)
    return jax.tree.leaves(cache)
