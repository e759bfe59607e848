// Tiles of a matrix product, and what happens to a tile's result. Included once by each variant.
#pragma once

#include "simd.h"

namespace moebatch {
namespace {

constexpr int kVecs = kPanel / kLanes;  // vectors of a panel's width
// One word of each pair of inputs (or of each input) of 16 outputs, widened to float.
struct Bf16Weights {
    static constexpr int kStep = 2;
    static constexpr int64_t kStepBytes = 64;
    static vf load(const uint8_t* at, int part, int v) {
        at += v * kLanes * 4;
        return part == 0 ? even_bf16(at) : odd_bf16(at);
    }
};
struct F16Weights {
    static constexpr int kStep = 1;
    static constexpr int64_t kStepBytes = 32;
    static vf load(const uint8_t* at, int, int v) {
        return load_f16(reinterpret_cast<const uint16_t*>(at) + v * kLanes);
    }
};
struct F32Weights {
    static constexpr int kStep = 1;
    static constexpr int64_t kStepBytes = 64;
    static vf load(const uint8_t* at, int, int v) {
        return vload(reinterpret_cast<const float*>(at) + v * kLanes);
    }
};

// Each output is one chain of fused multiply-adds in the order of the inputs.
template <class W, int M, int P>
void fma_tile(const float* x, const uint8_t* const* panels, int64_t inputs, const Ahead& ahead,
              float* out) {
    constexpr int kWide = P * kVecs;
    vf sum[M][kWide];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int v = 0; v < kWide; ++v) sum[m][v] = vset(0.0f);
    const int64_t steps = (inputs + W::kStep - 1) / W::kStep;
    const uint8_t* at[P];
    const uint8_t* next[P];
    for (int p = 0; p < P; ++p) {
        at[p] = panels[p];
        next[p] = ahead.at[p];
    }
    for (int64_t step = 0; step < steps; ++step) {
        MB_UNROLL for (int p = 0; p < P; ++p) {
            __builtin_prefetch(next[p], 0, 2);
            next[p] += ahead.step;
        }
        MB_UNROLL for (int part = 0; part < W::kStep; ++part) {
            vf w[kWide];
            MB_UNROLL for (int v = 0; v < kWide; ++v)
                w[v] = W::load(at[v / kVecs], part, v % kVecs);
            MB_UNROLL for (int m = 0; m < M; ++m) {
                const vf b = vset(x[m * W::kStep + part]);
                MB_UNROLL for (int v = 0; v < kWide; ++v) add_product(sum[m][v], b, w[v]);
            }
        }
        x += M * W::kStep;
        MB_UNROLL for (int p = 0; p < P; ++p) at[p] += W::kStepBytes;
    }
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int v = 0; v < kWide; ++v)
            vstore(out + m * P * kPanel + v * kLanes, sum[m][v]);
}

// The instance for a number of rows that is known at run time only.
template <class W, int P, int M>
struct FmaRows {
    static void run(const float* x, int rows, const uint8_t* const* panels, int64_t inputs,
                    const Ahead& ahead, float* out) {
        if (rows == M) {
            fma_tile<W, M, P>(x, panels, inputs, ahead, out);
        } else if constexpr (M > 1) {
            FmaRows<W, P, M - 1>::run(x, rows, panels, inputs, ahead, out);
        }
    }
};

// Registers: sums, a vector of weights per column, one broadcast value.
#if MB_SIMD == 512
constexpr int kFmaRows = 12, kFmaPairRows = 12;  // the latter: rows that two panels at once allow
#elif MB_SIMD == 256
constexpr int kFmaRows = 6, kFmaPairRows = 2;
#elif defined(__aarch64__)
constexpr int kFmaRows = 5, kFmaPairRows = 2;
#else
constexpr int kFmaRows = 3, kFmaPairRows = 1;
#endif

template <class W>
void multiply_fma(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                  const Inputs& shape, const Ahead& ahead, float* out) {
    const float* tile = static_cast<const float*>(x);
    const int64_t inputs = shape.count;
    if (num_panels == 1) {
        FmaRows<W, 1, kFmaRows>::run(tile, rows, panels, inputs, ahead, out);
    } else if (rows <= kFmaPairRows) {
        FmaRows<W, 2, kFmaPairRows>::run(tile, rows, panels, inputs, ahead, out);
    } else {
        float one[kFmaRows * kPanel];
        for (int p = 0; p < 2; ++p) {
            const Ahead part = {{ahead.at[p], nullptr}, ahead.step};
            FmaRows<W, 1, kFmaRows>::run(tile, rows, panels + p, inputs, part, one);
            for (int m = 0; m < rows; ++m)
                std::memcpy(out + (m * 2 + p) * kPanel, one + m * kPanel, sizeof(float) * kPanel);
        }
    }
}

