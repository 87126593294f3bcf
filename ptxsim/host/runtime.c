// Stand-in for NVIDIA's libcute_dsl_runtime.so: the functions that host code compiled by the CuTe DSL calls.
//
// A compiled CuTe DSL function is machine code for the CPU that loads an embedded GPU binary, fills in parameters and
// calls the CUDA runtime through thin wrappers, `_cudaLaunchKernelEx` and so on. This file defines the same names.
// Nothing is executed here: loading a library and launching a kernel are handed to two callbacks of
// ptxsim/host/session.py, everything else answers like one idle GPU whose memory is the memory of this process.
//
// The set of names is private to nvidia-cutlass-dsl (4.8.1); tests/ptxsim/test_host_interface.py compares it with the
// real file.
// Every name carries a prefix here: the just-in-time linker of the DSL looks names up among everything the process has
// loaded and takes the first, so under the same names this library and the real one would get into each other's way,
// both for kernels that are simulated and for kernels that run on a GPU. ptxsim/host/binding.py makes the connection.
//
// Functions return a cudaError_t or CUresult: 0 is success, 801 "not supported" in both enumerations.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DSL(name) ptxsim_##name

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801, RAISED_IN_PYTHON = 999 };

// ------------------------------------------------------------------------------------------ what Python installs

typedef struct {
    uint32_t x, y, z;
} Dim3;

// cudaLaunchConfig_t and cudaLaunchAttribute (72 bytes) of CUDA 12 and 13; read by ptxsim/host/launches.py.
typedef struct {
    Dim3 grid, block;
    uint64_t shared_bytes;
    void *stream;
    void *attributes;
    uint32_t num_attributes;
} LaunchConfig;

typedef int (*LoadCallback)(uint64_t library, const void *image, uint64_t image_bytes);
typedef int (*LaunchCallback)(uint64_t library, const char *kernel, const LaunchConfig *config, void **arguments);

// Functions of CPython's C interface, handed in as addresses so that this file needs no headers.
typedef int (*GilEnsure)(void);
typedef void (*GilRelease)(int);
typedef void (*SetObject)(void *type, void *value);

static LoadCallback on_load;
static LaunchCallback on_launch;
static GilEnsure gil_ensure;
static GilRelease gil_release;
static SetObject set_python_error;
static void *raised_type, *raised_value; // the exception of the last launch, borrowed from the session that holds it
static int compute_major = 10, compute_minor = 0, num_multiprocessors = 148;

void ptxsim_set_callbacks(LoadCallback load, LaunchCallback launch) {
    on_load = load;
    on_launch = launch;
}

void ptxsim_set_python(GilEnsure ensure, GilRelease release, SetObject set_object) {
    gil_ensure = ensure;
    gil_release = release;
    set_python_error = set_object;
}

// The exception that a launch callback raised, or two null pointers once it has been delivered.
void ptxsim_set_raised(void *type, void *value) {
    raised_type = type;
    raised_value = value;
}

void ptxsim_set_device(int major, int minor, int multiprocessors) {
    compute_major = major;
    compute_minor = minor;
    num_multiprocessors = multiprocessors;
}

// ------------------------------------------------------------------------------------------ libraries and kernels

typedef struct {
    char *name;
    uint64_t library;
} Kernel;

static uint64_t num_libraries; // a library's handle is its number: never reused, unlike an address

// Bytes of a GPU binary: a "fatbin" (u32 magic, u16 version, u16 header bytes, u64 bytes that follow) or a bare ELF
// file, which ends with its section or its program headers.
static uint64_t image_size(const void *image) {
    const unsigned char *bytes = image;
    uint32_t magic;
    uint64_t offset;
    uint16_t count, size;
    memcpy(&magic, bytes, 4);
    if (magic == 0xBA55ED50u) {
        memcpy(&size, bytes + 6, 2);
        memcpy(&offset, bytes + 8, 8);
        return offset + size;
    }
    if (magic != 0x464C457Fu)
        return 0;
    memcpy(&offset, bytes + 0x20, 8);
    memcpy(&size, bytes + 0x36, 2);
    memcpy(&count, bytes + 0x38, 2);
    uint64_t end = offset + (uint64_t)size * count;
    memcpy(&offset, bytes + 0x28, 8);
    memcpy(&size, bytes + 0x3A, 2);
    memcpy(&count, bytes + 0x3C, 2);
    uint64_t section_end = offset + (uint64_t)size * count;
    return end > section_end ? end : section_end;
}

