// Attention over a chunk of cached context. Included once by each variant.
//
// Blocks are used one after another, each for all of its heads, in the order in which they lie in memory.
// Keys of a block become a panel, so that scores are the products of the matrix kernels; values are
// summed token by token. Every number is one chain in the order of dimensions or tokens: it does not
// depend on how many query vectors share the chunk.
#pragma once

#include "whole_impl.h"

#if defined(__AVX512BF16__)
#include "dot_impl.h"
#endif

namespace moebatch {
namespace {

// 16 numbers of a cached row and upwards, widened.
struct Bf16Values {
    static constexpr int64_t kBytes = 2;
    static vf load(const uint8_t* at, int v) {
        return load_bf16(reinterpret_cast<const uint16_t*>(at) + v * kLanes);
    }
};
// The even columns of two vectors' width, then the odd ones: half the work of widening in order.
struct Bf16PairValues {
    static constexpr int64_t kBytes = 2;
    static vf load(const uint8_t* at, int v) {
        at += v / 2 * kLanes * 4;
        return v % 2 == 0 ? even_bf16(at) : odd_bf16(at);
    }
};
struct F16Values {
    static constexpr int64_t kBytes = 2;
    static vf load(const uint8_t* at, int v) {
        return load_f16(reinterpret_cast<const uint16_t*>(at) + v * kLanes);
    }
};
struct I8Values {
    static constexpr int64_t kBytes = 1;
    static vf load(const uint8_t* at, int v) {
        return load_signed(reinterpret_cast<const int8_t*>(at) + v * kLanes);
    }
};
struct F32Values {
    static constexpr int64_t kBytes = 4;
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

// out [vectors][stride] += weights [vectors][kChunk] times a block's values; each sum is one chain in the
// order of tokens. `ahead` is a block that is fetched meanwhile.
template <class Wide, class V>
void add_block(const float* weights, int vectors, const uint8_t* at, int64_t row_bytes, int columns,
               bool first, float* out, int64_t stride, const uint8_t* ahead) {
    constexpr int kWide = kValueVecs * kLanes;
    const int64_t tiles = columns / kWide + columns % kWide / kLanes;
    Fetched fetched = {ahead, ahead == nullptr ? 0 : columns * V::kBytes / tiles};
    for (int m = 0; m < vectors; m += kValueRows) {
        const int rows = vectors - m < kValueRows ? vectors - m : kValueRows;
        const float* w = weights + m * kChunk;
        float* to = out + m * stride;
        int column = 0;
        if (m > 0) fetched.step = 0;
        for (; column + kWide <= columns; column += kWide)
            ValueRows<Wide, kValueVecs, kValueRows>::run(rows, fetched, w, at + column * Wide::kBytes, row_bytes,
                                                      first, to + column, stride);
        for (; column + kLanes <= columns; column += kLanes)
            ValueRows<V, 1, kValueRows>::run(rows, fetched, w, at + column * V::kBytes, row_bytes, first,
                                             to + column, stride);
    }
}

#if defined(__AVX512BF16__)
// Weights rounded to bf16, pairs of tokens in a word, at the beginning of a vector's row.
inline void round_pairs(float* weights, int tokens) {
    for (int t = 0; t < tokens; t += kPanel)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(weights) + t),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + t))));
}

// Columns of two tokens' values side by side: 0-3, 8-11 ... of 32, then 4-7, 12-15 ...
constexpr int kPairColumns = 2 * kLanes;

// As value_tile, for bf16 numbers: pairs of tokens at a time, C times 32 columns.
template <int M, int C>
void pair_tile(const float* weights, const uint8_t* at, int64_t row_bytes, bool first, float* out,
               int64_t stride, Fetched& fetched) {
    vf sum[M][2 * C];
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int c = 0; c < 2 * C; ++c)
            sum[m][c] = first ? vset(0.0f) : vload(out + m * stride + c * kLanes);
    for (int t = 0; t < kPanel; t += 2, at += 2 * row_bytes) {
        fetched.next();
        __m512bh v[2 * C];
        MB_UNROLL for (int c = 0; c < C; ++c) {
            const __m512i even = _mm512_loadu_si512(at + c * 64), odd = _mm512_loadu_si512(at + row_bytes + c * 64);
            v[2 * c] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
            v[2 * c + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
        }
        MB_UNROLL for (int m = 0; m < M; ++m) {
            int32_t pair;
            std::memcpy(&pair, reinterpret_cast<const uint16_t*>(weights + m * kChunk) + t, sizeof pair);
            const __m512bh w = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            MB_UNROLL for (int c = 0; c < 2 * C; ++c) sum[m][c] = _mm512_dpbf16_ps(sum[m][c], w, v[c]);
        }
    }
    MB_UNROLL for (int m = 0; m < M; ++m)
        MB_UNROLL for (int c = 0; c < 2 * C; ++c) vstore(out + m * stride + c * kLanes, sum[m][c]);
}

