/* The floor of an exact prefix lookup: one cache line per block, many of them in flight.
 *
 * Whatever the index looks like, the tokens of every block must be read from memory and compared. Here it is
 * known where they are, and nothing is hashed, looked up, pinned or checked.
 */
#include <stdint.h>
#include <string.h>

#define AHEAD 32 /* lines in flight */

/* How many of `n` blocks of 16 tokens equal the prompt's; block i of the prompt is at stored[where[i]]. */
int32_t lines_equal(const int32_t (*stored)[16], const int32_t *where, const int32_t (*prompt)[16], int32_t n) {
    int32_t equal = 0;
    for (int32_t i = 0; i < n && i < AHEAD; i++) __builtin_prefetch(stored[where[i]]);
    for (int32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(stored[where[i + AHEAD]]);
        equal += memcmp(stored[where[i]], prompt[i], sizeof prompt[i]) == 0;
    }
    return equal;
}

/* Write the prompt's blocks to where they belong. */
void lines_store(int32_t (*stored)[16], const int32_t *where, const int32_t (*prompt)[16], int32_t n) {
    for (int32_t i = 0; i < n && i < AHEAD; i++) __builtin_prefetch(stored[where[i]], 1);
    for (int32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(stored[where[i + AHEAD]], 1);
        memcpy(stored[where[i]], prompt[i], sizeof prompt[i]);
    }
}
