// Products with weights that are whole numbers of 4 or 8 bits in groups with a scale each. Included
// once by each variant.
//
// x as floats: numbers are widened to the weights they stand for, and summed as other weights are.
// x in 8 bits: whole numbers are summed exactly within a group; groups are added up as floats in order.
#pragma once

#include "gemm_impl.h"

namespace moebatch {
namespace {

// Inputs whose numbers stand side by side in a word of a panel.
template <int BITS>
constexpr int kWordInputs = 32 / BITS;

// Where the parts of a panel begin.
struct WholePanel {
    const uint8_t* scales;
    const uint8_t* zeros;  // null: all are the middle
    const uint8_t* numbers;

    WholePanel(const uint8_t* panel, const Inputs& inputs)
        : scales(panel),
          zeros(inputs.zeros ? panel + inputs.groups() * kPanel * 2 : nullptr),
          numbers(panel + inputs.header()) {}
    vf scale(int64_t group, int v) const {
        return load_f16(reinterpret_cast<const uint16_t*>(scales) + group * kPanel + v * kLanes);
    }
};

template <int BITS>
vf zero_of(const WholePanel& panel, int64_t group, int v) {
    return panel.zeros ? load_bytes(panel.zeros + group * kPanel + v * kLanes)
                       : vset(static_cast<float>(1 << (BITS - 1)));
}

inline int64_t blocks_of_group(const Inputs& inputs, int64_t group) {
    const int64_t rest = inputs.padded() - group * inputs.group;
    return (rest < inputs.group ? rest : inputs.group) / kBlockInputs;
}

// Each output is one chain of fused multiply-adds in the order of the inputs.
template <int BITS, int M, int P>
void widened_tile(const float* x, const uint8_t* const* panels, const Inputs& inputs,
                  const Ahead& ahead, float* out, int64_t stride) {
    constexpr int kWide = P * kVecs;
    vf sum[M][kWide];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int v = 0; v < kWide; ++v) sum[m][v] = vset(0.0f);
    const WholePanel both[2] = {{panels[0], inputs}, {panels[P - 1], inputs}};
    const uint8_t* at[2] = {both[0].numbers, both[1].numbers};
    const uint8_t* next[2] = {ahead.at[0], ahead.at[1]};
    const int64_t groups = inputs.groups();
    for (int64_t group = 0; group < groups; ++group) {
        vf scale[kWide], offset[kWide];
        MB_UNROLL for (int v = 0; v < kWide; ++v) {
            scale[v] = both[v / kVecs].scale(group, v % kVecs);
            // Exact: a product of 11 and 8 bits; so is the weight itself.
            offset[v] = vset(0.0f) - zero_of<BITS>(both[v / kVecs], group, v % kVecs) * scale[v];
        }
        const int64_t words = blocks_of_group(inputs, group) * kBlockInputs / kWordInputs<BITS>;
        for (int64_t word = 0; word < words; ++word) {
            MB_UNROLL for (int p = 0; p < P; ++p) {
                __builtin_prefetch(next[p], 0, 2);
                next[p] += ahead.step;
            }
            MB_UNROLL for (int k = 0; k < kWordInputs<BITS>; ++k) {
                const int right = k % 4 * 8 + k / 4 * 4;
                vf w[kWide];
                MB_UNROLL for (int v = 0; v < kWide; ++v)
                    w[v] = vfma(field_of_words(at[v / kVecs] + v % kVecs * kLanes * 4, right,
                                               (1 << BITS) - 1), scale[v], offset[v]);
                MB_UNROLL for (int m = 0; m < M; ++m) {
                    const vf b = vset(x[m * kWordInputs<BITS> + k]);
                    MB_UNROLL for (int v = 0; v < kWide; ++v) add_product(sum[m][v], b, w[v]);
                }
            }
            x += M * kWordInputs<BITS>;
            MB_UNROLL for (int p = 0; p < P; ++p) at[p] += 64;
        }
    }
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int v = 0; v < kWide; ++v) vstore(out + m * stride + v * kLanes, sum[m][v]);
}

template <int BITS>
struct Widened {
    static constexpr int kRows = kFmaRows, kPairRows = kFmaPairRows;
    template <int M, int P, class... Args>
    static void tile(Args... args) {
        widened_tile<BITS, M, P>(args...);
    }
};

// x packed in 8 bits.
struct WholeX {
    const float* scales;
    const int32_t* sums;
    const int32_t* words;
};

inline WholeX whole_x(const void* tile, int rows, const Inputs& inputs) {
    const int64_t count = inputs.groups() * rows;
    const float* scales = static_cast<const float*>(tile);
    const int32_t* sums = reinterpret_cast<const int32_t*>(scales + count);
    return {scales, sums, sums + count};
}

