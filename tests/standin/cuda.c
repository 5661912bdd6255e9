/* A CUDA driver whose device is the host: device memory is host memory, and each stream is a thread that does its work
 * in order and late, so that reading what was not waited for shows. It has what trtdet and its stand-in for TensorRT
 * call, with the names and the order of arguments of cuda.h.
 *
 * Its faults are set by environment variables:
 *   CUDA_STANDIN_INIT      what cuInit answers, such as 803
 *   CUDA_STANDIN_DEVICES   how many devices there are (1); with 0, cuInit answers 100, as drivers do
 *   CUDA_STANDIN_SM        compute capability (89)
 *   CUDA_STANDIN_MEMORY    bytes of memory of the device (1 GiB)
 *   CUDA_STANDIN_PINNED    bytes that the host can lock (1 GiB)
 *   CUDA_STANDIN_FAULT     the code that every wait answers once a host function ran: a kernel that went wrong
 *   CUDA_STANDIN_UNCAPTURABLE  set: a host function cannot be captured, as work that needs the host cannot
 *   CUDA_STANDIN_OLD       set: entry points of graphs are missing, as in an old driver
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901
};

typedef struct Event { pthread_mutex_t lock; pthread_cond_t done; int pending, recorded; struct timespec at; } Event;
typedef void (*HostFunction)(void *);
typedef struct Work {
    enum { COPY, CALL, RECORD, LAUNCH } kind;
    void *to; const void *from; size_t size;
    HostFunction call; void *argument;
    Event *event;
    struct Graph *graph;
    struct Work *next;
} Work;
typedef struct Graph { Work *first, *last; } Graph;
typedef struct Stream {
    pthread_t thread; pthread_mutex_t lock; pthread_cond_t changed;
    Work *first, *last; int busy, ending;
    int capturing, invalid, mode; Graph *graph; pthread_t owner;
} Stream;
typedef struct Block { void *address; size_t size; int pinned; struct Block *next; } Block;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int started, failed, primary, global_captures;
static Block *blocks;
static long live[6]; /* device memory, pinned memory, streams, events, graphs, contexts */
static __thread int current;
static __thread int thread_captures;

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

/* For tests: how many of each kind are alive. */
long standin_live(int kind) { return live[kind]; }

static void count(int kind, int change)
{
    __atomic_add_fetch(&live[kind], change, __ATOMIC_SEQ_CST);
}

static CUresult ready(void)
{
    if (!started) return NOT_INITIALIZED;
    return current ? (failed ? failed : SUCCESS) : INVALID_CONTEXT;
}

/* What must not be called while a stream captures: in any thread with the global mode, else in the capturing one. */
static CUresult unsafe(void)
{
    CUresult code = ready();
    if (code) return code;
    return global_captures || thread_captures ? CAPTURE_UNSUPPORTED : SUCCESS;
}

CUresult cuInit(unsigned flags)
{
    (void)flags;
    long code = setting("CUDA_STANDIN_INIT", 0);
    if (code) return (CUresult)code;
    if (setting("CUDA_STANDIN_DEVICES", 1) == 0) return NO_DEVICE;
    started = 1;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }

CUresult cuGetErrorString(CUresult code, const char **text)
{
    static const struct { int code; const char *text; } known[] = {
        {0, "no error"}, {1, "invalid argument"}, {2, "out of memory"}, {3, "initialization error"},
        {36, "API call is not supported in the installed CUDA driver"}, {100, "no CUDA-capable device is detected"},
        {101, "invalid device ordinal"}, {201, "invalid device context"}, {400, "invalid resource handle"},
        {600, "device not ready"}, {700, "an illegal memory access was encountered"},
        {719, "unspecified launch failure"}, {803, "system has unsupported display driver / cuda driver combination"},
        {900, "operation not permitted when stream is capturing"},
        {901, "operation failed due to a previous error during capture"}, {999, "unknown error"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].code == code) { *text = known[i].text; return SUCCESS; }
    *text = NULL;
    return INVALID_VALUE;
}

CUresult cuDeviceGetCount(int *n) { *n = (int)setting("CUDA_STANDIN_DEVICES", 1); return started ? SUCCESS : NOT_INITIALIZED; }

