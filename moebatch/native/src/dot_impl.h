// Products of bf16 numbers by AVX512-BF16. Included by the variant that has it.
#pragma once

#include "gemm_impl.h"

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

}  // namespace
}  // namespace moebatch
