// What a SIMD variant offers to the drivers, as a table of plain functions.
//
// Shapes: M rows of x (tokens), K inputs, N outputs. A panel holds 16 outputs of a weight matrix;
// a tile is up to `max_rows` rows of x times one or two panels.
//
// Packed weights, panel after panel, K padded to `k_step` with zeros:
//   bf16        [K/2][16][2]  two inputs of an output side by side, as dot-product instructions want
//   fp16, fp32  [K][16]
//   int8        16 scales, 16 sums of the whole numbers, then [K/4][16][4]
// Packed x, one tile of m rows after another: [K/k_step][m][k_step]; in 8 bits after m scales.
//
// A result is one chain of additions in the order of the inputs, whatever M, tile or thread: it is
// bit for bit the same in any batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moebatch {

constexpr int kPanel = 16;
constexpr int kMaxRows = 16;

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

constexpr int64_t kI8Header = 2 * 4 * kPanel;  // bytes before an int8 panel's numbers

// How x enters the products. f32: as it is, widened weights. bf16: rounded first. i8: each row is
// rounded to 8 bits on a scale of its own.
enum class XKind : int { f32 = 0, bf16 = 1, i8 = 2 };

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

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

// What a tile fetches into the caches while it computes: `step` bytes of each panel per k_step.
struct Ahead {
    const uint8_t* at[2];
    int64_t step;
};

struct Gemm {
    XKind x_kind;
    int k_step;    // inputs that stand side by side in x and w
    int max_rows;  // of a tile
    // Pack rows [first, first + rows) of x into one tile.
    void (*pack_x)(const XRows& x, int64_t first, int rows, int64_t inputs, void* tile);
    // out [rows][panels * 16] = tile of x times one or two panels of weights.
    void (*multiply)(const void* x, int rows, const uint8_t* const* panels, int num_panels,
                     int64_t inputs, const Ahead& ahead, float* out);
    // Null where a row must be whole before it can be packed (8 bits: its scale).
    // Store features [first, first + count) of h [rows][16] into a packed tile of `rows` rows.
    void (*store_h)(const float* h, int rows, int64_t first, int count, void* tile);
};

constexpr int kChunk = 256;  // tokens of context that one softmax covers before results are merged
constexpr int kChunkBlocks = kChunk / kPanel;
constexpr int kMaxVectors = 64;  // query vectors that share a chunk

// Some query vectors of one key/value head against one chunk of context, in blocks of 16 tokens.
struct Chunk {
    DType type;
    int head_dim;
    int blocks;
    const void* keys[kChunkBlocks];  // [16][head_dim] each
    const void* values[kChunkBlocks];
    int vectors;
    const float* queries;  // [vectors][head_dim], scaled
    int first[kMaxVectors], last[kMaxVectors];  // tokens of the chunk that a vector sees
};

// Softmax-weighted values of a chunk: largest score, sum of weights, weighted sum [vectors][head_dim].
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
    // Panels of keys, widened values, scores, packed queries and one tile's scores.
    return sizeof(float) * (2 * kChunk * wide + kMaxVectors * kChunk + kMaxVectors * (wide + 2) +
                            kMaxRows * 2 * kPanel);
}

// The variants; null where the compiler could not build one.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();

}  // namespace moebatch
