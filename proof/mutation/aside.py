"""Mutants of what a judge of results is not asked about: it reads no digest, no counter and no error text.

Any recording sees them all the same: the first score has them, the second leaves them out.
"""

from __future__ import annotations

import re

from proof.mutation.source import Function

#: Why -> functions, by their names.
FUNCTIONS = {
    "fingerprint": re.compile(r"(?:\w*fingerprint\w*|chain|names_hash)$"),  # it alone shows hashes of tokens
    "check": re.compile(
        r"(?:check|find_fault|(?:blocks|seqs|index|groups|tree|names)_check|names_count"
        r"|check_(?:names|node|chain|block|ids|sequence|users|below)"
        r"|check_(?:tails|line|units|found|kept|bundles|checkpoints?)|tree_fields"
        r"|check_(?:references|free_slots|pending|holes|group|lengths|arena)|compare_holds|count_bundles|_corrupt)$"
    ),
    "statistics": re.compile(r"(?:\w*stats|refcount_histogram|count_references|(?:index|tree)_nbytes|num_free)$"),
    "error texts": re.compile(r"(?:show|out_of_blocks|refuse|blocks_short|__repr__|failed|error_message)$"),
    "digest": re.compile(r"(?:digest|mix|mix_tokens|mix_bytes|untagged)$"),
}
#: Why -> what statements mention.
STATEMENTS = {
    "digest": re.compile(r"\bdigest\b|^(?:cdef uint64_t )?h = mix|^return mix"),
    "statistics": re.compile(
        r"\b(?:peak_used|allocs|evictions|revivals|reuse_gap|cow_copies|cow_tokens|queries|query_tokens|hit_tokens|"
        r"inserted|duplicates|num_shared|evicted_tokens|sum_tokens|sum_blocks)\b"
        r"|^shared \+=|^cdef int32_t k, \w+, shared = 0$"
    ),
    "error texts": re.compile(r"^name = |^wanted = |^found = code|^(?:v|verdict)\.(?!reason)\w+(?:, v\.\w+)* ="),
}
#: Calls that write down why something is refused -> how many of their arguments are more than words.
REFUSALS = {"refused": 2, "blocks_short": 2}


def aside(function: Function, source: str) -> str:
    """Why a mutant is left to recordings, "" if the judge is asked."""
    for why, pattern in FUNCTIONS.items():
        if pattern.match(function.name):
            return why
    for why, pattern in STATEMENTS.items():
        if pattern.search(source):
            return why
    return ""
