/* The yardstick: every byte once, as floats, with four streams of loads so that neither the adds' latency nor one
 * page's end holds the memory up. */
static float read_sum(const char *bytes, int64_t nbytes) {
    enum { STEP = 4 * VL * (int64_t)sizeof(float) };
    vf a = {0}, b = {0}, c = {0}, d = {0};
    int64_t at = 0;
    for (; at + STEP <= nbytes; at += STEP) {
        const float *p = (const float *)(const void *)(bytes + at);
        a += v_load(p);
        b += v_load(p + VL);
        c += v_load(p + 2 * VL);
        d += v_load(p + 3 * VL);
    }
    float sum = v_sum((a + b) + (c + d));
    for (; at < nbytes; at += (int64_t)sizeof(float)) {
        float x = 0;
        memcpy(&x, bytes + at, nbytes - at < 4 ? (size_t)(nbytes - at) : 4);
        sum += x;
    }
    return sum;
}
