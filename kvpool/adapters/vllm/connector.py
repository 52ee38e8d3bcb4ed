"""vLLM's prompts in a kvpool store: an engine that is started again finds them on disk. docs/embedding.md is the page.

vLLM makes one connector for its scheduler, which asks the store's index and sends with every step what to load and to
save, and one for its worker, which loads in a thread. A load that does not return holds its request, and those that
wait behind it. A request asks once, so a store that promises what it cannot load is not asked again.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvpool.adapters.vllm.weights import fingerprint, log
from kvpool.store import BlockLayout, Blocks, BlockStore, DiskStore, Layout, leading

PIECE = 64  # blocks that a load reads at a time
NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
stores: dict[str, BlockStore] = {}  # of this process: scheduler and worker may share one, and engines too
users: WeakSet[KVPoolConnector] = WeakSet()  # connectors that were not shut down


class Step(base.KVConnectorMetadata):
    """What a worker has to do in a step: blocks by their ids in the cache and their names in the store."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, list[int], Blocks]] = []
        self.saves: list[tuple[list[int], Blocks]] = []


class Followed:
    """A request, as the scheduler's connector knows it."""

    def __init__(self, request: Any, layout: Layout, epoch: str) -> None:
        self.request, self.layout = request, layout
        named = [request.cache_salt, epoch]
        self.namespace = json.dumps(named).encode() if any(named) else b""
        self.prompt = layout.blocks(request.all_token_ids[: request.num_tokens - 1], self.namespace)[0]
        self.table: list[int] = []
        self.saved = 0  # leading blocks that the store was offered or that were hits
        self.named, self.key = 0, None  # leading blocks that have names, and the key of the last one
        self.found = 0  # leading blocks of the prompt that the store has

    def fill(self, full: int) -> Iterator[tuple[list[int], Blocks]]:
        """Ids and names of the blocks that are full now and were not before."""
        if self.saved < full:
            tokens = self.request.all_token_ids[self.named * self.layout.block_size : full * self.layout.block_size]
            names = self.layout.blocks(tokens, self.namespace, self.key)[0]
            yield self.table[self.saved : full], names[self.saved - self.named :]
            self.saved, self.named, self.key = full, full, names.keys[-1].tobytes()