int DSL(_cudaLibraryLoadData)(uint64_t *library, const void *image, void *options, void *option_values,
                              uint32_t num_options, void *library_options, void *library_values,
                              uint32_t num_library_options) {
    *library = ++num_libraries;
    return on_load ? on_load(*library, image, image_size(image)) : SUCCESS;
}

int DSL(_cuLibraryLoadData)(uint64_t *library, const void *image, void *options, void *option_values,
                            uint32_t num_options, void *library_options, void *library_values,
                            uint32_t num_library_options) {
    return DSL(_cudaLibraryLoadData)(library, image, options, option_values, num_options, library_options,
                                     library_values, num_library_options);
}

int DSL(_cudaLibraryGetKernel)(Kernel **kernel, uint64_t library, const char *name) {
    *kernel = malloc(sizeof **kernel); // kept: compiled functions hold on to their kernels until the process ends
    (*kernel)->name = strdup(name);
    (*kernel)->library = library;
    return SUCCESS;
}

int DSL(_cuLibraryGetKernel)(Kernel **kernel, uint64_t library, const char *name) {
    return DSL(_cudaLibraryGetKernel)(kernel, library, name);
}

int DSL(_cudaLibraryGetKernelCount)(uint32_t *count, uint64_t library) {
    *count = 1;
    return SUCCESS;
}

int DSL(_cuLibraryGetKernelCount)(uint32_t *count, uint64_t library) {
    return DSL(_cudaLibraryGetKernelCount)(count, library);
}

int DSL(_cudaLibraryUnload)(uint64_t library) { return SUCCESS; }
int DSL(_cuLibraryUnload)(uint64_t library) { return SUCCESS; }

// No static shared memory, no local memory: only the attributes' presence matters to the callers.
int DSL(_cuKernelGetAttribute)(int *value, int attribute, Kernel *kernel, int device) {
    *value = 0;
    return SUCCESS;
}

int DSL(_cudaKernelSetAttributeForDevice)(Kernel *kernel, int attribute, int value, int device) { return SUCCESS; }
int DSL(_cudaFuncSetAttribute)(Kernel *kernel, int attribute, int value) { return SUCCESS; }

