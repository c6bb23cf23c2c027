/* Initialization, devices, primary and other contexts, and each thread's stack of current ones. */
#include <stdio.h>
#include <string.h>

#include "standin.h"

#define DEVICES 8
#define STACK_DEPTH 32
#define ATTRIBUTES 256

int device_count = 1;
int driver_version = 13050;
static CUhandle primary[DEVICES];
static int attributes[ATTRIBUTES];
static __thread CUhandle stack[STACK_DEPTH];
static __thread int depth;

/* As of an H100, where it matters. */
static const struct {
    int attribute;
    int value;
} first_attributes[] = {
    {1, 1024},       /* threads per block */
    {2, 1024},       /* block x, y, z */
    {3, 1024},
    {4, 64},
    {5, 2147483647}, /* grid x, y, z */
    {6, 65535},
    {7, 65535},
    {8, 49152},      /* shared memory per block */
    {9, 65536},      /* constant memory */
    {10, 32},        /* warp size */
    {12, 65536},     /* registers per block */
    {13, 1980000},   /* clock, kHz */
    {16, 132},       /* multiprocessors */
    {31, 1},         /* concurrent kernels */
    {36, 2619000},   /* memory clock, kHz */
    {37, 5120},      /* memory bus width */
    {38, 52428800},  /* L2 cache */
    {39, 2048},      /* threads per multiprocessor */
    {40, 3},         /* copy engines */
    {41, 1},         /* unified addressing */
    {75, 9},         /* compute capability */
    {76, 0},
    {78, 1},         /* stream priorities */
    {81, 233472},    /* shared memory per multiprocessor */
    {82, 65536},     /* registers per multiprocessor */
    {83, 1},         /* managed memory */
    {95, 1},         /* cooperative launch */
    {97, 232448},    /* shared memory per block, on request */
    {106, 32},       /* blocks per multiprocessor */
    {115, 1},        /* memory pools */
    {120, 1},        /* cluster launch */
};

static bool device_valid(CUdevice device) { return device >= 0 && device < device_count; }

static void attributes_reset(void)
{
    memset(attributes, 0, sizeof attributes);
    for (size_t i = 0; i < sizeof first_attributes / sizeof *first_attributes; i++)
        attributes[first_attributes[i].attribute] = first_attributes[i].value;
}

struct context *context_found(CUhandle handle) { return object_find(handle, CONTEXT); }

struct context *current_context(void) { return depth ? context_found(stack[depth - 1]) : NULL; }

static struct context *context_create(CUdevice device, bool is_primary, unsigned flags)
{
    CUhandle handle;
    struct context *context = object_create(CONTEXT, sizeof *context, &handle);
    *context = (struct context){.handle = handle, .device = device, .primary = is_primary, .flags = flags};
    return context;
}

/* A primary context keeps its handle for good; what is in it goes. */
static void context_empty(struct context *context)
{
    events_destroy(context);
    streams_destroy(context);
    modules_destroy(context);
}

