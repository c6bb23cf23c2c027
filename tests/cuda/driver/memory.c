/* Memory and copies. Device memory is host memory; a copy moves its bytes when it is called and takes its time on the
 * stream. A captured copy moves nothing, now or at replay. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define FIRST_COPY_NS 2000
#define FIRST_HOST_RATE 25000     /* bytes per microsecond between host and device */
#define FIRST_DEVICE_RATE 1000000 /* and within the device */
#define MEMORY_BYTES ((size_t)80 << 30)

struct allocation {
    struct allocation *next;
    uintptr_t address;
    size_t size;
    bool on_host;
    CUdevice device;
};

static struct allocation *allocations;
static size_t device_bytes;
static int64_t copy_ns = FIRST_COPY_NS;
static int64_t host_rate = FIRST_HOST_RATE;
static int64_t device_rate = FIRST_DEVICE_RATE;
static CUhandle pools[16];
static uint64_t release_threshold;

void memory_reset(void)
{
    copy_ns = FIRST_COPY_NS;
    host_rate = FIRST_HOST_RATE;
    device_rate = FIRST_DEVICE_RATE;
}

static struct allocation *allocation_of(uintptr_t address, size_t size)
{
    for (struct allocation *each = allocations; each; each = each->next)
        if (address >= each->address && address + size <= each->address + each->size) return each;
    return NULL;
}

static bool in_device(uintptr_t address, size_t size)
{
    struct allocation *allocation = allocation_of(address, size);
    return allocation && !allocation->on_host;
}