inline int64_t row_of(const XRows& x, int64_t m) { return x.index ? x.index[m] : m; }

// Floats of one row, whatever its type; `scratch` holds them where x is not of floats.
inline const float* floats_of(const XRows& x, int64_t m, int64_t first, int64_t count,
                              float* scratch) {
    const int64_t at = row_of(x, m) * x.stride + first;
    if (x.type == DType::f32) return static_cast<const float*>(x.data) + at;
    const uint16_t* half = static_cast<const uint16_t*>(x.data) + at;
    for (int64_t k = 0; k < count; ++k) {
        const uint32_t word = static_cast<uint32_t>(half[k]) << 16;
        std::memcpy(scratch + k, &word, sizeof word);
    }
    return scratch;
}

constexpr int64_t kPackBlock = 64;

template <int STEP, int PAD = STEP>
void pack_x_f32(const XRows& x, int64_t first, int rows, const Inputs& shape, void* tile) {
    float* out = static_cast<float*>(tile);
    const int64_t inputs = shape.count;
    float scratch[kPackBlock];
    for (int64_t k = 0; k < inputs; k += kPackBlock) {
        const int64_t count = inputs - k < kPackBlock ? inputs - k : kPackBlock;
        for (int m = 0; m < rows; ++m) {
            const float* from = floats_of(x, first + m, k, count, scratch);
            for (int64_t j = 0; j < count; ++j) {
                out[((k + j) / STEP * rows + m) * STEP + (k + j) % STEP] = from[j];
            }
        }
    }
    for (int64_t k = inputs; k % PAD; ++k)
        for (int m = 0; m < rows; ++m) out[(k / STEP * rows + m) * STEP + k % STEP] = 0.0f;
}

// x rounded to bf16, pairs of inputs in a word.
[[maybe_unused]] void pack_x_bf16(const XRows& x, int64_t first, int rows, const Inputs& shape, void* tile) {
    uint32_t* out = static_cast<uint32_t*>(tile);
    const int64_t inputs = shape.count;
    float scratch[kPackBlock];
    for (int64_t k = 0; k < inputs; k += kPackBlock) {
        const int64_t count = inputs - k < kPackBlock ? inputs - k : kPackBlock;
        for (int m = 0; m < rows; ++m) {
            const float* from = floats_of(x, first + m, k, count, scratch);
            uint16_t rounded[kPackBlock + 1];
            for (int64_t j = 0; j < count; ++j) rounded[j] = to_bf16(from[j]);
            rounded[count] = 0;
            for (int64_t j = 0; j < count; j += 2) {
                out[(k + j) / 2 * rows + m] =
                    rounded[j] | (static_cast<uint32_t>(rounded[j + 1]) << 16);
            }
        }
    }
}

// The same, held as floats: for variants that multiply floats only.
void pack_x_rounded(const XRows& x, int64_t first, int rows, const Inputs& shape, void* tile) {
    pack_x_f32<2>(x, first, rows, shape, tile);
    float* out = static_cast<float*>(tile);
    const int64_t all = round_up(shape.count, 2) * rows;
    for (int64_t i = 0; i < all; ++i) {
        const uint32_t word = static_cast<uint32_t>(to_bf16(out[i])) << 16;
        std::memcpy(out + i, &word, sizeof word);
    }
}

template <int STEP>
void store_h_f32(const float* h, int rows, int64_t first, int count, void* tile) {
    float* out = static_cast<float*>(tile);
    for (int m = 0; m < rows; ++m)
        for (int j = 0; j < count; ++j)
            out[((first + j) / STEP * rows + m) * STEP + (first + j) % STEP] = h[m * kPanel + j];
}

void store_h_rounded(const float* h, int rows, int64_t first, int count, void* tile) {
    float rounded[kMaxRows * kPanel];
    for (int i = 0; i < rows * kPanel; ++i) {
        const uint32_t word = static_cast<uint32_t>(to_bf16(h[i])) << 16;
        std::memcpy(rounded + i, &word, sizeof word);
    }
    store_h_f32<2>(rounded, rows, first, count, tile);
}

[[maybe_unused]] void store_h_bf16(const float* h, int rows, int64_t first, int count, void* tile) {
    uint32_t* out = static_cast<uint32_t*>(tile) + first / 2 * rows;
    for (int m = 0; m < rows; ++m)
        for (int j = 0; j < count / 2; ++j)
            out[j * rows + m] = to_bf16(h[m * kPanel + 2 * j]) |
                                (static_cast<uint32_t>(to_bf16(h[m * kPanel + 2 * j + 1])) << 16);
}

