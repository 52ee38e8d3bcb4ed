"""`Summary`: the account of one `PagedKV`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the memory of one `PagedKV` is. Blocks cover all layers."""

    blocks_used: int  # in tables now
    blocks_peak: int  # the most at any time
    blocks_free: int  # what a new sequence could take, the cached ones included
    blocks_cached: int  # of these, kept by the prefix cache until somebody needs them
    blocks_leaked: int  # in use, but in no table of a live cache of this model
    sequences: int
    kv_nbytes: int  # blocks_used * bytes per block
    kv_nbytes_peak: int
    pool_nbytes: int  # allocated, once
    mlx_peak_nbytes: int  # mx.get_peak_memory(): all of MLX, weights and activations included
    cow_copies: int  # blocks copied because a shared tail was written
    cow_tokens: int
    query_tokens: int  # tokens that `PagedKV.fetch` was asked for
    hit_tokens: int  # of these, found in the prefix cache
    mlx_pool_copies: int  # whole pool arrays that MLX copied to write to them, as counted by the last `settle`
    route: str  # "fused", or "gather: " or "lost: " and why, see `PagedKV.route`

    def __str__(self) -> str:
        mib = 1 / 2**20
        return (
            f"blocks: {self.blocks_used} used, {self.blocks_peak} peak, {self.blocks_free} free "
            f"({self.blocks_cached} cached), {self.blocks_leaked} leaked; {self.sequences} sequences\n"
            f"KV: {self.kv_nbytes * mib:.2f} MiB used, {self.kv_nbytes_peak * mib:.2f} MiB peak, "
            f"{self.pool_nbytes * mib:.2f} MiB allocated; MLX peak {self.mlx_peak_nbytes * mib:.2f} MiB\n"
            f"copies: {self.cow_copies} blocks on write ({self.cow_tokens} tokens), "
            f"{self.mlx_pool_copies} pool arrays by MLX\n"
            f"attention: {self.route}"
        )
