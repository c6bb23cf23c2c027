/* Stream capture: which calls it forbids to whom, what spoils it, and how streams join it and leave it. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static struct capture *captures;
static uint64_t last_id;
static __thread int thread_mode = CAPTURE_MODE_GLOBAL;

void node_set_clear(struct node_set *set)
{
    free(set->positions);
    *set = (struct node_set){0};
}

void node_set_copy(struct node_set *to, const struct node_set *from)
{
    node_set_clear(to);
    if (!from->count) return;
    to->count = from->count;
    to->positions = malloc(from->count * sizeof *to->positions);
    memcpy(to->positions, from->positions, from->count * sizeof *to->positions);
}

static void node_set_join(struct node_set *to, const struct node_set *from)
{
    for (size_t i = 0; i < from->count; i++) {
        bool known = false;
        for (size_t j = 0; j < to->count; j++) known = known || to->positions[j] == from->positions[i];
        if (known) continue;
        to->positions = realloc(to->positions, (to->count + 1) * sizeof *to->positions);
        to->positions[to->count++] = from->positions[i];
    }
}

struct capture *capture_of_id(uint64_t id)
{
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (capture->id == id) return capture;
    return NULL;
}

static void invalidate(struct capture *capture) { capture->status = CAPTURE_INVALIDATED; }

bool unsafe_calls_prohibited(void)
{
    bool prohibited = false;
    if (thread_mode == CAPTURE_MODE_RELAXED) return false;
    for (struct capture *capture = captures; capture; capture = capture->next) {
        bool own = capture->thread == this_thread() && capture->mode != CAPTURE_MODE_RELAXED;
        bool of_other = capture->thread != this_thread() && capture->mode == CAPTURE_MODE_GLOBAL &&
                        thread_mode == CAPTURE_MODE_GLOBAL;
        if (!own && !of_other) continue;
        invalidate(capture);
        prohibited = true;
    }
    return prohibited;
}

bool capturing_blocks_legacy(struct context *context, bool spoil)
{
    bool blocked = false;
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        if (!stream->capture || !stream_blocking(stream)) continue;
        blocked = true;
        if (spoil) invalidate(stream->capture);
    }
    return blocked;
}

static bool legacy_is_blocked(struct stream *stream)
{
    return stream->context->legacy == stream && capturing_blocks_legacy(stream->context, true);
}

CUresult capture_allows_work(struct stream *stream)
{
    if (legacy_is_blocked(stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    bool invalidated = stream->capture && stream->capture->status == CAPTURE_INVALIDATED;
    return invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult capture_allows_waiting(struct stream *stream)
{
    CUresult error = capture_allows_work(stream);
    if (error || !stream->capture) return error;
    invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_allows_context_waiting(struct context *context)
{
    CUresult error = CUDA_SUCCESS;
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        if (!stream->capture) continue;
        invalidate(stream->capture);
        error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return error;
}

CUresult capture_allows_event_use(struct event *event)
{
    if (!event->capture) return CUDA_SUCCESS;
    struct capture *capture = capture_of_id(event->capture);
    if (capture) invalidate(capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

/* cuStreamWaitEvent as far as captures are concerned; `done` tells whether nothing is left to do. */
CUresult capture_wait(struct stream *stream, struct event *event, bool *done)
{
    *done = false;
    CUresult error = capture_allows_work(stream);
    if (error) return error;
    *done = !event->recorded;
    if (*done) return CUDA_SUCCESS;
    struct capture *of_event = event->capture ? capture_of_id(event->capture) : NULL;
    if (!stream->capture && !event->capture) return CUDA_SUCCESS;
    *done = true;
    if (!of_event || of_event != stream->capture) {
        if (stream->capture) invalidate(stream->capture);
        if (of_event && stream->capture) invalidate(of_event);
        if (!event->capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        if (!of_event) return CUDA_ERROR_CAPTURED_EVENT;
        if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (of_event->status == CAPTURE_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->context->legacy == stream) {
        invalidate(of_event);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    stream->capture = of_event;
    node_set_join(&stream->last, &event->captured);
    return CUDA_SUCCESS;
}

static struct capture *leaving;

static void leave(void *object)
{
    struct context *context = object;
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        if (stream->capture != leaving) continue;
        stream->capture = NULL;
        node_set_clear(&stream->last);
    }
}

/* Takes all its streams out of the capture and hands over its graph. */
static struct graph *finish(struct capture *capture)
{
    struct capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    leaving = capture;
    objects_each(CONTEXT, leave);
    struct graph *graph = capture->graph;
    free(capture);
    return graph;
}

void captures_reset(void)
{
    thread_mode = CAPTURE_MODE_GLOBAL;
    while (captures) graph_destroy(finish(captures));
}

void capture_forget_stream(struct stream *stream)
{
    /* What a forked stream did stays in the graph, and may have been joined. */
    if (stream->capture && stream->capture->origin == stream) graph_destroy(finish(stream->capture));
}

/* Whether the stream that began the capture waits, at its end, for all work of those that joined. */
static bool forks_joined(struct capture *capture)
{
    struct graph *graph = capture->graph;
    const struct node_set *last = &capture->origin->last;
    bool *joined = calloc(graph->count + 1, sizeof *joined);
    bool all = true;
    for (size_t i = 0; i < last->count; i++) joined[last->positions[i]] = true;
    for (size_t at = graph->count; at-- > 0;) {
        all = all && joined[at];
        for (size_t i = 0; i < graph->nodes[at]->depends_on.count; i++)
            joined[graph->nodes[at]->depends_on.positions[i]] = true;
    }
    free(joined);
    return all;
}

CUresult api_cuStreamBeginCapture(CUhandle handle, int mode)
{
    DRIVER_CALL(cuStreamBeginCapture);
    trace_about(&call, handle, 0);
    struct stream *stream;
    CUresult error = stream_found(handle, &stream);
    if (error) RETURN(error);
    if (mode < CAPTURE_MODE_GLOBAL || mode > CAPTURE_MODE_RELAXED) RETURN(CUDA_ERROR_INVALID_VALUE);
    if (stream->context->legacy == stream) RETURN(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->capture) RETURN(CUDA_ERROR_ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture);
    *capture = (struct capture){.id = ++last_id,
                                .mode = mode,
                                .status = CAPTURE_ACTIVE,
                                .thread = this_thread(),
                                .origin = stream,
                                .graph = graph_create(),
                                .next = captures};
    captures = stream->capture = capture;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamEndCapture(CUhandle handle, CUhandle *graph)
{
    DRIVER_CALL(cuStreamEndCapture);
    trace_about(&call, handle, 0);
    *graph = 0;
    struct stream *stream;
    CUresult error = stream_found(handle, &stream);
    if (error) RETURN(error);
    struct capture *capture = stream->capture;
    if (!capture) RETURN(CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin != stream) {
        invalidate(capture);
        RETURN(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if (capture->mode != CAPTURE_MODE_RELAXED && capture->thread != this_thread())
        RETURN(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    if (capture->status == CAPTURE_INVALIDATED)
        error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!forks_joined(capture))
        error = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    struct graph *made = finish(capture);
    if (error)
        graph_destroy(made);
    else
        *graph = made->handle;
    RETURN(error);
}

CUresult api_cuStreamIsCapturing(CUhandle handle, int *status)
{
    DRIVER_CALL(cuStreamIsCapturing);
    trace_about(&call, handle, 0);
    struct stream *stream;
    CUresult error = stream_found(handle, &stream);
    if (error) RETURN(error);
    if (stream->context->legacy == stream && capturing_blocks_legacy(stream->context, false))
        RETURN(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = stream->capture ? stream->capture->status : CAPTURE_NONE;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetCaptureInfo_v3(CUhandle handle, int *status, uint64_t *id, CUhandle *graph,
                                       const CUhandle **nodes, const void **edges, size_t *count)
{
    DRIVER_CALL(cuStreamGetCaptureInfo);
    trace_about(&call, handle, 0);
    struct stream *stream;
    CUresult error = stream_found(handle, &stream);
    if (error) RETURN(error);
    if (stream->context->legacy == stream && capturing_blocks_legacy(stream->context, false))
        RETURN(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    struct capture *capture = stream->capture;
    *status = capture ? capture->status : CAPTURE_NONE;
    if (edges) *edges = NULL;
    if (*status != CAPTURE_ACTIVE) RETURN(CUDA_SUCCESS);
    free(stream->last_handles);
    stream->last_handles = calloc(stream->last.count + 1, sizeof *stream->last_handles);
    for (size_t i = 0; i < stream->last.count; i++)
        stream->last_handles[i] = capture->graph->nodes[stream->last.positions[i]]->handle;
    if (id) *id = capture->id;
    if (graph) *graph = capture->graph->handle;
    if (nodes) *nodes = stream->last_handles;
    if (count) *count = stream->last.count;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuStreamGetCaptureInfo_v2(CUhandle handle, int *status, uint64_t *id, CUhandle *graph,
                                       const CUhandle **nodes, size_t *count)
{
    return api_cuStreamGetCaptureInfo_v3(handle, status, id, graph, nodes, NULL, count);
}

CUresult api_cuThreadExchangeStreamCaptureMode(int *mode)
{
    DRIVER_CALL(cuThreadExchangeStreamCaptureMode);
    if (*mode < CAPTURE_MODE_GLOBAL || *mode > CAPTURE_MODE_RELAXED) RETURN(CUDA_ERROR_INVALID_VALUE);
    int previous = thread_mode;
    thread_mode = *mode;
    *mode = previous;
    RETURN(CUDA_SUCCESS);
}
