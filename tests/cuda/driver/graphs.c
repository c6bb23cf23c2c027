/* Graphs: nodes with stored durations and what they depend on, and their replay. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct user_object {
    CUhandle handle;
    void *argument;
    void (*destroy)(void *);
    unsigned references;
};

struct user_reference {
    struct user_reference *next;
    CUhandle object;
    unsigned count;
};

/* What cuGraphInstantiate makes: a copy of the graph. One replay of it ends before the next begins. */
struct executable {
    CUhandle handle;
    struct graph *graph;
    int64_t tail;
};

static void user_object_drop(CUhandle handle, unsigned count)
{
    struct user_object *object = object_find(handle, USER_OBJECT);
    if (!object) return;
    object->references = object->references > count ? object->references - count : 0;
    if (object->references) return;
    if (object->destroy) call_later(object->destroy, object->argument);
    object_destroy(handle);
}

static void graph_keep(struct graph *graph, CUhandle object, unsigned count)
{
    struct user_reference *reference = malloc(sizeof *reference);
    *reference = (struct user_reference){graph->references, object, count};
    graph->references = reference;
}

struct graph *graph_create(void)
{
    CUhandle handle;
    struct graph *graph = object_create(GRAPH, sizeof *graph, &handle);
    graph->handle = handle;
    return graph;
}

void graph_destroy(struct graph *graph)
{
    for (size_t i = 0; i < graph->count; i++) {
        node_set_clear(&graph->nodes[i]->depends_on);
        object_destroy(graph->nodes[i]->handle);
    }
    free(graph->nodes);
    while (graph->references) {
        struct user_reference *reference = graph->references;
        graph->references = reference->next;
        user_object_drop(reference->object, reference->count);
        free(reference);
    }
    object_destroy(graph->handle);
}

static struct node *node_add(struct graph *graph, enum node_kind kind, int64_t duration_ns, CUhandle event)
{
    CUhandle handle;
    struct node *node = object_create(NODE, sizeof *node, &handle);
    *node = (struct node){
        .handle = handle, .kind = kind, .position = graph->count, .duration_ns = duration_ns, .event = event};
    graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof(struct node *));
    graph->nodes[graph->count++] = node;
    return node;
}

struct node *captured(struct stream *stream, enum node_kind kind, int64_t duration_ns, CUhandle event)
{
    struct node *node = node_add(stream->capture->graph, kind, duration_ns, event);
    node->depends_on = stream->last;
    stream->last = (struct node_set){1, malloc(sizeof(size_t))};
    stream->last.positions[0] = node->position;
    return node;
}

static struct graph *graph_copy(const struct graph *graph)
{
    struct graph *copy = graph_create();
    for (size_t i = 0; i < graph->count; i++) {
        const struct node *node = graph->nodes[i];
        node_set_copy(&node_add(copy, node->kind, node->duration_ns, node->event)->depends_on, &node->depends_on);
    }
    for (const struct user_reference *each = graph->references; each; each = each->next) {
        struct user_object *object = object_find(each->object, USER_OBJECT);
        if (!object) continue;
        object->references += each->count;
        graph_keep(copy, each->object, each->count);
    }
    return copy;
}

/* When the graph's last node ends if its first begins at `start`. Records its events, unless it is only asked how long. */
static int64_t run(const struct graph *graph, int64_t start, bool records)
{
    int64_t *ends = calloc(graph->count + 1, sizeof *ends);
    int64_t last = start;
    for (size_t i = 0; i < graph->count; i++) {
        const struct node *node = graph->nodes[i];
        int64_t begin = start;
        for (size_t j = 0; j < node->depends_on.count; j++)
            if (ends[node->depends_on.positions[j]] > begin) begin = ends[node->depends_on.positions[j]];
        struct event *event = object_find(node->event, EVENT);
        if (records && event && node->kind == WAIT_EVENT_NODE && event->recorded && event->time > begin)
            begin = event->time;
        ends[i] = later(begin, node->duration_ns);
        if (records && event && node->kind == EVENT_RECORD_NODE) event_happens(event, ends[i]);
        if (ends[i] > last) last = ends[i];
    }
    free(ends);
    return last;
}

