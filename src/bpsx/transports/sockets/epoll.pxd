# epoll and eventfd, as the transports over sockets use them.
from libc.stdint cimport uint32_t

cdef enum:
    EVENTS = 64                 # most events per epoll_wait()

cdef extern from *:
    """
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    static inline int bpsx_epoll_set(int epoll, int how, int fd, uint32_t events, void *what) {
        struct epoll_event e = { .events = events, .data = { .ptr = what } };
        return epoll_ctl(epoll, how, fd, &e);
    }
    """
    ctypedef union epoll_data_t:
        void *ptr
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_MOD
        EPOLL_CTL_DEL
        EPOLLIN
        EPOLLOUT
        EFD_CLOEXEC
        EFD_NONBLOCK
    int epoll_create1(int flags) nogil
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout_ms) nogil
    # Add or change `fd`, whose events come with the pointer `what`.
    int epoll_set "bpsx_epoll_set"(int epoll, int how, int fd, uint32_t events, void *what) nogil
    int eventfd(unsigned int initval, int flags) nogil
