// Attention over a chunk of cached context. Included once by each variant.
//
// Keys of a block become a panel, so that scores are the products of the matrix kernels; values are
// summed token by token. Every number is one chain in the order of dimensions or tokens: it does not
// depend on how many query vectors share the chunk.
#pragma once

#include "whole_impl.h"

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
struct I8Values {
    static constexpr int64_t kBytes = 1;
    static constexpr bool kPairs = false;
    static vf load(const uint8_t* at, int v) {
        return load_signed(reinterpret_cast<const int8_t*>(at) + v * kLanes);
    }
};
struct F32Values {
    static constexpr int64_t kBytes = 4;
    static constexpr bool kPairs = false;
    static vf load(const uint8_t* at, int v) {
        return vload(reinterpret_cast<const float*>(at) + v * kLanes);
    }
};

inline int64_t bytes_of(DType type) { return type == DType::f32 ? 4 : type == DType::i8 ? 1 : 2; }

// What each token's step fetches: a little at a time, as more than some twenty lines on their way make
// the processor wait.
struct Fetched {
    const uint8_t* at;
    int64_t step;  // bytes

    void next() {
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + i, 0, 2);
        at += step;
    }
};

#if MB_SIMD == 512
constexpr int kValueRows = 6, kValueVecs = 4;
#elif MB_SIMD == 256
constexpr int kValueRows = 5, kValueVecs = 2;
#else
constexpr int kValueRows = 2, kValueVecs = 4;
#endif

// out [M][stride] += weights [M][kChunk] times a block's values, for C vectors of columns.
template <class V, int M, int C>
void value_tile(const float* weights, const uint8_t* at, int64_t row_bytes, bool first, float* out,
                int64_t stride, Fetched& fetched) {
    vf sum[M][C];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int c = 0; c < C; ++c)
            sum[m][c] = first ? vset(0.0f) : vload(out + m * stride + c * kLanes);
    for (int t = 0; t < kPanel; ++t, at += row_bytes) {
        fetched.next();
        vf v[C];
        MB_UNROLL for (int c = 0; c < C; ++c) v[c] = V::load(at, c);
        MB_UNROLL for (int m = 0; m < M; ++m) {
            const vf w = vset(weights[m * kChunk + t]);
            MB_UNROLL for (int c = 0; c < C; ++c) add_product(sum[m][c], w, v[c]);
        }
    }
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int c = 0; c < C; ++c) vstore(out + m * stride + c * kLanes, sum[m][c]);
}

template <class V, int C, int M>
struct ValueRows {
    template <class... Args>
    static void run(int rows, Fetched& fetched, Args... args) {
        if (rows == M) {
            value_tile<V, M, C>(args..., fetched);
        } else if constexpr (M > 1) {
            ValueRows<V, C, M - 1>::run(rows, fetched, args...);
        }
    }
};

// What was summed as the even and the odd columns of vectors' pairs, in the order of columns.
inline void put_in_order(float* sums, int columns) {
    for (int column = 0; column < columns; column += 2 * kLanes) {
        float in_order[2 * kLanes];
        for (int k = 0; k < 2 * kLanes; ++k) in_order[k] = sums[column + k % 2 * kLanes + k / 2];
        std::memcpy(sums + column, in_order, sizeof in_order);
    }
}

