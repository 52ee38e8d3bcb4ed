"""A pytest plugin (`-p tier_on_kvpool`): where vLLM's tests make a tier of files or of examples, they get kvpool's."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from kvpool.adapters.vllm.tier import KVPoolTier


class FileSystemTierManager(KVPoolTier):
    """Takes the options of vLLM's file tier. Its lookups need no second call, and a job is over when it is written."""

    def __init__(self, *given, root_dir, enable_kv_events=False, n_read_threads=0, n_write_threads=0, **options):
        super().__init__(*given, path=root_dir, max_nbytes=1 << 30, **options)
        self.folder = Path(root_dir)
        self.stored = self.stored if enable_kv_events else None
        self._lookup_manager = SimpleNamespace(_pending_results=SimpleNamespace(empty=lambda: False), _lookup_batch=[])
        self._store_job_keys = {}
        self.file_mapper = SimpleNamespace(get_file_name=self.segment)
        self.store.ready.wait(60)

    def segment(self, key):
        """The file with all blocks of a store as small as a test's."""
        return str(next(self.folder.glob("rank0/*.kvpool*"), self.folder / "none"))

    events = property(lambda self: self.stored)

    def drain_jobs(self):
        super().drain_jobs()
        self.store.drain()


class Chunks(dict):
    """What a tier has. A test puts a chunk into it by name."""

    def __init__(self, tier):
        self.tier = tier

    def __setitem__(self, key, here):
        super().__setitem__(key, here)
        self.tier.store.store(self.tier.names([key]), np.zeros((1, self.tier.block_size_bytes), np.uint8))
        self.tier.store.drain()


class ExampleSecondaryTierManager(KVPoolTier):
    """A job is over when it was submitted, as in vLLM's example."""

    medium = Medium.CPU

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None, custom_param=0):
        self.folder = tempfile.TemporaryDirectory()
        given = (offloading_spec, primary_kv_view, tier_type, self.folder.name, 1 << 28, backpressure_detector)
        super().__init__(*given, weights="test")
        self.store.ready.wait(60)
        self.chunks, self.completed_jobs = Chunks(self), []

    def submit(self, job, call):
        super().submit(job, call)
        KVPoolTier.drain_jobs(self)
        self.store.drain()
        (done,) = super().get_finished_jobs()
        if done.success and not job.is_promotion:
            self.chunks.update(dict.fromkeys(job.keys, True))
        self.completed_jobs.append(done)

    def get_finished_jobs(self):
        told, self.completed_jobs = self.completed_jobs, []
        return told

    def get_num_chunks(self):
        return len(self.chunks)


class DelayedSecondaryTierManager(ExampleSecondaryTierManager):
    """A store is told of when a test says so."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.blocks, self._held_jobs, self._request_policy = self.chunks, [], None
        self.fail_stores, self.num_store_submissions = False, 0
        self.get_num_blocks = self.get_num_chunks

    def submit_store(self, job):
        self.num_store_submissions += 1
        if self.fail_stores:
            self.submit(job, lambda names, rows: np.zeros(len(rows), bool))
        else:
            super().submit_store(job)
        self._held_jobs.append(self.completed_jobs.pop())

    def release_jobs(self):
        self.completed_jobs += self._held_jobs
        self._held_jobs.clear()

    drain_jobs = release_jobs

    def on_new_request(self, req_context):
        context = super().on_new_request(req_context)
        return RequestOffloadingContext(policy=self._request_policy) if self._request_policy else context


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items if hasattr(item.module, "DelayedSecondaryTierManager")}:
        module.DelayedSecondaryTierManager = DelayedSecondaryTierManager


fs.FileSystemTierManager = FileSystemTierManager
example.ExampleSecondaryTierManager = ExampleSecondaryTierManager
