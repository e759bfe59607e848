// Vectors of floats for one SIMD variant. Included by each variant's source file, compiled with that
// variant's flags; everything has internal linkage, so that no function compiled for a newer
// processor can be picked by the linker for an older one.
#pragma once

#include <cstdint>
#include <cstring>

#if MB_SIMD == 512 || MB_SIMD == 256
#include <immintrin.h>
#endif

#include "kernels.h"

#define MB_UNROLL _Pragma("GCC unroll 32")

namespace moebatch {
namespace {

#if MB_SIMD == 512

using vf = __m512;
using vi = __m512i;
constexpr int kLanes = 16;
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, 0); }
inline vf vpow2(vf n) {  // 2^n for whole n in [-126, 127]
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// Even and odd bf16 numbers of a vector of pairs, as floats.
inline vf even_bf16(const void* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline vf odd_bf16(const void* p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline vf load_bf16(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline vf load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The bits of `mask` of each word after a shift to the right, as whole numbers.
inline vf field_of_words(const void* p, int right, int mask) {
    const __m512i down = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(right));
    return _mm512_cvtepi32_ps(_mm512_and_si512(down, _mm512_set1_epi32(mask)));
}
inline vf load_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_signed(const int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store_words(int32_t* p, vf v) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(v)); }
inline vf vabs(vf v) { return _mm512_abs_ps(v); }
inline float vsum(vf v) { return _mm512_reduce_add_ps(v); }
inline float vlargest(vf v) { return _mm512_reduce_max_ps(v); }

#elif MB_SIMD == 256

using vf = __m256;
constexpr int kLanes = 8;
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vpow2(vf n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline vf even_bf16(const void* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 16));
}
inline vf odd_bf16(const void* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(static_cast<const __m256i*>(p)),
                                                _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline vf load_bf16(const uint16_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline vf load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf field_of_words(const void* p, int right, int mask) {
    const __m256i down = _mm256_srl_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)),
                                          _mm_cvtsi32_si128(right));
    return _mm256_cvtepi32_ps(_mm256_and_si256(down, _mm256_set1_epi32(mask)));
}
inline vf load_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_signed(const int8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store_words(int32_t* p, vf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(v));
}
inline vf vabs(vf v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline float vsum(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vlargest(vf v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

#else  // any processor: four floats, which SSE2, NEON and others hold in a register

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi32 __attribute__((vector_size(16)));
constexpr int kLanes = 4;
inline vf vload(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void vstore(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vround(vf a) {  // nearest even, for |a| < 2^22
    const vf magic = vset(12582912.0f);
    return (a + magic) - magic;
}
inline vf vpow2(vf n) {
    const vi32 whole = __builtin_convertvector(n, vi32);
    return reinterpret_cast<vf>((whole + 127) << 23);
}
inline vi32 load_words(const void* p) {
    vi32 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vf even_bf16(const void* p) { return reinterpret_cast<vf>(load_words(p) << 16); }
inline vf odd_bf16(const void* p) {
    return reinterpret_cast<vf>(load_words(p) & static_cast<int32_t>(0xffff0000u));
}
inline vf field_of_words(const void* p, int right, int mask) {
    return __builtin_convertvector((load_words(p) >> right) & mask, vf);
}
inline vf load_bytes(const uint8_t* p) {
    return vf{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
              static_cast<float>(p[3])};
}
inline vf load_signed(const int8_t* p) {
    return vf{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
              static_cast<float>(p[3])};
}
inline void store_words(int32_t* p, vf v) {
    const vi32 whole = __builtin_convertvector(v, vi32);
    std::memcpy(p, &whole, sizeof whole);
}
inline vf vabs(vf v) { return reinterpret_cast<vf>(reinterpret_cast<vi32>(v) & 0x7fffffff); }
inline float widen_bf16(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}
inline vf load_bf16(const uint16_t* p) {
    return vf{widen_bf16(p[0]), widen_bf16(p[1]), widen_bf16(p[2]), widen_bf16(p[3])};
}
inline float widen_f16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
    float x;
    if (exponent == 0) {  // zero and subnormal numbers
        x = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -x : x;
    }
    const uint32_t shifted = exponent == 31u ? 255u : exponent + 112u;
    const uint32_t word = sign | (shifted << 23) | (mantissa << 13);
    std::memcpy(&x, &word, sizeof x);
    return x;
}
inline vf load_f16(const uint16_t* p) {
    return vf{widen_f16(p[0]), widen_f16(p[1]), widen_f16(p[2]), widen_f16(p[3])};
}
inline float vsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float vlargest(vf v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

#endif

// sum += a * b, rounded once where the variant's vfma is.
inline void add_product(vf& sum, vf a, vf b) {
#if MB_SIMD == 256
    // With all 16 registers in use compilers overwrite a factor, and then move sums through memory.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum = vfma(a, b, sum);
#endif
}

// e^x to about two units in the last place; below -87 and above 88 it stays at the bound's value.
// Cody and Waite's reduction by ln 2 in two parts, then a polynomial for |r| <= ln(2)/2.
inline vf vexp(vf x) {
    x = vmin(vset(88.0f), vmax(vset(-87.0f), x));  // in this order not-a-number stays
    const vf n = vround(x * vset(1.44269504088896341f));
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    const vf e = vfma(p, r * r, r) + vset(1.0f);
    return e * vpow2(n);
}

// Round to bf16, nearest even; not-a-number stays one.
inline uint16_t to_bf16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 64u);
    return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

}  // namespace
}  // namespace moebatch
