# Monitor (mutex and condition variable), atomics and monotonic clock for code without the GIL.
from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <sched.h>
    #include <stdint.h>
    #include <time.h>

    typedef struct { pthread_mutex_t mutex; pthread_cond_t cond; } bpsx_monitor;

    static inline int bpsx_monitor_init(bpsx_monitor *m) {
        /* The monotonic clock: a step of the wall clock must neither end a wait early nor prolong
           it. */
        pthread_condattr_t attr;
        if (pthread_condattr_init(&attr)) return -1;
        if (pthread_condattr_setclock(&attr, CLOCK_MONOTONIC)) return -1;
        if (pthread_cond_init(&m->cond, &attr)) return -1;
        pthread_condattr_destroy(&attr);
        return pthread_mutex_init(&m->mutex, NULL) ? -1 : 0;
    }
    static inline void bpsx_monitor_destroy(bpsx_monitor *m) {
        pthread_cond_destroy(&m->cond);
        pthread_mutex_destroy(&m->mutex);
    }
    static inline void bpsx_lock(bpsx_monitor *m) { pthread_mutex_lock(&m->mutex); }
    static inline void bpsx_unlock(bpsx_monitor *m) { pthread_mutex_unlock(&m->mutex); }
    static inline void bpsx_notify_all(bpsx_monitor *m) { pthread_cond_broadcast(&m->cond); }
    static inline int64_t bpsx_now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    static inline void bpsx_wait_until(bpsx_monitor *m, int64_t deadline_ns) {
        struct timespec t = { deadline_ns / 1000000000LL, deadline_ns % 1000000000LL };
        pthread_cond_timedwait(&m->cond, &m->mutex, &t);
    }
    static inline void bpsx_wait(bpsx_monitor *m) { pthread_cond_wait(&m->cond, &m->mutex); }
    static inline int64_t bpsx_add(int64_t *p, int64_t v) {
        return __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL); }
    static inline int64_t bpsx_load(int64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void bpsx_store(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
    }
    static inline void bpsx_yield(void) { sched_yield(); }
    """
    ctypedef struct Monitor "bpsx_monitor":
        pass
    int monitor_init "bpsx_monitor_init"(Monitor *m) noexcept nogil
    void monitor_destroy "bpsx_monitor_destroy"(Monitor *m) noexcept nogil
    void lock "bpsx_lock"(Monitor *m) noexcept nogil
    void unlock "bpsx_unlock"(Monitor *m) noexcept nogil
    void notify_all "bpsx_notify_all"(Monitor *m) noexcept nogil
    void wait "bpsx_wait"(Monitor *m) noexcept nogil
    void wait_until "bpsx_wait_until"(Monitor *m, int64_t deadline_ns) noexcept nogil
    int64_t now_ns "bpsx_now_ns"() noexcept nogil
    int64_t atomic_add "bpsx_add"(int64_t *p, int64_t v) noexcept nogil
    int64_t atomic_load "bpsx_load"(int64_t *p) noexcept nogil
    void atomic_store "bpsx_store"(int64_t *p, int64_t v) noexcept nogil
    void yield_cpu "bpsx_yield"() noexcept nogil
