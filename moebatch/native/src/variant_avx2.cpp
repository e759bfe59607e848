// AVX2, FMA and F16C: Intel since Haswell (2013), AMD since Zen.
#define MB_SIMD 256
#include "attention_impl.h"

namespace moebatch {
namespace {

const Gemm* gemm_for(DType weight, bool bf16_x) {
    switch (weight) {
        case DType::f32: return &kFmaF32;
        case DType::f16: return &kFmaF16;
        case DType::bf16: return bf16_x ? &kRoundedBf16 : &kFmaBf16;
        case DType::i8: return bf16_x ? &kWholeI8 : &kFmaI8;
        case DType::i4: return bf16_x ? &kWholeI4 : &kFmaI4;
        default: return nullptr;
    }
}

double peak(int64_t rounds, bool bf16_x, float* sink) {
    return bf16_x ? 0.0 : peak_fma(rounds, sink);
}

}  // namespace

const Kernels* avx2_kernels() {
    static const Kernels kernels = {"avx2", gemm_for, activate, scatter, transpose16,
                                    range, round_to, attend, merge, peak, read_all};
    return &kernels;
}

}  // namespace moebatch