int DSL(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)(int *count, Kernel *kernel, int block, uint64_t shared_bytes) {
    *count = 1;
    return SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- launching

int DSL(_cudaLaunchKernelEx)(const LaunchConfig *config, Kernel *kernel, void **arguments) {
    return on_launch ? on_launch(kernel->library, kernel->name, config, arguments) : SUCCESS;
}

// -------------------------------------------------------------------------------------------------- tensor maps

// `CUtensorMap` in the format of the hardware, which the DSL also writes by itself for its TMA atoms; decoded in
// ptxsim/machine. Found by differential probing (prototype: HOST.md, section 4). Sixteen 64-bit words:
//   0  address
//   1  [1] 1; [4:6] rank-1; [7:10] element type; [13:14] swizzle; [15] fill with NaN (a guess, only read by ourselves);
//      [16] round to tf32; [17:18] L2 promotion; [21] 128 KiB or more; [32:63] stride 1
//   2  strides 2, 3;  3  stride 4, and from bit 32 four bits more of each stride     (strides in units of 16 bytes)
//   4  extents 0, 1;  5  extents 2, 3;  6 extent 4, [32+3i:] element stride i, [56:63] box 0;  7 boxes 1..4
// Extents, boxes and element strides are stored less one.
int DSL(_cuTensorMapEncodeTiled)(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                            const uint64_t *strides, const uint32_t *boxes, const uint32_t *element_strides,
                            int interleave, int swizzle, int l2_promotion, int fills_nan) {
    // CUtensorMapDataType: u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32_ftz tf32 tf32_ftz 16u4_align8; the two types
    // with other alignments have not been seen, nor interleaving, nor the swizzles with larger atoms (above 3).
    static const uint8_t codes[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8, 11};
    if (type < 0 || type >= (int)sizeof codes || rank < 1 || rank > 5 || interleave || swizzle < 0 || swizzle > 3)
        return NOT_SUPPORTED;
    static const uint8_t bits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4};
    if ((uint64_t)address % 16)
        return INVALID_VALUE;
    uint64_t words[16] = {0}, stride[4] = {0}, extent[5] = {0}, box[5] = {0}, bytes = extents[0] * bits[type] / 8;
    for (uint32_t i = 0; i < rank; i++) {
        if (extents[i] == 0 || boxes[i] == 0 || boxes[i] > 256 || element_strides[i] == 0 || element_strides[i] > 8)
            return INVALID_VALUE;
        if (i > 0 && strides[i - 1] % 16)
            return INVALID_VALUE;
        extent[i] = extents[i] - 1;
        box[i] = boxes[i] - 1;
        words[6] |= (uint64_t)(element_strides[i] - 1) << (32 + 3 * i);
        if (i > 0) {
            stride[i - 1] = strides[i - 1] >> 4;
            bytes += extent[i] * strides[i - 1];
        }
    }
    int is_tf32 = type == 11 || type == 12;
    words[0] = (uint64_t)address;
    words[1] = 1 << 1 | (uint64_t)(rank - 1) << 4 | (uint64_t)codes[type] << 7 | (uint64_t)swizzle << 13 |
               (uint64_t)(fills_nan != 0) << 15 | (uint64_t)is_tf32 << 16 | (uint64_t)(l2_promotion & 3) << 17 |
               (uint64_t)(bytes >= 128 << 10) << 21 | stride[0] << 32;
    words[2] = (stride[1] & 0xFFFFFFFF) | stride[2] << 32;
    words[3] = stride[3] & 0xFFFFFFFF;
    for (int i = 0; i < 4; i++)
        words[3] |= (stride[i] >> 32 & 15) << (32 + 4 * i);
    words[4] = (extent[0] & 0xFFFFFFFF) | extent[1] << 32;
    words[5] = (extent[2] & 0xFFFFFFFF) | extent[3] << 32;
    words[6] |= (extent[4] & 0xFFFFFFFF) | box[0] << 56;
    words[7] = box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24;
    memcpy(map, words, sizeof words);
    return SUCCESS;
}

// ------------------------------------------------------------------------------------------------------- device

int DSL(_cudaGetDevice)(int *device) {
    *device = 0;
    return SUCCESS;
}

int DSL(_cudaSetDevice)(int device) { return SUCCESS; }

int DSL(_cudaGetDeviceCount)(int *count) {
    *count = 1;
    return SUCCESS;
}

int DSL(_cuDeviceGet)(int *device, int ordinal) {
    *device = 0;
    return SUCCESS;
}

// cudaDeviceAttr; the limits are those of compute capability 9.0 and 10.0 (CUDA C++ programming guide).
int DSL(_cudaDeviceGetAttribute)(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;                // threads per block
    case 2: case 3: *value = 1024; break;        // block x, y
    case 4: *value = 64; break;                  // block z
    case 5: *value = 0x7FFFFFFF; break;          // grid x
    case 6: case 7: *value = 65535; break;       // grid y, z
    case 8: *value = 48 << 10; break;            // shared memory per block without opting in
    case 10: *value = 32; break;                 // warp size
    case 16: *value = num_multiprocessors; break;
    case 39: *value = 2048; break;               // threads per multiprocessor
    case 75: *value = compute_major; break;
    case 76: *value = compute_minor; break;
    case 81: *value = 228 << 10; break;          // shared memory per multiprocessor
    case 95: *value = 1; break;                  // cooperative launch
    case 97: *value = 227 << 10; break;          // shared memory per block with opting in
    case 120: *value = 1; break;                 // clusters
    default: *value = 0;
    }
    return SUCCESS;
}

