/* Streams and events of the pretend libcuda.so.1. */
#include "pretend.h"
#include <signal.h>

struct op {
    struct op *next;
    void (*run)(void *);
    void *argument;
}; /* run is NULL for a record, its argument */
struct stream {
    struct stream *next;
    struct op *first, *last;
    int ordinal, capturing, closed;
    unsigned long long number;
    long queued, done, held, released;
};
/* One record of an event. The event refers to its last record; operations that make a record or
 * wait for it keep it if the event has a newer one or is destroyed. */
struct record {
    int done, references;
};
struct event {
    struct event *next;
    struct record *record;
    int ordinal;
};

static struct stream *streams, *defaults[MAX_GPUS];
static struct event *events;

static void let_go(struct record *r) {
    if (r && --r->references == 0) free(r);
}

static void *work(void *argument) {
    struct stream *s = argument;
    pthread_mutex_lock(&lock);
    while (s->first || !s->closed) {
        struct op *op = s->first;
        if (!op) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        long us = delay_us;
        pthread_mutex_unlock(&lock);
        if (us) usleep((useconds_t)us);
        if (op->run) op->run(op->argument);
        pthread_mutex_lock(&lock);
        if (!op->run) { /* here, so that a stream is idle once its last event has completed */
            ((struct record *)op->argument)->done = 1;
            let_go(op->argument);
        }
        if (!(s->first = op->next)) s->last = NULL;
        free(op);
        s->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    free(s);
    return NULL;
}

static struct stream *make_stream(int ordinal) {
    struct stream *s = calloc(1, sizeof *s);
    pthread_t thread;
    sigset_t all, before;
    static unsigned long long made;
    s->ordinal = ordinal;
    s->number = __sync_fetch_and_add(&made, 1);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the process's own threads */
    int failed = pthread_create(&thread, NULL, work, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(s);
        return NULL;
    }
    pthread_detach(thread);
    return s;
}

/* With the lock. NULL, the legacy stream (1) and the per-thread stream (2) are one default stream
 * per GPU here; it needs a context, which determines the GPU. */
static struct stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) {
        if (current() < 0) return NULL;
        struct stream **d = &defaults[current()];
        return *d ? *d : (*d = make_stream(current()));
    }
    struct stream *s = streams;
    while (s && s != handle) s = s->next;
    return s;
}

/* With the lock. A capturing stream accepts no operation: there are no graphs, and tests must
 * notice what would be captured. */
static int queue(struct stream *s, void (*run)(void *), void *argument) {
    if (s->capturing) return CAPTURE_UNSUPPORTED;
    struct op *op = malloc(sizeof *op);
    *op = (struct op){NULL, run, argument};
    if (s->last) s->last->next = op;
    else s->first = op;
    s->last = op;
    s->queued++;
    pthread_cond_broadcast(&changed);
    return OK;
}

int queue_on(void *handle, void (*run)(void *), void *argument) {
    struct stream *s = stream_of(handle);
    return s ? queue(s, run, argument) : INVALID_HANDLE;
}

/* Queues `run(argument)` as the stream's next operation. If this returns 0, run must free the
 * argument. */
int pretend_enqueue(void *handle, void (*run)(void *), void *argument) {
    pthread_mutex_lock(&lock);
    return locked(queue_on(handle, run, argument));
}

static struct stream *busy(void) {
    for (struct stream *s = streams; s; s = s->next)
        if (s->first) return s;
    for (int i = 0; i < MAX_GPUS; i++)
        if (defaults[i] && defaults[i]->first) return defaults[i];
    return NULL;
}

void sit_out(void) {
    while (busy()) pthread_cond_wait(&changed, &lock);
}
long alive_streams(void) {
    long n = 0;
    for (struct stream *s = streams; s; s = s->next) n++;
    return n;
}
long alive_events(void) {
    long n = 0;
    for (struct event *e = events; e; e = e->next) n++;
    return n;
}

/* ---- control by tests ---- */

struct hold {
    struct stream *stream;
    long ticket;
};

static void stay(void *argument) {
    struct hold *h = argument;
    pthread_mutex_lock(&lock);
    while (h->stream->released < h->ticket) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    free(h);
}

int pretend_hold(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    if (!s || s->capturing) return locked(INVALID_HANDLE);
    struct hold *h = malloc(sizeof *h);
    *h = (struct hold){s, ++s->held};
    return locked(queue(s, stay, h));
}

int pretend_release(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    if (!s) return locked(INVALID_HANDLE);
    s->released = s->held;
    pthread_cond_broadcast(&changed);
    return locked(OK);
}

int pretend_capture(void *handle, int on) {
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    if (s) s->capturing = on;
    return locked(s ? OK : INVALID_HANDLE);
}

