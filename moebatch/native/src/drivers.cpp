#include "drivers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace moebatch {

namespace {

constexpr size_t kAlign = 64;
// Rows of x that are packed at once, and that one task carries: x then stays in the caches.
constexpr int64_t kMaxPackedRows = 1024;
constexpr int64_t kTaskRows = 256;
// Numbers of h that one group of experts holds at once.
constexpr int64_t kMaxInner = 1 << 22;
// A task should last some ten microseconds: far longer than taking it, far shorter than a call.
constexpr double kTaskFlops = 2e6;

struct Tile {
    int64_t first;  // row
    int rows;
    int64_t offset;  // rows of x packed before it
};

// Rows [first, last) in tiles of nearly equal height.
void add_tiles(std::vector<Tile>& tiles, int64_t first, int64_t last, int max_rows,
               int64_t offset) {
    const int64_t rows = last - first, count = (rows + max_rows - 1) / max_rows;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t a = rows * i / count, b = rows * (i + 1) / count;
        tiles.push_back({first + a, static_cast<int>(b - a), offset + a});
    }
}

int64_t x_row_bytes(const Gemm& gemm, const Inputs& inputs) {
    const int64_t item = gemm.x_kind == XKind::f32 ? 4 : gemm.x_kind == XKind::bf16 ? 2 : 1;
    const int64_t scales = gemm.x_kind == XKind::i8 ? inputs.groups() * 8 : 0;
    return round_up(inputs.count, gemm.k_step) * item + scales;
}

// Bytes of a panel that go with one fetch.
int64_t bytes_per_step(const Matrix& w, const Gemm& gemm) {
    return w.panel_bytes() / (round_up(w.inputs.count, gemm.k_step) / gemm.fetch) / 32 * 32;
}

// A range of panels: large ones first, small ones at the end, so that all workers end together.
template <class F>
void guided(int64_t panels, double flops_per_panel, int64_t step, int workers, const F& add) {
    const int64_t least =
        round_up(static_cast<int64_t>(kTaskFlops / std::max(flops_per_panel, 1.0)) + 1, step);
    for (int64_t first = 0; first < panels;) {
        const int64_t share = round_up((panels - first) / (2 * workers), step);
        const int64_t last = std::min(panels, first + std::max(least, share));
        add(first, last);
        first = last;
    }
}

constexpr int64_t kNear = 4096;         // bytes ahead in a stream that comes from main memory
constexpr int64_t kMaxAhead = 384 << 10;  // of the second-level cache

// Two panels that a run of tiles is multiplied with. The first tile reads them from main memory; so
// that memory is not idle during the others, all tiles share in fetching the panels that follow.
struct Panels {
    const uint8_t* at[2];
    int count;
    int64_t bytes;  // of one panel
    const uint8_t* next[2];
    bool fetched;  // by the tiles before

    Ahead ahead(int64_t tile, int64_t tiles, int64_t step_bytes) const {
        if (tiles == 1 || (tile == 0 && !fetched) || next[0] == nullptr || bytes * count > kMaxAhead)
            return {{at[0] + kNear, at[count - 1] + kNear}, step_bytes};
        const int64_t offset = bytes * tile / tiles;
        return {{next[0] + offset, next[1] + offset}, std::max<int64_t>(1, step_bytes / tiles)};
    }
};

// y [rows][panels * 16] -> out, without the padding.
void store_rows(const float* y, const Tile& tile, int panels, int64_t column, int64_t columns,
                const float* bias, const Output& out) {
    for (int m = 0; m < tile.rows; ++m) {
        float* to = out.data + (tile.first + m) * out.stride + column;
        const float* from = y + m * panels * kPanel;
        if (bias == nullptr) {
            std::memcpy(to, from, sizeof(float) * static_cast<size_t>(columns));
        } else {
            for (int64_t n = 0; n < columns; ++n) to[n] = from[n] + bias[column + n];
        }
    }
}

}  // namespace

Buffer::~Buffer() { std::free(data_); }

uint8_t* Buffer::get(size_t bytes) {
    if (bytes > bytes_) {
        std::free(data_);
        bytes_ = 0;
        data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
        if (data_ == nullptr) throw std::bad_alloc();
        bytes_ = bytes;
    }
    return data_;
}