CUresult cuDeviceGet(int *device, int index)
{
    if (!started) return NOT_INITIALIZED;
    if (index < 0 || index >= setting("CUDA_STANDIN_DEVICES", 1)) return INVALID_DEVICE;
    *device = index;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, int device)
{
    (void)device;
    snprintf(name, (size_t)size, "Stand-in GPU");
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    long sm = setting("CUDA_STANDIN_SM", 89);
    if (attribute != 75 && attribute != 76) return INVALID_VALUE;
    *value = (int)(attribute == 75 ? sm / 10 : sm % 10);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = (size_t)setting("CUDA_STANDIN_MEMORY", 1L << 30);
    return SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, (size_t)size, "0000:%02X:00.0", device + 1);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    if (!started) return NOT_INITIALIZED;
    *context = &primary;
    count(5, 1);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; count(5, -1); return SUCCESS; }

CUresult cuCtxPushCurrent_v2(void *context)
{
    if (context != &primary) return INVALID_CONTEXT;
    current++;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **context)
{
    if (!current) return INVALID_CONTEXT;
    current--;
    if (context) *context = &primary;
    return SUCCESS;
}

static size_t used(int pinned)
{
    size_t sum = 0;
    for (Block *block = blocks; block; block = block->next) sum += block->pinned == pinned ? block->size : 0;
    return sum;
}

static CUresult reserve(void **address, size_t size, int pinned)
{
    CUresult code = unsafe();
    if (code) return code;
    size_t limit = (size_t)setting(pinned ? "CUDA_STANDIN_PINNED" : "CUDA_STANDIN_MEMORY", 1L << 30);
    pthread_mutex_lock(&guard);
    if (!size || used(pinned) + size > limit) {
        pthread_mutex_unlock(&guard);
        return size ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    Block *block = malloc(sizeof *block);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    *block = (Block){memory, size, pinned, blocks};
    memset(block->address, 0xA5, size); /* memory is not zero before something is written */
    blocks = block;
    pthread_mutex_unlock(&guard);
    *address = block->address;
    count(pinned, 1);
    return SUCCESS;
}

static CUresult release(void *address, int pinned)
{
    CUresult code = unsafe();
    if (code) return code;
    pthread_mutex_lock(&guard);
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->address == address && (*at)->pinned == pinned) {
            Block *block = *at;
            *at = block->next;
            pthread_mutex_unlock(&guard);
            munmap(block->address, block->size); /* so that whoever still uses it dies of it */
            free(block);
            count(pinned, -1);
            return SUCCESS;
        }
    pthread_mutex_unlock(&guard);
    return INVALID_VALUE;
}

/* Whether so many bytes from there on are memory of the device. */
static int is_device(const void *address, size_t size)
{
    int found = 0;
    pthread_mutex_lock(&guard);
    for (Block *block = blocks; block && !found; block = block->next) {
        const char *start = block->address, *at = address;
        found = !block->pinned && at >= start && at + size <= start + block->size;
    }
    pthread_mutex_unlock(&guard);
    return found;
}

CUresult cuMemAlloc_v2(uintptr_t *address, size_t size) { return reserve((void **)address, size, 0); }
CUresult cuMemFree_v2(uintptr_t address) { return release((void *)address, 0); }
CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) { (void)flags; return reserve(address, size, 1); }
CUresult cuMemFreeHost(void *address) { return release(address, 1); }

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult code = ready();
    if (code) return code;
    pthread_mutex_lock(&guard);
    *total = (size_t)setting("CUDA_STANDIN_MEMORY", 1L << 30);
    *free_bytes = *total - used(0);
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}

static void perform(const Work *work)
{
    if (work->kind == COPY) memcpy(work->to, work->from, work->size);
    if (work->kind == CALL) {
        work->call(work->argument);
        if (setting("CUDA_STANDIN_FAULT", 0)) failed = (int)setting("CUDA_STANDIN_FAULT", 0);
    }
    if (work->kind == LAUNCH)
        for (Work *one = work->graph->first; one; one = one->next) perform(one);
    if (work->kind == RECORD) {
        Event *event = work->event;
        pthread_mutex_lock(&event->lock);
        clock_gettime(CLOCK_MONOTONIC, &event->at);
        event->recorded = 1;
        event->pending--;
        pthread_cond_broadcast(&event->done);
        pthread_mutex_unlock(&event->lock);
    }
}