void pretend_delay(long us) {
    pthread_mutex_lock(&lock);
    delay_us = us;
    pthread_mutex_unlock(&lock);
}

/* ---- CUDA's streams ---- */

static int create(void **handle, unsigned flags) {
    if (flags > 1) return INVALID_VALUE;
    struct stream *s = make_stream(current());
    if (!s) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    s->next = streams;
    *handle = streams = s;
    return locked(OK);
}

int cuStreamCreate(void **handle, unsigned flags) {
    ENTER(CONTEXT);
    return create(handle, flags);
}
int cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    ENTER(CONTEXT);
    (void)priority;
    return create(handle, flags);
}

/* Returns at once. Queued operations still run, and a hold that no call could release any more
 * ends. */
int cuStreamDestroy_v2(void *handle) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct stream **at = &streams;
    while (*at && *at != handle) at = &(*at)->next;
    if (!*at) return locked(INVALID_HANDLE);
    *at = (*at)->next;
    struct stream *s = handle;
    s->closed = 1;
    s->released = s->held;
    pthread_cond_broadcast(&changed);
    return locked(OK);
}

int cuStreamSynchronize(void *handle) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    if (!s) return locked(INVALID_HANDLE);
    if (s->capturing) return locked(CAPTURE_UNSUPPORTED);
    long until = s->queued; /* does not wait for what other threads queue meanwhile */
    while (s->done < until) pthread_cond_wait(&changed, &lock);
    return locked(OK);
}

int cuStreamQuery(void *handle) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    return locked(!s             ? INVALID_HANDLE
                  : s->capturing ? CAPTURE_UNSUPPORTED
                  : s->first     ? NOT_READY
                                 : OK);
}

int cuStreamIsCapturing(void *handle, int *status) {
    ENTER(INITIALIZED);
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    *status = s && s->capturing;
    return locked(s || (uintptr_t)handle <= 2 ? OK : INVALID_HANDLE);
}

int cuStreamGetId(void *handle, unsigned long long *number) {
    ENTER(INITIALIZED);
    pthread_mutex_lock(&lock);
    struct stream *s = stream_of(handle);
    if (s) *number = s->number;
    return locked(s ? OK : INVALID_HANDLE);
}

/* ---- events ---- */

static struct event *event_of(void *handle) {
    struct event *e = events;
    while (e && e != handle) e = e->next;
    return e;
}

static void await(void *argument) {
    struct record *r = argument;
    pthread_mutex_lock(&lock);
    while (!r->done) pthread_cond_wait(&changed, &lock);
    let_go(r);
    pthread_mutex_unlock(&lock);
}

int cuEventCreate(void **handle, unsigned flags) {
    ENTER(CONTEXT);
    if (flags > 7) return INVALID_VALUE;
    struct event *e = calloc(1, sizeof *e);
    pthread_mutex_lock(&lock);
    *e = (struct event){events, NULL, current()};
    *handle = events = e;
    return locked(OK);
}

int cuEventDestroy_v2(void *handle) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct event **at = &events;
    while (*at && *at != handle) at = &(*at)->next;
    if (!*at) return locked(INVALID_HANDLE);
    *at = (*at)->next;
    let_go(((struct event *)handle)->record);
    free(handle);
    return locked(OK);
}

int cuEventRecord(void *handle, void *stream) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct event *e = event_of(handle);
    struct stream *s = stream_of(stream);
    if (!e || !s || s->ordinal != e->ordinal) return locked(INVALID_HANDLE);
    struct record *r = malloc(sizeof *r);
    *r = (struct record){0, 2};
    int code = queue(s, NULL, r);
    if (code) {
        free(r);
        return locked(code);
    }
    let_go(e->record);
    e->record = r;
    return locked(OK);
}

int cuStreamWaitEvent(void *stream, void *handle, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    pthread_mutex_lock(&lock);
    struct event *e = event_of(handle);
    struct stream *s = stream_of(stream);
    if (!e || !s) return locked(INVALID_HANDLE);
    if (s->capturing) return locked(CAPTURE_UNSUPPORTED);
    if (!e->record || e->record->done) return locked(OK);
    e->record->references++;
    return locked(queue(s, await, e->record));
}

int cuEventQuery(void *handle) {
    ENTER(INITIALIZED);
    pthread_mutex_lock(&lock);
    struct event *e = event_of(handle);
    return locked(!e ? INVALID_HANDLE : !e->record || e->record->done ? OK : NOT_READY);
}

int cuEventSynchronize(void *handle) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct event *e = event_of(handle);
    struct record *r = e ? e->record : NULL;
    if (r) r->references++;
    pthread_mutex_unlock(&lock);
    if (r) await(r);
    return e ? OK : INVALID_HANDLE;
}
