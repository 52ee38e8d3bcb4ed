"""A kvpool store as the second tier of vLLM's offloading, behind its blocks in host memory; see docs/embedding.md.

vLLM names a chunk by the hash of its tokens. That name stands in the place of the tokens of a record, so a load
compares all of it. Each rank has a folder of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from vllm import __version__ as vllm_version
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpool.adapters.vllm.weights import log, sampled
from kvpool.store import BlockLayout, Blocks, DiskStore, Layout, prefix_keys

WORDS = 8  # int32 of a SHA-256, in the place of tokens


class KVPoolTier(SecondaryTierManager):
    """vLLM's interface of a tier. `options` are those of `kvpool.store.DiskStore`; `weights` names the model's."""

    medium = base.Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, path: str, max_nbytes: int,
        backpressure_detector: Any = None, weights: str = "", locality: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else base.Locality(locality)
        config, model, nbytes = offloading_spec.config, offloading_spec.config.model, self.block_size_bytes
        self.rows = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(-1, nbytes)
        groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
        sizes = [getattr(config.parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")]  # replicas share all
        kind = (config.kv_cache_layout, config.canonical_layout, config.replicated_layout)
        content = f"vLLM {vllm_version}, {model.dtype}, {config.cache}, {groups}, {sizes}, {kind}"
        layout = Layout((BlockLayout(WORDS, nbytes, content),), weights or sampled(model.name) or model.name)
        self.store = DiskStore(str(Path(path) / f"rank{config.parallel.rank}"), layout, max_nbytes, **options)
        self.namespace = prefix_keys([], WORDS)[0].tobytes()
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="kvpool-tier")
        self.jobs: dict[Future[np.ndarray], TransferJob] = {}
        self.lost: dict[str, set[base.OffloadKey]] = {}  # of each request: what did not load, and is not promised again
        self.stored: list[base.OffloadingEvent] | None = [] if config.enable_kv_cache_events else None

    def names(self, keys: Iterable[base.OffloadKey]) -> Blocks:
        digests = np.frombuffer(b"".join(hashlib.sha256(key).digest() for key in keys), np.uint8).reshape(-1, 32)
        short = np.ascontiguousarray(digests[:, :16])
        return Blocks(short, np.zeros_like(short), digests.view(np.int32), self.namespace)

    def lookup(self, key: base.OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        found = key not in self.lost.get(req_context.req_id, ()) and self.store.lookup(self.names([key]))[0]
        return base.LookupResult.HIT if found else base.LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.submit(job_metadata, lambda names, rows: np.full(len(rows), self.store.store(names, rows) == len(rows)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.submit(job_metadata, self.store.load)

    def submit(self, job: TransferJob, call: Any) -> None:
        future = self.threads.submit(lambda: call(self.names(job.keys), [self.rows[chunk] for chunk in job.chunk_ids]))
        self.jobs[future] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for future in [future for future in self.jobs if future.done()]:
            job = self.jobs.pop(future)
            if (error := future.exception()) is not None:
                log.error("job %d of the tier failed, its chunks are misses", job.job_id, exc_info=error)
            good = future.result() if error is None else np.zeros(len(job.keys), bool)
            kept = [key for key, here in zip(job.keys, good, strict=True) if here]
            if job.is_promotion:
                self.lost.get(job.req_context.req_id, set()).update(set(job.keys).difference(kept))
            elif kept and self.stored is not None:
                self.stored.append(base.OffloadingEvent(kept, self.medium, removed=False, locality=self.locality))
            yield JobResult(job.job_id, bool(good.all()), kept if job.is_promotion else None)

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        told, self.stored = self.stored or [], None if self.stored is None else []
        return told

    def touch(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> None:
        self.store.touch(self.names(keys))

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        self.lost[req_context.req_id] = set()
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        self.lost.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        wait(list(self.jobs))

    def shutdown(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        self.store.close()
