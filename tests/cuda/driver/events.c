/* Events: points in time on a stream, as the host's clock has them and as the device's clock stamps them. */
#include "standin.h"

static uint64_t pending_destroyed;
static uint64_t pending_recorded;

void event_happens(struct event *event, int64_t time_ns)
{
    event->recorded = true;
    event->time = time_ns;
    event->stamp = device_stamp(time_ns);
    event->capture = 0;
    node_set_clear(&event->captured);
}

static bool is_pending(const struct event *event) { return event->recorded && !event->capture && !visible(event->time); }

static void event_free(struct event *event)
{
    node_set_clear(&event->captured);
    object_destroy(event->handle);
}

static struct context *doomed;

static void destroy_of_doomed(void *object)
{
    struct event *event = object;
    if (event->context == doomed) event_free(event);
}

void events_destroy(struct context *context)
{
    doomed = context;
    objects_each(EVENT, destroy_of_doomed);
}

static void complete(void *object)
{
    struct event *event = object;
    if (event->time > host_now()) event->time = event->stamp = 0;
}

void events_reset(void)
{
    objects_each(EVENT, complete);
    pending_destroyed = pending_recorded = 0;
}

CUresult api_cuEventCreate(CUhandle *created, unsigned flags)
{
    DRIVER_CALL(cuEventCreate);
    if (flags & ~7u) RETURN(CUDA_ERROR_INVALID_VALUE);
    struct context *context = current_context();
    if (!context) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    CUhandle handle;
    struct event *event = object_create(EVENT, sizeof *event, &handle);
    event->handle = handle;
    event->context = context;
    event->flags = flags;
    *created = handle;
    trace_about(&call, 0, handle);
    RETURN(CUDA_SUCCESS);
}

#define EVENT_CALL(name)                                                                                               \
    DRIVER_CALL(name);                                                                                                 \
    trace_about(&call, 0, handle);                                                                                     \
    struct event *event = object_find(handle, EVENT);                                                                  \
    if (!event) RETURN(CUDA_ERROR_INVALID_HANDLE)

static CUresult record(struct event *event, CUhandle stream_handle, unsigned flags)
{
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (error) return error;
    if (stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~(unsigned)EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    error = capture_allows_work(stream);
    if (error) return error;
    if (flags & EVENT_RECORD_EXTERNAL) {
        if (!stream->capture) return CUDA_ERROR_INVALID_VALUE;
        captured(stream, EVENT_RECORD_NODE, 0, event->handle);
        return CUDA_SUCCESS;
    }
    if (is_pending(event)) pending_recorded++;
    if (stream->capture) {
        event->recorded = true;
        event->capture = stream->capture->id;
        node_set_copy(&event->captured, &stream->last);
        return CUDA_SUCCESS;
    }
    event_happens(event, stream_work(stream, 0));
    return CUDA_SUCCESS;
}

CUresult api_cuEventRecord(CUhandle handle, CUhandle stream)
{
    EVENT_CALL(cuEventRecord);
    trace_about(&call, stream, handle);
    RETURN(record(event, stream, 0));
}

CUresult api_cuEventRecordWithFlags(CUhandle handle, CUhandle stream, unsigned flags)
{
    EVENT_CALL(cuEventRecordWithFlags);
    trace_about(&call, stream, handle);
    RETURN(record(event, stream, flags));
}

CUresult api_cuEventQuery(CUhandle handle)
{
    EVENT_CALL(cuEventQuery);
    CUresult error = capture_allows_event_use(event);
    if (error) RETURN(error);
    RETURN(is_pending(event) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult api_cuEventSynchronize(CUhandle handle)
{
    EVENT_CALL(cuEventSynchronize);
    CUresult error = capture_allows_event_use(event);
    if (error) RETURN(error);
    RETURN(event->recorded ? wait_until(event->time) : CUDA_SUCCESS);
}

CUresult api_cuEventElapsedTime(float *milliseconds, CUhandle handle, CUhandle end_handle)
{
    EVENT_CALL(cuEventElapsedTime);
    struct event *end = object_find(end_handle, EVENT);
    if (!end || event->context->device != end->context->device) RETURN(CUDA_ERROR_INVALID_HANDLE);
    if ((event->flags | end->flags) & EVENT_DISABLE_TIMING) RETURN(CUDA_ERROR_INVALID_HANDLE);
    CUresult error = capture_allows_event_use(event);
    if (!error) error = capture_allows_event_use(end);
    if (error) RETURN(error);
    if (!event->recorded || !end->recorded) RETURN(CUDA_ERROR_INVALID_HANDLE);
    if (is_pending(event) || is_pending(end)) RETURN(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((double)(end->stamp - event->stamp) / 1e6);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuEventDestroy(CUhandle handle)
{
    EVENT_CALL(cuEventDestroy);
    if (is_pending(event)) pending_destroyed++;
    event_free(event);
    RETURN(CUDA_SUCCESS);
}

/* For the tests */

EXPORT uint64_t standin_pending_destroyed(void)
{
    driver_lock();
    uint64_t result = pending_destroyed;
    driver_unlock();
    return result;
}

EXPORT uint64_t standin_pending_recorded(void)
{
    driver_lock();
    uint64_t result = pending_recorded;
    driver_unlock();
    return result;
}
