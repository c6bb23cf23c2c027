/* The trace: one entry for each driver call, up to a limit, read by the tests. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "standin.h"

#define TRACE_LIMIT 200000

static struct trace_entry *entries;
static long count;
static long capacity;
static uint64_t dropped;
static bool tracing = true;
static __thread struct trace_entry scratch; /* takes the details of a call that is not traced */

long trace_begin(const char *function)
{
    static __thread long thread;
    if (!tracing) return -1;
    if (count == TRACE_LIMIT) {
        dropped++;
        return -1;
    }
    if (count == capacity) {
        capacity = capacity ? capacity * 2 : 1024;
        entries = realloc(entries, (size_t)capacity * sizeof *entries);
    }
    if (!thread) thread = syscall(SYS_gettid);
    entries[count] = (struct trace_entry){.function = function, .time_ns = host_now(), .thread = thread};
    return count++;
}

struct trace_entry *trace_of(const struct call *call)
{
    /* After a reset, a call that had slept since before it finds its entry gone. */
    return call->trace >= 0 && call->trace < count ? &entries[call->trace] : &scratch;
}

void trace_about(const struct call *call, CUhandle stream, CUhandle handle)
{
    struct trace_entry *entry = trace_of(call);
    entry->stream = stream;
    entry->handle = handle;
}

void trace_reset(void)
{
    for (long i = 0; i < count; i++) free((void *)entries[i].arguments);
    free(entries);
    entries = NULL;
    count = capacity = 0;
    dropped = 0;
    tracing = true;
}

EXPORT void standin_set_tracing(int enabled)
{
    driver_lock();
    tracing = enabled;
    driver_unlock();
}

EXPORT long standin_trace_count(void)
{
    driver_lock();
    long result = count;
    driver_unlock();
    return result;
}

EXPORT uint64_t standin_trace_dropped(void)
{
    driver_lock();
    uint64_t result = dropped;
    driver_unlock();
    return result;
}

/* Copies entries from `first` on; how many. The names stay valid for good, the arguments until the trace is cleared. */
EXPORT long standin_trace_read(long first, long limit, struct trace_entry *to)
{
    driver_lock();
    long copied = count - first < limit ? count - first : limit;
    if (copied < 0) copied = 0;
    if (copied) memcpy(to, entries + first, (size_t)copied * sizeof *to);
    driver_unlock();
    return copied;
}

EXPORT void standin_trace_clear(void)
{
    driver_lock();
    bool enabled = tracing;
    trace_reset();
    tracing = enabled;
    driver_unlock();
}