void Runner::matmul(const Matrix& w, const XRows& x, int64_t rows, const float* bias, bool bf16_x,
                    const Output& out) {
    std::lock_guard<std::mutex> lock(calls_);
    const Gemm& gemm = *kernels_.gemm(w.type, bf16_x);
    const int64_t row_bytes = x_row_bytes(gemm, w.inputs), panels = w.panels();
    const int64_t step_bytes = bytes_per_step(w, gemm);
    std::vector<Tile> tiles;
    for (int64_t start = 0; start < rows; start += kMaxPackedRows) {
        const int64_t end = std::min(rows, start + kMaxPackedRows);
        uint8_t* packed = x_.get(static_cast<size_t>((end - start) * row_bytes));
        tiles.clear();
        add_tiles(tiles, start, end, gemm.max_rows, 0);
        const int64_t num_tiles = static_cast<int64_t>(tiles.size());
        pool_.run(num_tiles, [&](int64_t t, int) {
            const Tile& tile = tiles[static_cast<size_t>(t)];
            gemm.pack_x(x, tile.first, tile.rows, w.inputs, packed + tile.offset * row_bytes);
        });
        const int64_t blocks = (end - start + kTaskRows - 1) / kTaskRows;
        const double flops = 2.0 * kPanel * static_cast<double>(w.inputs.count * (end - start) / blocks);
        struct Task {
            int64_t block, first, last;
        };
        std::vector<Task> tasks;
        for (int64_t block = 0; block < blocks; ++block) {
            guided(panels, flops, 2, pool_.size(), [&](int64_t first, int64_t last) {
                tasks.push_back({block, first, last});
            });
        }
        pool_.run(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
            alignas(64) float y[kMaxRows * 2 * kPanel];
            const Task& task = tasks[static_cast<size_t>(i)];
            const int64_t from = num_tiles * task.block / blocks;
            const int64_t to = num_tiles * (task.block + 1) / blocks;
            for (int64_t p = task.first; p < task.last; p += 2) {
                const bool more = p + 2 < task.last;
                const Panels two = {{w.panel(p), w.panel(p + 1)}, p + 1 < panels ? 2 : 1,
                                    w.panel_bytes(), {more ? w.panel(p + 2) : nullptr, w.panel(p + 3)},
                                    p > task.first};
                const int64_t real = std::min<int64_t>(w.outputs - p * kPanel, two.count * kPanel);
                for (int64_t t = from; t < to; ++t) {
                    const Tile& tile = tiles[static_cast<size_t>(t)];
                    gemm.multiply(packed + tile.offset * row_bytes, tile.rows, two.at, two.count,
                                  w.inputs, two.ahead(t - from, to - from, step_bytes), y);
                    store_rows(y, tile, two.count, p * kPanel, real, bias, out);
                }
            }
        });
    }
}

// Rows [first, last) of one expert.
struct Runner::Part {
    size_t expert;
    int64_t first, last;
    size_t first_tile = 0, last_tile = 0;
};

void Runner::ffn(const std::vector<Expert>& experts, const Routed& routed, const XRows& x,
                 const Activation& activation, bool bf16_x, const Output& out) {
    std::lock_guard<std::mutex> lock(calls_);
    if (experts.empty()) return;
    const int64_t limit = std::max<int64_t>(64, kMaxInner / std::max<int64_t>(1, 2 * experts[0].gate.outputs));
    std::vector<Part> parts;
    int64_t held = 0;
    const auto flush = [&] {
        if (!parts.empty()) ffn_group(experts, parts, routed, x, activation, bf16_x, out);
        parts.clear();
        held = 0;
    };
    for (size_t e = 0; e < experts.size(); ++e) {
        for (int64_t first = routed.starts[e]; first < routed.starts[e + 1];) {
            const int64_t rest = routed.starts[e + 1] - first;
            // An expert is cut only where it alone is too large: its weights are read for each part.
            if (held > 0 && held + rest > limit) flush();
            const int64_t rows = std::min(rest, limit);
            parts.push_back({e, first, first + rows});
            held += rows;
            first += rows;
        }
    }
    flush();
}

