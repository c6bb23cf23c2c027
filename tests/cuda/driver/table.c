/* The one function that is exported under a name of CUDA's: it hands out all others. */
#include <string.h>

#include "standin.h"

#define PER_THREAD_DEFAULT_STREAM 2

/* Only their addresses are of interest here. */
#define OFFER(name, version, function) void function(void);
#include "offers.def"
#undef OFFER

static const struct {
    const char *name;
    int version;
    void (*function)(void);
} offers[] = {
#define OFFER(name, version, function) {#name, version, function},
#include "offers.def"
#undef OFFER
};

static bool function_offered(const char *name)
{
    for (size_t i = 0; i < sizeof offers / sizeof *offers; i++)
        if (strcmp(offers[i].name, name) == 0) return true;
    return false;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    int reported;
    driver_lock();
    reported = driver_version;
    if (flags & PER_THREAD_DEFAULT_STREAM) default_stream_is_per_thread = true;
    driver_unlock();
    *function = NULL;
    for (size_t i = 0; i < sizeof offers / sizeof *offers; i++)
        if (offers[i].version <= version && offers[i].version <= reported && strcmp(offers[i].name, name) == 0)
            *function = (void *)offers[i].function;
    if (strcmp(name, "cuGetProcAddress") == 0) *function = (void *)cuGetProcAddress_v2;
    if (status) *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT int standin_has_function(const char *name) { return strcmp(name, "*") == 0 || function_offered(name); }