// ------------------------------------------------------------------------- memory, streams, events: all at once

int DSL(_cudaMalloc)(void **memory, uint64_t bytes) {
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory ? SUCCESS : 2; // cudaErrorMemoryAllocation
}

int DSL(_cudaMallocAsync)(void **memory, uint64_t bytes, void *stream) { return DSL(_cudaMalloc)(memory, bytes); }
int DSL(_cudaMallocHost)(void **memory, uint64_t bytes) { return DSL(_cudaMalloc)(memory, bytes); }
int DSL(_cudaMallocManaged)(void **memory, uint64_t bytes, uint32_t flags) { return DSL(_cudaMalloc)(memory, bytes); }

int DSL(_cudaFree)(void *memory) {
    free(memory);
    return SUCCESS;
}

int DSL(_cudaFreeAsync)(void *memory, void *stream) { return DSL(_cudaFree)(memory); }
int DSL(_cudaFreeHost)(void *memory) { return DSL(_cudaFree)(memory); }

int DSL(_cudaMemset)(void *memory, int value, uint64_t bytes) {
    memset(memory, value, bytes);
    return SUCCESS;
}

int DSL(_cudaMemsetAsync)(void *memory, int value, uint64_t bytes, void *stream) {
    return DSL(_cudaMemset)(memory, value, bytes);
}

int DSL(_cudaMemcpy)(void *to, const void *from, uint64_t bytes, int kind) {
    memmove(to, from, bytes);
    return SUCCESS;
}

int DSL(_cudaMemcpyAsync)(void *to, const void *from, uint64_t bytes, int kind, void *stream) {
    return DSL(_cudaMemcpy)(to, from, bytes, kind);
}

int DSL(_cudaDeviceSynchronize)(void) { return SUCCESS; }
int DSL(_cudaStreamSynchronize)(void *stream) { return SUCCESS; }
int DSL(_cudaStreamDestroy)(void *stream) { return SUCCESS; }
int DSL(_cudaStreamWaitEvent)(void *stream, void *event, uint32_t flags) { return SUCCESS; }
int DSL(_cudaEventRecord)(void *event, void *stream) { return SUCCESS; }
int DSL(_cudaEventDestroy)(void *event) { return SUCCESS; }

int DSL(_cudaStreamCreate)(void **stream) {
    *stream = NULL; // the default stream
    return SUCCESS;
}

int DSL(_cudaEventCreate)(void **event) {
    *event = NULL;
    return SUCCESS;
}

int DSL(_cudaEventElapsedTime)(float *milliseconds, void *start, void *end) {
    *milliseconds = 0; // the simulator has no clock
    return SUCCESS;
}

// Graphs, captures, callbacks, symbols of libraries and the older form of a launch are not simulated.
#define UNSUPPORTED(name) int DSL(name)(void) { return NOT_SUPPORTED; }
UNSUPPORTED(_cudaGetDeviceProperties)
UNSUPPORTED(_cudaGraphDestroy)
UNSUPPORTED(_cudaGraphExecDestroy)
UNSUPPORTED(_cudaGraphInstantiate)
UNSUPPORTED(_cudaGraphLaunch)
UNSUPPORTED(_cudaLaunchKernel)
UNSUPPORTED(_cudaLibraryGetGlobal)
UNSUPPORTED(_cudaLibraryGetManaged)
UNSUPPORTED(_cudaLibraryGetUnifiedFunction)
UNSUPPORTED(_cudaLibraryLoadFromFile)
UNSUPPORTED(_cudaProfilerStart)
UNSUPPORTED(_cudaProfilerStop)
UNSUPPORTED(_cudaStreamAddCallback)
UNSUPPORTED(_cudaStreamBeginCapture)
UNSUPPORTED(_cudaStreamEndCapture)
UNSUPPORTED(_cuLibraryGetGlobal)
UNSUPPORTED(_cuLibraryGetManaged)
UNSUPPORTED(_cuLibraryGetModule)
UNSUPPORTED(_cuLibraryGetUnifiedFunction)
UNSUPPORTED(_cuLibraryLoadFromFile)

