/* Streams as points in time: a stream's tail is when all that was submitted to it is done. The legacy stream waits for
 * the context's blocking streams, and they for it. */
#include <stdlib.h>

#include "standin.h"

static uint64_t last_id = 10;
bool default_stream_is_per_thread;

static struct stream *stream_create(struct context *context, unsigned flags, int priority)
{
    CUhandle handle;
    struct stream *stream = object_create(STREAM, sizeof *stream, &handle);
    *stream = (struct stream){.handle = handle,
                              .context = context,
                              .next = context->streams,
                              .flags = flags,
                              .priority = priority,
                              .id = ++last_id};
    context->streams = stream;
    return stream;
}

/* The legacy stream and those of threads are not counted as live: nobody made them. */
static struct stream *default_stream(struct context *context, uint64_t thread)
{
    for (struct stream *each = context->streams; each; each = each->next)
        if (each->thread == thread && (each == context->legacy || each->thread)) return each;
    struct stream *stream = calloc(1, sizeof *stream);
    *stream = (struct stream){.context = context, .next = context->streams, .thread = thread, .id = ++last_id};
    stream->handle = thread ? STREAM_PER_THREAD : STREAM_LEGACY;
    context->streams = stream;
    if (!thread) context->legacy = stream;
    return stream;
}

CUresult stream_found(CUhandle handle, struct stream **stream)
{
    if (handle > STREAM_PER_THREAD) {
        *stream = object_find(handle, STREAM);
        return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    struct context *context = current_context();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    bool per_thread = handle == STREAM_PER_THREAD || (handle == 0 && default_stream_is_per_thread);
    *stream = default_stream(context, per_thread ? this_thread() : 0);
    return CUDA_SUCCESS;
}

static bool is_legacy(const struct stream *stream) { return stream->context->legacy == stream; }

bool stream_blocking(const struct stream *stream)
{
    return !is_legacy(stream) && !(stream->flags & STREAM_NON_BLOCKING);
}

int64_t stream_ready(const struct stream *stream)
{
    int64_t ready = stream->tail;
    if (is_legacy(stream)) {
        for (struct stream *each = stream->context->streams; each; each = each->next)
            if (stream_blocking(each) && each->tail > ready) ready = each->tail;
    } else if (stream_blocking(stream) && stream->context->legacy && stream->context->legacy->tail > ready) {
        ready = stream->context->legacy->tail;
    }
    return ready;
}

int64_t stream_start(const struct stream *stream)
{
    int64_t ready = stream_ready(stream);
    int64_t now = submitted_now();
    return ready > now ? ready : now;
}

int64_t stream_work(struct stream *stream, int64_t duration_ns)
{
    return stream->tail = later(stream_start(stream), duration_ns);
}

static void stream_free(struct stream *stream)
{
    capture_forget_stream(stream);
    node_set_clear(&stream->last);
    free(stream->last_handles);
    if (stream->handle > STREAM_PER_THREAD)
        object_destroy(stream->handle);
    else
        free(stream);
}

void streams_destroy(struct context *context)
{
    while (context->streams) {
        struct stream *stream = context->streams;
        context->streams = stream->next;
        stream_free(stream);
    }
    context->legacy = NULL;
}

static void forget_work(void *object)
{
    struct context *context = object;
    for (struct stream *stream = context->streams; stream; stream = stream->next) stream->tail = 0;
}

void streams_reset(void) { objects_each(CONTEXT, forget_work); }

CUresult api_cuStreamCreateWithPriority(CUhandle *created, unsigned flags, int priority)
{
    DRIVER_CALL(cuStreamCreateWithPriority);
    if (flags & ~(unsigned)STREAM_NON_BLOCKING) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *created = stream_create(current_context(), flags, priority)->handle;
    trace_about(&call, *created, 0);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamCreate(CUhandle *created, unsigned flags)
{
    DRIVER_CALL(cuStreamCreate);
    if (flags & ~(unsigned)STREAM_NON_BLOCKING) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *created = stream_create(current_context(), flags, 0)->handle;
    trace_about(&call, *created, 0);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamDestroy(CUhandle handle)
{
    DRIVER_CALL(cuStreamDestroy);
    trace_about(&call, handle, 0);
    struct stream *stream = object_find(handle, STREAM);
    if (!stream) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct stream **link = &stream->context->streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    stream_free(stream);
    RETURN(CUDA_SUCCESS);
}

#define STREAM_CALL(name)                                                                                              \
    DRIVER_CALL(name);                                                                                                 \
    trace_about(&call, handle, 0);                                                                                     \
    struct stream *stream;                                                                                             \
    CUresult error = stream_found(handle, &stream);                                                                    \
    if (error) RETURN(error)

CUresult api_cuStreamGetPriority(CUhandle handle, int *priority)
{
    STREAM_CALL(cuStreamGetPriority);
    *priority = stream->priority;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetFlags(CUhandle handle, unsigned *flags)
{
    STREAM_CALL(cuStreamGetFlags);
    *flags = stream->flags;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetId(CUhandle handle, unsigned long long *id)
{
    STREAM_CALL(cuStreamGetId);
    *id = stream->id;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetDevice(CUhandle handle, CUdevice *device)
{
    STREAM_CALL(cuStreamGetDevice);
    *device = stream->context->device;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetCtx(CUhandle handle, CUhandle *context)
{
    STREAM_CALL(cuStreamGetCtx);
    *context = stream->context->handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetCtx_v2(CUhandle handle, CUhandle *context, CUhandle *green_context)
{
    if (green_context) *green_context = 0;
    return api_cuStreamGetCtx(handle, context);
}

CUresult api_cuStreamQuery(CUhandle handle)
{
    STREAM_CALL(cuStreamQuery);
    error = capture_allows_waiting(stream);
    if (error) RETURN(error);
    RETURN(visible(stream_ready(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult api_cuStreamSynchronize(CUhandle handle)
{
    STREAM_CALL(cuStreamSynchronize);
    error = capture_allows_waiting(stream);
    if (error) RETURN(error);
    RETURN(wait_until(stream_ready(stream)));
}

CUresult api_cuStreamWaitEvent(CUhandle handle, CUhandle event_handle, unsigned flags)
{
    STREAM_CALL(cuStreamWaitEvent);
    trace_about(&call, handle, event_handle);
    struct event *event = object_find(event_handle, EVENT);
    if (!event) RETURN(CUDA_ERROR_INVALID_HANDLE);
    if (flags & ~(unsigned)EVENT_WAIT_EXTERNAL) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (flags & EVENT_WAIT_EXTERNAL) {
        if (!stream->capture) RETURN(CUDA_ERROR_INVALID_VALUE);
        error = capture_allows_work(stream);
        if (error) RETURN(error);
        captured(stream, WAIT_EVENT_NODE, 0, event_handle);
        RETURN(CUDA_SUCCESS);
    }
    bool done;
    error = capture_wait(stream, event, &done);
    if (error || done) RETURN(error);
    if (event->recorded && event->time > stream->tail) stream->tail = event->time;
    RETURN(CUDA_SUCCESS);
}
