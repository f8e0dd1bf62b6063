// Runs lightning_accel/data/single_pass.cu on the CPU: test_kernels.py compiles this file and calls `launch`.
//
// Blocks are a loop. The threads of a block are contexts (ucontext.h) that take turns: each runs up to the barrier,
// then the next; when all are there they go on. What one reads of shared memory before the barrier, or nobody has
// written, is the worst that it could be on a GPU: poison. Loads are checked for where they read.

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

struct Index {
    unsigned int x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

// What may be read: the images, the samples' numbers, the channels' numbers.
static struct {
    const char *begin, *end;
} readable[3];
static int stray_loads;

template <class T>
static T __ldg(const T* address) {
    const char* const at = reinterpret_cast<const char*>(address);
    for (const auto& range : readable)
        if (at >= range.begin && at + sizeof(T) <= range.end) return *address;
    ++stray_loads;
    return T();
}

static unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static ucontext_t scheduler, threads[1024];
static void __syncthreads() { swapcontext(&threads[threadIdx.x], &scheduler); }

#include "single_pass.cu"

static const size_t MAX_SHARED = 1 << 16, MARGIN = 256;
__align__(16) unsigned char staged[MAX_SHARED + MARGIN];

struct Call {
    const void *images, *samples, *levels;
    void* out;
    long long stride_n, stride_c, stride_h, stride_w;
    int first_sample, channels, in_height, in_width, height, width, turn_rows, turn_columns;
};
static Call call;
static bool is_finished[1024];
static void (*body)();

template <class In, class Out, int COUNT, bool LAST, class Offset>
static void thread_body() {
    make_tile<In, Out, COUNT, LAST, Offset>(
        static_cast<const In*>(call.images), static_cast<const int*>(call.samples),
        static_cast<const float*>(call.levels), static_cast<Out*>(call.out), call.stride_n, call.stride_c,
        call.stride_h, call.stride_w, call.first_sample,
        call.channels, call.in_height, call.in_width, call.height, call.width, call.turn_rows, call.turn_columns);
}

static void thread_main() {
    body();
    is_finished[threadIdx.x] = true;  // and on to uc_link, the scheduler
}

template <class In, class Out, int COUNT, class Offset>
static void choose(bool channels_last) {
    body = channels_last ? thread_body<In, Out, COUNT, true, Offset> : thread_body<In, Out, COUNT, false, Offset>;
}

template <class In, class Out, class Offset>
static void choose(int channels, bool channels_last) {
    if (channels == 1) body = thread_body<In, Out, 1, false, Offset>;
    else if (channels == 3) choose<In, Out, 3, Offset>(channels_last);
    else if (channels == 4) choose<In, Out, 4, Offset>(channels_last);
    else choose<In, Out, 0, Offset>(channels_last);
}

template <class In, class Out>
static void choose(int channels, bool channels_last, bool is_wide) {
    if (is_wide) choose<In, Out, long long>(channels, channels_last);
    else choose<In, Out, unsigned int>(channels, channels_last);
}

template <class In>
static void choose(int kind, int channels, bool channels_last, bool is_wide) {
    if (kind == 0) choose<In, Float32>(channels, channels_last, is_wide);
    else if (kind == 1) choose<In, Float16>(channels, channels_last, is_wide);
    else choose<In, BFloat16>(channels, channels_last, is_wide);
}

static bool is_untouched_beyond(size_t shared_bytes) {
    for (size_t i = shared_bytes; i < sizeof staged; ++i)
        if (staged[i] != 0xA5) return false;
    return true;
}

// Returns whether all threads came to the same barriers.
static bool run_block() {
    const size_t STACK = 1 << 16;
    static std::vector<char> stacks(1024 * STACK);
    std::memset(staged, 0xA5, sizeof staged);
    for (unsigned int t = 0; t < blockDim.x; ++t) {
        is_finished[t] = false;
        getcontext(&threads[t]);
        threads[t].uc_stack.ss_sp = stacks.data() + t * STACK;
        threads[t].uc_stack.ss_size = STACK;
        threads[t].uc_link = &scheduler;
        makecontext(&threads[t], thread_main, 0);
    }
    for (unsigned int waiting = blockDim.x; waiting;) {
        waiting = 0;
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            if (is_finished[threadIdx.x]) return false;  // a barrier that only others came to
            swapcontext(&scheduler, &threads[threadIdx.x]);
            if (!is_finished[threadIdx.x]) ++waiting;
        }
        if (waiting && waiting != blockDim.x) return false;
    }
    return true;
}

// `bounds` are the three readable ranges: begin, end, begin, end, begin, end. Negative: shared memory or barriers are
// wrong; else the number of loads from where nothing is to be read.
extern "C" int launch(
    int is_float, int kind, int channels, int channels_last, int is_wide, int tiles, int samples, int block,
    int shared_bytes, const char* const* bounds, const Call* given) {
    call = *given;
    stray_loads = 0;
    for (int i = 0; i < 3; ++i) readable[i] = {bounds[2 * i], bounds[2 * i + 1]};
    is_float ? choose<Float32>(kind, channels, channels_last != 0, is_wide != 0)
             : choose<UInt8>(kind, channels, channels_last != 0, is_wide != 0);
    gridDim = {static_cast<unsigned int>(tiles), static_cast<unsigned int>(samples), 1};
    blockDim = {static_cast<unsigned int>(block), 1, 1};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            if (!run_block() || !is_untouched_beyond(static_cast<size_t>(shared_bytes))) return -1;
    return stray_loads;
}

extern "C" void convert(const float* values, long long count, unsigned short* as_float16, unsigned short* as_bfloat16) {
    for (long long i = 0; i < count; ++i) {
        as_float16[i] = Format<Float16>::one(values[i]).bits;
        as_bfloat16[i] = Format<BFloat16>::one(values[i]).bits;
    }
}
