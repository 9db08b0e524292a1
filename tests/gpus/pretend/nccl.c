/* A pretend libnccl.so.2 for the pretend libcuda.so.1. Collectives are operations on its streams
 * and exchange their data through shared memory. The ranks of a communicator share a memory file
 * that ncclGetUniqueId creates; the id contains its path in /proc, so no file name remains. Each
 * rank has a slot for all others, and one for each other rank. A rank writes only its own words, so
 * a dead rank holds no lock. Each rank publishes its arguments, and all compare them: if ranks
 * differ, which in reality hangs or sums garbage, all report it and abort. */
#define _GNU_SOURCE
#include "reduce.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum what { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV };
enum { RANKS = 16, CHUNK = 1 << 18, SIZES_KEPT = 4096 };
static const char *const names[] = {"ncclAllReduce",     "ncclReduce",    "ncclBroadcast",
                                    "ncclReduceScatter", "ncclAllGather", "ncclSend",
                                    "ncclRecv"};

/* ---- shared memory ---- */

struct call {
    uint64_t number, count;
    int what, type, op, root;
}; /* root of REDUCE and BROADCAST; peer of SEND and RECV */
struct slot {
    _Atomic uint64_t posted, taken[RANKS];
    struct call call;
    _Alignas(64) char data[CHUNK];
};
struct meeting {
    _Atomic uint32_t bell, n, came;        /* bell: changes whenever anything here has changed */
    _Atomic uint32_t seats[RANKS], differ; /* differ: 1 once `how` describes the difference of two
                                              ranks, for those that wait */
    char how[400];
    int gpus[RANKS];
    _Alignas(64) struct slot
        slots[RANKS][RANKS + 1]; /* of a rank, for another one; the last is for all */
};

