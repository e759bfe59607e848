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
                  const Inputs& inputs, const Ahead& ahead, float* out) {
    const uint32_t* tile = static_cast<const uint32_t*>(x);
    const int64_t pairs = (inputs.count + 1) / 2;
    if (num_panels == 1) {
        DotRows<1, kDotRows>::run(tile, rows, panels, pairs, ahead, out);
    } else {
        DotRows<2, kDotRows>::run(tile, rows, panels, pairs, ahead, out);
    }
}

constexpr Gemm kDotBf16 = {XKind::bf16, 2, kDotRows, 2, pack_x_bf16, multiply_dot, store_h_bf16};

const Gemm* gemm_for(DType weight, bool bf16_x) {
    switch (weight) {
        case DType::f32: return &kFmaF32;
        case DType::f16: return &kFmaF16;
        case DType::bf16: return bf16_x ? &kDotBf16 : &kFmaBf16;
        case DType::i8: return bf16_x ? &kWholeI8 : &kFmaI8;
        case DType::i4: return bf16_x ? &kWholeI4 : &kFmaI4;
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
                                    range, round_to, attend, merge, peak, read_all};
    return &kernels;
}

}  // namespace moebatch
