// Crop, flip, normalise, cast and lay out in one pass over memory; single_pass.py says what is computed.
//
// Compiled by CuPy with NVRTC: no header is included. INPUT, OUTPUT, CHANNELS, CHANNELS_LAST and OFFSET are given as -D
// options by single_pass.py, one kernel for each combination that is met. Without them there are only the templates, from
// which tests/data/ instantiates every combination, for nvcc and (block and thread indices as loops) for the CPU.
//
// A block makes consecutive pixels of one sample, in TURNS; in each, every thread makes PIXELS neighbours, all of their
// channels: row and column are found once and then counted on. What was weighed:
// - Loads are of single elements, through the read-only path. The threads of a warp read neighbours, so that a line
//   comes from memory once and then from L1. Words of four bytes need aligned rows: one random crop in four has them.
// - Written straight from registers, three channels of two bytes would leave gaps of 16 bytes between a warp's stores
//   of 8: L2 would see every sector three times, and be the limit. So a block collects its pixels in shared memory, and
//   writes them out 16 bytes a thread, neighbours by neighbours.
// - Planes (NCHW) have no such gaps: four pixels of a plane are one store.
// - Two turns spread what a thread does once (the division, the channels' numbers) over twice the pixels; four would
//   take registers from the threads that hide the loads.

typedef unsigned char UInt8;
typedef float Float32;
struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

enum { PIXELS = 4, TURNS = 2, MAX_THREADS = 128 };

// Four values in one store, and the widest store there is.
struct alignas(8) Quad16 {
    unsigned int low, high;
};
struct alignas(16) Quad32 {
    float values[PIXELS];
};
struct alignas(16) Chunk {
    unsigned int words[4];
};

extern __shared__ __align__(16) unsigned char staged[];

// CuPy compiles with -ftz=true, which would flush what is subnormal; an instruction written out is left as it is.
__device__ __forceinline__ float multiply_add(float value, float scale, float bias) {
#ifdef __CUDA_ARCH__
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(value), "f"(scale), "f"(bias));
    return result;
#else
    return fmaf(value, scale, bias);
#endif
}

// The upper half of the float, to nearest, ties to even: what carries out of the mantissa rightly raises the exponent.
__device__ __forceinline__ unsigned int bfloat16_bits(unsigned int bits) {
    const unsigned int magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (bits >> 16) | 0x40u;  // NaN, and not infinity once its lower half is gone
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ unsigned int float16_bits(unsigned int bits) {
    const unsigned int sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520, half way to what would follow 65504: infinity
    if (magnitude >= 0x38800000u)  // 2^-14, the smallest normal number; the exponent's bias goes from 127 to 15
        return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
    if (magnitude <= 0x33000000u) return sign;  // 2^-25, half of the smallest subnormal number: zero is even
    const unsigned int shift = 126u - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const unsigned int whole = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return sign | (whole + (rest > half || (rest == half && (whole & 1u)) ? 1u : 0u));
}

// One value, and four, as the output has them.
template <class Out>
struct Format;

template <>
struct Format<Float32> {
    typedef Quad32 Quad;
    static __device__ __forceinline__ Float32 one(float value) { return value; }
    static __device__ __forceinline__ Quad four(const float* of, int every) {
        return Quad{{of[0], of[every], of[2 * every], of[3 * every]}};
    }
};

template <>
struct Format<BFloat16> {
    typedef Quad16 Quad;
    static __device__ __forceinline__ unsigned int two(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        unsigned int bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
#else
        return bfloat16_bits(__float_as_uint(low)) | bfloat16_bits(__float_as_uint(high)) << 16;
#endif
    }
    static __device__ __forceinline__ BFloat16 one(float value) {
        return BFloat16{static_cast<unsigned short>(two(value, 0.0f) & 0xffffu)};
    }
    static __device__ __forceinline__ Quad four(const float* of, int every) {
        return Quad{two(of[0], of[every]), two(of[2 * every], of[3 * every])};
    }
};

template <>
struct Format<Float16> {
    typedef Quad16 Quad;
    static __device__ __forceinline__ Float16 one(float value) {
#ifdef __CUDA_ARCH__
        Float16 result;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
        return result;
#else
        return Float16{static_cast<unsigned short>(float16_bits(__float_as_uint(value)))};
#endif
    }
    static __device__ __forceinline__ unsigned int two(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        unsigned int bits;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
#else
        return one(low).bits | static_cast<unsigned int>(one(high).bits) << 16;
#endif
    }
    static __device__ __forceinline__ Quad four(const float* of, int every) {
        return Quad{two(of[0], of[every]), two(of[2 * every], of[3 * every])};
    }
};

template <class Wide>
__device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<unsigned long long>(address) % sizeof(Wide) == 0;
}

