// Products over whole matrices: how work is cut into tasks for the pool. Pointers in, pointers out.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace moebatch {

// A packed weight matrix that someone else owns. Its outputs are padded to whole panels.
struct Matrix {
    const uint8_t* data = nullptr;
    DType type = DType::f32;
    int64_t outputs = 0;
    Inputs inputs;

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    int64_t panel_bytes() const;
    int64_t bytes() const { return panels() * panel_bytes(); }
    const uint8_t* panel(int64_t p) const { return data + p * panel_bytes(); }
};

struct Expert {
    Matrix gate, up, down;
    // Padded with zeros to whole panels; null where there are none.
    const float* gate_bias = nullptr;
    const float* up_bias = nullptr;
    const float* down_bias = nullptr;
};

// Rows of experts: those of experts[e] are [starts[e], starts[e + 1]) of tokens and weights.
struct Routed {
    std::vector<int64_t> starts;
    const int64_t* tokens = nullptr;
    const float* weights = nullptr;
};

struct Output {
    float* data = nullptr;
    int64_t stride = 0;
};

// Queries against a paged cache. A block holds 16 tokens of each key/value head: [groups][16][d].
struct Attention {
    DType type = DType::f32;  // of keys and values
    const uint8_t* keys = nullptr;
    const uint8_t* values = nullptr;
    const float* key_scales = nullptr;  // of each token and head, [groups][16] per block; for 8 bits
    const float* value_scales = nullptr;
    int64_t heads = 0, groups = 0, head_dim = 0;
    const float* q = nullptr;  // [rows][heads][head_dim], contiguous but for the row stride
    int64_t q_stride = 0;
    float* out = nullptr;  // the same shape
    int64_t out_stride = 0;
    int64_t rows = 0;
    const int64_t* sequences = nullptr;  // of each row: its line in `tables`
    const int64_t* lengths = nullptr;    // of each row: tokens it sees, itself the last
    const int32_t* tables = nullptr;     // block numbers
    int64_t table_stride = 0;
    int64_t window = 0;            // tokens that are seen at most; 0: all
    const float* sinks = nullptr;  // [heads] or null
    float scale = 1.0f;
    bool round_x = false;  // queries and softmax weights may be rounded to bf16
};

// Memory that grows and is kept.
class Buffer {
  public:
    ~Buffer();
    uint8_t* get(size_t bytes);

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Pack row-major weights [outputs][inputs], rows `stride` elements apart. `packed` may be the same
// memory where outputs fill whole panels, inputs fill whole steps and rows are dense.
void pack(const Kernels& kernels, const void* weights, DType type, int64_t outputs, int64_t inputs,
          int64_t stride, void* packed);

// Round row-major weights of f32, bf16 or f16 to the whole numbers that `to` describes: `to` without
// its data, which goes to `packed`. False where a weight is not finite or too large for an fp16 scale.
bool pack_rounded(const Kernels& kernels, const void* weights, DType type, int64_t stride, const Matrix& to,
                  void* packed);

// Runs kernels of one variant on a pool. One call at a time; further callers wait.
class Runner {
  public:
    Runner(const Kernels& kernels, int threads) : kernels_(kernels), pool_(threads) {}

    const Kernels& kernels() const { return kernels_; }
    Pool& pool() { return pool_; }

    // out [rows][outputs] = x w^T (+ bias, of `outputs` floats).
    void matmul(const Matrix& w, const XRows& x, int64_t rows, const float* bias, bool bf16_x,
                const Output& out);

    // out[token] += weight * expert(x[token]) for every routed row, experts in ascending order.
    // The inner type is that of `down`; all experts have one shape.
    void ffn(const std::vector<Expert>& experts, const Routed& routed, const XRows& x,
             const Activation& activation, bool bf16_x, const Output& out);

    // Softmax attention of every row; rows of one sequence with consecutive lengths share reads.
    void attend(const Attention& attention);

  private:
    struct Part;
    void ffn_group(const std::vector<Expert>& experts, const std::vector<Part>& parts,
                   const Routed& routed, const XRows& x, const Activation& activation,
                   bool bf16_x, const Output& out);

    const Kernels& kernels_;
    Pool pool_;
    std::mutex calls_;
    Buffer x_, h_, whole_;
};

// The best variant for this processor, or the one of that name; null where there is none.
const Kernels* choose_kernels(const char* name);
// Names of the variants that this processor can run, best first.
std::vector<const char*> variant_names();

}  // namespace moebatch
