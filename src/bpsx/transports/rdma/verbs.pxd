# libibverbs' functions that the data plane calls: post, poll, and notification of completions.
# pyverbs would hold the GIL for each, and ships no .pxd.
from libc.stdint cimport uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <arpa/inet.h>
    #include <fcntl.h>
    #include <infiniband/verbs.h>
    #include <string.h>
    /* Post a write with immediate data or, if `remote` is 0, a send. */
    static inline int bpsx_post(struct ibv_qp *qp, uint64_t id, struct ibv_sge *pieces, int n,
        int flags, uint64_t remote, uint32_t rkey, uint32_t imm) {
        struct ibv_send_wr wr, *bad;
        memset(&wr, 0, sizeof(wr));
        wr.wr_id = id; wr.sg_list = pieces; wr.num_sge = n;
        wr.send_flags = IBV_SEND_SIGNALED | flags;
        wr.opcode = remote ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND;
        wr.imm_data = htonl(imm); wr.wr.rdma.remote_addr = remote; wr.wr.rdma.rkey = rkey;
        return ibv_post_send(qp, &wr, &bad);
    }
    /* Post a plain write of the body, and behind it a send of the head, which announces the body.
       The completion of the send covers both. */
    static inline int bpsx_post_both(struct ibv_qp *qp, uint64_t id, struct ibv_sge *body,
        struct ibv_sge *head, int flags, uint64_t remote, uint32_t rkey) {
        struct ibv_send_wr first, second, *bad;
        memset(&first, 0, sizeof(first));
        memset(&second, 0, sizeof(second));
        first.wr_id = second.wr_id = id; first.num_sge = second.num_sge = 1; first.sg_list = body;
        second.sg_list = head; first.next = &second;
        first.opcode = IBV_WR_RDMA_WRITE; first.wr.rdma.remote_addr = remote;
        first.wr.rdma.rkey = rkey;
        second.opcode = IBV_WR_SEND; second.send_flags = IBV_SEND_SIGNALED | flags;
        return ibv_post_send(qp, &first, &bad);
    }
    static inline int bpsx_expect(struct ibv_qp *qp, uint64_t id, struct ibv_sge *piece) {
        struct ibv_recv_wr wr = { .wr_id = id, .sg_list = piece, .num_sge = 1 }, *bad;
        return ibv_post_recv(qp, &wr, &bad);
    }
    /* After this the adapter no longer accesses the memory of posted requests. */
    static inline int bpsx_reset(struct ibv_qp *qp) {
        struct ibv_qp_attr attr;
        memset(&attr, 0, sizeof(attr));
        attr.qp_state = IBV_QPS_RESET;
        return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
    }
    static inline int bpsx_never_blocks(struct ibv_comp_channel *channel) {
        return fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
    }
    static inline uint32_t bpsx_immediate(struct ibv_wc *wc) { return ntohl(wc->imm_data); }
    """
    cdef struct ibv_qp:
        pass
    cdef struct ibv_comp_channel:
        int fd
    cdef struct ibv_cq:
        ibv_comp_channel *channel
    cdef struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    cdef struct ibv_wc:
        uint64_t wr_id
        int status
        int opcode
        uint32_t byte_len
    enum:
        IBV_SEND_INLINE
        IBV_WC_RECV_RDMA_WITH_IMM
    int post "bpsx_post"(
        ibv_qp *qp, uint64_t id, ibv_sge *pieces, int n, int flags, uint64_t remote, uint32_t rkey,
        uint32_t imm
    ) nogil
    int post_both "bpsx_post_both"(
        ibv_qp *qp, uint64_t id, ibv_sge *body, ibv_sge *head, int flags, uint64_t remote,
        uint32_t rkey
    ) nogil
    int expect "bpsx_expect"(ibv_qp *qp, uint64_t id, ibv_sge *piece) nogil
    int reset "bpsx_reset"(ibv_qp *qp) nogil
    int never_blocks "bpsx_never_blocks"(ibv_comp_channel *channel) nogil
    uint32_t immediate "bpsx_immediate"(ibv_wc *wc) nogil
    int ibv_poll_cq(ibv_cq *cq, int most, ibv_wc *found) nogil
    int ibv_req_notify_cq(ibv_cq *cq, int solicited_only) nogil
    int ibv_get_cq_event(ibv_comp_channel *channel, ibv_cq **cq, void **context) nogil
    void ibv_ack_cq_events(ibv_cq *cq, unsigned int n) nogil
    const char *ibv_wc_status_str(int status) nogil


# Set-up of adapters, memory regions and queue pairs.
cdef extern from *:
    """
    /* Move a queue pair through INIT and RTR to RTS. InfiniBand uses `lid`, Ethernet the GID.
       Returns 0 or an errno, and sets *where to the step. */
    static inline int bpsx_connect(struct ibv_qp *qp, int port, int gid_index, const void *gid,
        uint16_t lid, int ethernet, uint32_t qpn, uint32_t psn,
                                   uint32_t own_psn, int mtu, int *where) {
        struct ibv_qp_attr a;
        int rc;
        memset(&a, 0, sizeof(a));
        a.qp_state = IBV_QPS_INIT; a.port_num = port; a.qp_access_flags = IBV_ACCESS_LOCAL_WRITE |
            IBV_ACCESS_REMOTE_WRITE;
        *where = 1;
        if ((rc = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
            IBV_QP_ACCESS_FLAGS))) return rc;
        memset(&a, 0, sizeof(a));
        a.qp_state = IBV_QPS_RTR; a.path_mtu = mtu; a.dest_qp_num = qpn; a.rq_psn = psn;
        a.min_rnr_timer = 12;
        a.ah_attr.port_num = port; a.ah_attr.dlid = lid;
        if (ethernet || lid == 0) {
            a.ah_attr.is_global = 1; a.ah_attr.grh.sgid_index = gid_index;
            a.ah_attr.grh.hop_limit = 64;
            memcpy(&a.ah_attr.grh.dgid, gid, 16);
        }
        *where = 2;
        if ((rc = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                IBV_QP_MIN_RNR_TIMER))) return rc;
        memset(&a, 0, sizeof(a));
        a.qp_state = IBV_QPS_RTS; a.sq_psn = own_psn; a.timeout = 18; a.retry_cnt = 6;
        a.rnr_retry = 6;
        /* timeout and retry_cnt: about 8 s of silence. Some adapters take 7 tries as "for ever".
           rnr_retry: credits guarantee that there is a receive request. */
        *where = 3;
        return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
            IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    }
    static inline struct ibv_mr *bpsx_register(struct ibv_pd *pd, void *at, size_t n) {
        return ibv_reg_mr(pd, at, n, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    }
    static inline struct ibv_mr *bpsx_register_to_send(struct ibv_pd *pd, void *at, size_t n) {
        return ibv_reg_mr(pd, at, n, 0); }
    static inline struct ibv_qp *bpsx_new_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t sends,
        uint32_t receives, uint32_t inlined, uint32_t *most_inline) {
        struct ibv_qp_init_attr a;
        memset(&a, 0, sizeof(a));
        a.send_cq = a.recv_cq = cq; a.qp_type = IBV_QPT_RC;
        a.cap.max_send_wr = sends; a.cap.max_recv_wr = receives; a.cap.max_send_sge = 2;
        a.cap.max_recv_sge = 1; a.cap.max_inline_data = inlined;
        struct ibv_qp *qp = ibv_create_qp(pd, &a);
        *most_inline = a.cap.max_inline_data;
        return qp;
    }
    static inline int bpsx_query_port(struct ibv_context *c, int port, struct ibv_port_attr *a) {
        return ibv_query_port(c, port, a); }
    static inline uint32_t bpsx_number(struct ibv_qp *qp) { return qp->qp_num; }
    """
    cdef struct ibv_context:
        pass
    cdef struct ibv_device:
        pass
    cdef struct ibv_pd:
        pass
    cdef struct ibv_mr:
        uint32_t lkey
        uint32_t rkey
    cdef struct ibv_port_attr:
        int active_mtu
        uint32_t max_msg_sz
        uint16_t lid
    int connect_pair "bpsx_connect"(
        ibv_qp *qp, int port, int gid_index, const void *gid, uint16_t lid, int ethernet,
        uint32_t qpn, uint32_t psn, uint32_t own_psn, int mtu, int *where
    ) nogil
    ibv_mr *register_to_be_written "bpsx_register"(ibv_pd *pd, void *at, size_t n) nogil
    ibv_mr *register_to_send "bpsx_register_to_send"(ibv_pd *pd, void *at, size_t n) nogil
    ibv_qp *new_qp "bpsx_new_qp"(
        ibv_pd *pd, ibv_cq *cq, uint32_t sends, uint32_t receives, uint32_t inlined,
        uint32_t *most_inline
    ) nogil
    uint32_t number_of "bpsx_number"(ibv_qp *qp) nogil
    int query_port "bpsx_query_port"(ibv_context *c, int port, ibv_port_attr *a) nogil
    ibv_device **ibv_get_device_list(int *n) nogil
    void ibv_free_device_list(ibv_device **devices) nogil
    const char *ibv_get_device_name(ibv_device *device) nogil
    ibv_context *ibv_open_device(ibv_device *device) nogil
    int ibv_close_device(ibv_context *context) nogil
    ibv_pd *ibv_alloc_pd(ibv_context *context) nogil
    int ibv_dealloc_pd(ibv_pd *pd) nogil
    int ibv_dereg_mr(ibv_mr *mr) nogil
    ibv_comp_channel *ibv_create_comp_channel(ibv_context *context) nogil
    int ibv_destroy_comp_channel(ibv_comp_channel *channel) nogil
    ibv_cq *ibv_create_cq(
        ibv_context *context, int most, void *which, ibv_comp_channel *channel, int vector
    ) nogil
    int ibv_destroy_cq(ibv_cq *cq) nogil
    int ibv_destroy_qp(ibv_qp *qp) nogil
    int ibv_fork_init() nogil