#if MB_SIMD == 512 || MB_SIMD == 256
#if MB_SIMD == 512
using vi = __m512i;
inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
inline vi iset(int32_t word) { return _mm512_set1_epi32(word); }
inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
inline vi iadd16(vi a, vi b) { return _mm512_add_epi16(a, b); }
inline vi iadd32(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi high_nibbles(vi v) { return iand(_mm512_srli_epi16(v, 4), iset(0x0f0f0f0f)); }
inline vi pairs16(vi a, vi b) { return _mm512_madd_epi16(a, b); }
inline vi pairs8(vi whole, vi with_sign) { return _mm512_maddubs_epi16(whole, with_sign); }
inline vi iabs8(vi v) { return _mm512_abs_epi8(v); }
inline vi give_sign(vi v, vi of) {  // where `of` is zero the result does not matter
    return _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(of), _mm512_setzero_si512(), v);
}
inline vi bytes_to_words(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf to_floats(vi v) { return _mm512_cvtepi32_ps(v); }
#else
using vi = __m256i;
inline vi iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline vi iset(int32_t word) { return _mm256_set1_epi32(word); }
inline vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi ixor(vi a, vi b) { return _mm256_xor_si256(a, b); }
inline vi iadd16(vi a, vi b) { return _mm256_add_epi16(a, b); }
inline vi iadd32(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi high_nibbles(vi v) { return iand(_mm256_srli_epi16(v, 4), iset(0x0f0f0f0f)); }
inline vi pairs16(vi a, vi b) { return _mm256_madd_epi16(a, b); }
inline vi pairs8(vi whole, vi with_sign) { return _mm256_maddubs_epi16(whole, with_sign); }
inline vi iabs8(vi v) { return _mm256_abs_epi8(v); }
inline vi give_sign(vi v, vi of) { return _mm256_sign_epi8(v, of); }
inline vi bytes_to_words(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline vf to_floats(vi v) { return _mm256_cvtepi32_ps(v); }
#endif

// Rows of a tile, and those that two panels at once allow.
#if defined(__AVX512VNNI__)
constexpr int kWholeRows = 12, kWholePairRows = 12;
#elif MB_SIMD == 512
constexpr int kWholeRows = 12, kWholePairRows = 6;
#else
constexpr int kWholeRows = 4, kWholePairRows = 1;
#endif

// What is taken off a number before it is multiplied. Without VNNI a sum of two products must fit 16
// bits: those of 4-bit numbers do, those of 8-bit ones only with a sign and one bit less.
#if defined(__AVX512VNNI__)
template <int BITS>
constexpr int kTakenOff = 0;
#else
template <int BITS>
constexpr int kTakenOff = BITS == 8 ? 128 : 0;
#endif

template <int BITS>
vi whole_zero(const WholePanel& panel, int64_t group, int v) {
    if (panel.zeros == nullptr) return iset((1 << (BITS - 1)) - kTakenOff<BITS>);
    const vi zero = bytes_to_words(panel.zeros + group * kPanel + v * kLanes);
    // Only the low half of a word meets a sum; the high half meets zero.
    return iadd16(zero, iset(-kTakenOff<BITS>));
}

// sum += the products of one block of 32 inputs.
template <int BITS, int M, int W>
inline void add_block(vi (&sum)[M][W], const int32_t* x, const uint8_t* const* at) {
    constexpr int kPerWord = kWordInputs<BITS> / 4;  // words of x per word of weights
#if !defined(__AVX512VNNI__)
    vi part[M][W];
    MB_UNROLL for (int m = 0; m < M; ++m) MB_UNROLL for (int v = 0; v < W; ++v) part[m][v] = iset(0);
    const vi ones = iset(0x00010001);
#endif
    MB_UNROLL for (int word = 0; word < kBlockInputs / kWordInputs<BITS>; ++word) {
        MB_UNROLL for (int half = 0; half < kPerWord; ++half, x += M) {
            vi w[W];
            MB_UNROLL for (int v = 0; v < W; ++v) {
                const vi raw = iload(at[v / kVecs] + word * 64 + v % kVecs * kLanes * 4);
                w[v] = BITS == 8 ? raw : half == 0 ? iand(raw, iset(0x0f0f0f0f)) : high_nibbles(raw);
            }
#if defined(__AVX512VNNI__)
            MB_UNROLL for (int m = 0; m < M; ++m) {
                const vi b = iset(x[m]);
                MB_UNROLL for (int v = 0; v < W; ++v) sum[m][v] = _mm512_dpbusd_epi32(sum[m][v], w[v], b);
            }
#else
            if constexpr (BITS == 4) {  // 16 sums of two stay below 2^15
                MB_UNROLL for (int m = 0; m < M; ++m) {
                    const vi b = iset(x[m]);
                    MB_UNROLL for (int v = 0; v < W; ++v) part[m][v] = iadd16(part[m][v], pairs8(w[v], b));
                }
            } else {
                vi size[W];
                MB_UNROLL for (int v = 0; v < W; ++v) {
                    w[v] = ixor(w[v], iset(static_cast<int32_t>(0x80808080u)));
                    size[v] = iabs8(w[v]);
                }
                MB_UNROLL for (int m = 0; m < M; ++m) {
                    const vi b = iset(x[m]);
                    MB_UNROLL for (int v = 0; v < W; ++v)
                        sum[m][v] = iadd32(sum[m][v], pairs16(pairs8(size[v], give_sign(b, w[v])), ones));
                }
            }
#endif
        }
    }
#if !defined(__AVX512VNNI__)
    if constexpr (BITS == 4) {
        MB_UNROLL for (int m = 0; m < M; ++m)
            MB_UNROLL for (int v = 0; v < W; ++v) sum[m][v] = iadd32(sum[m][v], pairs16(part[m][v], ones));
    }
#endif
}

template <int BITS, int M, int P>
void whole_tile(const WholeX& given, const uint8_t* const* panels, const Inputs& inputs,
                const Ahead& ahead, float* out, int64_t stride) {
    constexpr int kWide = P * kVecs;
    const WholePanel both[2] = {{panels[0], inputs}, {panels[P - 1], inputs}};
    const uint8_t* at[2] = {both[0].numbers, both[1].numbers};
    const uint8_t* next[2] = {ahead.at[0], ahead.at[1]};
    WholeX x = given;
    float sums[M * kWide * kLanes] = {};  // the registers are taken by whole numbers
    const int64_t groups = inputs.groups();
    for (int64_t group = 0; group < groups; ++group) {
        vi sum[M][kWide];
        MB_UNROLL for (int v = 0; v < kWide; ++v) {
            const vi zero = whole_zero<BITS>(both[v / kVecs], group, v % kVecs);
            MB_UNROLL for (int m = 0; m < M; ++m) sum[m][v] = pairs16(zero, iset(x.sums[m]));
        }
        for (int64_t block = blocks_of_group(inputs, group); block > 0; --block) {
            MB_UNROLL for (int i = 0; i < BITS; ++i)
                MB_UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(next[p] + i * ahead.step, 0, 2);
            add_block<BITS>(sum, x.words, at);
            x.words += M * kBlockInputs / 4;
            MB_UNROLL for (int p = 0; p < P; ++p) {
                at[p] += BITS * 64;
                next[p] += BITS * ahead.step;
            }
        }
        MB_UNROLL for (int v = 0; v < kWide; ++v) {
            const vf scale = both[v / kVecs].scale(group, v % kVecs);
            MB_UNROLL for (int m = 0; m < M; ++m) {
                float* to = sums + (m * kWide + v) * kLanes;
                vstore(to, vfma(to_floats(sum[m][v]), scale * vset(x.scales[m]), vload(to)));
            }
        }
        x.scales += M;
        x.sums += M;
    }
    for (int m = 0; m < M; ++m)
        std::memcpy(out + m * stride, sums + m * P * kPanel, sizeof(float) * P * kPanel);
}

template <int BITS>
struct Whole {
    static constexpr int kRows = kWholeRows, kPairRows = kWholePairRows;
    template <int M, int P, class... Args>
    static void tile(Args... args) {
        whole_tile<BITS, M, P>(args...);
    }
};

// Each group of each row on its own scale: 127 stands for its largest number.
void pack_x_whole(const XRows& x, int64_t first, int rows, const Inputs& inputs, void* tile) {
    const WholeX to = whole_x(tile, rows, inputs);
    float* scales = const_cast<float*>(to.scales);
    int32_t* sums = const_cast<int32_t*>(to.sums);
    int32_t* words = const_cast<int32_t*>(to.words);
    const int64_t groups = inputs.groups();
    alignas(64) float scratch[kMaxGroup], values[kMaxGroup];
    alignas(64) int32_t numbers[kMaxGroup];
    for (int m = 0; m < rows; ++m) {
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t start = group * inputs.group;
            const int64_t padded = blocks_of_group(inputs, group) * kBlockInputs;
            const int64_t rest = inputs.count - start, count = rest < padded ? rest : padded;
            const float* from = floats_of(x, first + m, start, count, scratch);
            std::memcpy(values, from, sizeof(float) * static_cast<size_t>(count));
            for (int64_t k = count; k < padded; ++k) values[k] = 0.0f;
            vf top = vset(0.0f), bad = vset(0.0f);
            for (int64_t k = 0; k < padded; k += kLanes) {
                const vf v = vload(values + k);
                top = vmax(vabs(v), top);
                bad = bad + v * vset(0.0f);  // not-a-number for those and for infinity
            }
            const float largest = vlargest(top), broken = vsum(bad);
            // So small a number that its factor is none counts as zero.
            const bool fine = broken == 0.0f && largest > 1e-36f;
            const vf factor = vset(fine ? 127.0f / largest : 0.0f);
            scales[group * rows + m] = broken == 0.0f ? largest / 127.0f : broken;
            int32_t all = 0;
            for (int64_t k = 0; k < padded; k += kLanes)
                store_words(numbers + k, vround(vload(values + k) * factor));
            for (int64_t k = 0; k < padded; ++k) all += numbers[k] = fine ? numbers[k] : 0;
            sums[group * rows + m] = -all & 0xffff;
            int32_t* word = words + start / 4 * rows + m;
            for (int64_t k = 0; k < padded; k += 4, word += rows)
                *word = (numbers[k] & 255) | (numbers[k + 1] & 255) << 8 | (numbers[k + 2] & 255) << 16 |
                        static_cast<int32_t>(static_cast<uint32_t>(numbers[k + 3]) << 24);
        }
    }
}
#endif

// The instance for a number of rows that is known at run time only.
template <class T, int P, int M>
struct WholeRows {
    template <class... Args>
    static void run(int rows, Args... args) {
        if (rows == M) {
            T::template tile<M, P>(args...);
        } else if constexpr (M > 1) {
            WholeRows<T, P, M - 1>::run(rows, args...);
        }
    }
};

template <class T, class X>
void multiply_grouped(X x, int rows, const uint8_t* const* panels, int num_panels,
                      const Inputs& inputs, const Ahead& ahead, float* out) {
    const int64_t stride = num_panels * kPanel;
    if (num_panels == 2 && rows <= T::kPairRows) {
        WholeRows<T, 2, T::kPairRows>::run(rows, x, panels, inputs, ahead, out, stride);
        return;
    }
    for (int p = 0; p < num_panels; ++p) {
        const Ahead part = {{ahead.at[p], ahead.at[p]}, ahead.step};
        WholeRows<T, 1, T::kRows>::run(rows, x, panels + p, inputs, part, out + p * kPanel, stride);
    }
}

template <int BITS>
void multiply_widened(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                      const Inputs& inputs, const Ahead& ahead, float* out) {
    multiply_grouped<Widened<BITS>>(static_cast<const float*>(x), rows, panels, num_panels, inputs, ahead, out);
}

// h must be whole rows: panels do not end where blocks do.
constexpr Gemm kFmaI8 = {XKind::f32, 32, kFmaRows, 4, pack_x_f32<4, 32>, multiply_widened<8>, nullptr};
constexpr Gemm kFmaI4 = {XKind::f32, 32, kFmaRows, 8, pack_x_f32<8, 32>, multiply_widened<4>, nullptr};

#if MB_SIMD == 512 || MB_SIMD == 256
template <int BITS>
void multiply_whole(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                    const Inputs& inputs, const Ahead& ahead, float* out) {
    multiply_grouped<Whole<BITS>>(whole_x(x, rows, inputs), rows, panels, num_panels, inputs, ahead, out);
}

constexpr Gemm kWholeI8 = {XKind::i8, 32, kWholeRows, 4, pack_x_whole, multiply_whole<8>, nullptr};
constexpr Gemm kWholeI4 = {XKind::i8, 32, kWholeRows, 8, pack_x_whole, multiply_whole<4>, nullptr};
#endif

// For rounding weights.
bool range(const float* values, int64_t n, float* low, float* high) {
    bool fine = true;
    for (int j = 0; j < kPanel; j += kLanes) {
        vf least = vset(0.0f), most = vset(0.0f), bad = vset(0.0f);
        for (int64_t k = 0; k < n; ++k) {
            const vf v = vload(values + k * kPanel + j);
            least = vmin(v, least);
            most = vmax(v, most);
            bad = bad + v * vset(0.0f);
        }
        vstore(low + j, least);
        vstore(high + j, most);
        fine = fine && vsum(bad) == 0.0f;
    }
    return fine;
}

void round_to(const float* values, int64_t n, const float* factor, const float* zero, float most,
              int32_t* numbers) {
    for (int64_t k = 0; k < n; ++k)
        for (int j = 0; j < kPanel; j += kLanes) {
            const vf whole = vround(vload(values + k * kPanel + j) * vload(factor + j));
            store_words(numbers + k * kPanel + j,
                        vmax(vset(0.0f), vmin(vset(most), whole + vload(zero + j))));
        }
}

}  // namespace
}  // namespace moebatch
