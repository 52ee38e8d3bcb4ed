/* Callgrind's marks as functions, so that Python can count the instructions of one piece of work. */
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define RUNNING_ON_VALGRIND 0
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_TOGGLE_COLLECT
#define CALLGRIND_DUMP_STATS_AT(name) ((void)(name))
#endif

/* 1 when this process runs under callgrind and the marks below do something. */
int counting(void) { return RUNNING_ON_VALGRIND != 0; }

void count_prepare(void) { CALLGRIND_START_INSTRUMENTATION; }

void count_toggle(void) { CALLGRIND_TOGGLE_COLLECT; }

/* Write what was collected since the last dump to a file of its own, with `name` in its header. */
void count_dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
