/* Time. The host's clock is CLOCK_MONOTONIC, or stands still until a test or a wait moves it. The device's clock drifts
 * against it, and there are delays on the way to the device and back. */
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>

#include "standin.h"

#define FIRST_VIRTUAL_NS INT64_C(1000000000)
#define SLICE_NS INT64_C(2000000)

static bool is_virtual;
static bool waits_move_clock = true;
static int64_t virtual_now = FIRST_VIRTUAL_NS;
static int64_t submit_latency_ns;
static int64_t completion_latency_ns;
static int64_t resolution_ns = 1;
static double drift_ppm;
static int64_t host_base; /* device clock: what it read at this host time ... */
static int64_t device_base;
static int64_t wait_limit_ns = INT64_C(10000000000); /* of real time: a test must not hang */

static int64_t monotonic_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void sleep_ns(int64_t duration_ns)
{
    struct timespec duration = {duration_ns / 1000000000, duration_ns % 1000000000};
    nanosleep(&duration, NULL);
}

int64_t host_now(void) { return is_virtual ? virtual_now : monotonic_now(); }

int64_t later(int64_t time_ns, int64_t duration_ns)
{
    return duration_ns >= NEVER_NS - time_ns ? NEVER_NS : time_ns + duration_ns;
}

int64_t submitted_now(void) { return host_now() + submit_latency_ns; }

bool visible(int64_t time_ns) { return host_now() >= later(time_ns, completion_latency_ns); }

static int64_t drifted(int64_t time_ns)
{
    int64_t passed = time_ns - host_base;
    return device_base + passed + (int64_t)((double)passed * drift_ppm / 1e6);
}

int64_t device_stamp(int64_t time_ns)
{
    int64_t stamp = drifted(time_ns);
    return stamp - ((stamp % resolution_ns) + resolution_ns) % resolution_ns;
}

void host_pass(int64_t duration_ns)
{
    if (is_virtual) {
        virtual_now += duration_ns;
        return;
    }
    driver_unlock();
    sleep_ns(duration_ns);
    driver_lock();
}

CUresult wait_until(int64_t time_ns)
{
    if (visible(time_ns)) return CUDA_SUCCESS;
    int64_t until = later(time_ns, completion_latency_ns);
    if (is_virtual && waits_move_clock && until < NEVER_NS) {
        virtual_now = until;
        return CUDA_SUCCESS;
    }
    int64_t deadline = monotonic_now() + wait_limit_ns;
    if (is_virtual && waits_move_clock) return CUDA_ERROR_LAUNCH_TIMEOUT;
    while (!visible(time_ns)) {
        int64_t left = is_virtual ? SLICE_NS / 10 : until - host_now();
        if (monotonic_now() >= deadline) return CUDA_ERROR_LAUNCH_TIMEOUT;
        driver_unlock();
        if (left > 0) sleep_ns(left < SLICE_NS ? left : SLICE_NS);
        driver_lock();
    }
    return CUDA_SUCCESS;
}

void clock_reset(void)
{
    is_virtual = false;
    waits_move_clock = true;
    virtual_now = FIRST_VIRTUAL_NS;
    submit_latency_ns = completion_latency_ns = 0;
    resolution_ns = 1;
    drift_ppm = 0;
    host_base = device_base = 0;
    wait_limit_ns = INT64_C(10000000000);
}

/* For the tests */

EXPORT int64_t standin_now(void)
{
    driver_lock();
    int64_t now = host_now();
    driver_unlock();
    return now;
}

EXPORT void standin_use_virtual_clock(int64_t now_ns)
{
    driver_lock();
    is_virtual = true;
    virtual_now = now_ns;
    streams_reset();
    events_reset();
    driver_unlock();
}

EXPORT int64_t standin_advance(int64_t duration_ns)
{
    driver_lock();
    host_pass(duration_ns);
    int64_t now = host_now();
    driver_unlock();
    return now;
}

EXPORT void standin_set_waits_move_clock(int enabled)
{
    driver_lock();
    waits_move_clock = enabled;
    driver_unlock();
}

EXPORT void standin_set_wait_limit(int64_t limit_ns)
{
    driver_lock();
    wait_limit_ns = limit_ns;
    driver_unlock();
}

EXPORT void standin_set_latency(int64_t submit_ns, int64_t completion_ns)
{
    driver_lock();
    submit_latency_ns = submit_ns;
    completion_latency_ns = completion_ns;
    driver_unlock();
}

/* From now on the device's clock runs `ppm` millionths fast, after a jump by `jump_ns`. */
EXPORT void standin_set_device_clock(double ppm, int64_t jump_ns)
{
    driver_lock();
    int64_t now = host_now();
    device_base = drifted(now) + jump_ns;
    host_base = now;
    drift_ppm = ppm;
    driver_unlock();
}

EXPORT void standin_set_resolution(int64_t step_ns)
{
    driver_lock();
    resolution_ns = step_ns < 1 ? 1 : step_ns;
    driver_unlock();
}