template <int C, int M>
struct PairRows {
    template <class... Args>
    static void run(int rows, Fetched& fetched, Args... args) {
        if (rows == M) {
            pair_tile<M, C>(args..., fetched);
        } else if constexpr (M > 1) {
            PairRows<C, M - 1>::run(rows, fetched, args...);
        }
    }
};

inline void put_pairs_in_order(float* sums, int columns) {
    for (int column = 0; column < columns; column += kPairColumns) {
        float in_order[kPairColumns];
        for (int k = 0; k < kPairColumns; ++k)
            in_order[k] = sums[column + k / 4 % 2 * kLanes + k / 8 * 4 + k % 4];
        std::memcpy(sums + column, in_order, sizeof in_order);
    }
}

// As add_block; weights as round_pairs left them, columns whole times 32.
void add_pairs(const float* weights, int vectors, const uint8_t* at, int columns, bool first, float* out,
               const uint8_t* ahead) {
    constexpr int kWide = 2 * kPairColumns;
    const int64_t tiles = (columns + kWide - 1) / kWide, row_bytes = columns * 2;
    Fetched fetched = {ahead, ahead == nullptr ? 0 : 2 * row_bytes / tiles};
    for (int m = 0; m < vectors; m += kValueRows) {
        const int rows = vectors - m < kValueRows ? vectors - m : kValueRows;
        float* to = out + m * columns;
        int column = 0;
        if (m > 0) fetched.step = 0;
        for (; column + kWide <= columns; column += kWide)
            PairRows<2, kValueRows>::run(rows, fetched, weights + m * kChunk, at + column * 2, row_bytes, first,
                                         to + column, int64_t{columns});
        if (column < columns)
            PairRows<1, kValueRows>::run(rows, fetched, weights + m * kChunk, at + column * 2, row_bytes, first,
                                         to + column, int64_t{columns});
    }
}
#endif

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

// Where the blocks of a chunk lie that come some places after a place in the order of use: keys, values,
// then what the thread reads next.
struct Order {
    const Chunk& chunk;
    int64_t head_bytes;  // of a block
    int places;          // some tens of kilobytes

    explicit Order(const Chunk& of)
        : chunk(of), head_bytes(kPanel * of.head_dim * bytes_of(of.type)),
          places(static_cast<int>(kLead / (head_bytes * of.groups)) + 1) {}

    // One head of the block that is fetched while block `b` of the keys or the values is used.
    const uint8_t* ahead(int b, bool values, int group) const {
        int at = b + places + (values ? chunk.blocks : 0);
        const void* block;
        if (at < chunk.blocks) {
            block = chunk.keys[at];
        } else if ((at -= chunk.blocks) < chunk.blocks) {
            block = chunk.values[at];
        } else if ((at -= chunk.blocks) < chunk.num_next) {
            block = chunk.next[at];
        } else {
            return nullptr;
        }
        return static_cast<const uint8_t*>(block) + group * head_bytes;
    }

  private:
    static constexpr int64_t kLead = 64 << 10;
};

