// AVX-512 with BF16 and VNNI: Intel since Cooper Lake, AMD since Zen 4.
#define MB_SIMD 512
#include "attention_impl.h"

namespace moebatch {
namespace {

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
