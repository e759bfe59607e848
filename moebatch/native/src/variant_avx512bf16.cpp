// AVX-512 with BF16 and VNNI: Intel since Cooper Lake, AMD since Zen 4.
#define MB_SIMD 512
#include "attention_impl.h"

namespace moebatch {
namespace {

// Registers: 28 sums, two vectors of weights, one broadcast pair.
constexpr int kDotRows = 14;

// Each output is one chain of two-term dot products in the order of the inputs.
template <int M, int P>
void dot_tile(const uint32_t* x, const uint8_t* const* panels, int64_t pairs, const Ahead& ahead,
              float* out) {
    __m512 sum[M][P];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int p = 0; p < P; ++p) sum[m][p] = _mm512_setzero_ps();
    const uint8_t* at[P];
    const uint8_t* next[P];
    for (int p = 0; p < P; ++p) {
        at[p] = panels[p];
        next[p] = ahead.at[p];
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
        __m512bh w[P];
        MB_UNROLL for (int p = 0; p < P; ++p) {
            w[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at[p]));
            __builtin_prefetch(next[p], 0, 2);
            at[p] += 64;
            next[p] += ahead.step;
        }
        MB_UNROLL for (int m = 0; m < M; ++m) {
            const __m512bh b =
                reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[m])));
            MB_UNROLL for (int p = 0; p < P; ++p) sum[m][p] = _mm512_dpbf16_ps(sum[m][p], b, w[p]);
        }
        x += M;
    }
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int p = 0; p < P; ++p)
            vstore(out + (m * P + p) * kPanel, sum[m][p]);
}

template <int P, int M>
struct DotRows {
    static void run(const uint32_t* x, int rows, const uint8_t* const* panels, int64_t pairs,
                    const Ahead& ahead, float* out) {
        if (rows == M) {
            dot_tile<M, P>(x, panels, pairs, ahead, out);
        } else if constexpr (M > 1) {
            DotRows<P, M - 1>::run(x, rows, panels, pairs, ahead, out);
        }
    }
};

void multiply_dot(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                  int64_t inputs, const Ahead& ahead, float* out) {
    const uint32_t* tile = static_cast<const uint32_t*>(x);
    const int64_t pairs = (inputs + 1) / 2;
    if (num_panels == 1) {
        DotRows<1, kDotRows>::run(tile, rows, panels, pairs, ahead, out);
    } else {
        DotRows<2, kDotRows>::run(tile, rows, panels, pairs, ahead, out);
    }
}

constexpr Gemm kDotBf16 = {XKind::bf16, 2, kDotRows, pack_x_bf16, multiply_dot, store_h_bf16};

// Whole numbers are summed exactly; x is unsigned, so 128 times the weights' sum is taken off.
template <int M, int P>
void int_tile(const uint32_t* x, const uint8_t* const* panels, int64_t steps, const Ahead& ahead,
              const float* scales, float* out) {
    __m512i sum[M][P];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int p = 0; p < P; ++p) sum[m][p] = _mm512_setzero_si512();
    const uint8_t* at[P];
    const uint8_t* next[P];
    for (int p = 0; p < P; ++p) {
        at[p] = panels[p] + kI8Header;
        next[p] = ahead.at[p];
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512i w[P];
        MB_UNROLL for (int p = 0; p < P; ++p) {
            w[p] = _mm512_loadu_si512(at[p]);
            __builtin_prefetch(next[p], 0, 2);
            at[p] += 64;
            next[p] += ahead.step;
        }
        MB_UNROLL for (int m = 0; m < M; ++m) {
            const __m512i b = _mm512_set1_epi32(static_cast<int>(x[m]));
            MB_UNROLL for (int p = 0; p < P; ++p) sum[m][p] = _mm512_dpbusd_epi32(sum[m][p], b, w[p]);
        }
        x += M;
    }
    MB_UNROLL for (int p = 0; p < P; ++p) {
        const vf scale = vload(reinterpret_cast<const float*>(panels[p]));
        const __m512i extra = _mm512_slli_epi32(_mm512_loadu_si512(panels[p] + 4 * kPanel), 7);
        MB_UNROLL for (int m = 0; m < M; ++m)
            vstore(out + (m * P + p) * kPanel,
                   _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[m][p], extra)) * (scale * vset(scales[m])));
    }
}

