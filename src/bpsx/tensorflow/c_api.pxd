# TensorFlow's C API, looked up in the library that is loaded: bpsx is built without TensorFlow.
# TensorFlow's c/kernels.h, c/ops.h, c/tf_tensor.h and c/tf_status.h document each function; its
# objects are `void *` here.
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy, memset, strrchr, strstr

cdef extern from "<dlfcn.h>" nogil:
    ctypedef struct Dl_info:
        const char *dli_fname
    void *dlopen(const char *path, int mode)
    void *dlsym(void *library, const char *name)
    int dladdr(const void *address, Dl_info *found)
    int RTLD_LAZY, RTLD_NOLOAD

cdef enum:
    OK = 0                      # code of a TF_Status; others are those of Why in async_op.pxd

# More than 20 fields: a table of functions.
cdef struct Api:
    # Definition of an op
    void *(*new_op)(const char *name) noexcept nogil
    void (*add_attr)(void *op, const char *spec) noexcept nogil
    void (*add_input)(void *op, const char *spec) noexcept nogil
    void (*add_output)(void *op, const char *spec) noexcept nogil
    void (*set_stateful)(void *op, bint on) noexcept nogil
    void (*set_shapes)(
        void *op, void (*infer)(void *context, void *status) noexcept nogil
    ) noexcept nogil
    void (*register_op)(void *op, void *status) noexcept nogil
    int64_t (*n_shapes)(void *context) noexcept nogil
    void *(*new_shape)() noexcept nogil
    void (*get_shape)(void *context, int i, void *shape, void *status) noexcept nogil
    void (*set_shape)(void *context, int i, void *shape, void *status) noexcept nogil
    void (*delete_shape)(void *shape) noexcept nogil
    void *(*new_scalar)(void *context) noexcept nogil
    # Kernels of an op
    void *(*new_kernel)(
        const char *op, const char *device, void *(*create)(void *) noexcept nogil,
        void (*compute)(void *, void *, void *) noexcept nogil,
        void (*forget)(void *) noexcept nogil
    ) noexcept nogil
    void (*register_kernel)(const char *name, void *builder, void *status) noexcept nogil
    void (*attr_size)(
        void *making, const char *name, int32_t *n, int32_t *total, void *status
    ) noexcept nogil
    void (*attr_strings)(
        void *making, const char *name, char **values, size_t *lengths, int n, void *storage,
        size_t size, void *status
    ) noexcept nogil
    void (*attr_ints)(
        void *making, const char *name, int64_t *values, int n, void *status
    ) noexcept nogil
    void (*attr_int)(void *making, const char *name, int64_t *value, void *status) noexcept nogil
    void (*attr_bool)(void *making, const char *name, uint8_t *value, void *status) noexcept nogil
    void (*fail_making)(void *making, void *status) noexcept nogil
    # A call of a kernel
    int (*n_inputs)(void *context) noexcept nogil
    int (*n_outputs)(void *context) noexcept nogil
    void (*get_input)(void *context, int i, void **tensor, void *status) noexcept nogil
    void *(*make_output)(
        void *context, const int *candidates, int n, int i, const int64_t *dims, int n_dims,
        int *forwarded, void *status
    ) noexcept nogil
    void (*set_output)(void *context, int i, const void *tensor, void *status) noexcept nogil
    void (*fail)(void *context, void *status) noexcept nogil
    void (*run_done)(void *done) noexcept nogil
    # Tensors and statuses
    int (*dtype)(const void *tensor) noexcept nogil
    int (*n_dims)(const void *tensor) noexcept nogil
    int64_t (*dim)(const void *tensor, int i) noexcept nogil
    size_t (*n_bytes)(const void *tensor) noexcept nogil
    void *(*data)(const void *tensor) noexcept nogil
    void (*delete_tensor)(void *tensor) noexcept nogil
    void *(*new_status)() noexcept nogil
    void (*set_status)(void *status, int code, const char *text) noexcept nogil
    int (*code)(const void *status) noexcept nogil
    const char *(*message)(const void *status) noexcept nogil
    void (*delete_status)(void *status) noexcept nogil


cdef inline void find(
    void *library, const char **missing, const char *name, void **where
) noexcept nogil:
    """Look up a function, or note the first that is missing."""
    where[0] = dlsym(library, name)
    if where[0] == NULL and missing[0] == NULL:
        missing[0] = name


