"""`Simple`: a backend whose attention is made of parts that a test replaces, to plant one fault at a time."""

from dataclasses import dataclass

import numpy as np

from kvpool.protocol import AttentionOptions
from kvpool_backends.checks import checked_queries
from kvpool_backends.numpy import NumpyBackend


@dataclass
class Query:
    """What one head of one query token is answered from."""

    q: np.ndarray  # [D]
    k: np.ndarray  # [C, D], the whole context of the row
    v: np.ndarray  # [C, Dv]
    visible: int  # that many oldest tokens
    scale: float
    options: AttentionOptions
    token: int  # of the batch
    first: int  # token of the batch, the row's first query
    seq_len: int
    head: int
    kv_head: int


class Simple(NumpyBackend):
    """Right, and slow: head by head."""

    def visible(self, seq_len, q_len, j):
        return seq_len - q_len + j + 1

    def kv_head(self, head, num_q_heads):
        return head // (num_q_heads // self.spec.num_kv_heads)

    def context(self, plane, table, seq_len):
        return self._context(plane, table, seq_len)

    # ------------------------------------------------------------------------------------ one query of one head

    def one(self, x):
        seen = slice(self.oldest(x), x.visible)
        scores = self.scores(x, x.k[seen])
        if x.options.alibi_slopes is not None:
            scores = scores + self.alibi(x, np.arange(seen.start, seen.stop))
        if x.options.mask is not None:
            scores = scores + self.bias(self.mask(x)[seen])
        return self.mix(scores, -np.inf if x.options.sinks is None else self.sink(x), x.v[seen])

    def oldest(self, x):
        return 0 if x.options.window is None else max(0, x.visible - x.options.window)

    def scores(self, x, k):
        scores = k @ x.q * x.scale
        cap = x.options.soft_cap
        return scores if cap is None else cap * np.tanh(scores / cap)

    def alibi(self, x, key):
        return float(x.options.alibi_slopes[x.head]) * (key - (x.visible - 1))

    def mask(self, x):
        mask = x.options.mask[x.token]
        return mask if mask.ndim == 1 else mask[0 if len(mask) == 1 else x.head]

    def bias(self, mask):
        return np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask

    def sink(self, x):
        return float(x.options.sinks[x.head])

    def mix(self, scores, sink, v):
        peak = max(scores.max(), sink)
        if peak == -np.inf:
            return np.zeros(v.shape[1])
        weights = np.exp(scores - peak)
        return weights @ v / (weights.sum() + np.exp(sink - peak))

    # ------------------------------------------------------------------------------------ the call

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False, scores=None, scores_out=None):
        if return_attn or scores is not None or scores_out is not None:
            more = {"return_attn": return_attn, "scores": scores, "scores_out": scores_out}
            whole = super().attend(step, layer, q, scale, options=options, **more)
            return whole if return_attn else (self.attend(step, layer, q, scale, options=options), whole[1])
        scale, options = checked_queries(self, step, layer, q, scale, options)
        planes = self._layer(layer)
        out = np.zeros((*q.shape[:2], self.spec.result_dim))
        for row, seq_len in enumerate(step.seq_lens.tolist()):
            begin, end = step.cu_q_lens[row : row + 2].tolist()
            if begin < end:
                k, v = (self.context(plane, step.block_tables[row], seq_len) for plane in planes)
                if self.spec.latent:
                    k, v = np.concatenate([k, v], axis=-1), k
            for token in range(begin, end):
                visible = self.visible(seq_len, end - begin, token - begin)
                for head in range(q.shape[1]):
                    kv = self.kv_head(head, q.shape[1])
                    one = q[token, head].astype(float)
                    out[token, head] = self.one(
                        Query(one, k[:, kv], v[:, kv], visible, scale, options, token, begin, seq_len, head, kv)
                    )
        return out.astype(np.float32)


class ZeroTimesWhatIsThere(Simple):
    """A planted fault: the whole last block takes part with weights of 0, and 0 * NaN is NaN."""

    def context(self, plane, table, seq_len):
        blocks = -(-seq_len // self.spec.block_size)
        return self._context(plane, table[:blocks], blocks * self.spec.block_size)

    def one(self, x):
        scores = np.where(np.arange(len(x.k)) < x.visible, self.scores(x, x.k), -np.inf)
        return self.mix(scores, -np.inf, x.v)
