/* What the stand-in needs of the CUDA driver's binary interface: result codes, constants and the two structures that it
 * reads. Written down from the public documentation; handles are plain integers here, as wide as pointers. */
#ifndef CUDA_ABI_H
#define CUDA_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUhandle;
typedef unsigned long long CUdeviceptr;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
};

enum { STREAM_LEGACY = 1, STREAM_PER_THREAD = 2 };
enum { STREAM_NON_BLOCKING = 1 };
enum { EVENT_BLOCKING_SYNC = 1, EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4 };
enum { EVENT_RECORD_EXTERNAL = 1, EVENT_WAIT_EXTERNAL = 1 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };
enum { CAPTURE_MODE_GLOBAL = 0, CAPTURE_MODE_THREAD_LOCAL = 1, CAPTURE_MODE_RELAXED = 2 };
enum { LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4 };

typedef struct {
    unsigned id;
    union {
        char pad[64];
        uint64_t alignment;
        unsigned cluster[3];
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    CUhandle stream;
    const CUlaunchAttribute *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

static_assert(sizeof(CUlaunchAttribute) == 72, "as in the driver's interface");
static_assert(sizeof(CUlaunchConfig) == 56, "as in the driver's interface");
static_assert(offsetof(CUlaunchConfig, stream) == 32, "as in the driver's interface");
static_assert(offsetof(CUlaunchConfig, attributes) == 40, "as in the driver's interface");

#endif