// out [vectors][stride] = weights [vectors][kChunk] times values. A block stays in the caches while all
// its columns are summed; each sum is one chain in the order of tokens.
template <class Wide, class V>
void sum_values(const float* weights, const Chunk& chunk, const void* const* blocks, int64_t row_bytes,
                int columns, float* out, int64_t stride) {
    constexpr int kWide = kValueVecs * kLanes;
    for (int b = 0; b < chunk.blocks; ++b) {
        Fetched fetched = {nullptr, 0};
        if (b < chunk.next_blocks) {  // with the first rows' tiles
            const int64_t tiles = columns / kWide + columns % kWide / kLanes;
            fetched = {static_cast<const uint8_t*>(chunk.next_keys[b]),
                       chunk.head_dim * bytes_of(chunk.type) / tiles};
        }
        const uint8_t* at = static_cast<const uint8_t*>(blocks[b]);
        for (int m = 0; m < chunk.vectors; m += kValueRows) {
            const int rows = chunk.vectors - m < kValueRows ? chunk.vectors - m : kValueRows;
            const float* w = weights + m * kChunk + b * kPanel;
            float* to = out + m * stride;
            int column = 0;
            if (m > 0) fetched.step = 0;
            for (; column + kWide <= columns; column += kWide)
                ValueRows<Wide, kValueVecs, kValueRows>::run(rows, fetched, w, at + column * Wide::kBytes, row_bytes,
                                                          b == 0, to + column, stride);
            for (; column + kLanes <= columns; column += kLanes)
                ValueRows<V, 1, kValueRows>::run(rows, fetched, w, at + column * V::kBytes, row_bytes,
                                                 b == 0, to + column, stride);
        }
    }
    for (int m = 0; Wide::kPairs && m < chunk.vectors; ++m)
        put_in_order(out + m * stride, columns / kWide * kWide);
}

inline float one_float(const void* row, DType type, int64_t k) {
    if (type == DType::f32) return static_cast<const float*>(row)[k];
    if (type == DType::i8) return static_cast<float>(static_cast<const int8_t*>(row)[k]);
    // Through vectors: the one conversion that every variant has.
    uint16_t bits[kLanes] = {static_cast<const uint16_t*>(row)[k]};
    float wide[kLanes];
    vstore(wide, type == DType::bf16 ? load_bf16(bits) : load_f16(bits));
    return wide[0];
}