cdef inline const char *find_all(Api *api) noexcept nogil:
    """Fill ``api``. Returns the first function that is missing, or the library; NULL: none is."""
    cdef const char *missing = NULL
    cdef void *library = dlopen(b"libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD)
    if library == NULL:
        return b"libtensorflow_framework.so.2"
    find(library, &missing, b"TF_NewOpDefinitionBuilder", <void **>&api.new_op)
    find(library, &missing, b"TF_OpDefinitionBuilderAddAttr", <void **>&api.add_attr)
    find(library, &missing, b"TF_OpDefinitionBuilderAddInput", <void **>&api.add_input)
    find(library, &missing, b"TF_OpDefinitionBuilderAddOutput", <void **>&api.add_output)
    find(library, &missing, b"TF_OpDefinitionBuilderSetIsStateful", <void **>&api.set_stateful)
    find(
        library, &missing, b"TF_OpDefinitionBuilderSetShapeInferenceFunction",
        <void **>&api.set_shapes
    )
    find(library, &missing, b"TF_RegisterOpDefinition", <void **>&api.register_op)
    find(library, &missing, b"TF_ShapeInferenceContextNumInputs", <void **>&api.n_shapes)
    find(library, &missing, b"TF_NewShapeHandle", <void **>&api.new_shape)
    find(library, &missing, b"TF_ShapeInferenceContextGetInput", <void **>&api.get_shape)
    find(library, &missing, b"TF_ShapeInferenceContextSetOutput", <void **>&api.set_shape)
    find(library, &missing, b"TF_DeleteShapeHandle", <void **>&api.delete_shape)
    find(library, &missing, b"TF_ShapeInferenceContextScalar", <void **>&api.new_scalar)
    find(library, &missing, b"TF_NewAsyncKernelBuilder", <void **>&api.new_kernel)
    find(library, &missing, b"TF_RegisterKernelBuilder", <void **>&api.register_kernel)
    find(library, &missing, b"TF_OpKernelConstruction_GetAttrSize", <void **>&api.attr_size)
    find(
        library, &missing, b"TF_OpKernelConstruction_GetAttrStringList", <void **>&api.attr_strings
    )
    find(library, &missing, b"TF_OpKernelConstruction_GetAttrInt64List", <void **>&api.attr_ints)
    find(library, &missing, b"TF_OpKernelConstruction_GetAttrInt64", <void **>&api.attr_int)
    find(library, &missing, b"TF_OpKernelConstruction_GetAttrBool", <void **>&api.attr_bool)
    find(library, &missing, b"TF_OpKernelConstruction_Failure", <void **>&api.fail_making)
    find(library, &missing, b"TF_NumInputs", <void **>&api.n_inputs)
    find(library, &missing, b"TF_NumOutputs", <void **>&api.n_outputs)
    find(library, &missing, b"TF_GetInput", <void **>&api.get_input)
    find(library, &missing, b"TF_ForwardInputOrAllocateOutput", <void **>&api.make_output)
    find(library, &missing, b"TF_SetOutput", <void **>&api.set_output)
    find(library, &missing, b"TF_OpKernelContext_Failure", <void **>&api.fail)
    find(library, &missing, b"TF_RunAsyncOpKernelDoneCallback", <void **>&api.run_done)
    find(library, &missing, b"TF_TensorType", <void **>&api.dtype)
    find(library, &missing, b"TF_NumDims", <void **>&api.n_dims)
    find(library, &missing, b"TF_Dim", <void **>&api.dim)
    find(library, &missing, b"TF_TensorByteSize", <void **>&api.n_bytes)
    find(library, &missing, b"TF_TensorData", <void **>&api.data)
    find(library, &missing, b"TF_DeleteTensor", <void **>&api.delete_tensor)
    find(library, &missing, b"TF_NewStatus", <void **>&api.new_status)
    find(library, &missing, b"TF_SetStatus", <void **>&api.set_status)
    find(library, &missing, b"TF_GetCode", <void **>&api.code)
    find(library, &missing, b"TF_Message", <void **>&api.message)
    find(library, &missing, b"TF_DeleteStatus", <void **>&api.delete_status)
    return missing


# TensorFlow's callback for an asynchronous kernel is the address of a std::function<void()> on the
# caller's stack: it has to be moved out before the kernel returns. This is libstdc++'s layout: 16
# bytes that hold the target or a pointer to it; the function that copies and destroys the target;
# the function that calls it. No header promises this layout, so `is_known` checks each callback
# before it is used.
cdef struct Done:
    char held[16]
    int (*manager)(Done *target, const Done *source, int op) noexcept nogil
    void (*invoker)(const Done *held) noexcept nogil

cdef enum:
    DESTROY = 3                 # operation code of a manager


cdef inline bint is_of_tensorflow(const void *address) noexcept nogil:
    """Whether ``address`` lies in one of TensorFlow's libraries."""
    cdef Dl_info found
    cdef const char *file
    if dladdr(address, &found) == 0 or found.dli_fname == NULL:
        return False
    file = strrchr(found.dli_fname, b'/')
    return strstr(found.dli_fname if file == NULL else file, b"tensorflow") != NULL


cdef inline bint is_known(const Done *done, void **known) noexcept nogil:
    """Whether ``done`` has the layout above: both pointers are to functions of TensorFlow's.

    ``known``: the two pointers of a callback checked before, to compare with the next.
    """
    cdef void *manager = <void *>done.manager
    cdef void *invoker = <void *>done.invoker
    if manager == NULL or invoker == NULL:
        return False
    if manager == known[0] and invoker == known[1]:
        return True
    if not (is_of_tensorflow(manager) and is_of_tensorflow(invoker)):
        return False
    known[0], known[1] = manager, invoker
    return True


cdef inline void move(Done *target, Done *source) noexcept nogil:
    """Move ``source`` to ``target``, and leave ``source`` empty."""
    memcpy(target, source, sizeof(Done))
    source.manager = NULL


cdef inline void run(Api *api, Done *done) noexcept nogil:
    """Report to TensorFlow that the kernel is done, and destroy the callback."""
    api.run_done(done)
    done.manager(done, done, DESTROY)
    memset(done, 0, sizeof(Done))