void activate(const Activation& how, const float* gate_up, int rows, const float* gate_bias,
              const float* up_bias, float* h) {
    const vf one = vset(1.0f), alpha = vset(-how.alpha), shift = vset(how.shift);
    const vf low = vset(-how.limit), high = vset(how.limit);
    for (int m = 0; m < rows; ++m) {
        for (int v = 0; v < kPanel; v += kLanes) {
            vf gate = vload(gate_up + m * 2 * kPanel + v);
            vf up = vload(gate_up + m * 2 * kPanel + kPanel + v);
            if (gate_bias) gate = gate + vload(gate_bias + v);
            if (up_bias) up = up + vload(up_bias + v);
            if (how.limit > 0.0f) {
                gate = vmin(gate, high);
                up = vmax(vmin(up, high), low);
            }
            const vf sigmoid = one / (one + vexp(alpha * gate));
            vstore(h + m * kPanel + v, (up + shift) * (gate * sigmoid));
        }
    }
}

void scatter(const float* y, int rows, int panels, int columns, const float* bias,
             const int64_t* tokens, const float* weights, float* out, int64_t stride) {
    const int whole = columns / kLanes * kLanes;
    for (int m = 0; m < rows; ++m) {
        float* to = out + tokens[m] * stride;
        const float* from = y + m * panels * kPanel;
        const vf weight = vset(weights[m]);
        for (int n = 0; n < whole; n += kLanes) {
            const vf value = bias ? vload(from + n) + vload(bias + n) : vload(from + n);
            vstore(to + n, vfma(weight, value, vload(to + n)));
        }
        for (int n = whole; n < columns; ++n) {
            to[n] += weights[m] * (bias ? from[n] + bias[n] : from[n]);
        }
    }
}

float read_all(const float* data, int64_t floats) {
    vf sum[8];
    for (auto& s : sum) s = vset(0.0f);
    for (int64_t i = 0; i + 8 * kLanes <= floats; i += 8 * kLanes) {
        __builtin_prefetch(data + i + 512, 0, 3);
        MB_UNROLL for (int j = 0; j < 8; ++j) sum[j] = sum[j] + vload(data + i + j * kLanes);
    }
    float all = 0.0f;
    for (auto& s : sum) all += vsum(s);
    return all;
}

// As many independent chains as a tile has, so that latency is hidden as it is there.
double peak_fma(int64_t rounds, float* sink) {
    constexpr int kChains = 12;
    vf sum[kChains];
    for (auto& s : sum) s = vset(1.0f);
    const vf a = vset(0.999f), b = vset(0.001f);
    for (int64_t i = 0; i < rounds; ++i) {
        MB_UNROLL for (int j = 0; j < kChains; ++j) sum[j] = vfma(sum[j], a, b);
    }
    for (auto& s : sum) *sink += vsum(s);
    return 2.0 * kChains * kLanes * static_cast<double>(rounds);
}

#if MB_SIMD == 512 || MB_SIMD == 256
// Transpose 8 x 8 words.
inline void transpose8(const uint32_t* rows, int64_t stride, uint32_t* out) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + i * stride));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out + i * kPanel),
                         _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + (i + 4) * kPanel),
                         _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#endif

void transpose16(const uint32_t* rows, int64_t stride, int64_t words, uint32_t* out) {
    int64_t k = 0;
#if MB_SIMD == 512 || MB_SIMD == 256
    for (; k + 8 <= words; k += 8) {
        transpose8(rows + k, stride, out + k * kPanel);
        transpose8(rows + 8 * stride + k, stride, out + k * kPanel + 8);
    }
#endif
    for (; k < words; ++k)
        for (int j = 0; j < kPanel; ++j) std::memcpy(out + k * kPanel + j, rows + j * stride + k, 4);
}

constexpr Gemm kFmaF32 = {XKind::f32, 1, kFmaRows, 1, pack_x_f32<1>, multiply_fma<F32Weights>, store_h_f32<1>};
constexpr Gemm kFmaF16 = {XKind::f32, 1, kFmaRows, 1, pack_x_f32<1>, multiply_fma<F16Weights>, store_h_f32<1>};
constexpr Gemm kFmaBf16 = {XKind::f32, 2, kFmaRows, 2, pack_x_f32<2>, multiply_fma<Bf16Weights>, store_h_f32<2>};
[[maybe_unused]] constexpr Gemm kRoundedBf16 = {
    XKind::f32, 2, kFmaRows, 2, pack_x_rounded, multiply_fma<Bf16Weights>, store_h_rounded};

}  // namespace
}  // namespace moebatch
