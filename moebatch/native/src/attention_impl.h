// Attention over a chunk of cached context. Included once by each variant.
//
// Keys of a block become a panel, so that scores are the products of the matrix kernels; values are
// summed token by token. Every number is one chain in the order of dimensions or tokens: it does not
// depend on how many query vectors share the chunk.
#pragma once

#include "gemm_impl.h"

namespace moebatch {
namespace {

// 16 numbers of a cached row and upwards, widened.
struct Bf16Values {
    static constexpr int64_t kBytes = 2;
    static constexpr bool kPairs = false;
    static vf load(const uint8_t* at, int v) {
        return load_bf16(reinterpret_cast<const uint16_t*>(at) + v * kLanes);
    }
};
// The even columns of two vectors' width, then the odd ones: half the work of widening in order.
struct Bf16PairValues {
    static constexpr int64_t kBytes = 2;
    static constexpr bool kPairs = true;
    static vf load(const uint8_t* at, int v) {
        at += v / 2 * kLanes * 4;
        return v % 2 == 0 ? even_bf16(at) : odd_bf16(at);
    }
};
struct F16Values {
    static constexpr int64_t kBytes = 2;
    static constexpr bool kPairs = false;
    static vf load(const uint8_t* at, int v) {
        return load_f16(reinterpret_cast<const uint16_t*>(at) + v * kLanes);
    }
};
struct F32Values {
    static constexpr int64_t kBytes = 4;
    static constexpr bool kPairs = false;
    static vf load(const uint8_t* at, int v) {
        return vload(reinterpret_cast<const float*>(at) + v * kLanes);
    }
};

#if MB_SIMD == 512
constexpr int kValueRows = 6, kValueVecs = 4;
#elif MB_SIMD == 256
constexpr int kValueRows = 5, kValueVecs = 2;
#else
constexpr int kValueRows = 2, kValueVecs = 4;
#endif

// out [M][stride] = weights [M][kChunk] times values, for C vectors of columns.
template <class V, int M, int C>
void value_tile(const float* weights, const void* const* blocks, int num_blocks, int64_t row_bytes,
                int64_t column, float* out, int64_t stride) {
    vf sum[M][C];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int c = 0; c < C; ++c) sum[m][c] = vset(0.0f);
    for (int b = 0; b < num_blocks; ++b) {
        const uint8_t* at = static_cast<const uint8_t*>(blocks[b]) + column * V::kBytes;
        for (int t = 0; t < kPanel; ++t, at += row_bytes) {
            vf v[C];
            MB_UNROLL for (int c = 0; c < C; ++c) v[c] = V::load(at, c);
            MB_UNROLL for (int m = 0; m < M; ++m) {
                const vf w = vset(weights[m * kChunk + b * kPanel + t]);
                MB_UNROLL for (int c = 0; c < C; ++c) sum[m][c] = vfma(w, v[c], sum[m][c]);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        float* to = out + m * stride + column;
        float in_order[C * kLanes];
        MB_UNROLL for (int c = 0; c < C; ++c)
            vstore(V::kPairs ? in_order + c * kLanes : to + c * kLanes, sum[m][c]);
        for (int k = 0; V::kPairs && k < C * kLanes; ++k)  // column k of its pair of vectors
            to[k] = in_order[k / (2 * kLanes) * 2 * kLanes + k % 2 * kLanes +
                             k % (2 * kLanes) / 2];
    }
}

template <class V, int C, int M>
struct ValueRows {
    template <class... Args>
    static void run(int rows, Args... args) {
        if (rows == M) {
            value_tile<V, M, C>(args...);
        } else if constexpr (M > 1) {
            ValueRows<V, C, M - 1>::run(rows, args...);
        }
    }
};

template <class Wide, class V>
void sum_values(const float* weights, int vectors, const void* const* blocks, int num_blocks,
                int64_t row_bytes, int columns, float* out, int64_t stride) {
    for (int m = 0; m < vectors; m += kValueRows) {
        const int rows = vectors - m < kValueRows ? vectors - m : kValueRows;
        const float* w = weights + m * kChunk;
        int64_t column = 0;
        for (; column + kValueVecs * kLanes <= columns; column += kValueVecs * kLanes)
            ValueRows<Wide, kValueVecs, kValueRows>::run(rows, w, blocks, num_blocks, row_bytes,
                                                      column, out + m * stride, stride);
        for (; column + kLanes <= columns; column += kLanes)
            ValueRows<V, 1, kValueRows>::run(rows, w, blocks, num_blocks, row_bytes, column,
                                             out + m * stride, stride);
    }
}

inline float one_float(const void* row, DType type, int64_t k) {
    if (type == DType::f32) return static_cast<const float*>(row)[k];
    // Through vectors: the one conversion that every variant has.
    uint16_t bits[kLanes] = {static_cast<const uint16_t*>(row)[k]};
    float wide[kLanes];
    vstore(wide, type == DType::bf16 ? load_bf16(bits) : load_f16(bits));
    return wide[0];
}

// Rows [16][head_dim] of any type as floats, `stride` apart, zeros beyond head_dim.
void widen_block(const void* block, DType type, int head_dim, int64_t stride, float* out) {
    const int64_t item = type == DType::f32 ? 4 : 2;
    for (int t = 0; t < kPanel; ++t) {
        const uint8_t* row = static_cast<const uint8_t*>(block) + t * head_dim * item;
        float* to = out + t * stride;
        int k = 0;
        for (; k + kLanes <= head_dim; k += kLanes) {
            const uint8_t* at = row + k * item;
            vstore(to + k, type == DType::f32    ? F32Values::load(at, 0)
                           : type == DType::bf16 ? Bf16Values::load(at, 0)
                                                 : F16Values::load(at, 0));
        }
        for (; k < head_dim; ++k) to[k] = one_float(row, type, k);
        for (; k < stride; ++k) to[k] = 0.0f;
    }
}

inline void fetch(const void* block, int64_t bytes) {
    const uint8_t* at = static_cast<const uint8_t*>(block);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Weights exp(score - largest) of the tokens that a vector sees, zero for the others.
inline void soften(float* scores, int tokens, int first, int last, float* largest, float* sum) {
    for (int t = 0; t < first; ++t) scores[t] = -__builtin_inff();
    for (int t = last; t < tokens; ++t) scores[t] = -__builtin_inff();
    vf top = vload(scores);
    for (int t = kLanes; t < tokens; t += kLanes) top = vmax(top, vload(scores + t));
    const float highest = vlargest(top);
    const vf offset = vset(highest);
    for (int t = 0; t < tokens; t += kLanes) vstore(scores + t, vexp(vload(scores + t) - offset));
    for (int t = 0; t < first; ++t) scores[t] = 0.0f;
    for (int t = last; t < tokens; ++t) scores[t] = 0.0f;
    vf all = vset(0.0f);
    for (int t = 0; t < tokens; t += kLanes) all = all + vload(scores + t);
    *largest = highest;
    *sum = vsum(all);
}

void attend(const Chunk& chunk, void* scratch, const Attended& out) {
    const int head_dim = chunk.head_dim, tokens = chunk.blocks * kPanel;
    const int64_t wide = round_up(head_dim, kPanel);
    float* panels = static_cast<float*>(scratch);
    float* widened = panels + kChunk * wide;
    float* scores = widened + kChunk * wide;
    float* queries = scores + kMaxVectors * kChunk;
    float* tile_scores = queries + kMaxVectors * (wide + 2);

    // Keys: bf16 pairs move as words; other types are widened first.
    const bool words = chunk.type == DType::bf16 && head_dim % 2 == 0;
    const int64_t block_bytes = static_cast<int64_t>(kPanel) * head_dim * (chunk.type == DType::f32 ? 4 : 2);
    const int64_t panel_floats = words ? kPanel * (head_dim / 2) : kPanel * head_dim;
    const Gemm& gemm = words ? kFmaBf16 : kFmaF32;
    for (int b = 0; b < chunk.blocks; ++b) {
        if (b + 4 < chunk.blocks) fetch(chunk.keys[b + 4], block_bytes);
        fetch(chunk.values[b], block_bytes);
        uint32_t* panel = reinterpret_cast<uint32_t*>(panels + b * panel_floats);
        if (words) {
            transpose16(static_cast<const uint32_t*>(chunk.keys[b]), head_dim / 2, head_dim / 2, panel);
        } else {
            widen_block(chunk.keys[b], chunk.type, head_dim, wide, widened);
            transpose16(reinterpret_cast<const uint32_t*>(widened), wide, head_dim, panel);
        }
    }

    const XRows rows = {chunk.queries, DType::f32, head_dim, nullptr};
    for (int m = 0; m < chunk.vectors; m += gemm.max_rows) {
        const int count = chunk.vectors - m < gemm.max_rows ? chunk.vectors - m : gemm.max_rows;
        gemm.pack_x(rows, m, count, head_dim, queries);
        int seen = 0;
        for (int i = m; i < m + count; ++i) seen = chunk.last[i] > seen ? chunk.last[i] : seen;
        for (int b = 0; b * kPanel < seen; b += 2) {
            const int pair = b + 1 < chunk.blocks ? 2 : 1;
            const uint8_t* at[2] = {reinterpret_cast<const uint8_t*>(panels + b * panel_floats),
                                    reinterpret_cast<const uint8_t*>(panels + (b + 1) * panel_floats)};
            gemm.multiply(queries, count, at, pair, head_dim, {{at[0], at[0]}, 0}, tile_scores);
            for (int i = 0; i < count; ++i)
                std::memcpy(scores + (m + i) * kChunk + b * kPanel, tile_scores + i * pair * kPanel,
                            sizeof(float) * static_cast<size_t>(pair * kPanel));
        }
    }
    for (int m = 0; m < chunk.vectors; ++m)
        soften(scores + m * kChunk, tokens, chunk.first[m], chunk.last[m], out.largest + m, out.sum + m);

    // Values: widened once where many vectors use them or a row does not fill its vectors.
    if (head_dim % kPanel == 0 && (chunk.type == DType::f32 || chunk.vectors <= 2 * kValueRows)) {
        const auto sum = chunk.type == DType::f32    ? sum_values<F32Values, F32Values>
                         : chunk.type == DType::bf16 ? sum_values<Bf16PairValues, Bf16Values>
                                                     : sum_values<F16Values, F16Values>;
        sum(scores, chunk.vectors, chunk.values, chunk.blocks, block_bytes / kPanel, head_dim,
            out.values, head_dim);
        return;
    }
    const void* blocks[kChunkBlocks];
    for (int b = 0; b < chunk.blocks; ++b) {
        blocks[b] = widened + b * kPanel * wide;
        widen_block(chunk.values[b], chunk.type, head_dim, wide, widened + b * kPanel * wide);
    }
    if (head_dim % kPanel == 0) {
        sum_values<F32Values, F32Values>(scores, chunk.vectors, blocks, chunk.blocks, wide * 4, head_dim,
                              out.values, head_dim);
        return;
    }
    float* padded = panels;  // the keys are done with
    sum_values<F32Values, F32Values>(scores, chunk.vectors, blocks, chunk.blocks, wide * 4,
                          static_cast<int>(wide), padded, wide);
    for (int m = 0; m < chunk.vectors; ++m)
        std::memcpy(out.values + m * head_dim, padded + m * wide, sizeof(float) * static_cast<size_t>(head_dim));
}

void merge(float* largest, float* sum, float* values, float chunk_largest, float chunk_sum,
           const float* chunk_values, int head_dim) {
    if (chunk_largest == -__builtin_inff()) return;  // nothing of the chunk is seen
    const float top = chunk_largest > *largest ? chunk_largest : *largest;
    float factors[2 * kLanes];
    vstore(factors, vexp(vset(*largest - top)));
    vstore(factors + kLanes, vexp(vset(chunk_largest - top)));
    // Before the first chunk there is nothing to keep, and no finite largest score.
    const float keep = *largest == -__builtin_inff() ? 0.0f : factors[0], add = factors[kLanes];
    for (int k = 0; k < head_dim; ++k) values[k] = values[k] * keep + chunk_values[k] * add;
    *sum = *sum * keep + chunk_sum * add;
    *largest = top;
}

}  // namespace
}  // namespace moebatch
