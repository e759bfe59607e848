// Plain C++ with vectors of four floats; any processor. NEON processors get their own fused
// multiply-adds only where the compiler makes them of `a * b + c` (untested there).
#define MB_SIMD 128
#include "attention_impl.h"

namespace moebatch {
namespace {

const Gemm* gemm_for(DType weight, bool bf16_x) {
    switch (weight) {
        case DType::f32: return &kFmaF32;
        case DType::f16: return &kFmaF16;
        case DType::bf16: return bf16_x ? &kRoundedBf16 : &kFmaBf16;
        case DType::i8: return &kFmaI8;
        case DType::i4: return &kFmaI4;
        default: return nullptr;
    }
}

double peak(int64_t rounds, bool bf16_x, float* sink) {
    return bf16_x ? 0.0 : peak_fma(rounds, sink);
}

}  // namespace

const Kernels* portable_kernels() {
    static const Kernels kernels = {"portable", gemm_for, activate, scatter, transpose16,
                                    range, round_to, attend, merge, peak, read_all};
    return &kernels;
}

}  // namespace moebatch