// ----------------------------------------------------------------------------------- helpers of the CUDA dialect

const char *DSL(cuda_dialect_get_error_name)(int error) {
    return error == SUCCESS ? "cudaSuccess" : error == NOT_SUPPORTED ? "cudaErrorNotSupported" : "error in ptxsim";
}

int DSL(cuda_dialect_print_on_error)(int error) {
    if (error)
        fprintf(stderr, "ptxsim: CUDA error %d (%s)\n", error, DSL(cuda_dialect_get_error_name)(error));
    return error;
}

void DSL(cuda_dialect_assert_success)(int error) {
    if (DSL(cuda_dialect_print_on_error)(error))
        abort();
}

// ------------------------------------------------------------------------------------------------------- TVM-FFI

typedef void (*SetRaised)(const char *kind, const char *message);                    // TVMFFIErrorSetRaisedFromCStr
typedef void (*SetRaisedParts)(const char *kind, const char **parts, int num_parts); // …FromCStrParts

// TVM-FFI turns an error into a Python exception by its kind. "EnvErrorAlreadySet" stands for "the interpreter already
// holds an exception" (tvm_ffi/cython/error.pxi): so the exception of the launch callback arrives as it is.
static const char *error_kind(int error) {
    if (error != RAISED_IN_PYTHON || !raised_value)
        return "RuntimeError";
    int state = gil_ensure();
    set_python_error(raised_type, raised_value);
    raised_type = raised_value = NULL;
    gil_release(state);
    return "EnvErrorAlreadySet";
}

void DSL(CuteDSLRT_TVMFFISetRaisedCudaError)(SetRaisedParts set_raised, int error) {
    char number[16];
    snprintf(number, sizeof number, "%d ", error);
    const char *parts[] = {"CUDA error ", number, DSL(cuda_dialect_get_error_name)(error)};
    set_raised(error_kind(error), parts, 3);
}

void DSL(CuteDSLRT_TVMFFISetRaisedCudaLaunchError)(SetRaisedParts set_raised, int error) {
    DSL(CuteDSLRT_TVMFFISetRaisedCudaError)(set_raised, error);
}

// A function loads its library at the first call; `slot` is a global of the compiled module.
int DSL(cuda_dialect_init_library_once)(void **slot, int (*init)(void **), int (*load)(void **, int),
                                        SetRaised set_raised) {
    if (*slot)
        return SUCCESS;
    void *library = NULL;
    int error = init(&library);
    if (!error && load)
        error = load(&library, 0);
    if (error)
        set_raised(error_kind(error), DSL(cuda_dialect_get_error_name)(error));
    else
        *slot = library;
    return error;
}

void DSL(cuda_dialect_unload_library_once)(void **slot) { *slot = NULL; }

// ---------------------------------------------------------------------------------------------- DLPack exchange

// torch tells TVM-FFI about tensors through one table of functions, `torch.Tensor.__dlpack_c_exchange_api__`
// (struct DLPackExchangeAPI of dlpack.h 1.2). `ptxsim_divert_exchange` puts functions of this file into that table,
// which announce memory of the host as memory of CUDA device 0; `ptxsim_restore_exchange` puts torch's back.
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor; // DLTensor