static CUresult allocate(uintptr_t *address, size_t size, bool on_host, CUdevice device)
{
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    if (!on_host && size > MEMORY_BYTES - device_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = calloc(1, size);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation *added = malloc(sizeof *added);
    *added = (struct allocation){allocations, (uintptr_t)memory, size, on_host, device};
    allocations = added;
    if (!on_host) device_bytes += size;
    *address = added->address;
    return CUDA_SUCCESS;
}

static CUresult release(uintptr_t address, bool on_host)
{
    for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
        struct allocation *each = *link;
        if (each->address != address || each->on_host != on_host) continue;
        *link = each->next;
        if (!on_host) device_bytes -= each->size;
        free((void *)each->address);
        free(each);
        return CUDA_SUCCESS;
    }
    return address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static int64_t duration(size_t bytes, bool within_device)
{
    return copy_ns + (int64_t)bytes * 1000 / (within_device ? device_rate : host_rate);
}

/* Waits for a copy that is no stream's: it is the legacy stream's. */
static CUresult finish_now(CUresult error)
{
    struct stream *legacy;
    if (!error) error = stream_found(STREAM_LEGACY, &legacy);
    return error ? error : wait_until(legacy->tail);
}

static CUresult work(CUhandle stream_handle, enum node_kind kind, int64_t duration_ns, bool *now)
{
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (!error) error = capture_allows_work(stream);
    if (error) return error;
    *now = !stream->capture;
    if (stream->capture)
        captured(stream, kind, duration_ns, 0);
    else
        stream_work(stream, duration_ns);
    return CUDA_SUCCESS;
}

enum { HOST, DEVICE, EITHER };

static CUresult copy(uintptr_t to, int to_where, uintptr_t from, int from_where, size_t bytes, CUhandle stream)
{
    if (!bytes) return CUDA_SUCCESS;
    bool to_device = in_device(to, bytes);
    bool from_device = in_device(from, bytes);
    if ((to_where == DEVICE && !to_device) || (from_where == DEVICE && !from_device)) return CUDA_ERROR_INVALID_VALUE;
    bool now;
    CUresult error = work(stream, MEMCPY_NODE, duration(bytes, to_device && from_device), &now);
    if (!error && now) memmove((void *)to, (const void *)from, bytes);
    return error;
}

static CUresult fill(uintptr_t to, const void *pattern, size_t width, size_t count, CUhandle stream)
{
    if (!count) return CUDA_SUCCESS;
    if (!in_device(to, width * count)) return CUDA_ERROR_INVALID_VALUE;
    bool now;
    CUresult error = work(stream, MEMSET_NODE, duration(width * count, true), &now);
    for (size_t i = 0; !error && now && i < count; i++) memcpy((char *)to + i * width, pattern, width);
    return error;
}

#define COPY(name, to_type, to, to_where, from_type, from, from_where)                                                 \
    CUresult api_##name(to_type to, from_type from, size_t bytes)                                                      \
    {                                                                                                                  \
        DRIVER_CALL(name);                                                                                             \
        trace_about(&call, STREAM_LEGACY, 0);                                                                          \
        RETURN(finish_now(copy((uintptr_t)to, to_where, (uintptr_t)from, from_where, bytes, STREAM_LEGACY)));          \
    }                                                                                                                  \
    CUresult api_##name##Async(to_type to, from_type from, size_t bytes, CUhandle stream)                              \
    {                                                                                                                  \
        DRIVER_CALL(name##Async);                                                                                      \
        trace_about(&call, stream, 0);                                                                                 \
        RETURN(copy((uintptr_t)to, to_where, (uintptr_t)from, from_where, bytes, stream));                             \
    }

COPY(cuMemcpy, CUdeviceptr, to, EITHER, CUdeviceptr, from, EITHER)
COPY(cuMemcpyHtoD, CUdeviceptr, to, DEVICE, const void *, from, HOST)
COPY(cuMemcpyDtoH, void *, to, HOST, CUdeviceptr, from, DEVICE)
COPY(cuMemcpyDtoD, CUdeviceptr, to, DEVICE, CUdeviceptr, from, DEVICE)

#define FILL(name, type)                                                                                               \
    CUresult api_##name(CUdeviceptr to, type value, size_t count)                                                      \
    {                                                                                                                  \
        DRIVER_CALL(name);                                                                                             \
        trace_about(&call, STREAM_LEGACY, 0);                                                                          \
        RETURN(fill((uintptr_t)to, &value, sizeof value, count, STREAM_LEGACY));                                       \
    }                                                                                                                  \
    CUresult api_##name##Async(CUdeviceptr to, type value, size_t count, CUhandle stream)                              \
    {                                                                                                                  \
        DRIVER_CALL(name##Async);                                                                                      \
        trace_about(&call, stream, 0);                                                                                 \
        RETURN(fill((uintptr_t)to, &value, sizeof value, count, stream));                                              \
    }

FILL(cuMemsetD8, unsigned char)
FILL(cuMemsetD16, unsigned short)
FILL(cuMemsetD32, unsigned)

static CUresult allocate_in_context(uintptr_t *address, size_t size, bool on_host)
{
    struct context *context = current_context();
    return context ? allocate(address, size, on_host, context->device) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult api_cuMemAlloc(uintptr_t *address, size_t size)
{
    DRIVER_CALL(cuMemAlloc);
    RETURN(allocate_in_context(address, size, false));
}

CUresult api_cuMemFree(uintptr_t address)
{
    DRIVER_CALL(cuMemFree);
    RETURN(release(address, false));
}

CUresult api_cuMemAllocHost(uintptr_t *address, size_t size)
{
    DRIVER_CALL(cuMemAllocHost);
    RETURN(allocate_in_context(address, size, true));
}

CUresult api_cuMemHostAlloc(uintptr_t *address, size_t size, unsigned flags)
{
    DRIVER_CALL(cuMemHostAlloc);
    (void)flags;
    RETURN(allocate_in_context(address, size, true));
}

CUresult api_cuMemFreeHost(uintptr_t address)
{
    DRIVER_CALL(cuMemFreeHost);
    RETURN(release(address, true));
}

CUresult api_cuMemGetInfo(size_t *available, size_t *total)
{
    DRIVER_CALL(cuMemGetInfo);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *available = MEMORY_BYTES - device_bytes;
    *total = MEMORY_BYTES;
    RETURN(CUDA_SUCCESS);
}

static CUresult allocate_in_order(uintptr_t *address, size_t size, CUhandle stream_handle)
{
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (!error) error = capture_allows_work(stream);
    return error ? error : allocate(address, size, false, stream->context->device);
}

CUresult api_cuMemAllocAsync(uintptr_t *address, size_t size, CUhandle stream)
{
    DRIVER_CALL(cuMemAllocAsync);
    trace_about(&call, stream, 0);
    RETURN(allocate_in_order(address, size, stream));
}

CUresult api_cuMemAllocFromPoolAsync(uintptr_t *address, size_t size, CUhandle pool, CUhandle stream)
{
    DRIVER_CALL(cuMemAllocFromPoolAsync);
    trace_about(&call, stream, pool);
    if (!object_find(pool, POOL)) RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(allocate_in_order(address, size, stream));
}

CUresult api_cuMemFreeAsync(uintptr_t address, CUhandle stream_handle)
{
    DRIVER_CALL(cuMemFreeAsync);
    trace_about(&call, stream_handle, 0);
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (!error) error = capture_allows_work(stream);
    RETURN(error ? error : release(address, false));
}

static CUresult pool_of(CUdevice device, CUhandle *pool)
{
    if (device < 0 || device >= device_count) return CUDA_ERROR_INVALID_DEVICE;
    if (!pools[device]) object_create(POOL, 1, &pools[device]);
    *pool = pools[device];
    return CUDA_SUCCESS;
}

CUresult api_cuDeviceGetMemPool(CUhandle *pool, CUdevice device)
{
    DRIVER_CALL(cuDeviceGetMemPool);
    RETURN(pool_of(device, pool));
}

CUresult api_cuDeviceGetDefaultMemPool(CUhandle *pool, CUdevice device)
{
    DRIVER_CALL(cuDeviceGetDefaultMemPool);
    RETURN(pool_of(device, pool));
}

enum { POOL_RELEASE_THRESHOLD = 4 }; /* attributes below it are ints, it and those above are 64 bits wide */

CUresult api_cuMemPoolGetAttribute(CUhandle pool, int attribute, void *value)
{
    DRIVER_CALL(cuMemPoolGetAttribute);
    if (!object_find(pool, POOL)) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (attribute == POOL_RELEASE_THRESHOLD)
        *(uint64_t *)value = release_threshold;
    else
        memset(value, 0, attribute > POOL_RELEASE_THRESHOLD ? sizeof(uint64_t) : sizeof(int));
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuMemPoolSetAttribute(CUhandle pool, int attribute, const void *value)
{
    DRIVER_CALL(cuMemPoolSetAttribute);
    if (!object_find(pool, POOL)) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (attribute == POOL_RELEASE_THRESHOLD) release_threshold = *(const uint64_t *)value;
    RETURN(CUDA_SUCCESS);
}

enum { POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_POINTER = 3, POINTER_IS_MANAGED = 8, POINTER_DEVICE_ORDINAL = 9 };

/* Writes what is asked for; zeros for memory that the driver does not know. */
static CUresult pointer_attribute(int attribute, uintptr_t address, void *value)
{
    struct allocation *allocation = allocation_of(address, 1);
    switch (attribute) {
    case POINTER_MEMORY_TYPE: *(int *)value = allocation ? (allocation->on_host ? 1 : 2) : 0; break;
    case POINTER_DEVICE_POINTER: *(uint64_t *)value = allocation ? address : 0; break;
    case POINTER_IS_MANAGED: *(int *)value = 0; break;
    case POINTER_DEVICE_ORDINAL: *(int *)value = allocation ? allocation->device : -2; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult api_cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    DRIVER_CALL(cuPointerGetAttribute);
    if (!allocation_of((uintptr_t)address, 1)) RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(pointer_attribute(attribute, (uintptr_t)address, value));
}

CUresult api_cuPointerGetAttributes(unsigned count, const int *attributes, void **values, CUdeviceptr address)
{
    DRIVER_CALL(cuPointerGetAttributes);
    CUresult error = CUDA_SUCCESS;
    for (unsigned i = 0; !error && i < count; i++)
        error = pointer_attribute(attributes[i], (uintptr_t)address, values[i]);
    RETURN(error);
}

/* For the tests */

EXPORT int standin_set_copies(int64_t least_ns, int64_t host_bytes_per_us, int64_t device_bytes_per_us)
{
    if (least_ns < 0 || host_bytes_per_us < 1 || device_bytes_per_us < 1) return 1;
    driver_lock();
    copy_ns = least_ns;
    host_rate = host_bytes_per_us;
    device_rate = device_bytes_per_us;
    driver_unlock();
    return 0;
}

EXPORT uint64_t standin_allocations(int on_host)
{
    uint64_t count = 0;
    driver_lock();
    for (struct allocation *each = allocations; each; each = each->next) count += each->on_host == (on_host != 0);
    driver_unlock();
    return count;
}
