# XLA's foreign function interface (FFI), version 0.2, looked up in the library that is loaded;
# xla/ffi/api/c_api.h documents each part.
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memset

from bpsx.tensorflow.c_api cimport dlsym

cdef extern from "<dlfcn.h>" nogil:
    void *RTLD_DEFAULT

cdef enum:
    MAJOR = 0
    MINOR = 2                   # later ones add to the ends of structs
    METADATA = 1                # extension that asks a handler for its version
    EXECUTE = 3                 # stage of a call

cdef struct Extension:
    size_t size
    int kind
    Extension *next

cdef struct Version:
    size_t size
    Extension *extension
    int major
    int minor

cdef struct Metadata:
    size_t size
    Version version
    uint32_t traits

cdef struct MetadataExtension:
    Extension base
    Metadata *metadata

cdef struct Bytes:
    const char *data
    size_t length

cdef struct Buffer:
    size_t size
    Extension *extension
    int dtype
    char *data
    int64_t n_dims
    int64_t *dims

cdef struct Values:             # Arguments or results.
    size_t size
    Extension *extension
    int64_t n
    int *kinds
    Buffer **values

cdef struct Attributes:
    size_t size
    Extension *extension
    int64_t n
    int *kinds
    Bytes **names
    Bytes **values              # Texts; bpsx uses no other attributes.

cdef struct Frame:
    size_t size
    Extension *extension
    Ffi *api
    void *context
    int stage
    Values arguments
    Values results
    Attributes attributes
    void *future                # Out: a future, if the call goes on after the handler has returned.

cdef struct Bundle:
    void *instantiate
    void *prepare
    void *initialize
    void *(*execute)(Frame *) noexcept nogil

cdef struct Registration:
    size_t size
    Extension *extension
    Bytes name
    Bytes platform
    Bundle bundle
    uint32_t traits

cdef struct NewError:
    size_t size
    Extension *extension
    const char *text
    int code                    # In the numbering of TF_Status.

cdef struct OfFuture:
    size_t size
    Extension *extension
    void *future
    void *error

cdef struct Ffi:
    size_t size
    Extension *extension
    Version version
    void *internal
    void *(*new_error)(NewError *) noexcept nogil
    void *error_text
    void *destroy_error
    void *(*register)(Registration *) noexcept nogil
    void *others[9]
    void *(*new_future)(OfFuture *) noexcept nogil
    void *(*set_available)(OfFuture *) noexcept nogil
    void *(*set_error)(OfFuture *) noexcept nogil


cdef inline bint is_understood(Frame *frame) noexcept nogil:
    """Whether the frame's parts are as large as here: a larger part has moved those behind it.

    XLA does not count the future.
    """
    return (
        frame.size >= sizeof(Frame) - sizeof(void *)
        and frame.arguments.size == sizeof(Values)
        and frame.results.size == sizeof(Values)
        and frame.attributes.size == sizeof(Attributes)
    )


cdef inline Ffi *find_ffi() noexcept nogil:
    """Return XLA's FFI. NULL: there is none, or not one that bpsx knows."""
    cdef Ffi *(*get)() noexcept nogil
    cdef Ffi *found
    get = <Ffi *(*)() noexcept nogil>dlsym(RTLD_DEFAULT, b"_ZN3xla3ffi12GetXlaFfiApiEv")
    if get == NULL:
        return NULL
    found = get()
    if (
        found == NULL
        or found.version.major != MAJOR
        or found.version.minor < MINOR
        or found.size < sizeof(Ffi)
    ):
        return NULL
    return found


cdef inline bint asks_for_metadata(Frame *frame) noexcept nogil:
    """Whether a call only asks for the handler's version; if so, the reply is filled in."""
    cdef MetadataExtension *asked = <MetadataExtension *>frame.extension
    if frame.extension == NULL or frame.extension.kind != METADATA:
        return False
    asked.metadata.version.major, asked.metadata.version.minor = MAJOR, MINOR
    asked.metadata.traits = 0
    return True


cdef inline void *error_of(Ffi *ffi, int code, const char *text) noexcept nogil:
    cdef NewError new
    memset(&new, 0, sizeof(new))
    new.size, new.code, new.text = sizeof(new), code, text
    return ffi.new_error(&new)


cdef inline void *future_of(Ffi *ffi) noexcept nogil:
    """Return a new future. NULL: XLA gives none."""
    cdef OfFuture new
    memset(&new, 0, sizeof(new))
    new.size = 2 * sizeof(void *)
    if ffi.new_future(&new) != NULL:
        return NULL
    return new.future


cdef inline void complete(Ffi *ffi, void *future, void *error) noexcept nogil:
    """Complete a future. ``error``: NULL, or a result of :func:`error_of`."""
    cdef OfFuture one
    memset(&one, 0, sizeof(one))
    one.size, one.future, one.error = sizeof(one), future, error
    if error != NULL:
        ffi.set_error(&one)
    else:
        one.size -= sizeof(void *)
        ffi.set_available(&one)
