# Process id without a system call: each step asks twice per tensor, and getpid() takes 0.2 us. A
# forked child asks again. Call with the GIL.
cdef extern from *:
    """
    #include <pthread.h>
    #include <unistd.h>

    static int bpsx_known_pid;

    static void bpsx_forget_pid(void) { bpsx_known_pid = 0; }

    static inline int bpsx_own_pid(void) {
        static int hooked;
        if (!hooked) {
            if (pthread_atfork(NULL, NULL, bpsx_forget_pid)) return getpid();
            hooked = 1;
        }
        if (!bpsx_known_pid) bpsx_known_pid = getpid();
        return bpsx_known_pid;
    }
    """
    int own_pid "bpsx_own_pid"() noexcept