void Runner::ffn_group(const std::vector<Expert>& experts, const std::vector<Part>& given,
                       const Routed& routed, const XRows& x, const Activation& activation,
                       bool bf16_x, const Output& out) {
    const Expert& any = experts[given[0].expert];
    const int64_t inner = any.gate.outputs, outer = any.down.outputs;
    const Gemm& up = *kernels_.gemm(any.gate.type, bf16_x);
    const Gemm& down = *kernels_.gemm(any.down.type, bf16_x);
    const int max_rows = std::min(up.max_rows, down.max_rows);
    const int64_t x_bytes = x_row_bytes(up, any.gate.inputs), h_bytes = x_row_bytes(down, any.down.inputs);
    const int64_t h_padded = round_up(inner, down.k_step);
    const int64_t up_step = bytes_per_step(any.gate, up), down_step = bytes_per_step(any.down, down);

    std::vector<Part> parts = given;
    std::vector<Tile> tiles;
    int64_t rows = 0;
    for (auto& part : parts) {
        part.first_tile = tiles.size();
        add_tiles(tiles, part.first, part.last, max_rows, rows);
        part.last_tile = tiles.size();
        rows += part.last - part.first;
    }
    uint8_t* xs = x_.get(static_cast<size_t>(rows * x_bytes));
    uint8_t* hs = h_.get(static_cast<size_t>(rows * h_bytes));
    // Rows of h that must be whole before they can be packed wait here as floats.
    float* whole = down.store_h != nullptr
        ? nullptr
        : reinterpret_cast<float*>(whole_.get(sizeof(float) * static_cast<size_t>(rows * inner)));

    XRows gathered = x;
    gathered.index = routed.tokens;
    pool_.run(static_cast<int64_t>(tiles.size()), [&](int64_t t, int) {
        const Tile& tile = tiles[static_cast<size_t>(t)];
        up.pack_x(gathered, tile.first, tile.rows, any.gate.inputs, xs + tile.offset * x_bytes);
    });

    struct Task {
        const Part* part;
        int64_t first, last;  // panels
    };
    std::vector<Task> tasks;
    const int64_t inner_panels = any.gate.panels();
    for (const auto& part : parts) {
        const double flops = 4.0 * kPanel * static_cast<double>(any.gate.inputs.count * (part.last - part.first));
        guided(inner_panels, flops, 1, pool_.size(), [&](int64_t first, int64_t last) {
            tasks.push_back({&part, first, last});
        });
    }
    pool_.run(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
        alignas(64) float y[kMaxRows * 2 * kPanel];
        alignas(64) float h[kMaxRows * kPanel];
        const Task& task = tasks[static_cast<size_t>(i)];
        const Expert& expert = experts[task.part->expert];
        for (int64_t p = task.first; p < task.last; ++p) {
            const int64_t feature = p * kPanel;
            const bool more = p + 1 < task.last;
            const Panels two = {{expert.gate.panel(p), expert.up.panel(p)}, 2, any.gate.panel_bytes(),
                                {more ? expert.gate.panel(p + 1) : nullptr, expert.up.panel(p + 1)},
                                p > task.first};
            const size_t first_tile = task.part->first_tile;
            const int64_t num_tiles = static_cast<int64_t>(task.part->last_tile - first_tile);
            const float* gate_bias = expert.gate_bias ? expert.gate_bias + feature : nullptr;
            const float* up_bias = expert.up_bias ? expert.up_bias + feature : nullptr;
            const int64_t end = whole != nullptr ? inner : h_padded;
            const int count = static_cast<int>(std::min<int64_t>(kPanel, end - feature));
            for (int64_t t = 0; t < num_tiles; ++t) {
                const Tile& tile = tiles[first_tile + static_cast<size_t>(t)];
                up.multiply(xs + tile.offset * x_bytes, tile.rows, two.at, 2, any.gate.inputs,
                            two.ahead(t, num_tiles, up_step), y);
                kernels_.activate(activation, y, tile.rows, gate_bias, up_bias, h);
                if (whole == nullptr) {
                    down.store_h(h, tile.rows, feature, count, hs + tile.offset * h_bytes);
                    continue;
                }
                for (int m = 0; m < tile.rows; ++m)
                    std::memcpy(whole + (tile.offset + m) * inner + feature, h + m * kPanel,
                                sizeof(float) * static_cast<size_t>(count));
            }
        }
    });
    if (whole != nullptr) {
        const XRows rows_of_h = {whole, DType::f32, inner, nullptr};
        pool_.run(static_cast<int64_t>(tiles.size()), [&](int64_t t, int) {
            const Tile& tile = tiles[static_cast<size_t>(t)];
            down.pack_x(rows_of_h, tile.offset, tile.rows, any.down.inputs, hs + tile.offset * h_bytes);
        });
    }

    // A task owns its columns of the output, so that experts are added in ascending order.
    const int64_t outer_panels = any.down.panels();
    const int64_t width = outer_panels >= 4 * pool_.size() ? 2 : 1;
    pool_.run((outer_panels + width - 1) / width, [&](int64_t i, int) {
        alignas(64) float y[kMaxRows * 2 * kPanel];
        const int64_t p = i * width, column = p * kPanel;
        const int count = static_cast<int>(std::min(width, outer_panels - p));
        const int columns = static_cast<int>(std::min<int64_t>(count * kPanel, outer - column));
        for (size_t k = 0; k < parts.size(); ++k) {
            const Part& part = parts[k];
            const Expert& expert = experts[part.expert];
            const Expert* next = k + 1 < parts.size() ? &experts[parts[k + 1].expert] : nullptr;
            const Panels two = {{expert.down.panel(p), expert.down.panel(p + count - 1)}, count,
                                any.down.panel_bytes(),
                                {next ? next->down.panel(p) : nullptr,
                                 next ? next->down.panel(p + count - 1) : nullptr},
                                k > 0};
            const float* bias = expert.down_bias ? expert.down_bias + column : nullptr;
            const int64_t num_tiles = static_cast<int64_t>(part.last_tile - part.first_tile);
            for (int64_t t = 0; t < num_tiles; ++t) {
                const Tile& tile = tiles[part.first_tile + static_cast<size_t>(t)];
                down.multiply(hs + tile.offset * h_bytes, tile.rows, two.at, count, any.down.inputs,
                              two.ahead(t, num_tiles, down_step), y);
                kernels_.scatter(y, tile.rows, count, columns, bias, routed.tokens + tile.first,
                                 routed.weights + tile.first, out.data + column, out.stride);
            }
        }
    });
}

}  // namespace moebatch