struct id {
    char path[128];
};
struct comm {
    struct comm *next;
    struct meeting *meeting;
    uint32_t n;
    int rank, gpu, references, error;
    _Atomic int aborted;
    uint64_t queued, done, number; /* units queued and completed, which run in the order of the
                                      calls on all streams; collectives so far */
};
struct item {
    struct call call;
    const char *send;
    char *recv;
    uint64_t moved;
    int written, over;
};
struct unit {
    struct comm *comm;
    void *stream;
    uint64_t ticket;
    int n;
    struct item *items;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct comm *comms;
static long groups, sizes[SIZES_KEPT];
static char last_error[256];
static _Thread_local struct {
    struct unit *units;
    int n, depth, calls, code;
} group;

static int (*cuda_call)(const char *), (*cuda_enqueue)(void *, void (*)(void *), void *),
    (*cuda_known)(uintptr_t, size_t), (*cuda_gpu)(int *);

__attribute__((constructor)) static void open_cuda(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    cuda_call = cuda ? dlsym(cuda, "pretend_call") : NULL;
    if (!cuda_call) {
        fprintf(stderr, "pretend NCCL: libcuda.so.1 is not the pretend one\n");
        abort();
    }
    cuda_enqueue = dlsym(cuda, "pretend_enqueue");
    cuda_known = dlsym(cuda, "pretend_known");
    cuda_gpu = dlsym(cuda, "pretend_gpu");
}

static int wrong(int code, const char *why) {
    snprintf(last_error, sizeof last_error, "%s", why);
    return code;
}

static void ring(struct meeting *m) {
    atomic_fetch_add(&m->bell, 1);
    syscall(SYS_futex, &m->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void fall(const char *how) {
    fprintf(stderr, "pretend NCCL: %s\n", how);
    abort();
}

static void doze(struct meeting *m, uint32_t heard) {
    struct timespec some = {1, 0};
    if (m->differ == 1) fall(m->how);
    syscall(SYS_futex, &m->bell, FUTEX_WAIT, heard, &some, NULL, 0);
}
/* Waits for the condition; returns from the function if the communicator is aborted. */
#define UNTIL(c, so)                                                                               \
    for (uint32_t heard; heard = atomic_load(&(c)->meeting->bell), !(so);                          \
         doze((c)->meeting, heard))                                                                \
        if ((c)->aborted) return

/* ---- operations on a stream ---- */

static void describe(char *text, size_t room, const struct call *c) {
    char number[24] = "", op[16] = "", root[24] = "";
    if (c->number) snprintf(number, sizeof number, "#%llu ", (unsigned long long)c->number);
    if (c->op != NO_OP) snprintf(op, sizeof op, ", %s", op_names[c->op]);
    if (c->root >= 0)
        snprintf(root, sizeof root,
                 c->what == SEND   ? ", to %d"
                 : c->what == RECV ? ", from %d"
                                   : ", root %d",
                 c->root);
    snprintf(text, room, "%s%s of %llu %s%s%s", number, names[c->what],
             (unsigned long long)c->count, type_names[c->type], op, root);
}

static void differ(struct meeting *m, int a, const struct call *x, int b, const struct call *y) {
    char first[160], second[160], how[sizeof m->how];
    describe(first, sizeof first, a < b ? x : y);
    describe(second, sizeof second, a < b ? y : x);
    snprintf(how, sizeof how, "rank %d queued <%s>, rank %d <%s>", a < b ? a : b, first,
             a < b ? b : a, second);
    if (atomic_compare_exchange_strong(&m->differ, &(uint32_t){0},
                                       2)) { /* the first rank to see it informs the others */
        memcpy(m->how, how, sizeof how);
        m->differ = 1;
        ring(m);
    }
    fall(how);
}

static int same(const struct call *x, const struct call *y) {
    return x->number == y->number && x->what == y->what && x->type == y->type && x->op == y->op &&
           x->root == y->root && x->count == y->count;
}

static int all_taken(struct slot *s, uint32_t n) {
    for (uint32_t r = 0; r < n; r++)
        if (s->taken[r] != s->posted) return 0;
    return 1;
}

/* Whether each rank has put its next part into its slot. Examines all ranks, so a difference is
 * found even while another rank is missing. */
static int all_posted(struct comm *c, const struct call *mine) {
    uint32_t there = 0;
    for (uint32_t r = 0; r < c->n; r++) {
        struct slot *s = &c->meeting->slots[r][RANKS];
        if (s->posted == s->taken[c->rank]) continue;
        if (!same(mine, &s->call)) differ(c->meeting, c->rank, mine, (int)r, &s->call);
        there++;
    }
    return there == c->n;
}

static void put(struct slot *s, const struct item *i, uint64_t at, uint64_t some, uint32_t parts) {
    size_t size = type_sizes[i->call.type];
    for (uint32_t p = 0; some && p < parts; p++)
        memcpy(s->data + p * some * size, i->send + (p * i->call.count + at) * size, some * size);
    s->call = i->call;
    s->posted++;
}

static void get(struct comm *c, const struct item *i, uint64_t at, uint64_t some) {
    const struct call *k = &i->call;
    size_t size = type_sizes[k->type];
    char *from[RANKS], *to = i->recv + at * size;
    for (uint32_t r = 0; r < c->n; r++)
        from[r] = c->meeting->slots[r][RANKS].data +
                  (k->what == REDUCE_SCATTER ? (size_t)c->rank * some * size : 0);
    if (k->what == BROADCAST) memcpy(to, from[k->root], some * size);
    else if (k->what == ALL_GATHER)
        for (uint32_t r = 0; r < c->n; r++) memcpy(to + r * k->count * size, from[r], some * size);
    else if (k->what != REDUCE || k->root == c->rank)
        reducers[k->type](to, from, c->n, some, k->op);
}

/* Part by part: put the own part, wait for all, take theirs. A part is read before it is written,
 * so in-place calls need no special case. */
static void collect(struct comm *c, struct item *i) {
    struct slot *own = &c->meeting->slots[c->rank][RANKS];
    uint32_t parts = i->call.what == REDUCE_SCATTER ? c->n : 1;
    uint64_t most = CHUNK / type_sizes[i->call.type] / parts, at = 0;
    int mute = i->call.what == BROADCAST && i->call.root != c->rank;
    i->call.number = ++c->number;
    do {
        uint64_t some = i->call.count - at < most ? i->call.count - at : most;
        UNTIL(c, all_taken(own, c->n));
        put(own, i, at, mute ? 0 : some, parts);
        ring(c->meeting);
        UNTIL(c, all_posted(c, &i->call));
        if (some) get(c, i, at, some);
        for (uint32_t r = 0; r < c->n; r++) c->meeting->slots[r][RANKS].taken[c->rank]++;
        ring(c->meeting);
        at += some;
    } while (at < i->call.count);
}

/* One step of a send or receive, if one is possible. */
static int step(struct comm *c, struct item *i) {
    int other = i->call.root, sends = i->call.what == SEND;
    struct slot *s =
        sends ? &c->meeting->slots[c->rank][other] : &c->meeting->slots[other][c->rank];
    _Atomic uint64_t *taken = &s->taken[sends ? other : c->rank];
    size_t size = type_sizes[i->call.type];
    uint64_t left = i->call.count - i->moved, some = left < CHUNK / size ? left : CHUNK / size;
    if ((*taken == s->posted) != sends) return 0;
    if (sends && i->written && !left) return i->over = 1; /* the last part has been taken, too */
    if (sends) put(s, i, i->moved, some, 1);
    else {
        if (s->call.count != i->call.count || s->call.type != i->call.type)
            differ(c->meeting, c->rank, &i->call, other, &s->call);
        memcpy(i->recv + i->moved * size, s->data, some * size);
        ++*taken;
    }
    i->written = 1;
    i->moved += some;
    i->over = !sends && i->moved == i->call.count;
    ring(c->meeting);
    return 1;
}

/* All sends and receives of a unit at once, but those of one direction between two ranks in turn.
 * Returns the number of steps made; -1 at the end. */
static int steps(struct unit *u) {
    int done = 0, open = 0;
    for (int i = 0; i < u->n; i++) {
        struct item *a = &u->items[i];
        int free = a->call.what >= SEND && !a->over;
        open += free;
        for (int j = 0; j < i && free; j++)
            free = u->items[j].over || u->items[j].call.what != a->call.what ||
                   u->items[j].call.root != a->call.root;
        if (free) done += step(u->comm, a);
    }
    return open ? done : -1;
}

static void perform(struct unit *u) {
    for (int i = 0; i < u->n && !u->comm->aborted; i++)
        if (u->items[i].call.what < SEND) collect(u->comm, &u->items[i]);
    int done = 0;
    while (done >= 0) {
        UNTIL(u->comm, (done = steps(u)) != 0);
    }
}

static void let_go(struct comm *c) {
    pthread_mutex_lock(&lock);
    int last = --c->references == 0;
    pthread_mutex_unlock(&lock);
    if (last) {
        munmap(c->meeting, sizeof *c->meeting);
        free(c);
    }
}

static void run(void *argument) {
    struct unit *u = argument;
    struct comm *c = u->comm;
    pthread_mutex_lock(&lock);
    while (c->done != u->ticket && !c->aborted) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    if (!c->aborted) perform(u);
    pthread_mutex_lock(&lock);
    c->done++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    let_go(c);
    free(u->items);
    free(u);
}

/* ---- communicators ---- */

static struct comm *known(struct comm *c) {
    pthread_mutex_lock(&lock);
    struct comm *found = comms;
    while (found && found != c) found = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}
#define ENTER                                                                                      \
    do {                                                                                           \
        int code_ = cuda_call(__func__);                                                           \
        if (code_) return wrong(code_, "a test wanted this");                                      \
    } while (0)
#define ENTER_WITH(c)                                                                              \
    do {                                                                                           \
        ENTER;                                                                                     \
        if (!known(c)) return wrong(INVALID_ARGUMENT, "no such communicator");                     \
    } while (0)

int ncclGetVersion(int *version) {
    ENTER;
    *version = 22304;
    return OK;
}
const char *ncclGetLastError(struct comm *c) {
    (void)c;
    return last_error;
}

const char *ncclGetErrorString(int code) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

/* As in reality, the process that created this id must exist until all ranks have arrived. */
int ncclGetUniqueId(struct id *id) {
    ENTER;
    int file = memfd_create("pretend-nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(struct meeting)))
        return wrong(SYSTEM_ERROR, "no memory file");
    memset(id, 0, sizeof *id);
    snprintf(id->path, sizeof id->path, "/proc/%d/fd/%d", getpid(), file);
    return OK;
}

static struct meeting *enter_meeting(const struct id *id) {
    int file = open(id->path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    struct meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return m == MAP_FAILED ? NULL : m;
}

static void close_id(const struct id *id) {
    int pid, file;
    if (sscanf(id->path, "/proc/%d/fd/%d", &pid, &file) == 2 && pid == getpid()) close(file);
}

/* Takes a seat and waits for the others, for ever, as in reality. */
static int meet(struct meeting *m, int n, int rank, int where) {
    uint32_t nobody = 0, free = 0;
    if (!atomic_compare_exchange_strong(&m->n, &nobody, (uint32_t)n) && nobody != (uint32_t)n)
        return wrong(INVALID_ARGUMENT, "ranks differ in how many they are");
    if (!atomic_compare_exchange_strong(&m->seats[rank], &free, 1))
        return wrong(INVALID_ARGUMENT, "this rank is there already");
    m->gpus[rank] = where;
    m->came++;
    ring(m);
    for (uint32_t heard; heard = m->bell, m->came != (uint32_t)n;) doze(m, heard);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (m->gpus[i] == m->gpus[j]) return wrong(INVALID_USAGE, "Duplicate GPU detected");
    return OK;
}

int ncclCommInitRank(struct comm **out, int n, struct id id, int rank) {
    ENTER;
    int where = -1, gpu = cuda_gpu(&where);
    if (gpu < 0) return wrong(CUDA_ERROR, "no context is current");
    if (n < 1 || n > RANKS || rank < 0 || rank >= n) return wrong(INVALID_ARGUMENT, "no such rank");
    struct meeting *m = enter_meeting(&id);
    if (!m) return wrong(SYSTEM_ERROR, "whoever made this id is gone");
    int code = meet(m, n, rank, where);
    close_id(&id);
    if (code) {
        munmap(m, sizeof *m);
        return code;
    }
    struct comm *c = calloc(1, sizeof *c);
    c->meeting = m, c->n = (uint32_t)n, c->rank = rank, c->gpu = gpu, c->references = 1;
    pthread_mutex_lock(&lock);
    c->next = comms;
    *out = comms = c;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* The options are checked like NCCL does, and have no effect. */
int ncclCommInitRankConfig(struct comm **out, int n, struct id id, int rank, const void *config) {
    struct {
        size_t size;
        unsigned magic, version;
    } head;
    memcpy(&head, config, sizeof head);
    if (head.magic != 0xcafebeef || head.size < sizeof head)
        return wrong(INVALID_ARGUMENT, "no ncclConfig_t");
    return ncclCommInitRank(out, n, id, rank);
}

static void leave(struct comm *c, int aborts) {
    pthread_mutex_lock(&lock);
    struct comm **at = &comms;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    if (aborts) c->aborted = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    ring(c->meeting);
    let_go(c);
}

/* After a destroy, queued operations still run. After an abort they end at once and leave their
 * outputs undefined. Neither call waits for them. */
int ncclCommDestroy(struct comm *c) {
    ENTER_WITH(c);
    leave(c, 0);
    return OK;
}
int ncclCommAbort(struct comm *c) {
    ENTER_WITH(c);
    leave(c, 1);
    return OK;
}
int ncclCommGetAsyncError(struct comm *c, int *error) {
    ENTER_WITH(c);
    *error = c->error;
    return OK;
}
int ncclCommCount(struct comm *c, int *n) {
    ENTER_WITH(c);
    *n = (int)c->n;
    return OK;
}
int ncclCommUserRank(struct comm *c, int *rank) {
    ENTER_WITH(c);
    *rank = c->rank;
    return OK;
}
int ncclCommCuDevice(struct comm *c, int *gpu) {
    ENTER_WITH(c);
    *gpu = c->gpu;
    return OK;
}
int pretend_async_error(struct comm *c, int error) {
    if (!known(c)) return INVALID_ARGUMENT;
    c->error = error;
    return OK;
}

/* ---- queueing ---- */

static int queue(const struct unit *u) {
    struct unit *kept = malloc(sizeof *kept);
    *kept = *u;
    pthread_mutex_lock(&lock);
    kept->ticket = u->comm->queued;
    int code = cuda_enqueue(u->stream, run, kept);
    if (!code) {
        u->comm->queued++;
        u->comm->references++;
    }
    pthread_mutex_unlock(&lock);
    if (code) {
        free(kept->items);
        free(kept);
        return wrong(CUDA_ERROR, "the stream takes nothing");
    }
    return OK;
}

static void gather(struct comm *c, void *stream, const struct item *i) {
    int at = 0;
    while (at < group.n && (group.units[at].comm != c || group.units[at].stream != stream)) at++;
    if (at == group.n) {
        group.units = realloc(group.units, (size_t)++group.n * sizeof *group.units);
        group.units[at] = (struct unit){c, stream, 0, 0, NULL};
    }
    struct unit *u = &group.units[at];
    u->items = realloc(u->items, (size_t)(u->n + 1) * sizeof *u->items);
    u->items[u->n++] = *i;
    group.calls++;
}

int ncclGroupStart(void) {
    ENTER;
    group.depth++;
    return OK;
}

int ncclGroupEnd(void) {
    int wanted = cuda_call(__func__);
    if (!group.depth) return wrong(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth) return wanted;
    int code =
        wanted ? wanted
               : group.code; /* error of a call in the group: then nothing of the group is queued */
    for (int i = 0; i < group.n; i++) {
        if (!code) code = queue(&group.units[i]);
        else free(group.units[i].items);
    }
    pthread_mutex_lock(&lock);
    if (group.calls && !code) {
        if (groups < SIZES_KEPT) sizes[groups] = group.calls;
        groups++;
    }
    pthread_mutex_unlock(&lock);
    free(group.units);
    memset(&group, 0, sizeof group);
    return code;
}

/* Number of groups with calls, and, in `to`, the number of calls in each, the first groups first.
 */
long pretend_groups(long *to, long room) {
    pthread_mutex_lock(&lock);
    long n = groups;
    for (long i = 0; i < n && i < room && i < SIZES_KEPT; i++) to[i] = sizes[i];
    pthread_mutex_unlock(&lock);
    return n;
}

/* Checks pointers as NCCL does with NCCL_CHECK_POINTERS=1. */
static int check(struct comm *c, const struct item *i, uint64_t sent, uint64_t received) {
    int where, gpu = cuda_gpu(&where);
    if (!known(c)) return wrong(INVALID_ARGUMENT, "no such communicator");
    if (gpu != c->gpu) return wrong(CUDA_ERROR, "the current context is none, or another GPU's");
    const struct call *k = &i->call;
    if (k->type < 0 || k->type >= TYPES || k->op < NO_OP || k->op >= OPS || k->root < -1 ||
        k->root >= (int)c->n)
        return wrong(INVALID_ARGUMENT, "no such type, operation or rank");
    size_t size = type_sizes[k->type];
    if (!cuda_known((uintptr_t)i->send, sent * size) ||
        !cuda_known((uintptr_t)i->recv, received * size))
        return wrong(INVALID_ARGUMENT, "a buffer is not, or not wholly, on a GPU");
    return OK;
}

static int submit(struct comm *c, void *stream, struct item i, uint64_t sent, uint64_t received) {
    int code = cuda_call(names[i.call.what]);
    if (!code) code = check(c, &i, sent, received);
    if (group.depth) {
        if (code) group.code = code;
        else gather(c, stream, &i);
        return code;
    }
    if (code) return code;
    struct unit u = {c, stream, 0, 1, malloc(sizeof i)};
    *u.items = i;
    return queue(&u);
}
#define ITEM(what, count, type, op, root, send, recv)                                              \
    ((struct item){{0, count, what, type, op, root}, send, recv, 0, 0, 0})

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, struct comm *c,
                  void *stream) {
    return submit(c, stream, ITEM(ALL_REDUCE, count, type, op, -1, send, recv), count, count);
}

int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root,
               struct comm *c, void *stream) {
    return submit(c, stream, ITEM(REDUCE, count, type, op, root, send, recv), count,
                  known(c) && c->rank == root ? count : 0);
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, struct comm *c,
                  void *stream) {
    return submit(c, stream, ITEM(BROADCAST, count, type, NO_OP, root, send, recv),
                  known(c) && c->rank == root ? count : 0, count);
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, struct comm *c,
                      void *stream) {
    return submit(c, stream, ITEM(REDUCE_SCATTER, count, type, op, -1, send, recv),
                  known(c) ? count * c->n : 0, count);
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, struct comm *c,
                  void *stream) {
    return submit(c, stream, ITEM(ALL_GATHER, count, type, NO_OP, -1, send, recv), count,
                  known(c) ? count * c->n : 0);
}

int ncclSend(const void *send, size_t count, int type, int peer, struct comm *c, void *stream) {
    return submit(c, stream, ITEM(SEND, count, type, NO_OP, peer, send, NULL), count, 0);
}

int ncclRecv(void *recv, size_t count, int type, int peer, struct comm *c, void *stream) {
    return submit(c, stream, ITEM(RECV, count, type, NO_OP, peer, NULL, recv), 0, count);
}
