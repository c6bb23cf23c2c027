/* The lock, and what every driver call does first and last: count, cost time, fail when told to, be traced. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct later {
    struct later *next;
    void (*function)(void *);
    void *argument;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_watched = PTHREAD_ONCE_INIT;
static struct function *functions;
static bool in_child; /* of a process that had initialized the driver: nothing works any more */
static __thread struct later *pending;

bool driver_initialized;

/* What NVIDIA's documentation calls potentially unsafe is not listed there. These are known to be, or taken to be by
 * analogy; tests can change each. */
static const char *const unsafe_functions[] = {
    "cuCtxSynchronize", "cuEventElapsedTime", "cuEventQuery", "cuEventSynchronize", "cuMemAlloc",
    "cuMemAllocHost", "cuMemFree", "cuMemFreeHost", "cuMemHostAlloc", "cuMemcpy",
    "cuMemcpyDtoD", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemsetD8", "cuMemsetD16",
    "cuMemsetD32", "cuStreamQuery", "cuStreamSynchronize",
};

void driver_lock(void) { pthread_mutex_lock(&lock); }
void driver_unlock(void) { pthread_mutex_unlock(&lock); }

static void child_after_fork(void)
{
    pthread_mutex_init(&lock, NULL);
    in_child = in_child || driver_initialized;
    pending = NULL;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, child_after_fork); }

uint64_t this_thread(void)
{
    static uint64_t threads;
    static __thread uint64_t number;
    if (!number) number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return number;
}

const char *intern(const char *text)
{
    static struct interned {
        struct interned *next;
        char text[];
    } *texts[256];
    unsigned hash = 5381;
    for (const char *at = text; *at; at++) hash = hash * 33 + (unsigned char)*at;
    struct interned **bucket = &texts[hash % 256];
    for (struct interned *known = *bucket; known; known = known->next)
        if (strcmp(known->text, text) == 0) return known->text;
    struct interned *added = malloc(sizeof *added + strlen(text) + 1);
    strcpy(added->text, text);
    added->next = *bucket;
    *bucket = added;
    return added->text;
}

struct function *function_named(const char *name)
{
    for (struct function *known = functions; known; known = known->next)
        if (strcmp(known->name, name) == 0) return known;
    struct function *added = calloc(1, sizeof *added);
    added->name = intern(name);
    for (size_t i = 0; i < sizeof unsafe_functions / sizeof *unsafe_functions; i++)
        if (strcmp(unsafe_functions[i], name) == 0) added->unsafe = added->unsafe_first = true;
    added->next = functions;
    functions = added;
    return added;
}

void functions_reset(void)
{
    for (struct function *each = functions; each; each = each->next) {
        each->calls = each->fail_from = 0;
        each->fail_always = false;
        each->cost_ns = 0;
        each->unsafe = each->unsafe_first;
    }
}

static CUresult injected(const struct function *function)
{
    if (!function->fail_from) return CUDA_SUCCESS;
    bool now = function->fail_always ? function->calls >= function->fail_from : function->calls == function->fail_from;
    return now ? function->fail_with : CUDA_SUCCESS;
}

bool call_begin(struct call *call, struct function **cache, const char *name, bool needs_initialization)
{
    static struct function *every;
    call->locked = false;
    call->trace = -1;
    if (in_child) {
        call->result = CUDA_ERROR_NOT_INITIALIZED;
        return true;
    }
    pthread_once(&fork_watched, watch_forks);
    driver_lock();
    call->locked = true;
    if (!every) every = function_named("*");
    if (!*cache) *cache = function_named(name);
    struct function *function = *cache;
    function->calls++;
    every->calls++;
    call->trace = trace_begin(function->name);
    if (function->cost_ns) host_pass(function->cost_ns);
    CUresult result = injected(function);
    if (!result) result = injected(every);
    if (!result && needs_initialization && !driver_initialized) result = CUDA_ERROR_NOT_INITIALIZED;
    if (!result && function->unsafe && unsafe_calls_prohibited()) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return call_result(call, result) != CUDA_SUCCESS;
}

CUresult call_result(struct call *call, CUresult result)
{
    call->result = result;
    trace_of(call)->result = result;
    return result;
}

void call_later(void (*function)(void *), void *argument)
{
    struct later *added = malloc(sizeof *added);
    *added = (struct later){pending, function, argument};
    pending = added;
}

void call_end(struct call *call)
{
    if (!call->locked) return;
    driver_unlock();
    while (pending) {
        struct later *next = pending;
        pending = next->next;
        next->function(next->argument);
        free(next);
    }
}

/* For the tests */

EXPORT void standin_fail(const char *name, CUresult result, uint64_t call, int always)
{
    driver_lock();
    struct function *function = function_named(name);
    function->fail_from = function->calls + call;
    function->fail_always = always;
    function->fail_with = result;
    driver_unlock();
}

EXPORT void standin_succeed(const char *name)
{
    driver_lock();
    function_named(name)->fail_from = 0;
    driver_unlock();
}

EXPORT uint64_t standin_calls(const char *name)
{
    driver_lock();
    uint64_t calls = function_named(name)->calls;
    driver_unlock();
    return calls;
}

EXPORT void standin_set_cost(const char *name, int64_t cost_ns)
{
    driver_lock();
    function_named(name)->cost_ns = cost_ns;
    driver_unlock();
}

EXPORT void standin_set_unsafe(const char *name, int unsafe)
{
    driver_lock();
    function_named(name)->unsafe = unsafe;
    driver_unlock();
}