template <int P, int M>
struct IntRows {
    template <class... Args>
    static void run(int rows, Args... args) {
        if (rows == M) {
            int_tile<M, P>(args...);
        } else if constexpr (M > 1) {
            IntRows<P, M - 1>::run(rows, args...);
        }
    }
};

void multiply_int(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                  int64_t inputs, const Ahead& ahead, float* out) {
    const float* scales = static_cast<const float*>(x);
    const uint32_t* tile = static_cast<const uint32_t*>(x) + rows;
    const int64_t steps = (inputs + 3) / 4;
    if (num_panels == 1) {
        IntRows<1, kDotRows>::run(rows, tile, panels, steps, ahead, scales, out);
    } else {
        IntRows<2, kDotRows>::run(rows, tile, panels, steps, ahead, scales, out);
    }
}

// Each row on its own scale: 127 stands for its largest number; stored 128 higher.
void pack_x_int(const XRows& x, int64_t first, int rows, int64_t inputs, void* tile) {
    float* scales = static_cast<float*>(tile);
    uint8_t* out = reinterpret_cast<uint8_t*>(scales + rows);
    float scratch[kPackBlock];
    for (int m = 0; m < rows; ++m) {
        float largest = 0.0f, bad = 0.0f;
        for (int64_t k = 0; k < inputs; k += kPackBlock) {
            const int64_t count = inputs - k < kPackBlock ? inputs - k : kPackBlock;
            const float* from = floats_of(x, first + m, k, count, scratch);
            for (int64_t j = 0; j < count; ++j) {
                const float size = __builtin_fabsf(from[j]);
                largest = size > largest ? size : largest;
                bad += from[j] * 0.0f;  // not-a-number for those and for infinity
            }
        }
        scales[m] = largest / 127.0f + bad;
        const float factor = largest > 0.0f && bad == 0.0f ? 127.0f / largest : 0.0f;
        for (int64_t k = 0; k < inputs; k += kPackBlock) {
            const int64_t count = inputs - k < kPackBlock ? inputs - k : kPackBlock;
            const float* from = floats_of(x, first + m, k, count, scratch);
            for (int64_t j = 0; j < count; ++j) {
                const float whole = bad == 0.0f ? __builtin_rintf(from[j] * factor) : 0.0f;
                out[((k + j) / 4 * rows + m) * 4 + (k + j) % 4] =
                    static_cast<uint8_t>(static_cast<int>(whole) + 128);
            }
        }
        for (int64_t k = inputs; k % 4; ++k) out[(k / 4 * rows + m) * 4 + k % 4] = 128;
    }
}

constexpr Gemm kDotI8 = {XKind::i8, 4, kDotRows, pack_x_int, multiply_int, nullptr};

const Gemm* gemm_for(DType weight, bool bf16_x) {
    switch (weight) {
        case DType::f32: return &kFmaF32;
        case DType::f16: return &kFmaF16;
        case DType::bf16: return bf16_x ? &kDotBf16 : &kFmaBf16;
        case DType::i8: return bf16_x ? &kDotI8 : &kFmaI8;
        default: return nullptr;
    }
}

double peak(int64_t rounds, bool bf16_x, float* sink) {
    if (!bf16_x) return peak_fma(rounds, sink);
    constexpr int kChains = 16;
    __m512 sum[kChains];
    for (auto& s : sum) s = _mm512_setzero_ps();
    const __m512i a = _mm512_set1_epi32(0x3f803f80), b = a;
    for (int64_t i = 0; i < rounds; ++i) {
        MB_UNROLL for (int j = 0; j < kChains; ++j) sum[j] = _mm512_dpbf16_ps(
            sum[j], reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    for (auto& s : sum) *sink += vsum(s);
    return 64.0 * kChains * static_cast<double>(rounds);
}

}  // namespace

const Kernels* avx512bf16_kernels() {
    static const Kernels kernels = {"avx512bf16", gemm_for, activate, scatter, transpose16,
                                    attend, merge, peak, read_all};
    return &kernels;
}

}  // namespace moebatch
