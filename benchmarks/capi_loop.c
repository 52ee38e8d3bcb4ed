/* Decode steps from C, through the table of functions: what capi_loops.py measures. The caller holds the GIL. */
#include "../kvpool/include/kvpool.h"

int capi_steps(const kvpool_api *kv, kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, int64_t rows,
               int64_t steps, int with_done);

int capi_steps(const kvpool_api *kv, kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, int64_t rows,
               int64_t steps, int with_done) {
    int status = KVPOOL_OK;
    while (status == KVPOOL_OK && steps-- > 0) {
        status = kv->step(pool, plan, handles, NULL, rows, 0);
        if (status == KVPOOL_OK && with_done)
            status = kv->done(pool, plan);
    }
    return status;
}
