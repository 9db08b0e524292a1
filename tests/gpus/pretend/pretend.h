/* Declarations shared by cuda.c (calls, contexts, memory) and streams.c (streams, events). GPU
 * memory is host memory, and each stream is a thread that runs its queue in order. Signatures are
 * those of cuda.h, and a call needs a current context if cuda.h lists CUDA_ERROR_INVALID_CONTEXT
 * among its errors. Where CUDA accepts a mistake or crashes, this returns an error if it can, so
 * that tests see it. One lock protects all state, and every change wakes all waiting threads: there
 * are few threads, and this is simple. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900
};
enum { MAX_GPUS = 16, MAX_DEPTH = 32, MAX_NAMES = 128 };

/* First part of a call: returns the error that a test requests, or that of a missing cuInit or
 * context. */
enum need { NOTHING, INITIALIZED, CONTEXT };
#define ENTER(need)                                                                                \
    do {                                                                                           \
        int code_ = enter(__func__, need);                                                         \
        if (code_) return code_;                                                                   \
    } while (0)

#pragma GCC visibility push(hidden)
extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern long delay_us;
int enter(const char *name, enum need need);
int current(void);    /* the GPU whose context is current on this thread, -1 for none */
int locked(int code); /* releases the lock and returns code */
int queue_on(void *handle, void (*run)(void *),
             void *argument); /* with the lock: queues run(argument) as the stream's next operation,
                                 or returns an error */
void sit_out(void);           /* with the lock: waits until no stream has anything to do */
long alive_streams(void);
long alive_events(void);
#pragma GCC visibility pop

/* For tests and nccl.c. */
int pretend_call(const char *name);
int pretend_enqueue(void *handle, void (*run)(void *), void *argument);
int pretend_known(uintptr_t start, size_t bytes);
int pretend_gpu(int *where);