// `samples` is (N, 3): top, left, step. `levels` is (3, C): scale, bias, fill. Strides are in elements.
// COUNT is the number of channels, 0 where it is known at run time only. Offset is what an offset within a sample fits.
// The grid is (tiles of a sample, samples from `first_sample` on). `turn_rows` and `turn_columns` are the quotient and
// the remainder of a turn's pixels by the width: they spare a division, as costly as all else that is done for a pixel.
template <class In, class Out, int COUNT, bool LAST, class Offset>
__device__ __forceinline__ void make_tile(
    const In* __restrict__ images, const int* __restrict__ samples, const float* __restrict__ levels,
    Out* __restrict__ out, long long stride_n, long long stride_c, long long stride_h, long long stride_w,
    int first_sample, int channels, int in_height, int in_width, int height, int width, int turn_rows,
    int turn_columns) {
    typedef typename Format<Out>::Quad Quad;
    const bool is_staged = LAST && COUNT > 0;
    const int group = COUNT > 0 ? COUNT : 1;  // of channels, held in registers at a time
    const int count = COUNT > 0 ? COUNT : channels;

    const int sample = first_sample + static_cast<int>(blockIdx.y);
    const unsigned int pixels = static_cast<unsigned int>(height) * static_cast<unsigned int>(width);
    const unsigned int in_turn = blockDim.x * PIXELS, tile = blockIdx.x * in_turn * TURNS;
    const In* const source = images + sample * stride_n;
    Out* const target = out + static_cast<unsigned long long>(sample) * count * pixels;

    const int* const place = samples + 3 * static_cast<unsigned long long>(sample);
    const int top = __ldg(place), left = __ldg(place + 1), step = __ldg(place + 2);
    int row = static_cast<int>((tile + threadIdx.x * PIXELS) / static_cast<unsigned int>(width));
    int column = static_cast<int>(tile + threadIdx.x * PIXELS) - row * width;

#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const unsigned int in_tile = turn * in_turn + threadIdx.x * PIXELS, begin = tile + in_tile;
        bool is_inside[PIXELS];
        Offset offsets[PIXELS];  // what lies outside loads the sample's first pixel, and does not use it
        int y = top + row, at = column;
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {
            const int x = left + step * at;
            is_inside[k] = static_cast<unsigned int>(y) < static_cast<unsigned int>(in_height) &&
                           static_cast<unsigned int>(x) < static_cast<unsigned int>(in_width);
            offsets[k] = is_inside[k] ? static_cast<Offset>(y) * static_cast<Offset>(stride_h) +
                                            static_cast<Offset>(x) * static_cast<Offset>(stride_w)
                                      : static_cast<Offset>(0);
            if (++at == width) {
                at = 0;
                ++y;
            }
        }
        row += turn_rows;
        column += turn_columns;
        if (column >= width) {
            column -= width;
            ++row;
        }

        for (int first = 0; first < count; first += group) {
            In raw[PIXELS * group];  // no branch is between the loads: one does not wait for another
            float values[PIXELS * group];
#pragma unroll
            for (int c = 0; c < group; ++c) {
                const In* const plane = source + (first + c) * stride_c;
#pragma unroll
                for (int k = 0; k < PIXELS; ++k) raw[k * group + c] = __ldg(plane + offsets[k]);
            }
#pragma unroll
            for (int c = 0; c < group; ++c) {
                const float* const level = levels + first + c;
                const float scale = __ldg(level), bias = __ldg(level + count), fill = __ldg(level + 2 * count);
#pragma unroll
                for (int k = 0; k < PIXELS; ++k) {
                    const float value = multiply_add(static_cast<float>(raw[k * group + c]), scale, bias);
                    values[k * group + c] = is_inside[k] ? value : fill;
                }
            }
            if (is_staged) {
                Quad* const to = reinterpret_cast<Quad*>(staged) + in_tile / PIXELS * group;
#pragma unroll
                for (int c = 0; c < group; ++c) to[c] = Format<Out>::four(values + PIXELS * c, 1);
            } else if (LAST) {
#pragma unroll
                for (unsigned long long pixel = begin; pixel < begin + PIXELS; ++pixel)
                    if (pixel < pixels) target[pixel * count + first] = Format<Out>::one(values[pixel - begin]);
            } else {
#pragma unroll
                for (int c = 0; c < group; ++c) {
                    Out* const to = target + static_cast<unsigned long long>(first + c) * pixels + begin;
                    if (begin + PIXELS <= pixels && is_aligned<Quad>(to)) {
                        *reinterpret_cast<Quad*>(to) = Format<Out>::four(values + c, group);
                    } else {
#pragma unroll
                        for (int k = 0; k < PIXELS; ++k)
                            if (begin + k < pixels) to[k] = Format<Out>::one(values[k * group + c]);
                    }
                }
            }
        }
    }

    if (is_staged) {
        __syncthreads();
        const unsigned int left_over = pixels - tile, full = in_turn * TURNS;
        const unsigned int elements = (left_over < full ? left_over : full) * group;
        const Out* const from = reinterpret_cast<const Out*>(staged);
        Out* const to = target + static_cast<unsigned long long>(tile) * group;
        unsigned int done = 0;
        if (is_aligned<Chunk>(to)) {  // so are all samples whose bytes are a multiple of 16; others go by elements
            const unsigned int per_chunk = sizeof(Chunk) / sizeof(Out), chunks = elements / per_chunk;
            for (unsigned int i = threadIdx.x; i < chunks; i += blockDim.x)
                reinterpret_cast<Chunk*>(to)[i] = reinterpret_cast<const Chunk*>(staged)[i];
            done = chunks * per_chunk;
        }
        for (unsigned int i = done + threadIdx.x; i < elements; i += blockDim.x) to[i] = from[i];
    }
}

#ifdef INPUT
extern "C" __global__ void __launch_bounds__(MAX_THREADS) single_pass(
    const INPUT* __restrict__ images, const int* __restrict__ samples, const float* __restrict__ levels,
    OUTPUT* __restrict__ out, long long stride_n, long long stride_c, long long stride_h, long long stride_w,
    int first_sample, int channels, int in_height, int in_width, int height, int width, int turn_rows,
    int turn_columns) {
    make_tile<INPUT, OUTPUT, CHANNELS, CHANNELS_LAST, OFFSET>(
        images, samples, levels, out, stride_n, stride_c, stride_h, stride_w, first_sample, channels, in_height,
        in_width, height, width, turn_rows, turn_columns);
}
#endif