CUresult api_cuGraphCreate(CUhandle *graph, unsigned flags)
{
    DRIVER_CALL(cuGraphCreate);
    if (flags) RETURN(CUDA_ERROR_INVALID_VALUE);
    *graph = graph_create()->handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphDestroy(CUhandle handle)
{
    DRIVER_CALL(cuGraphDestroy);
    trace_about(&call, 0, handle);
    struct graph *graph = object_find(handle, GRAPH);
    if (!graph) RETURN(CUDA_ERROR_INVALID_VALUE);
    graph_destroy(graph);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphGetNodes(CUhandle handle, CUhandle *nodes, size_t *count)
{
    DRIVER_CALL(cuGraphGetNodes);
    struct graph *graph = object_find(handle, GRAPH);
    if (!graph) RETURN(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; nodes && i < *count; i++) nodes[i] = i < graph->count ? graph->nodes[i]->handle : 0;
    if (!nodes || *count > graph->count) *count = graph->count;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphNodeGetType(CUhandle handle, int *type)
{
    DRIVER_CALL(cuGraphNodeGetType);
    struct node *node = object_find(handle, NODE);
    if (!node) RETURN(CUDA_ERROR_INVALID_VALUE);
    *type = (int)node->kind;
    RETURN(CUDA_SUCCESS);
}

static CUresult instantiate(CUhandle *created, CUhandle graph_handle)
{
    struct graph *graph = object_find(graph_handle, GRAPH);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    CUhandle handle;
    struct executable *executable = object_create(EXECUTABLE, sizeof *executable, &handle);
    executable->handle = handle;
    executable->graph = graph_copy(graph);
    *created = handle;
    return CUDA_SUCCESS;
}

CUresult api_cuGraphInstantiateWithFlags(CUhandle *created, CUhandle graph, unsigned long long flags)
{
    DRIVER_CALL(cuGraphInstantiateWithFlags);
    (void)flags;
    CUresult error = instantiate(created, graph);
    trace_about(&call, 0, error ? graph : *created);
    RETURN(error);
}

CUresult api_cuGraphInstantiateWithParams(CUhandle *created, CUhandle graph, void *parameters)
{
    DRIVER_CALL(cuGraphInstantiateWithParams);
    CUresult error = instantiate(created, graph);
    memset((char *)parameters + 24, 0, sizeof(int)); /* its own result */
    trace_about(&call, 0, error ? graph : *created);
    RETURN(error);
}

CUresult api_cuGraphExecDestroy(CUhandle handle)
{
    DRIVER_CALL(cuGraphExecDestroy);
    trace_about(&call, 0, handle);
    struct executable *executable = object_find(handle, EXECUTABLE);
    if (!executable) RETURN(CUDA_ERROR_INVALID_VALUE);
    graph_destroy(executable->graph);
    object_destroy(handle);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphUpload(CUhandle handle, CUhandle stream_handle)
{
    DRIVER_CALL(cuGraphUpload);
    trace_about(&call, stream_handle, handle);
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (error) RETURN(error);
    RETURN(object_find(handle, EXECUTABLE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult api_cuGraphLaunch(CUhandle handle, CUhandle stream_handle)
{
    DRIVER_CALL(cuGraphLaunch);
    trace_about(&call, stream_handle, handle);
    struct executable *executable = object_find(handle, EXECUTABLE);
    if (!executable) RETURN(CUDA_ERROR_INVALID_VALUE);
    struct stream *stream;
    CUresult error = stream_found(stream_handle, &stream);
    if (!error) error = capture_allows_work(stream);
    if (error) RETURN(error);
    if (stream->capture) {
        captured(stream, GRAPH_NODE, run(executable->graph, 0, false), 0);
        RETURN(CUDA_SUCCESS);
    }
    int64_t start = stream_start(stream);
    if (executable->tail > start) start = executable->tail;
    stream->tail = executable->tail = run(executable->graph, start, true);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuUserObjectCreate(CUhandle *created, void *argument, void (*destroy)(void *), unsigned references,
                                unsigned flags)
{
    DRIVER_CALL(cuUserObjectCreate);
    (void)flags;
    CUhandle handle;
    struct user_object *object = object_create(USER_OBJECT, sizeof *object, &handle);
    *object = (struct user_object){handle, argument, destroy, references};
    *created = handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuUserObjectRetain(CUhandle handle, unsigned count)
{
    DRIVER_CALL(cuUserObjectRetain);
    struct user_object *object = object_find(handle, USER_OBJECT);
    if (!object) RETURN(CUDA_ERROR_INVALID_VALUE);
    object->references += count;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuUserObjectRelease(CUhandle handle, unsigned count)
{
    DRIVER_CALL(cuUserObjectRelease);
    if (!object_find(handle, USER_OBJECT)) RETURN(CUDA_ERROR_INVALID_VALUE);
    user_object_drop(handle, count);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphRetainUserObject(CUhandle graph_handle, CUhandle handle, unsigned count, unsigned flags)
{
    DRIVER_CALL(cuGraphRetainUserObject);
    struct graph *graph = object_find(graph_handle, GRAPH);
    struct user_object *object = object_find(handle, USER_OBJECT);
    if (!graph || !object) RETURN(CUDA_ERROR_INVALID_VALUE);
    bool moves = flags & 1; /* CU_GRAPH_USER_OBJECT_MOVE: the caller's references become the graph's */
    if (!moves) object->references += count;
    graph_keep(graph, handle, count);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuGraphReleaseUserObject(CUhandle graph_handle, CUhandle handle, unsigned count)
{
    DRIVER_CALL(cuGraphReleaseUserObject);
    struct graph *graph = object_find(graph_handle, GRAPH);
    if (!graph) RETURN(CUDA_ERROR_INVALID_VALUE);
    for (struct user_reference **link = &graph->references; *link; link = &(*link)->next) {
        struct user_reference *reference = *link;
        if (reference->object != handle) continue;
        unsigned dropped = count < reference->count ? count : reference->count;
        reference->count -= dropped;
        if (!reference->count) {
            *link = reference->next;
            free(reference);
        }
        user_object_drop(handle, dropped);
        RETURN(CUDA_SUCCESS);
    }
    RETURN(CUDA_ERROR_INVALID_VALUE);
}
