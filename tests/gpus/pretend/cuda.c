/* The pretend libcuda.so.1: calls, devices, contexts and memory. Streams and events are in
 * streams.c. */
#include "pretend.h"

struct context {
    int ordinal, retained;
};
enum kind { DEVICE, PINNED, REGISTERED };
struct range {
    struct range *next;
    uintptr_t start;
    size_t bytes;
    enum kind kind;
    int ordinal;
};
struct call {
    char name[48];
    long count, skip;
    int code;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
long delay_us;
static int state; /* 0 before cuInit, 1 after it, -1 in a child forked after it, where CUDA cannot
                     be used */
static struct context contexts[MAX_GPUS];
static struct range *ranges;
static struct call calls[MAX_NAMES];
static long pageable, straddling;
static _Thread_local struct context *stack[MAX_DEPTH];
static _Thread_local int depth;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static int gpus(void) {
    int n = number("PRETEND_GPUS", 1);
    return n < 0 ? 0 : n > MAX_GPUS ? MAX_GPUS : n;
}
int locked(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- calls: counted by name, and failed on demand ---- */

static struct call *call_named(const char *name) {
    struct call *c = calls;
    while (c < calls + MAX_NAMES - 1 && c->name[0] && strcmp(c->name, name)) c++;
    if (!c->name[0]) snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}

/* Counts a call and returns the error that a test requests, or 0. Also counts the calls of nccl.c.
 */
int pretend_call(const char *name) {
    pthread_mutex_lock(&lock);
    struct call *c = call_named(name);
    int code = c->code && c->skip-- == 0 ? c->code : OK;
    if (code) c->code = OK;
    c->count++;
    return locked(code);
}

long pretend_count(const char *name) {
    pthread_mutex_lock(&lock);
    long count = call_named(name)->count;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Makes one call of `name`, after `skip` more of them, do nothing and return `code`. */
void pretend_fail(const char *name, long skip, int code) {
    pthread_mutex_lock(&lock);
    struct call *c = call_named(name);
    c->skip = skip;
    c->code = code;
    pthread_mutex_unlock(&lock);
}

int enter(const char *name, enum need need) {
    int code = pretend_call(name);
    if (code || need == NOTHING) return code;
    if (state != 1) return NOT_INITIALIZED;
    if (need == INITIALIZED) return OK;
    if (current() < 0) return INVALID_CONTEXT;
    return stack[depth - 1]->retained ? OK : CONTEXT_IS_DESTROYED;
}

int cuGetErrorName(int code, const char **text) {
    static const struct {
        int code;
        const char *name;
    } names[] = {{OK, "CUDA_SUCCESS"},
                 {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                 {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
                 {100, "CUDA_ERROR_NO_DEVICE"},
                 {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                 {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
                 {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
                 {NOT_READY, "CUDA_ERROR_NOT_READY"},
                 {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                 {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
                 {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                 {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
                 {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    *text = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) *text = names[i].name;
    return *text ? OK : INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

/* ---- devices and contexts ---- */

/* The parent's threads do not exist in the child, and the lock's owner is unknown. */
static void forked(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    state = -1;
}

int cuInit(unsigned flags) {
    ENTER(NOTHING);
    if (flags) return INVALID_VALUE;
    if (state < 0) return NOT_INITIALIZED;
    if (!gpus()) return 100; /* CUDA_ERROR_NO_DEVICE */
    pthread_mutex_lock(&lock);
    if (!state) {
        pthread_atfork(NULL, NULL, forked);
        delay_us = number("PRETEND_DELAY_US", 0);
    }
    state = 1;
    return locked(OK);
}

int cuDriverGetVersion(int *version) {
    ENTER(NOTHING);
    *version = 12040;
    return OK;
}
int cuDeviceGetCount(int *count) {
    ENTER(INITIALIZED);
    *count = gpus();
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER(INITIALIZED);
    if (ordinal < 0 || ordinal >= gpus()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetName(char *name, int bytes, int device) {
    ENTER(INITIALIZED);
    if (device < 0 || device >= gpus()) return INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "Pretend GPU");
    return OK;
}

static int bus(int device) { return (number("PRETEND_FIRST_GPU", 0) + device) & 0xff; }

int cuDeviceGetPCIBusId(char *id, int bytes, int device) {
    ENTER(INITIALIZED);
    if (device < 0 || device >= gpus()) return INVALID_DEVICE;
    if (bytes < 13) return INVALID_VALUE;
    snprintf(id, (size_t)bytes, "0000:%02x:00.0", (unsigned)bus(device));
    return OK;
}

/* Attributes of a large GPU; 0 for those that no test has needed yet. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(INITIALIZED);
    if (device < 0 || device >= gpus()) return INVALID_DEVICE;
    switch (attribute) {
    case 33:
        *value = bus(device);
        break; /* PCI_BUS_ID */
    case 40:
        *value = 3;
        break; /* ASYNC_ENGINE_COUNT */
    case 75:
        *value = 9;
        break; /* COMPUTE_CAPABILITY_MAJOR */
    case 19:
    case 31:
    case 41:
    case 78:
    case 91:
    case 99:
        *value = 1;
        break; /* maps, registers and shares host memory; priorities */
    default:
        *value = 0;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(INITIALIZED);
    if (device < 0 || device >= gpus()) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    contexts[device].ordinal = device;
    contexts[device].retained++;
    *context = &contexts[device];
    return locked(OK);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(INITIALIZED);
    if (device < 0 || device >= gpus()) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!contexts[device].retained) return locked(INVALID_CONTEXT);
    contexts[device].retained--;
    return locked(OK);
}

static int is_context(void *handle) {
    for (int i = 0; i < MAX_GPUS; i++)
        if (handle == &contexts[i]) return contexts[i].retained > 0;
    return 0;
}

int current(void) { return depth && stack[depth - 1] ? stack[depth - 1]->ordinal : -1; }

/* The same for nccl.c, with the GPU's place on the bus. */
int pretend_gpu(int *where) {
    if (current() >= 0) *where = bus(current());
    return current();
}

int cuCtxPushCurrent_v2(void *context) {
    ENTER(INITIALIZED);
    if (!is_context(context) || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) {
    ENTER(INITIALIZED);
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return OK;
}

/* Nothing is captured into a graph; the mode is only stored, so tests can check that it is
 * restored. */
int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(INITIALIZED);
    static __thread int now;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    int before = now;
    now = *mode, *mode = before;
    return OK;
}

int cuCtxSetCurrent(void *context) {
    ENTER(INITIALIZED);
    if (context && !is_context(context)) return INVALID_CONTEXT;
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

int cuCtxGetCurrent(void **context) {
    ENTER(INITIALIZED);
    *context = depth ? stack[depth - 1] : NULL;
    return OK;
}

int cuCtxGetDevice(int *device) {
    ENTER(CONTEXT);
    *device = current();
    return OK;
}

/* ---- memory: kinds of address ranges ---- */

static struct range *range_at(uintptr_t address) {
    struct range *r = ranges;
    while (r && address - r->start >= r->bytes) r = r->next;
    return r;
}

static void add(uintptr_t start, size_t bytes, enum kind kind) {
    struct range *r = malloc(sizeof *r);
    *r = (struct range){ranges, start, bytes, kind, current() < 0 ? 0 : current()};
    ranges = r;
}

/* Removes the range that begins at `start`. */
static int take(uintptr_t start, enum kind kind) {
    struct range **at = &ranges;
    while (*at && ((*at)->start != start || (*at)->kind != kind)) at = &(*at)->next;
    struct range *r = *at;
    if (!r) return 0;
    *at = r->next;
    free(r);
    return 1;
}

/* Number of ranges that cover all of it; 0 if no range covers any byte, -1 if only a part is
 * covered. */
static int pieces(uintptr_t start, size_t bytes) {
    uintptr_t end = start + bytes, at = start;
    int found = 0;
    for (struct range *r; at < end && (r = range_at(at)); found++) at = r->start + r->bytes;
    if (at >= end) return found;
    for (struct range *r = ranges; r; r = r->next)
        if (r->start < end && start < r->start + r->bytes) return -1;
    return 0;
}

/* Whether the driver knows all of it, so that a GPU could read it. */
int pretend_known(uintptr_t start, size_t bytes) {
    pthread_mutex_lock(&lock);
    return locked(!bytes || pieces(start, bytes) > 0);
}

/* Declares it memory of this thread's GPU (without a context: of the first one) until it is
 * forgotten. Tests' arrays are in such memory. */
void pretend_device_memory(uintptr_t start, size_t bytes) {
    pthread_mutex_lock(&lock);
    add(start, bytes, DEVICE);
    pthread_mutex_unlock(&lock);
}
int pretend_forget_memory(uintptr_t start) {
    pthread_mutex_lock(&lock);
    return locked(take(start, DEVICE) ? OK : INVALID_VALUE);
}

static int allocate(void **memory, size_t bytes, enum kind kind) {
    if (!bytes) return INVALID_VALUE;
    *memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    if (!*memory) return OUT_OF_MEMORY;
    memset(*memory, 0xA5, bytes); /* so that no test finds zeros by luck */
    pthread_mutex_lock(&lock);
    add((uintptr_t)*memory, bytes, kind);
    return locked(OK);
}

/* Like CUDA, waits for all streams before it frees memory. */
static int give_back(void *memory, enum kind kind) {
    pthread_mutex_lock(&lock);
    sit_out();
    int there = take((uintptr_t)memory, kind);
    pthread_mutex_unlock(&lock);
    if (there) free(memory);
    return there ? OK : INVALID_VALUE;
}

int cuMemAlloc_v2(void **memory, size_t bytes) {
    ENTER(CONTEXT);
    return allocate(memory, bytes, DEVICE);
}
int cuMemFree_v2(void *memory) {
    ENTER(CONTEXT);
    return memory ? give_back(memory, DEVICE) : OK;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    return allocate(memory, bytes, PINNED);
}
int cuMemFreeHost(void *memory) {
    ENTER(CONTEXT);
    return memory ? give_back(memory, PINNED) : OK;
}

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    ENTER(CONTEXT);
    if (!memory || !bytes || flags > 15) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (pieces((uintptr_t)memory, bytes)) return locked(ALREADY_REGISTERED);
    add((uintptr_t)memory, bytes, REGISTERED);
    return locked(OK);
}

int cuMemHostUnregister(void *memory) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    sit_out();
    return locked(take((uintptr_t)memory, REGISTERED) ? OK : NOT_REGISTERED);
}

int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
    ENTER(INITIALIZED);
    pthread_mutex_lock(&lock);
    struct range *r = range_at(address);
    if (!r) return locked(INVALID_VALUE);
    if (attribute == 2)
        *(unsigned *)value =
            r->kind == DEVICE ? 2 : 1; /* MEMORY_TYPE: CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST */
    else if (attribute == 1) *(void **)value = &contexts[r->ordinal]; /* CONTEXT */
    else if (attribute == 9) *(int *)value = r->ordinal;              /* DEVICE_ORDINAL */
    else return locked(INVALID_VALUE);
    return locked(OK);
}

/* ---- work on streams ---- */

struct copy {
    void *to;
    const void *from;
    size_t bytes;
    int value;
};

static void copy(void *argument) {
    struct copy *c = argument;
    if (c->from) memmove(c->to, c->from, c->bytes);
    else memset(c->to, c->value, c->bytes);
    free(c);
}

/* With the lock. CUDA's rule: either all memory of a copy is known, or, for pageable memory, none.
 */
static int look_at(uintptr_t start, size_t bytes) {
    int n = pieces(start, bytes);
    pageable += n == 0;
    straddling += n > 1;
    return n < 0 ? INVALID_VALUE : OK;
}

static int queue_copy(struct copy c, void *stream) {
    pthread_mutex_lock(&lock);
    if (!c.bytes) return locked(OK);
    int code = look_at((uintptr_t)c.to, c.bytes);
    if (!code && c.from) code = look_at((uintptr_t)c.from, c.bytes);
    if (code) return locked(code);
    struct copy *kept = malloc(sizeof *kept);
    *kept = c;
    code = queue_on(stream, copy, kept);
    if (code) free(kept);
    return locked(code);
}

int cuMemcpyAsync(void *to, const void *from, size_t bytes, void *stream) {
    ENTER(CONTEXT);
    return to && from ? queue_copy((struct copy){to, from, bytes, 0}, stream) : INVALID_VALUE;
}

int cuMemsetD8Async(void *to, unsigned char value, size_t bytes, void *stream) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct range *r = range_at((uintptr_t)to);
    pthread_mutex_unlock(&lock);
    return r ? queue_copy((struct copy){to, NULL, bytes, value}, stream) : INVALID_VALUE;
}

/* Kernels are functions of this library with these arguments. The only one divides integers,
 * rounding down. */
struct launch {
    void (*kernel)(void *, uint64_t, int64_t);
    void *at;
    uint64_t count;
    int64_t divisor;
};

static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

void pretend_divide_int32(void *at, uint64_t count, int64_t divisor) {
    for (uint64_t i = 0; i < count; i++)
        ((int32_t *)at)[i] = (int32_t)floor_of(((int32_t *)at)[i], divisor);
}

void pretend_divide_int64(void *at, uint64_t count, int64_t divisor) {
    for (uint64_t i = 0; i < count; i++) ((int64_t *)at)[i] = floor_of(((int64_t *)at)[i], divisor);
}

static void launched(void *argument) {
    struct launch *l = argument;
    l->kernel(l->at, l->count, l->divisor);
    free(l);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    ENTER(CONTEXT);
    (void)y, (void)z, (void)by, (void)bz, (void)shared, (void)extra;
    if (function != (void *)pretend_divide_int32 && function != (void *)pretend_divide_int64)
        return NOT_SUPPORTED;
    if (!x || !bx) return INVALID_VALUE;
    struct launch *l = malloc(sizeof *l);
    *l = (struct launch){(void (*)(void *, uint64_t, int64_t))function, *(void **)arguments[0],
                         *(uint64_t *)arguments[1], *(int64_t *)arguments[2]};
    pthread_mutex_lock(&lock);
    int code = queue_on(stream, launched, l);
    if (code) free(l);
    return locked(code);
}

/* ---- queries by tests ---- */

long pretend_pageable(void) {
    pthread_mutex_lock(&lock);
    long n = pageable;
    pthread_mutex_unlock(&lock);
    return n;
}
long pretend_straddling(void) {
    pthread_mutex_lock(&lock);
    long n = straddling;
    pthread_mutex_unlock(&lock);
    return n;
}

/* The present number of "streams", "events", "registered", "pinned", "device" or "contexts"
 * (retained, not released). */
long pretend_alive(const char *what) {
    static const char *const kinds[] = {"device", "pinned", "registered"};
    pthread_mutex_lock(&lock);
    long n = !strcmp(what, "streams")  ? alive_streams()
             : !strcmp(what, "events") ? alive_events()
                                       : 0;
    if (!strcmp(what, "contexts"))
        for (int i = 0; i < MAX_GPUS; i++) n += contexts[i].retained;
    for (struct range *r = ranges; r; r = r->next) n += !strcmp(what, kinds[r->kind]);
    pthread_mutex_unlock(&lock);
    return n;
}
