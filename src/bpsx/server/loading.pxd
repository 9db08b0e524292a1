# Loads what a lane needs when a key is registered: kernels for its element type, and the codec of
# its compression. These functions take the GIL and call Python.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc

from bpsx.core.codec.made cimport packed_new
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport Compressed, KeyState


cdef inline bint load(Lane *lane, int dtype) noexcept with gil:
    """Load a dtype's kernels when the first key needs them.

    If that fails, no worker can get its sum, so the lane ends.
    """
    from bpsx.dtypes import BY_CODE

    if dtype not in BY_CODE:
        return False            # malformed, or of another version
    try:
        (<object>lane.owner).load(dtype)
        return True
    except Exception as e:
        (<object>lane.owner).break_with(e)
        lane.counters.dropped += 1
        return False


cdef inline void pack_entry(Lane *lane, KeyState *e, bytes name, bytes codec) except *:
    """Create the state of a key's compression. Raises ConfigError for an invalid codec."""
    from functools import partial

    from bpsx.compression.spec import make_for_server, stream
    from bpsx.dtypes import BY_CODE, BY_NAME
    from bpsx.planning.placement import PARTS_PER_TENSOR
    from bpsx.system.descriptors import with_own

    made = with_own(partial(
        make_for_server, codec.decode(errors="replace"), BY_CODE[e.dtype].name, e.nbytes,
        stream(name, e.key % PARTS_PER_TENSOR)
    ))
    wide = BY_NAME["float64" if made.wide_itemsize == 8 else "float32"].code
    (<object>lane.owner).load(wide)
    (<object>lane.owner).keep(made)
    e.compressed = <Compressed *>calloc(1, sizeof(Compressed))
    if e.compressed == NULL:
        raise MemoryError("no memory for a compressed key")
    e.compressed.wide_kernels = &lane.kernels[<int>wide]
    e.compressed.packed = packed_new(made)


cdef inline void cannot_rebuild(Lane *lane, uint64_t key) noexcept with gil:
    """End the lane: the workers' logs of a key have a gap.

    Cannot happen as long as workers keep what they have to.
    """
    from bpsx.errors import BpsxError

    (<object>lane.owner).break_with(
        BpsxError(f"the compression state of key {key} cannot be rebuilt from the workers' logs")
    )
    lane.counters.dropped += 1


cdef inline void tell_reset(Lane *lane, uint32_t term) noexcept with gil:
    """Log that residuals were lost, with a server and a worker."""
    (<object>lane.owner).log(
        f"term {term}: error feedback of compressed keys starts from zero, because a server was"
        " lost together with a worker, whose part of it no other process has"
    )


cdef inline bint make_packed(
    Lane *lane, KeyState *e, const char *name, uint64_t length, uint32_t codec_bytes
) noexcept with gil:
    """Load what a compressed key needs. False if `codec` is invalid.

    Without memory or kernels no worker can get its sum, so the lane ends.
    """
    from bpsx.errors import ConfigError

    try:
        pack_entry(lane, e, name[:length], name[length:length + codec_bytes])
        return True
    except ConfigError as x:
        (<object>lane.owner).log(
            f"a worker registered a key whose compression this server does not know: {x}"
        )
        return False
    except Exception as x:
        (<object>lane.owner).break_with(x)
        lane.counters.dropped += 1
        return False
