// What a SIMD variant offers to the drivers, as a table of plain functions.
//
// Shapes: M rows of x (tokens), K inputs, N outputs. A panel holds 16 outputs of a weight matrix;
// a tile is up to `max_rows` rows of x times one or two panels.
//
// Packed weights, panel after panel, K padded to `k_step` with zeros:
//   bf16        [K/2][16][2]  two inputs of an output side by side, as dot-product instructions want
//   fp16, fp32  [K][16]
//   whole numbers of 4 or 8 bits in groups of inputs: [groups][16] scales in fp16, [groups][16] zero
//               points in bytes (where not all are the middle), up to whole lines of 64 bytes, then
//               int8 [K/4][16][4], int4 [K/8][16][4], inputs k and k + 4 in a byte; K up to whole 32s.
//               A weight is scale * (number - zero point), exactly, in float32.
// Packed x, one tile of m rows after another: [K/k_step][m][k_step]; in 8 bits a group of inputs has
// a scale as well: [groups][m] scales, [groups][m] sums (see XKind), then [K/4][m][4].
//
// A result is one chain of additions in the order of the inputs, whatever M, tile or thread: it is
// bit for bit the same in any batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebatch {

constexpr int kPanel = 16;
constexpr int kMaxRows = 16;
constexpr int kBlockInputs = 32;  // whole numbers come in blocks of so many inputs
constexpr int kMaxGroup = 256;

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, i4 = 4 };

// How x enters the products. f32: as it is, widened weights. bf16: rounded first. i8: each row is
// rounded to 8 bits, each group of inputs on a scale of its own; with each goes the negated sum of its
// whole numbers, in the low half of a word: what the weights' zero points are multiplied with.
enum class XKind : int { f32 = 0, bf16 = 1, i8 = 2 };

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The inputs of a weight matrix, and how they share scales where the weights are whole numbers.
struct Inputs {
    int64_t count = 0;
    int64_t group = 0;   // inputs under one scale, a multiple of 32 up to 256; the last may have fewer
    bool zeros = false;  // whether groups have zero points of their own

    int64_t groups() const { return (count + group - 1) / group; }
    int64_t padded() const { return round_up(count, kBlockInputs); }
    // Bytes of a panel before its whole numbers.
    int64_t header() const { return round_up(groups() * kPanel * (zeros ? 3 : 2), 64); }
};

// Rows of x in memory: float or bf16, any row stride, optionally through an index.
struct XRows {
    const void* data = nullptr;
    DType type = DType::f32;
    int64_t stride = 0;              // elements
    const int64_t* index = nullptr;  // row numbers; null: 0, 1, 2 ...
};

// gate and up of one tile and one panel -> (up + shift) * gate * sigmoid(alpha * gate), both clamped.
struct Activation {
    float alpha = 1.0f;
    float shift = 0.0f;
    float limit = 0.0f;  // of gate from above and of up on both sides; 0: none
};

// What a tile fetches into the caches while it computes: `step` bytes of each panel at a time.
struct Ahead {
    const uint8_t* at[2];
    int64_t step;
};

struct Gemm {
    XKind x_kind;
    int k_step;    // inputs that stand side by side in x and w
    int max_rows;  // of a tile
    int fetch;     // inputs per step of Ahead
    // Pack rows [first, first + rows) of x into one tile.
    void (*pack_x)(const XRows& x, int64_t first, int rows, const Inputs& inputs, void* tile);
    // out [rows][panels * 16] = tile of x times one or two panels of weights.
    void (*multiply)(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                     const Inputs& inputs, const Ahead& ahead, float* out);
    // Null where a row must be whole before it can be packed (8 bits: its scales).
    // Store features [first, first + count) of h [rows][16] into a packed tile of `rows` rows.
    void (*store_h)(const float* h, int rows, int64_t first, int count, void* tile);
};

constexpr int kChunk = 256;  // tokens of context that one softmax covers before results are merged
constexpr int kChunkBlocks = kChunk / kPanel;
constexpr int kMaxVectors = 64;  // query vectors that meet a chunk at once

// Query vectors of neighbouring key/value heads against one chunk of context, in blocks of 16 tokens.
// A block holds its heads side by side, [groups][16][head_dim].
struct Chunk {
    DType type;
    bool round_x;  // queries and weights may be rounded to bf16
    int head_dim;
    int blocks;
    int groups;            // key/value heads
    const void* keys[kChunkBlocks];
    const void* values[kChunkBlocks];
    const float* key_scales[kChunkBlocks];  // [groups][16], of the tokens; for 8 bits only
    const float* value_scales[kChunkBlocks];
    // What is read after this chunk's keys and values by the same thread. Main memory is fast where
    // whole blocks are read one after another: while one is used, that some places later is fetched.
    const void* next[2 * kChunkBlocks];
    int num_next;
    int vectors;           // of each group, kMaxVectors in all
    const float* queries;  // [groups][vectors][head_dim], scaled
    int first[kMaxVectors], last[kMaxVectors];  // tokens of the chunk that a group's vector sees
};

// Softmax-weighted values of a chunk, for all vectors of all groups: largest score, sum of weights,
// weighted sum [groups][vectors][head_dim].
struct Attended {
    float* largest;
    float* sum;
    float* values;
};

struct Kernels {
    const char* name;
    // By weight type and by whether x may be rounded to bf16; null where there is none.
    const Gemm* (*gemm)(DType weight, bool bf16_x);
    // h [rows][16] from gate_up [rows][32]; biases of 16 features each, or null.
    void (*activate)(const Activation& how, const float* gate_up, int rows, const float* gate_bias,
                     const float* up_bias, float* h);
    // out[token] += weight * (y + bias) for 16 * panels columns, `columns` of them real.
    void (*scatter)(const float* y, int rows, int panels, int columns, const float* bias,
                    const int64_t* tokens, const float* weights, float* out, int64_t stride);
    // Transpose 16 rows of 32-bit words, row after row `stride` words apart, into [words][16].
    void (*transpose16)(const uint32_t* rows, int64_t stride, int64_t words, uint32_t* out);
    // Of values [n][16] the smallest and the largest number of each column, zero among them; whether
    // all are finite.
    bool (*range)(const float* values, int64_t n, float* low, float* high);
    // numbers = values * factor + zero, rounded and cut to [0, most]; factor and zero by column.
    void (*round_to)(const float* values, int64_t n, const float* factor, const float* zero, float most,
                     int32_t* numbers);
    // `scratch` holds attend_scratch(head_dim) bytes.
    void (*attend)(const Chunk& chunk, void* scratch, const Attended& out);
    // Merge a chunk's result into that of the chunks before it, for one vector.
    void (*merge)(float* largest, float* sum, float* values, float chunk_largest, float chunk_sum,
                  const float* chunk_values, int head_dim);
    // Register-only loops for benchmarks; return the floating-point operations done.
    double (*peak)(int64_t rounds, bool bf16_x, float* sink);
    float (*read_all)(const float* data, int64_t floats);
};

inline size_t attend_scratch(int head_dim) {
    const size_t wide = static_cast<size_t>(round_up(head_dim, kPanel));
    // A widened block, two panels of keys, scores, packed queries, padded sums, one tile's scores.
    return sizeof(float) * (kPanel * wide + 2 * kPanel * wide + kMaxVectors * kChunk +
                            kMaxVectors * (2 * wide + 2) + kMaxRows * 2 * kPanel);
}

// The variants; null where the compiler could not build one.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();

}  // namespace moebatch
