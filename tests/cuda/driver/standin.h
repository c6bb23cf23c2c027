/* What the parts of the stand-in share. One lock guards everything; it is released only while a call sleeps. Functions
 * named api_cuX are the driver's functions as cuGetProcAddress_v2 hands them out; functions named standin_x are exported
 * for the tests; everything else expects the lock to be held. */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

#define EXPORT __attribute__((visibility("default")))

/* calls.c: the lock, and what happens at the beginning and end of every driver call */

struct function {
    const char *name;
    struct function *next;
    uint64_t calls;
    uint64_t fail_from; /* the call, counted as `calls`, that fails; 0: none */
    bool fail_always;   /* and all later ones */
    CUresult fail_with;
    int64_t cost_ns;   /* how long the call keeps its caller */
    bool unsafe;       /* prohibited while a capture forbids potentially unsafe calls */
    bool unsafe_first; /* its value when the library was loaded */
};

struct call {
    bool locked;
    CUresult result;
    long trace; /* position in the trace, or -1 */
};

/* Opens a driver function's body: counts the call, injects what is to be injected, takes the lock until it returns. */
#define DRIVER_CALL_FROM_START(name)                                                                                   \
    static struct function *called;                                                                                    \
    struct call call __attribute__((cleanup(call_end)));                                                               \
    if (call_begin(&call, &called, #name, false)) return call.result
#define DRIVER_CALL(name)                                                                                              \
    static struct function *called;                                                                                    \
    struct call call __attribute__((cleanup(call_end)));                                                               \
    if (call_begin(&call, &called, #name, true)) return call.result
#define RETURN(code) return call_result(&call, (code))

bool call_begin(struct call *call, struct function **cache, const char *name, bool needs_initialization);
CUresult call_result(struct call *call, CUresult result);
void call_end(struct call *call);
struct function *function_named(const char *name);
void functions_reset(void);
void driver_lock(void);
void driver_unlock(void);
uint64_t this_thread(void);
const char *intern(const char *text);

/* Runs `function(argument)` on this thread after the lock was released: for callbacks, which may take other locks. */
void call_later(void (*function)(void *), void *argument);

extern bool driver_initialized;

/* trace.c: what was called, for the tests to read */

struct trace_entry {
    const char *function;
    const char *kernel; /* of a launch, else NULL */
    int64_t time_ns;
    int64_t thread; /* as threading.get_native_id() gives it */
    uint64_t stream;
    uint64_t handle; /* the event, function or graph that the call was about */
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t cluster[3]; /* 0, 0, 0 without one */
    uint32_t shared_bytes;
    int32_t result;
    uint32_t arguments_size;
    const unsigned char *arguments;
};

long trace_begin(const char *function);
struct trace_entry *trace_of(const struct call *call); /* where to add details; never NULL */
void trace_about(const struct call *call, CUhandle stream, CUhandle handle);
void trace_reset(void);

/* clock.c: host time, device time, waiting */

#define NEVER_NS (INT64_C(1) << 61)

int64_t host_now(void);
int64_t later(int64_t time_ns, int64_t duration_ns); /* their sum, never beyond NEVER_NS */
int64_t submitted_now(void);                         /* when work submitted now can begin at the earliest */
bool visible(int64_t time_ns);                       /* whether the host sees that the device passed this time */
int64_t device_stamp(int64_t time_ns);               /* what the device's clock reads at this host time */
/* Both release the lock while they sleep: pointers may be stale afterwards. */
void host_pass(int64_t duration_ns);
CUresult wait_until(int64_t time_ns);
void clock_reset(void);

/* handles.c: objects behind integers that are never reused, so that a stale handle is found out */

enum kind { CONTEXT = 1, STREAM, EVENT, MODULE, LIBRARY, KERNEL, FUNCTION, GRAPH, NODE, EXECUTABLE, USER_OBJECT, POOL, KINDS };

void *object_create(enum kind kind, size_t size, CUhandle *handle); /* zeroed */
void *object_find(CUhandle handle, enum kind kind);                 /* NULL: no such object, or no longer */
void object_destroy(CUhandle handle);
uint64_t objects_live(enum kind kind);
void objects_each(enum kind kind, void (*visit)(void *object));

/* contexts.c */

struct context {
    CUhandle handle;
    CUdevice device;
    bool primary;
    int references;
    unsigned flags;
    struct stream *streams; /* all, the legacy one and those of threads among them */
    struct stream *legacy;
};

extern int device_count;
extern int driver_version;
struct context *current_context(void);
struct context *context_found(CUhandle handle);

/* streams.c */

/* Positions of graph nodes that the next captured node depends on. */
struct node_set {
    size_t count;
    size_t *positions;
};

struct stream {
    CUhandle handle;
    struct context *context;
    struct stream *next;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t thread; /* of a per-thread default stream, else 0 */
    int64_t tail;    /* when everything submitted so far is done */
    struct capture *capture;
    struct node_set last;
    CUhandle *last_handles; /* as handed out by cuStreamGetCaptureInfo */
};

extern bool default_stream_is_per_thread;
CUresult stream_found(CUhandle handle, struct stream **stream);
bool stream_blocking(const struct stream *stream);
int64_t stream_ready(const struct stream *stream); /* when its work, and what it implicitly waits for, is done */
int64_t stream_start(const struct stream *stream); /* when work submitted to it now begins */
int64_t stream_work(struct stream *stream, int64_t duration_ns); /* adds work; when it ends */
void streams_destroy(struct context *context);
void streams_reset(void);

/* events.c */

struct event {
    CUhandle handle;
    struct context *context;
    unsigned flags;
    bool recorded;
    int64_t time;
    int64_t stamp;
    uint64_t capture; /* identifier of the capture that it was last recorded in, else 0 */
    struct node_set captured;
};

void event_happens(struct event *event, int64_t time_ns);
void events_destroy(struct context *context);
void events_reset(void);

/* capture.c */

struct capture {
    uint64_t id;
    int mode;
    int status;
    uint64_t thread;
    struct stream *origin;
    struct graph *graph;
    struct capture *next;
};

bool unsafe_calls_prohibited(void); /* for this thread; if so, also invalidates what the attempt spoils */
CUresult capture_allows_work(struct stream *stream); /* error if submitting to the stream is not possible now */
CUresult capture_allows_waiting(struct stream *stream);
CUresult capture_allows_context_waiting(struct context *context);
CUresult capture_allows_event_use(struct event *event);
CUresult capture_wait(struct stream *stream, struct event *event, bool *done);
bool capturing_blocks_legacy(struct context *context, bool invalidate);
struct capture *capture_of_id(uint64_t id);
void capture_forget_stream(struct stream *stream);
void captures_reset(void);
void node_set_copy(struct node_set *to, const struct node_set *from);
void node_set_clear(struct node_set *set);

/* graphs.c */

enum node_kind { KERNEL_NODE = 0, MEMCPY_NODE, MEMSET_NODE, HOST_NODE, GRAPH_NODE, EMPTY_NODE, WAIT_EVENT_NODE, EVENT_RECORD_NODE };

struct node {
    CUhandle handle;
    enum node_kind kind;
    size_t position;
    int64_t duration_ns;
    CUhandle event;
    struct node_set depends_on;
};

struct graph {
    CUhandle handle;
    size_t count;
    struct node **nodes; /* each after those that it depends on */
    struct user_reference *references;
};

struct graph *graph_create(void);
void graph_destroy(struct graph *graph);
/* Adds a node after the stream's last one to the graph that the stream captures into. */
struct node *captured(struct stream *stream, enum node_kind kind, int64_t duration_ns, CUhandle event);

/* modules.c */

struct kernel_settings {
    const char *name;
    struct kernel_settings *next;
    int64_t duration_ns;
    int registers;
    int static_shared_bytes;
    int constant_bytes;
    int local_bytes;
    int max_threads;
};

struct kernel {
    CUhandle handle; /* of a library's kernel, else 0 */
    struct kernel_settings *settings;
    struct image *image;
    CUhandle library;
    CUhandle function; /* made when first asked for */
    int max_dynamic_shared_bytes;
    unsigned parameter_count;
    size_t *offsets;
    size_t *sizes;
};

struct kernel *launchable(CUhandle handle); /* behind a CUfunction or a CUkernel; NULL if it is neither */
size_t parameters_size(const struct kernel *kernel);
struct kernel_settings *kernel_settings_named(const char *name);
void kernel_settings_reset(void);
void modules_destroy(struct context *context);

/* memory.c */

void memory_reset(void);


#endif
