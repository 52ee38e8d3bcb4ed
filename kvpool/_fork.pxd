"""A number that is another one in a forked child: what is marked with the parent's is nobody's any more.

A thread that was inside of a call while another one forked does not exist in the child, where its call never ends.
"""

cdef extern from *:
    """
    #include <pthread.h>
    static unsigned kv_process_number = 1;
    static void kv_forked(void) { kv_process_number++; }
    static int kv_watch_forks(void) { return pthread_atfork(NULL, NULL, kv_forked); }
    """
    unsigned process_number "kv_process_number"     # never 0; of the module that has called watch_forks
    int watch_forks "kv_watch_forks"()