// Rows [16][head_dim] of any type as floats, `stride` apart, zeros beyond head_dim.
void widen_block(const void* block, DType type, int head_dim, int64_t stride, float* out) {
    const int64_t item = bytes_of(type);
    for (int t = 0; t < kPanel; ++t) {
        const uint8_t* row = static_cast<const uint8_t*>(block) + t * head_dim * item;
        float* to = out + t * stride;
        int k = 0;
        for (; k + kLanes <= head_dim; k += kLanes) {
            const uint8_t* at = row + k * item;
            vstore(to + k, type == DType::f32    ? F32Values::load(at, 0)
                           : type == DType::bf16 ? Bf16Values::load(at, 0)
                           : type == DType::i8   ? I8Values::load(at, 0)
                                                 : F16Values::load(at, 0));
        }
        for (; k < head_dim; ++k) to[k] = one_float(row, type, k);
        for (; k < stride; ++k) to[k] = 0.0f;
    }
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

// Scores [vectors][kChunk]: two blocks of keys at a time become panels.
void score(const Chunk& chunk, float* panels, float* widened, float* queries, float* tile_scores,
           float* scores) {
    const int head_dim = chunk.head_dim;
    const int64_t wide = round_up(head_dim, kPanel);
    // bf16 pairs move as words; other types are widened first.
    const bool words = chunk.type == DType::bf16 && head_dim % 2 == 0;
    const int64_t block_bytes = kPanel * head_dim * bytes_of(chunk.type);
    const int64_t panel_floats = words ? kPanel * (head_dim / 2) : kPanel * head_dim;
    const Gemm& gemm = words ? kFmaBf16 : kFmaF32;
    const int64_t steps = head_dim / gemm.k_step;
    const XRows rows = {chunk.queries, DType::f32, head_dim, nullptr};
    int seen[kMaxVectors];  // tokens, by the first vector of a tile
    for (int m = 0; m < chunk.vectors; m += gemm.max_rows) {
        const int count = chunk.vectors - m < gemm.max_rows ? chunk.vectors - m : gemm.max_rows;
        gemm.pack_x(rows, m, count, {head_dim}, queries + m * (wide + 1));
        seen[m] = 0;
        for (int i = m; i < m + count; ++i) seen[m] = chunk.last[i] > seen[m] ? chunk.last[i] : seen[m];
    }
    for (int b = 0; b < chunk.blocks; b += 2) {
        const int pair = b + 1 < chunk.blocks ? 2 : 1;
        const uint8_t* at[2];
        for (int i = 0; i < pair; ++i) {
            uint32_t* panel = reinterpret_cast<uint32_t*>(panels + i * panel_floats);
            at[i] = reinterpret_cast<const uint8_t*>(panel);
            if (words) {
                transpose16(static_cast<const uint32_t*>(chunk.keys[b + i]), head_dim / 2, head_dim / 2, panel);
            } else {
                widen_block(chunk.keys[b + i], chunk.type, head_dim, wide, widened);
                transpose16(reinterpret_cast<const uint32_t*>(widened), wide, head_dim, panel);
            }
        }
        for (int m = 0; m < chunk.vectors; m += gemm.max_rows) {
            if (b * kPanel >= seen[m]) continue;
            const int count = chunk.vectors - m < gemm.max_rows ? chunk.vectors - m : gemm.max_rows;
            // The values of these tokens are fetched meanwhile.
            const Ahead ahead = {{static_cast<const uint8_t*>(chunk.values[b]),
                                  static_cast<const uint8_t*>(chunk.values[b + pair - 1])},
                                 m == 0 ? block_bytes / steps : 0};
            gemm.multiply(queries + m * (wide + 1), count, at, pair, {head_dim}, ahead, tile_scores);
            for (int i = 0; i < count; ++i)
                for (int p = 0; p < pair; ++p)
                    for (int t = 0; t < kPanel; t += kLanes) {
                        vf s = vload(tile_scores + (i * pair + p) * kPanel + t);
                        if (chunk.type == DType::i8) s = s * vload(chunk.key_scales[b + p] + t);
                        vstore(scores + (m + i) * kChunk + (b + p) * kPanel + t, s);
                    }
        }
    }
}

void attend(const Chunk& chunk, void* scratch, const Attended& out) {
    const int head_dim = chunk.head_dim, tokens = chunk.blocks * kPanel;
    const int64_t wide = round_up(head_dim, kPanel);
    float* widened = static_cast<float*>(scratch);
    float* panels = widened + kChunk * wide;
    float* scores = panels + 2 * kPanel * wide;
    float* queries = scores + kMaxVectors * kChunk;
    float* padded = queries + kMaxVectors * (wide + 2);
    float* tile_scores = padded + kMaxVectors * wide;

    score(chunk, panels, widened, queries, tile_scores, scores);
    for (int m = 0; m < chunk.vectors; ++m) {
        float* weights = scores + m * kChunk;
        soften(weights, tokens, chunk.first[m], chunk.last[m], out.largest + m, out.sum + m);
        // A token that is not seen may have any scale, even none.
        for (int t = chunk.first[m]; chunk.type == DType::i8 && t < chunk.last[m]; ++t)
            weights[t] *= chunk.value_scales[t / kPanel][t % kPanel];
    }

    // Values: widened once where many vectors use them or a row does not fill its vectors.
    if (head_dim % kPanel == 0 && (chunk.type == DType::f32 || chunk.vectors <= 2 * kValueRows)) {
        const auto sum = chunk.type == DType::f32    ? sum_values<F32Values, F32Values>
                         : chunk.type == DType::bf16 ? sum_values<Bf16PairValues, Bf16Values>
                         : chunk.type == DType::i8   ? sum_values<I8Values, I8Values>
                                                     : sum_values<F16Values, F16Values>;
        sum(scores, chunk, chunk.values, head_dim * bytes_of(chunk.type), head_dim, out.values, head_dim);
        return;
    }
    const void* blocks[kChunkBlocks];
    for (int b = 0; b < chunk.blocks; ++b) {
        blocks[b] = widened + b * kPanel * wide;
        widen_block(chunk.values[b], chunk.type, head_dim, wide, widened + b * kPanel * wide);
    }
    if (head_dim % kPanel == 0) {
        sum_values<F32Values, F32Values>(scores, chunk, blocks, wide * 4, head_dim, out.values, head_dim);
        return;
    }
    sum_values<F32Values, F32Values>(scores, chunk, blocks, wide * 4, static_cast<int>(wide), padded, wide);
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
