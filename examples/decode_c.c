/* An engine's decode loop in C: one token more for each sequence, step after step, without a call of Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <kvpool/include/kvpool.h>

static const kvpool_api *kv;

static int run(kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, int64_t rows, long long steps,
               long long *sum) {
    kvpool_array slots;
    int status = KVPOOL_OK;
    while (status == KVPOOL_OK && steps-- > 0) {
        status = kv->step(pool, plan, handles, NULL, rows, 0); /* NULL: one token each */
        if (status == KVPOOL_OK)
            status = kv->array(plan, KVPOOL_SLOT_MAPPING, &slots);
        if (status != KVPOOL_OK)
            break; /* KVPOOL_OUT_OF_BLOCKS: nothing has happened; preempt somebody and call again */
        for (int64_t k = 0; k < slots.length; k++) /* your kernels run here */
            *sum += ((const int32_t *)slots.data)[k];
        status = kv->done(pool, plan);
    }
    return status;
}

/* decode(pool, plan, handles, steps): the sum of the slots that were written. */
static PyObject *decode(PyObject *module, PyObject *args) {
    PyObject *objects[2];
    Py_buffer handles;
    long long steps, sum = 0;
    kvpool_pool *pool;
    kvpool_plan *plan;
    int status;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy*L", &objects[0], &objects[1], &handles, &steps))
        return NULL;
    if ((status = kv->pool_from(objects[0], &pool)) == KVPOOL_OK &&
        (status = kv->plan_from(objects[1], &plan)) == KVPOOL_OK)
        status = run(pool, plan, (const int64_t *)handles.buf, handles.len / 8, steps, &sum);
    PyBuffer_Release(&handles);
    return status == KVPOOL_OK ? PyLong_FromLongLong(sum) : (PyObject *)kv->raise_error();
}

static PyMethodDef methods[] = {{"decode", decode, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "decode_c", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_decode_c(void) {
    kv = kvpool_import(); /* NULL: ImportError says what does not fit */
    return kv == NULL ? NULL : PyModule_Create(&definition);
}
