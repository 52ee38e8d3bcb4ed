"""What docs/scheduling.md says of every step, judged from outside: by handles, the pool and the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np


class Watch:
    """Sees every step; keeps what it needs to judge the next one."""

    def __init__(self, scheduler: Any, pool: Any, options: dict[str, Any]) -> None:
        self.scheduler, self.pool, self.options = scheduler, pool, options
        self.decoding: set[int] = set()  # handles that must be rows of the next step, if they are open still
        self.candidates: set[int] = set()  # of the step that is out: rows that get a token
        self.admissions = self.preemptions = 0
        # For workloads in which each request is one sequence: handle -> request, in which order they came, how much
        # is computed; requests seen, those that ended, those that a step has shown for the first time.
        self.running: dict[int, Any] = {}
        self.order: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.requests: dict[Any, Any] = {}
        self.gone: set[Any] = set()
        self.newcomers: list[Any] = []
        self.door: dict[Any, Any] = {}  # requests that were added before this step was decided
        self.simple = self.strict = True
        self.chunk_before = False
        self.caches = False  # whether the pool has a prefix cache
        self.checkpoints = False  # whether chunks end where the pool takes a checkpoint
        self.restarted: Any = None  # the request that started over alone
        self.before: Any = None  # the last step and copies of what it showed
        self.steps = self.tokenless = self.failures = 0
        self.turns: Any = None  # `Turns`, where it can judge
        self.decodes: list[Any] = []  # requests of the decodes of the step that is out
        self.dropped = 0  # steps that were planned ahead, with rows that had ended when the step before was in

    def step(self, step: Any, requests: list[Any]) -> None:
        """Judge a step that `schedule` has returned, with the request of each row.

        One that was planned ahead is judged when the step before it is in.
        """
        handles, num_new, decodes = step.handles, step.num_new, step.num_decodes
        total, options = len(step.tokens), self.options
        assert len(handles) == len(num_new) == len(step.plan.handles) == len(step.lanes)
        assert np.unique(handles).size == handles.size
        assert int(num_new.sum()) == total == step.plan.num_tokens
        assert (num_new > 0).all(), "a row without tokens"
        drafts = int(num_new[:decodes].sum()) - decodes
        assert drafts == step.num_drafts
        assert not drafts or total <= options["max_step_tokens"], "drafts pass the budget"
        assert (num_new[:decodes] <= max(1, options["prefill_chunk"])).all()
        assert len(handles) <= options["max_running"], "more rows than max_running"
        chunks = num_new[decodes:]
        assert total <= max(options["max_step_tokens"], decodes), f"{total} tokens, budget {options['max_step_tokens']}"
        assert (chunks <= options["prefill_chunk"]).all(), f"a chunk of {chunks.max()} tokens"
        limits = [request.max_tokens for request in step.requests]
        assert (step.sample_position < limits).all(), "a sample of a sequence that has all its tokens"
        ends = np.cumsum(num_new) - 1
        inside = step.sample_at < num_new[:decodes].sum()
        assert np.isin(step.sample_at[~inside], ends).all(), "a sample that is no last token of a chunk"
        assert np.array_equal(np.unique(step.sample_at[inside]), np.arange(num_new[:decodes].sum()))
        assert (np.diff(step.sample_at) >= 0).all()
        assert np.isin(ends[:decodes], step.sample_at).all(), "a decode without a sample"
        self._arrays_hold(step)
        self._stall_free(handles, decodes, len(chunks))
        self._watermark(handles, step.num_drafts)
        self._victims(step, requests)
        sampled = np.isin(ends, step.sample_at)
        if self.simple and options["mixed"]:
            self._nothing_is_left_lying(step, sampled)
        self.candidates = set(handles[sampled].tolist())
        self.steps += 1

    def _arrays_hold(self, step: Any) -> None:
        """With two plans in turn, what the step before shows is what it showed."""
        if self.options.get("plans") == 2:
            if self.before is not None:
                old, shown = self.before
                assert all(np.array_equal(a, b) for a, b in zip(self._shown(old), shown, strict=True))
            self.before = step, [array.copy() for array in self._shown(step)]

    def _shown(self, step: Any) -> list[np.ndarray]:
        groups = zip(self.pool.options.groups, step.plan.groups, strict=True)
        parts = [part for group, part in groups if group.kind != "state"]
        of_parts = [array for part in parts for array in (part.block_tables, part.slot_mapping, part.kv_lens)]
        return [step.handles, step.tokens, step.sample_at, *of_parts]

    def _nothing_is_left_lying(self, step: Any, sampled: np.ndarray) -> None:
        """While there is budget, chunks are whole; while there are lanes and blocks too, nobody waits."""
        left = self.options["max_step_tokens"] - len(step.tokens) + step.num_drafts
        if left <= 0:
            return
        cut = ~sampled & (step.num_new < self.options["prefill_chunk"])
        assert self.checkpoints or not cut.any(), f"a chunk was cut, {left} tokens of the budget are left"
        running = set(self.running.values())
        waiting = [r for name, r in self.door.items() if name not in self.gone and name not in running]
        is_full = len(step.handles) >= self.options["max_running"]
        if not self.strict or step.follows is not None or not waiting or is_full:
            return
        if any(r.n > 1 or r.beam_width for r in waiting) or self.pool.stats().sequences >= self.pool.options.max_seqs:
            return
        stats, size = self.pool.stats(), self.pool.block_size
        need = max(-(-(r.prompt.size + r.max_tokens) // size) for r in waiting)
        explicit = self.options["watermark"]
        keep = 2 * len(step.handles) + (explicit or 0) + self.pool.options.watermark
        keep += sum(map(self._promised, self.running))
        assert stats.free < need + keep, f"{len(waiting)} wait, {stats.free} blocks are free"

    def _promised(self, handle: int) -> int:
        """Blocks for the known tokens of a running sequence that it does not hold yet, in a pool of one full group."""
        if not self.pool.is_open(handle):
            return 0
        request = self.requests[self.running[handle]]
        known = request.prompt.size + self.scheduler.tokens_of(request.id).size
        return max(0, -(-known // self.pool.block_size) - len(self.pool.table(handle, 0)))

    def _stall_free(self, handles: np.ndarray, decodes: int, chunks: int) -> None:
        """Whoever got a token gets the next one in the next step, unless it ended or was preempted."""
        must = {handle for handle in self.decoding if self.pool.is_open(handle)}
        rows = set(handles[:decodes].tolist())
        if self.options["mixed"]:
            assert must <= rows, f"{len(must - rows)} decodes stalled"
            return
        assert not (chunks and decodes), "a mixed step without mixed=True"
        assert chunks <= 1
        if chunks:
            assert not (must and self.chunk_before), "decodes stalled by two chunks"
        else:
            assert must <= rows, f"{len(must - rows)} decodes stalled in a step of decodes"
        self.chunk_before = bool(chunks)

    def _watermark(self, handles: np.ndarray, drafts: int) -> None:
        """An admission beside others leaves the watermark, of which drafts may take some."""
        watermark, admissions = self.options["watermark"], self.scheduler.stats().admissions
        if watermark and admissions > self.admissions and len(handles) > admissions - self.admissions:
            stats = self.pool.stats()
            assert stats.free + drafts >= watermark, f"{stats.free} blocks left: {watermark}"
        self.admissions = admissions

    def _victims(self, step: Any, requests: list[Any]) -> None:
        """Who lost its blocks, by the policy, for whom, and that no new request is admitted before it is."""
        preemptions = self.scheduler.stats().preemptions
        new = preemptions - self.preemptions
        self.preemptions = preemptions
        before = set(self.running)
        if new and not step.num_decodes:  # the policy named every decode: each had its token since it was admitted
            assert any(not self.pool.is_open(handle) for handle in self.decoding), "preempted for nobody's token"
        if new and not any(self.pool.is_open(handle) for handle in before):
            self._started_over_alone()
        lens = step.plan.positions[np.cumsum(step.num_new) - step.num_new]
        self.decodes = [request.id for request in requests[: step.num_decodes]]
        for row, (request, handle) in enumerate(zip(requests, step.handles.tolist(), strict=True)):
            if request.n > 1 or request.beam_width:
                self.simple = False  # several handles a request
            fresh = request.id not in self.requests
            self.requests[request.id] = request
            if request.id != self.restarted:
                self.restarted = None  # others run: who is left alone after them may start over again
            if handle not in self.running:
                self.running[handle] = request.id
                self.order[handle] = len(self.order)
                if self.turns is not None:
                    known = request.prompt.size + self.scheduler.tokens_of(request.id).size
                    self.turns.admit(request.id, known, int(lens[row]))
                if fresh:
                    self.newcomers.append(request)
        lost = [handle for handle in before if not self.pool.is_open(handle) and self.running[handle] not in self.gone]
        if self.simple:
            if new:
                self._policy(lost, [h for h in before if self.pool.is_open(h)])
            for handle in before:
                if not self.pool.is_open(handle):
                    del self.running[handle]
            back = set(self.running.values())
            waiting = {name for name in self.requests if name not in self.gone and name not in back}
            for request in self.newcomers:
                assert not waiting, f"{request.id} was admitted while {waiting}, which had been preempted, waited"
        self.newcomers.clear()

    def _started_over_alone(self) -> None:
        """Nobody was spared: that is right for one request that is left alone, once until others run."""
        lost = {self.running[handle] for handle in self.computed if not self.pool.is_open(handle)}
        assert self.caches and len(lost) == 1, "nobody was spared"
        (alone,) = lost
        assert alone != self.restarted, f"{alone} started over alone twice"
        self.restarted = alone

    def _policy(self, lost: list[int], stayed: list[int]) -> None:
        """The victims are those that the policy names."""
        policy = self.options["preempt"]
        if not lost or not stayed or not self.strict:
            return
        if policy == "last":
            assert min(self.order[h] for h in lost) > max(self.order[h] for h in stayed), "not the last was preempted"
        elif policy == "longest":
            shortest = min(self.computed.get(h, 0) for h in lost)
            assert shortest >= max(self.computed.get(h, 0) for h in stayed), "not the longest was preempted"
        elif policy == "priority":
            highest = max(self.requests[self.running[h]].priority for h in lost)
            assert highest <= min(self.requests[self.running[h]].priority for h in stayed), "not the lowest priority"

    def failed(self) -> None:
        self.before = None  # the next step has the plan of the first that failed
        self.failures += 1
        self.tokenless = 0
        self.preemptions = self.scheduler.stats().preemptions
        self.candidates = set()
        self.chunk_before = False
        self.forget_closed()

    def forget_closed(self) -> None:
        """Whose blocks a failure or a cancellation took has not been preempted."""
        self.computed = {handle: n for handle, n in self.computed.items() if self.pool.is_open(handle)}

    def updated(self, sampled: int, requests: Any) -> None:
        """`update` has returned; so many tokens were sampled. Progress is judged here, so that no loop is endless."""
        if self.turns is not None:
            for name in self.decodes:
                if name not in self.gone:
                    self.turns.decode(name)
        self.decoding = {h for h in self.decoding | self.candidates if self.pool.is_open(h)}
        self.candidates = set()
        self.computed = {handle: self.pool.num_tokens(handle) for handle in self.running if self.pool.is_open(handle)}
        self.tokenless = 0 if sampled else self.tokenless + 1
        chunk = min(self.options["prefill_chunk"], self.options["max_step_tokens"])
        longest = max(r.prompt.size + r.max_tokens for r in requests.values())
        chunks, most = -(-longest // chunk) + 1, self.options["max_running"]  # a beam's last token comes by itself
        # Nothing is preempted without a token, so steps without one are chunks of those who run, once each.
        assert self.tokenless <= most * chunks, f"{self.tokenless} steps without a token, at most {most * chunks}"
        counts = self.scheduler.stats()
        bound = counts.sampled_tokens + counts.admissions * chunks + self.dropped
        assert counts.steps <= bound, f"too many steps: {counts}"
        # (A pool in order cannot roll a failed step back: its rows start over.)
        assert counts.preemptions <= most * (counts.sampled_tokens + self.failures), f"too many preemptions: {counts}"

    def finished(self, requests: Any, outputs: Any) -> None:
        """The whole run: what was counted."""
        counts = self.scheduler.stats()
        ended = [output.finish_reason for output in outputs.values()]
        assert (counts.cancelled, counts.expired) == (ended.count("cancelled"), ended.count("deadline")), counts
        assert counts.finished == len(ended) - counts.cancelled - counts.expired, counts
        for output in outputs.values():
            times = output.times
            order = [t for t in (times.arrived, times.admitted, times.first_token, times.finished) if t is not None]
            assert order == sorted(order), times
            assert output.num_cached < requests[output.id].prompt.size
            assert output.num_cached % self.pool.block_size == 0
        if self.simple and not self.failures:
            assert counts.preemptions == sum(output.preemptions for output in outputs.values()), counts
            if not (counts.preemptions or counts.spills or counts.cancelled or counts.expired):
                total = sum(requests[o.id].prompt.size + o.tokens.size - 1 for o in outputs.values())
                computed = counts.prefill_tokens + counts.decode_tokens
                assert computed + counts.hit_tokens == total, f"{total} tokens to compute, {counts}"
                assert counts.hit_tokens == sum(output.num_cached for output in outputs.values())