static void *worker(void *argument)
{
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ending) pthread_cond_wait(&stream->changed, &stream->lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        pthread_mutex_unlock(&stream->lock);
        usleep(200); /* late enough that a missing wait reads what was there before */
        perform(work);
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->busy--;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static CUresult enqueue(Stream *stream, Work work)
{
    CUresult code = ready();
    if (code) return code;
    if (!stream) return INVALID_HANDLE;
    if (stream->capturing && stream->invalid) return CAPTURE_INVALIDATED;
    if (stream->capturing && work.kind == CALL && getenv("CUDA_STANDIN_UNCAPTURABLE")) {
        stream->invalid = 1;
        return CAPTURE_UNSUPPORTED;
    }
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    if (stream->capturing) {
        if (stream->graph->last) stream->graph->last->next = kept; else stream->graph->first = kept;
        stream->graph->last = kept;
        return SUCCESS;
    }
    pthread_mutex_lock(&stream->lock);
    if (stream->last) stream->last->next = kept; else stream->first = kept;
    stream->last = kept;
    stream->busy++;
    if (work.kind == RECORD) {
        pthread_mutex_lock(&work.event->lock);
        work.event->pending++;
        pthread_mutex_unlock(&work.event->lock);
    }
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

CUresult cuStreamCreate(Stream **stream, unsigned flags)
{
    (void)flags;
    CUresult code = ready();
    if (code) return code;
    Stream *made = calloc(1, sizeof *made);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    pthread_create(&made->thread, NULL, worker, made);
    *stream = made;
    count(2, 1);
    return SUCCESS;
}

CUresult cuStreamDestroy_v2(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    count(2, -1);
    return ready();
}

CUresult cuStreamSynchronize(Stream *stream)
{
    CUresult code = ready();
    if (code) return code;
    if (stream->capturing) { stream->invalid = 1; return CAPTURE_UNSUPPORTED; }
    pthread_mutex_lock(&stream->lock);
    while (stream->busy) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return failed;
}

CUresult cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, Stream *stream)
{
    if (!is_device((void *)to, size)) return INVALID_VALUE;
    return enqueue(stream, (Work){.kind = COPY, .to = (void *)to, .from = from, .size = size});
}

CUresult cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, Stream *stream)
{
    if (!is_device((void *)from, size)) return INVALID_VALUE;
    return enqueue(stream, (Work){.kind = COPY, .to = to, .from = (void *)from, .size = size});
}

CUresult cuLaunchHostFunc(Stream *stream, HostFunction call, void *argument)
{
    return enqueue(stream, (Work){.kind = CALL, .call = call, .argument = argument});
}

CUresult cuEventCreate(Event **event, unsigned flags)
{
    (void)flags;
    CUresult code = ready();
    if (code) return code;
    *event = calloc(1, sizeof **event);
    pthread_mutex_init(&(*event)->lock, NULL);
    pthread_cond_init(&(*event)->done, NULL);
    count(3, 1);
    return SUCCESS;
}

CUresult cuEventDestroy_v2(Event *event) { free(event); count(3, -1); return ready(); }
CUresult cuEventRecord(Event *event, Stream *stream) { return enqueue(stream, (Work){.kind = RECORD, .event = event}); }

CUresult cuEventElapsedTime_v2(float *ms, Event *start, Event *end)
{
    CUresult code = ready();
    if (code) return code;
    if (start->pending || end->pending) return NOT_READY;
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    *ms = (float)(1e3 * (double)(end->at.tv_sec - start->at.tv_sec) + 1e-6 * (double)(end->at.tv_nsec - start->at.tv_nsec));
    return SUCCESS;
}

CUresult cuStreamBeginCapture_v2(Stream *stream, int mode)
{
    CUresult code = ready();
    if (code) return code;
    stream->capturing = 1;
    stream->invalid = 0;
    stream->mode = mode;
    stream->graph = calloc(1, sizeof *stream->graph);
    if (mode == 0) __atomic_add_fetch(&global_captures, 1, __ATOMIC_SEQ_CST);
    if (mode == 1) thread_captures++;
    return SUCCESS;
}