def layout_of(vllm_config: Any, kv_cache_config: Any, weights: str | None) -> Layout:
    """One record holds one block of all layers."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in groups]
    if parallel.world_size != 1:
        raise ValueError(f"[KVPoolConnector] the engine has {parallel.world_size} ranks, the connector serves one")
    if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):  # vLLM cannot compute a block
        raise ValueError(  # that the store has lost if a window let go of those before it
            f"[KVPoolConnector] the cache has {', '.join(type(spec).__name__ for spec in specs)}, the connector serves "
            f"one group of full attention: --disable-hybrid-kv-cache-manager makes that of windows beside full layers"
        )
    spec, names = specs[0], groups[0].layer_names
    kernels = vllm_config.device_config.device_type, vllm_config.attention_config.backend  # which pack the numbers
    machine = platform.machine(), torch.cpu._is_amx_tile_supported()  # decides, too, which of a CPU's
    content = f"vLLM {vllm_version}, {kernels} {machine}, {len(names)} layers of {spec}"
    return Layout(
        (BlockLayout(spec.block_size, spec.page_size_bytes * len(names), content),),
        weights or fingerprint(vllm_config.model_config),
    )


def open_store(layout: Layout, options: dict[str, Any]) -> BlockStore:
    """The store of these options, one for each path and process."""
    if not {"path", "max_nbytes"} <= set(options) <= {"path", "max_nbytes", "reserve_nbytes", "weights"}:
        raise ValueError(
            f"[KVPoolConnector] kv_connector_extra_config has {sorted(options)}, it needs path and max_nbytes and may "
            "have reserve_nbytes, weights"
        )
    path = str(Path(options["path"]).resolve())
    if path not in stores or stores[path].layout != layout:
        stores[path] = DiskStore(path, layout, **{name: options[name] for name in set(options) - {"path", "weights"}})
    return stores[path]


class KVPoolConnector(base.KVConnectorBase_V1):
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        told = vllm_config.kv_transfer_config
        if told.kv_role != "kv_both":
            raise ValueError(f"[KVPoolConnector] kv_role is {told.kv_role}, it must be kv_both: a store is both sides")
        options = told.kv_connector_extra_config
        told.kv_load_failure_policy = "recompute"
        self.layout = layout_of(vllm_config, kv_cache_config, options.get("weights"))
        self.store = open_store(self.layout, options)
        users.add(self)
        self.size = self.layout.block_size
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvpool-{role.name.lower()}")
        self.followed: dict[str, Followed] = {}
        self.epoch = ""  # of the weights: a part of each namespace
        self.step = Step()
        self.caches: list[Any] = []  # of each layer, [blocks, ..], integers; NumPy's if they are in host memory
        self.loading: dict[str, Future[set[int]]] = {}
        self.lost: set[int] = set()

    @staticmethod
    def guarded(otherwise: Any, call: Any, *arguments: Any) -> Any:
        """What a call returns. If it raises, for want of memory for instance, the engine goes on without it."""
        try:
            return call(*arguments)
        except Exception:
            log.exception("%s failed, the engine goes on without it", call.__name__)
            return otherwise

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.mm_features or request.prompt_embeds is not None or request.lora_request:
            return 0, False
        followed = self.followed.get(request.request_id)
        if followed is None:
            followed = self.followed[request.request_id] = Followed(request, self.layout, self.epoch)
            followed.found = leading(self.guarded(np.zeros(1, bool), self.store.lookup, followed.prompt))
        if followed.table:  # served before: the store's answer is used up
            return 0, False
        more = max(0, followed.found * self.size - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        followed = self.followed.get(request.request_id)
        if followed is None or not num_external_tokens or followed.table:
            return
        (followed.table,) = map(list, blocks.get_block_ids())
        first, end = followed.found - num_external_tokens // self.size, followed.found
        self.step.loads.append((request.request_id, followed.table[first:end], followed.prompt[first:end]))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self.step = self.step, Step()
        cached = scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self.follow(step, scheduler_output, new.req_id, new.num_computed_tokens, new.block_ids, True)
        for name, ids, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self.follow(step, scheduler_output, name, computed, ids, name in cached.resumed_req_ids)
        return step

    def follow(self, step: Step, output: Any, name: str, computed: int, ids: Any, anew: bool) -> None:
        """The table of a request after a step, and the blocks that the step fills."""
        followed = self.followed.get(name)
        if followed is None or followed.request.mm_features:  # which a session may get later
            return
        if anew:
            followed.table, followed.saved = [], max(followed.saved, computed // self.size)
        followed.table += ids[0] if ids else []
        known = min(computed + output.num_scheduled_tokens[name], followed.request.num_tokens)
        step.saves += followed.fill(min(known // self.size, len(followed.table)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self.followed.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """The weights have changed: no later request finds what was saved, nor is what runs saved under their names."""
        self.followed.clear()
        self.epoch = os.urandom(16).hex()
        return True

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        for name in self._kv_cache_config.kv_cache_groups[0].layer_names:
            layer = kv_caches[name].movedim(list(kv_caches[name].shape).index(blocks), 0)
            layer = layer.view(NUMBERS[layer.element_size()])  # which NumPy has, unlike bfloat16
            self.caches.append(layer if layer.is_cuda else layer.numpy())
        nbytes = sum(layer[0].nbytes for layer in self.caches)
        if nbytes != self.layout.groups[0].nbytes:
            raise ValueError(f"[KVPoolConnector] a block has {nbytes} bytes, its spec {self.layout.groups[0].nbytes}")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, ids, blocks in self._get_connector_metadata().loads:
            self.loading[name] = self.thread.submit(self.guarded, set(ids), self.load, ids, blocks)

    def load(self, ids: list[int], blocks: Blocks) -> set[int]:
        """Fill blocks of the cache; returns the ids of those that the store does not have."""
        rows = np.empty((min(len(ids), PIECE), self.layout.groups[0].nbytes), np.uint8)
        for first in range(0, len(ids), PIECE):
            some = ids[first : first + PIECE]
            good = leading(self.store.load(blocks[first : first + PIECE], rows[: len(some)]))
            for layer, part in self.parts(rows[:good]):
                layer[some[:good]] = torch.from_numpy(part).to(layer.device) if torch.is_tensor(layer) else part
            if torch.is_tensor(self.caches[0]):  # vLLM reads on a stream of its own
                torch.cuda.current_stream(self.caches[0].device).synchronize()
            if good < len(some):
                return set(ids[first + good :])
        return set()

    def parts(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        """Each layer, and its part of rows that hold a block of all layers each, in the shape of the layer's blocks."""
        at = 0
        for layer in self.caches:
            part = rows[:, at : at + layer[0].nbytes].view(f"i{layer.itemsize}")
            yield layer, part.reshape(len(rows), *layer.shape[1:])
            at += layer[0].nbytes

    def wait_for_save(self) -> None:
        for ids, blocks in self._get_connector_metadata().saves:
            self.guarded(None, self.save, ids, blocks)

    def save(self, ids: list[int], blocks: Blocks) -> None:
        rows = np.empty((len(ids), self.layout.groups[0].nbytes), np.uint8)
        for layer, part in self.parts(rows):
            part[:] = layer[ids].cpu().numpy() if torch.is_tensor(layer) else layer[ids]
        self.store.store(blocks, rows)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        done = {name for name, future in self.loading.items() if future.done()}
        for name in done:
            self.lost |= self.loading.pop(name).result()
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved behind the step, all layers at once."""

    def shutdown(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)  # a load may hang
        users.discard(self)
        if all(each.store is not self.store for each in users):
            for path in [path for path, store in stores.items() if store is self.store]:
                del stores[path]  # an engine that this process makes later gets a store that is open
            self.store.close()
