// Which variants this processor can run.
#include <cstring>

#include "drivers.h"

namespace moebatch {

namespace {

struct Variant {
    const Kernels* (*kernels)();
    bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // f16c came earlier
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

constexpr Variant kVariants[] = {  // best first
#if defined(MB_HAS_AVX512BF16)
    {avx512bf16_kernels, has_avx512bf16},
#endif
#if defined(MB_HAS_AVX512)
    {avx512_kernels, has_avx512},
#endif
#if defined(MB_HAS_AVX2)
    {avx2_kernels, has_avx2},
#endif
    {portable_kernels, [] { return true; }},
};

}  // namespace

const Kernels* choose_kernels(const char* name) {
    for (const auto& variant : kVariants) {
        if (!variant.supported()) continue;
        const Kernels* kernels = variant.kernels();
        if (name == nullptr || std::strcmp(name, kernels->name) == 0) return kernels;
    }
    return nullptr;
}

std::vector<const char*> variant_names() {
    std::vector<const char*> names;
    for (const auto& variant : kVariants) {
        if (variant.supported()) names.push_back(variant.kernels()->name);
    }
    return names;
}

}  // namespace moebatch