static void drop(Graph *graph)
{
    for (Work *one = graph->first, *next; one; one = next) { next = one->next; free(one); }
    free(graph);
}

CUresult cuStreamEndCapture(Stream *stream, Graph **graph)
{
    *graph = NULL;
    if (!stream->capturing) return INVALID_VALUE;
    stream->capturing = 0;
    if (stream->mode == 0) __atomic_add_fetch(&global_captures, -1, __ATOMIC_SEQ_CST);
    if (stream->mode == 1) thread_captures--;
    if (stream->invalid) { drop(stream->graph); return CAPTURE_INVALIDATED; }
    *graph = stream->graph;
    count(4, 1);
    return SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(Graph **made, Graph *graph, unsigned long long flags)
{
    (void)flags;
    CUresult code = ready();
    if (code) return code;
    Graph *copy = calloc(1, sizeof *copy);
    for (Work *one = graph->first; one; one = one->next) {
        Work *kept = malloc(sizeof *kept);
        *kept = *one;
        kept->next = NULL;
        if (copy->last) copy->last->next = kept; else copy->first = kept;
        copy->last = kept;
    }
    *made = copy;
    count(4, 1);
    return SUCCESS;
}

CUresult cuGraphDestroy(Graph *graph) { drop(graph); count(4, -1); return SUCCESS; }
CUresult cuGraphExecDestroy(Graph *graph) { drop(graph); count(4, -1); return ready(); }
CUresult cuGraphLaunch(Graph *graph, Stream *stream) { return enqueue(stream, (Work){.kind = LAUNCH, .graph = graph}); }

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
    (void)version;
    (void)flags;
#define ENTRY(name, function) {name, (void *)function}
    static const struct { const char *name; void *function; } entries[] = {
        ENTRY("cuInit", cuInit), ENTRY("cuDriverGetVersion", cuDriverGetVersion),
        ENTRY("cuGetErrorString", cuGetErrorString), ENTRY("cuDeviceGetCount", cuDeviceGetCount),
        ENTRY("cuDeviceGet", cuDeviceGet), ENTRY("cuDeviceGetName", cuDeviceGetName),
        ENTRY("cuDeviceGetAttribute", cuDeviceGetAttribute), ENTRY("cuDeviceTotalMem", cuDeviceTotalMem_v2),
        ENTRY("cuDeviceGetPCIBusId", cuDeviceGetPCIBusId), ENTRY("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain),
        ENTRY("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2), ENTRY("cuCtxPushCurrent", cuCtxPushCurrent_v2),
        ENTRY("cuCtxPopCurrent", cuCtxPopCurrent_v2), ENTRY("cuMemAlloc", cuMemAlloc_v2), ENTRY("cuMemFree", cuMemFree_v2),
        ENTRY("cuMemHostAlloc", cuMemHostAlloc), ENTRY("cuMemFreeHost", cuMemFreeHost), ENTRY("cuMemGetInfo", cuMemGetInfo_v2),
        ENTRY("cuStreamCreate", cuStreamCreate), ENTRY("cuStreamDestroy", cuStreamDestroy_v2),
        ENTRY("cuStreamSynchronize", cuStreamSynchronize), ENTRY("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2),
        ENTRY("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2), ENTRY("cuLaunchHostFunc", cuLaunchHostFunc),
        ENTRY("cuEventCreate", cuEventCreate), ENTRY("cuEventDestroy", cuEventDestroy_v2), ENTRY("cuEventRecord", cuEventRecord),
        ENTRY("cuEventElapsedTime", cuEventElapsedTime_v2), ENTRY("cuStreamBeginCapture", cuStreamBeginCapture_v2),
        ENTRY("cuStreamEndCapture", cuStreamEndCapture), ENTRY("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags),
        ENTRY("cuGraphDestroy", cuGraphDestroy), ENTRY("cuGraphExecDestroy", cuGraphExecDestroy),
        ENTRY("cuGraphLaunch", cuGraphLaunch)};
    *address = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(entries[i].name, name) && !(getenv("CUDA_STANDIN_OLD") && strstr(name, "Graph")))
            *address = entries[i].function;
    if (status) *status = *address ? 0 : 1;
    return *address ? SUCCESS : NOT_FOUND;
}