inline void fetch(const uint8_t* at, int64_t bytes) {
    for (int64_t i = 0; at != nullptr && i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// A block's keys of one head as a panel; meanwhile the first bytes of `ahead` are fetched.
void key_panel(const Chunk& chunk, const void* keys, bool words, float* widened, uint32_t* panel,
               const uint8_t* ahead, int64_t bytes) {
    constexpr int64_t kPieces = 4;
    const int head_dim = chunk.head_dim;
    int64_t stride = head_dim / 2, all = head_dim / 2;  // in words
    const uint32_t* from = static_cast<const uint32_t*>(keys);
    if (!words) {
        stride = round_up(head_dim, kPanel), all = head_dim;
        widen_block(keys, chunk.type, head_dim, stride, widened);
        from = reinterpret_cast<const uint32_t*>(widened);
    }
    const int64_t piece = round_up((all + kPieces - 1) / kPieces, 8);
    for (int64_t k = 0, i = 0; k < all; k += piece, ++i) {
        fetch(ahead == nullptr ? nullptr : ahead + i * (bytes / kPieces), bytes / kPieces);
        transpose16(from + k, stride, all - k < piece ? all - k : piece, panel + k * kPanel);
    }
}

struct Scratch {
    float* widened;
    float* panels;
    float* scores;
    float* queries;
    float* padded;
    float* tile_scores;

    Scratch(void* memory, int64_t wide)
        : widened(static_cast<float*>(memory)),
          panels(widened + kPanel * wide),
          scores(panels + 2 * kPanel * wide),
          queries(scores + kMaxVectors * kChunk),
          padded(queries + kMaxVectors * (wide + 2)),
          tile_scores(padded + kMaxVectors * wide) {}
};

// Scores [groups][vectors][kChunk]: two blocks of keys at a time become panels.
void score(const Chunk& chunk, const Scratch& scratch) {
    const int head_dim = chunk.head_dim;
    const int64_t wide = round_up(head_dim, kPanel);
    // bf16 pairs move as words; other types are widened first.
    const bool words = chunk.type == DType::bf16 && head_dim % 2 == 0;
    const Order order(chunk);
    const int64_t panel_floats = words ? kPanel * (head_dim / 2) : kPanel * head_dim;
#if defined(__AVX512BF16__)
    const Gemm& gemm = words && chunk.round_x ? kDotBf16 : words ? kFmaBf16 : kFmaF32;
#else
    const Gemm& gemm = words ? kFmaBf16 : kFmaF32;
#endif
    const int64_t steps = head_dim / gemm.k_step, with_panel = order.head_bytes / 4 / 256 * 256;
    const XRows rows = {chunk.queries, DType::f32, head_dim, nullptr};
    int seen[kMaxVectors];  // tokens, by the first vector of a tile
    for (int m = 0; m < chunk.vectors; m += gemm.max_rows) {
        const int count = chunk.vectors - m < gemm.max_rows ? chunk.vectors - m : gemm.max_rows;
        seen[m] = 0;
        for (int i = m; i < m + count; ++i) seen[m] = chunk.last[i] > seen[m] ? chunk.last[i] : seen[m];
        for (int g = 0; g < chunk.groups; ++g) {
            const int vector = g * chunk.vectors + m;
            gemm.pack_x(rows, vector, count, {head_dim}, scratch.queries + vector * (wide + 1));
        }
    }
    for (int b = 0; b < chunk.blocks; b += 2) {
        const int pair = b + 1 < chunk.blocks ? 2 : 1;
        for (int g = 0; g < chunk.groups; ++g) {
            const uint8_t* at[2];
            Ahead ahead = {{nullptr, nullptr}, (order.head_bytes - with_panel) / steps};
            for (int i = 0; i < pair; ++i) {
                uint32_t* panel = reinterpret_cast<uint32_t*>(scratch.panels + i * panel_floats);
                const uint8_t* keys = static_cast<const uint8_t*>(chunk.keys[b + i]) + g * order.head_bytes;
                const uint8_t* later = order.ahead(b + i, false, g);
                at[i] = reinterpret_cast<const uint8_t*>(panel);
                key_panel(chunk, keys, words, scratch.widened, panel, later, with_panel);
                ahead.at[i] = later == nullptr ? at[i] : later + with_panel;
            }
            if (ahead.at[0] == at[0] || (pair == 2 && ahead.at[1] == at[1])) ahead.step = 0;
            for (int m = 0; m < chunk.vectors; m += gemm.max_rows) {
                if (b * kPanel >= seen[m]) continue;
                const int count = chunk.vectors - m < gemm.max_rows ? chunk.vectors - m : gemm.max_rows;
                const int vector = g * chunk.vectors + m;
                gemm.multiply(scratch.queries + vector * (wide + 1), count, at, pair, {head_dim}, ahead,
                              scratch.tile_scores);
                ahead.step = 0;
                for (int i = 0; i < count; ++i)
                    for (int p = 0; p < pair; ++p)
                        for (int t = 0; t < kPanel; t += kLanes) {
                            vf s = vload(scratch.tile_scores + (i * pair + p) * kPanel + t);
                            if (chunk.type == DType::i8)
                                s = s * vload(chunk.key_scales[b + p] + g * kPanel + t);
                            vstore(scratch.scores + (vector + i) * kChunk + (b + p) * kPanel + t, s);
                        }
            }
        }
    }
}

void attend(const Chunk& chunk, void* memory, const Attended& out) {
    const int head_dim = chunk.head_dim, tokens = chunk.blocks * kPanel, vectors = chunk.vectors;
    const int64_t wide = round_up(head_dim, kPanel);
    const Scratch scratch(memory, wide);
    const Order order(chunk);

    score(chunk, scratch);
    for (int v = 0; v < chunk.groups * vectors; ++v) {
        float* weights = scratch.scores + v * kChunk;
        const int m = v % vectors, g = v / vectors;
        soften(weights, tokens, chunk.first[m], chunk.last[m], out.largest + v, out.sum + v);
        // A token that is not seen may have any scale, even none.
        for (int t = chunk.first[m]; chunk.type == DType::i8 && t < chunk.last[m]; ++t)
            weights[t] *= chunk.value_scales[t / kPanel][g * kPanel + t % kPanel];
    }
    const auto each_block = [&](const auto& use) {
        for (int b = 0; b < chunk.blocks; ++b)
            for (int g = 0; g < chunk.groups; ++g)
                use(b, g, scratch.scores + g * vectors * kChunk,
                    static_cast<const uint8_t*>(chunk.values[b]) + g * order.head_bytes);
    };

#if defined(__AVX512BF16__)
    if (chunk.round_x && chunk.type == DType::bf16 && head_dim % kPairColumns == 0) {
        for (int v = 0; v < chunk.groups * vectors; ++v) round_pairs(scratch.scores + v * kChunk, tokens);
        each_block([&](int b, int g, const float* weights, const uint8_t* at) {
            add_pairs(weights + b * (kPanel / 2), vectors, at, head_dim, b == 0,
                      out.values + g * vectors * head_dim, order.ahead(b, true, g));
        });
        for (int v = 0; v < chunk.groups * vectors; ++v) put_pairs_in_order(out.values + v * head_dim, head_dim);
        return;
    }
#endif
    // Values: widened first where many vectors use them or a row does not fill its vectors.
    if (head_dim % kPanel == 0 && (chunk.type == DType::f32 || vectors <= 2 * kValueRows)) {
        const auto add = chunk.type == DType::f32    ? add_block<F32Values, F32Values>
                         : chunk.type == DType::bf16 ? add_block<Bf16PairValues, Bf16Values>
                         : chunk.type == DType::i8   ? add_block<I8Values, I8Values>
                                                     : add_block<F16Values, F16Values>;
        each_block([&](int b, int g, const float* weights, const uint8_t* at) {
            add(weights + b * kPanel, vectors, at, head_dim * bytes_of(chunk.type), head_dim, b == 0,
                out.values + g * vectors * head_dim, head_dim, order.ahead(b, true, g));
        });
        constexpr int kWide = kValueVecs * kLanes;
        for (int v = 0; chunk.type == DType::bf16 && v < chunk.groups * vectors; ++v)
            put_in_order(out.values + v * head_dim, head_dim / kWide * kWide);
        return;
    }
    const bool whole = head_dim % kPanel == 0;
    each_block([&](int b, int g, const float* weights, const uint8_t* at) {
        fetch(order.ahead(b, true, g), order.head_bytes);
        widen_block(at, chunk.type, head_dim, wide, scratch.widened);
        float* sums = whole ? out.values : scratch.padded;
        add_block<F32Values, F32Values>(weights + b * kPanel, vectors,
                                        reinterpret_cast<const uint8_t*>(scratch.widened), wide * 4,
                                        static_cast<int>(wide), b == 0, sums + g * vectors * wide, wide, nullptr);
    });
    for (int v = 0; !whole && v < chunk.groups * vectors; ++v)
        std::memcpy(out.values + v * head_dim, scratch.padded + v * wide, sizeof(float) * static_cast<size_t>(head_dim));
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