CUresult api_cuInit(unsigned flags)
{
    DRIVER_CALL_FROM_START(cuInit);
    if (flags) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (device_count == 0) RETURN(CUDA_ERROR_NO_DEVICE);
    if (!driver_initialized) attributes_reset();
    driver_initialized = true;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDriverGetVersion(int *version)
{
    DRIVER_CALL_FROM_START(cuDriverGetVersion);
    *version = driver_version;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceGet(CUdevice *device, int ordinal)
{
    DRIVER_CALL(cuDeviceGet);
    if (!device_valid(ordinal)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceGetCount(int *count)
{
    DRIVER_CALL(cuDeviceGetCount);
    *count = device_count;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceGetName(char *name, int length, CUdevice device)
{
    DRIVER_CALL(cuDeviceGetName);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "Stand-in GPU %d", device);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceGetUuid(unsigned char uuid[16], CUdevice device)
{
    DRIVER_CALL(cuDeviceGetUuid);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0xa0 + i);
    uuid[15] = (unsigned char)device;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    DRIVER_CALL(cuDeviceTotalMem);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    *bytes = (size_t)80 << 30;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    DRIVER_CALL(cuDeviceGetAttribute);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    if (attribute <= 0 || attribute >= ATTRIBUTES) RETURN(CUDA_ERROR_INVALID_VALUE);
    *value = attributes[attribute];
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDevicePrimaryCtxRetain(CUhandle *context, CUdevice device)
{
    DRIVER_CALL(cuDevicePrimaryCtxRetain);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    if (!primary[device]) primary[device] = context_create(device, true, 0)->handle;
    context_found(primary[device])->references++;
    *context = primary[device];
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDevicePrimaryCtxRelease(CUdevice device)
{
    DRIVER_CALL(cuDevicePrimaryCtxRelease);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    struct context *context = context_found(primary[device]);
    if (!context || !context->references) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (--context->references == 0) context_empty(context);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    DRIVER_CALL(cuDevicePrimaryCtxGetState);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    struct context *context = context_found(primary[device]);
    *flags = context ? context->flags : 0;
    *active = context && context->references > 0;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags)
{
    DRIVER_CALL(cuDevicePrimaryCtxSetFlags);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    struct context *context = context_found(primary[device]);
    if (!context) primary[device] = (context = context_create(device, true, flags))->handle;
    context->flags = flags;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxCreate(CUhandle *created, unsigned flags, CUdevice device)
{
    DRIVER_CALL(cuCtxCreate);
    if (!device_valid(device)) RETURN(CUDA_ERROR_INVALID_DEVICE);
    if (depth == STACK_DEPTH) RETURN(CUDA_ERROR_UNKNOWN);
    *created = context_create(device, false, flags)->handle;
    stack[depth++] = *created;
    RETURN(CUDA_SUCCESS);
}

/* Affinity and the like, in `parameters`, do not matter here. */
CUresult api_cuCtxCreate_v4(CUhandle *created, void *parameters, unsigned flags, CUdevice device)
{
    (void)parameters;
    return api_cuCtxCreate(created, flags, device);
}

CUresult api_cuCtxDestroy(CUhandle handle)
{
    DRIVER_CALL(cuCtxDestroy);
    struct context *context = context_found(handle);
    if (!context || context->primary) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    context_empty(context);
    object_destroy(handle);
    if (depth && stack[depth - 1] == handle) depth--;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxPushCurrent(CUhandle handle)
{
    DRIVER_CALL(cuCtxPushCurrent);
    if (!context_found(handle)) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (depth == STACK_DEPTH) RETURN(CUDA_ERROR_UNKNOWN);
    stack[depth++] = handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxPopCurrent(CUhandle *handle)
{
    DRIVER_CALL(cuCtxPopCurrent);
    if (!depth) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (handle) *handle = stack[depth];
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxSetCurrent(CUhandle handle)
{
    DRIVER_CALL(cuCtxSetCurrent);
    if (handle && !context_found(handle)) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (depth) depth--;
    if (handle) stack[depth++] = handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxGetCurrent(CUhandle *handle)
{
    DRIVER_CALL(cuCtxGetCurrent);
    *handle = depth ? stack[depth - 1] : 0;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxGetDevice_v2(CUdevice *device, CUhandle handle)
{
    DRIVER_CALL(cuCtxGetDevice);
    struct context *context = handle ? context_found(handle) : current_context();
    if (!context) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *device = context->device;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxGetDevice(CUdevice *device) { return api_cuCtxGetDevice_v2(device, 0); }

CUresult api_cuCtxGetFlags(unsigned *flags)
{
    DRIVER_CALL(cuCtxGetFlags);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *flags = current_context()->flags;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxGetId(CUhandle handle, unsigned long long *id)
{
    DRIVER_CALL(cuCtxGetId);
    struct context *context = handle ? context_found(handle) : current_context();
    if (!context) RETURN(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    *id = context->handle & 0xffffffff;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    DRIVER_CALL(cuCtxGetStreamPriorityRange);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuCtxSynchronize_v2(CUhandle handle)
{
    DRIVER_CALL(cuCtxSynchronize);
    struct context *context = handle ? context_found(handle) : current_context();
    if (!context) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    CUresult error = capture_allows_context_waiting(context);
    if (error) RETURN(error);
    int64_t end = 0;
    for (struct stream *stream = context->streams; stream; stream = stream->next)
        if (stream->tail > end) end = stream->tail;
    RETURN(wait_until(end));
}

CUresult api_cuCtxSynchronize(void) { return api_cuCtxSynchronize_v2(0); }

/* Errors */

#define ERROR(name, text) {name, #name, text}
static const struct {
    CUresult result;
    const char *name;
    const char *text;
} errors[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no device"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "invalid image"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "no valid context"),
    ERROR(CUDA_ERROR_INVALID_PTX, "invalid PTX"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "illegal state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "no such name"),
    ERROR(CUDA_ERROR_NOT_READY, "not done yet"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal memory access"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources for a launch"),
    ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "waited for too long"),
    ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "primary context is active"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "launch failed"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted while a stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture is invalid after an earlier error"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "would merge two captures"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture began in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a forked stream was not joined"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "would depend on work outside of the capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream would depend on a capturing stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture began in another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

CUresult api_cuGetErrorName(CUresult result, const char **name)
{
    DRIVER_CALL_FROM_START(cuGetErrorName);
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == result) *name = errors[i].name;
    RETURN(*name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult api_cuGetErrorString(CUresult result, const char **text)
{
    DRIVER_CALL_FROM_START(cuGetErrorString);
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == result) *text = errors[i].text;
    RETURN(*text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* For the tests */

EXPORT int standin_set_devices(int count)
{
    if (count < 0 || count > DEVICES) return 1;
    driver_lock();
    device_count = count;
    driver_unlock();
    return 0;
}

EXPORT void standin_set_version(int version)
{
    driver_lock();
    driver_version = version;
    driver_unlock();
}

EXPORT int standin_set_device_attribute(int attribute, int value)
{
    if (attribute <= 0 || attribute >= ATTRIBUTES) return 1;
    driver_lock();
    attributes[attribute] = value;
    driver_unlock();
    return 0;
}

EXPORT uint64_t standin_live(int kind)
{
    driver_lock();
    uint64_t live = objects_live((enum kind)kind);
    driver_unlock();
    return live;
}

/* Everything as after loading, except for objects: those that exist stay, with all their work done. */
EXPORT void standin_reset(void)
{
    driver_lock();
    device_count = 1;
    driver_version = 13050;
    attributes_reset();
    captures_reset();
    clock_reset();
    functions_reset();
    kernel_settings_reset();
    memory_reset();
    streams_reset();
    events_reset();
    trace_reset();
    driver_unlock();
}