typedef struct {
    uint32_t version[2];
    void *manager_context, *deleter;
    uint64_t flags;
    Tensor tensor;
} ManagedTensor; // DLManagedTensorVersioned

typedef struct {
    uint32_t version[2];
    void *previous;
    int (*allocate)(Tensor *prototype, ManagedTensor **out, void *context, void *set_error);
    int (*from_python)(void *object, ManagedTensor **out);
    int (*to_python)(ManagedTensor *tensor, void **out);
    int (*borrow)(void *object, Tensor *out);
    int (*current_stream)(int device_type, int device_id, void **out);
} ExchangeTable;

enum { DEVICE_CPU = 1, DEVICE_CUDA = 2 };

static ExchangeTable torch_table; // what the table held before it was diverted

// Ranges [begin, end) of the tensors announced since ptxsim_clear_ranges, for bounds checks.
static uint64_t (*ranges)[2];
static uint64_t num_ranges, range_capacity;

uint64_t ptxsim_ranges(uint64_t (**out)[2]) {
    *out = ranges;
    return num_ranges;
}

void ptxsim_clear_ranges(void) { num_ranges = 0; }

static void note_range(const Tensor *tensor) {
    int64_t last = 0, contiguous = 1;
    if (!tensor->data)
        return;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] == 0)
            return;
        last += (tensor->shape[i] - 1) * (tensor->strides ? tensor->strides[i] : contiguous);
        contiguous *= tensor->shape[i];
    }
    uint64_t begin = (uint64_t)tensor->data + tensor->byte_offset;
    uint64_t end = begin + ((uint64_t)(last + 1) * tensor->type_bits * tensor->type_lanes + 7) / 8;
    for (uint64_t i = num_ranges; i-- > 0;)
        if (ranges[i][0] == begin && ranges[i][1] == end)
            return;
    if (num_ranges == range_capacity) {
        range_capacity = range_capacity ? 2 * range_capacity : 64;
        ranges = realloc(ranges, range_capacity * sizeof *ranges);
    }
    ranges[num_ranges][0] = begin;
    ranges[num_ranges++][1] = end;
}

static void move_to(Tensor *tensor, int from, int to) {
    if (tensor->device_type == from) {
        tensor->device_type = to;
        tensor->device_id = 0;
    }
}

static int borrow(void *object, Tensor *out) {
    int error = torch_table.borrow(object, out);
    if (!error) {
        note_range(out);
        move_to(out, DEVICE_CPU, DEVICE_CUDA);
    }
    return error;
}

static int from_python(void *object, ManagedTensor **out) {
    int error = torch_table.from_python(object, out);
    if (!error) {
        note_range(&(*out)->tensor);
        move_to(&(*out)->tensor, DEVICE_CPU, DEVICE_CUDA);
    }
    return error;
}

static int to_python(ManagedTensor *tensor, void **out) {
    move_to(&tensor->tensor, DEVICE_CUDA, DEVICE_CPU);
    return torch_table.to_python(tensor, out);
}

static int allocate(Tensor *prototype, ManagedTensor **out, void *context, void *set_error) {
    Tensor on_host = *prototype;
    move_to(&on_host, DEVICE_CUDA, DEVICE_CPU);
    int error = torch_table.allocate(&on_host, out, context, set_error);
    if (!error) {
        note_range(&(*out)->tensor);
        move_to(&(*out)->tensor, DEVICE_CPU, DEVICE_CUDA);
    }
    return error;
}

static int current_stream(int device_type, int device_id, void **out) {
    *out = NULL;
    return SUCCESS;
}

void ptxsim_divert_exchange(ExchangeTable *table) {
    torch_table = *table;
    table->allocate = allocate;
    table->from_python = from_python;
    table->to_python = to_python;
    if (table->borrow)
        table->borrow = borrow;
    table->current_stream = current_stream;
}

void ptxsim_restore_exchange(ExchangeTable *table) {
    ExchangeTable restored = torch_table;
    *table = restored;
}
