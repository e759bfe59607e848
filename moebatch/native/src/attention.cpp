// Attention over the paged cache: which query vectors meet which chunk of context on which thread.
#include <algorithm>
#include <cmath>
#include <limits>

#include "drivers.h"

namespace moebatch {

namespace {

// Neighbouring queries of one sequence.
struct QueryTile {
    int64_t first;
    int rows;
    int64_t first_chunk, last_chunk;
    int64_t offset;  // chunks of the tiles before it
};

std::vector<QueryTile> query_tiles(const Attention& a) {
    const int64_t most = std::max<int64_t>(1, kMaxVectors / (a.heads / a.groups));
    std::vector<QueryTile> tiles;
    int64_t offset = 0;
    for (int64_t r = 0; r < a.rows;) {
        int64_t end = r + 1;
        while (end < a.rows && end - r < most && a.sequences[end] == a.sequences[r] &&
               a.lengths[end] == a.lengths[end - 1] + 1)
            ++end;
        const int64_t first = a.window > 0 ? std::max<int64_t>(0, a.lengths[r] - a.window) : 0;
        const QueryTile tile = {r, static_cast<int>(end - r), first / kChunk,
                                (a.lengths[end - 1] + kChunk - 1) / kChunk, offset};
        offset += tile.last_chunk - tile.first_chunk;
        tiles.push_back(tile);
        r = end;
    }
    return tiles;
}

// One tile's query vectors of one key/value head, scaled.
void gather_queries(const Attention& a, const QueryTile& tile, int64_t group, float* queries) {
    const int64_t share = a.heads / a.groups;
    for (int r = 0; r < tile.rows; ++r) {
        const float* from = a.q + (tile.first + r) * a.q_stride + group * share * a.head_dim;
        float* to = queries + r * share * a.head_dim;
        for (int64_t k = 0; k < share * a.head_dim; ++k) to[k] = from[k] * a.scale;
    }
}

int64_t item_bytes(DType type) { return type == DType::f32 ? 4 : type == DType::i8 ? 1 : 2; }

// Block numbers of a chunk of one tile's context.
int chunk_blocks(const Attention& a, const QueryTile& tile, int64_t index, const int32_t** numbers) {
    const int64_t start = index * kChunk, longest = a.lengths[tile.first + tile.rows - 1];
    *numbers = a.tables + a.sequences[tile.first] * a.table_stride + start / kPanel;
    return static_cast<int>((std::min<int64_t>(kChunk, longest - start) + kPanel - 1) / kPanel);
}

void fill_chunk(const Attention& a, const QueryTile& tile, int64_t group, int64_t index, Chunk& chunk) {
    const int share = static_cast<int>(a.heads / a.groups);
    const int64_t start = index * kChunk;
    chunk.type = a.type;
    chunk.head_dim = static_cast<int>(a.head_dim);
    chunk.vectors = tile.rows * share;
    const int32_t* numbers;
    chunk.blocks = chunk_blocks(a, tile, index, &numbers);
    const int64_t head_bytes = kPanel * a.head_dim * item_bytes(a.type);
    for (int b = 0; b < chunk.blocks; ++b) {
        const int64_t at = numbers[b] * a.groups + group;
        chunk.keys[b] = a.keys + at * head_bytes;
        chunk.values[b] = a.values + at * head_bytes;
        if (a.key_scales == nullptr) continue;
        chunk.key_scales[b] = a.key_scales + at * kPanel;
        chunk.value_scales[b] = a.value_scales + at * kPanel;
    }
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t length = a.lengths[tile.first + r];
        const int64_t from = a.window > 0 ? std::max<int64_t>(0, length - a.window) : 0;
        const int last = static_cast<int>(std::clamp<int64_t>(length - start, 0, kChunk));
        const int first = static_cast<int>(std::clamp<int64_t>(from - start, 0, last));
        for (int h = 0; h < share; ++h) {
            chunk.first[r * share + h] = first;
            chunk.last[r * share + h] = last;
        }
    }
}

}  // namespace

void Runner::attend(const Attention& a) {
    std::lock_guard<std::mutex> lock(calls_);
    const std::vector<QueryTile> tiles = query_tiles(a);
    if (tiles.empty()) return;
    const int64_t units = static_cast<int64_t>(tiles.size()) * a.groups, d = a.head_dim;
    const int64_t share = a.heads / a.groups;
    const int64_t chunks = tiles.back().offset + tiles.back().last_chunk - tiles.back().first_chunk;
    int64_t vectors = 0;  // of the largest tile
    for (const auto& tile : tiles) vectors = std::max<int64_t>(vectors, tile.rows * share);
    // With few units the chunks of one go to several threads; the arithmetic is the same.
    const bool split = pool_.size() > 1 && units < 4 * pool_.size() && chunks > static_cast<int64_t>(tiles.size());

    const int64_t part = vectors * (d + 2);  // floats of one chunk's result
    const size_t scratch = (attend_scratch(static_cast<int>(d)) + 63) / 64 * 64;
    const size_t own = (scratch + sizeof(float) * static_cast<size_t>(vectors * d + 2 * part) + 63) / 64 * 64;
    uint8_t* workers = x_.get(own * static_cast<size_t>(pool_.size()));
    float* parts = split ? reinterpret_cast<float*>(
        h_.get(sizeof(float) * static_cast<size_t>(chunks * a.groups * part))) : nullptr;

    // A chunk of one tile's and one key/value head's context.
    struct Place {
        const QueryTile* tile;
        int64_t group, index;
    };
    const auto compute = [&](const Place& at, const Place* next, uint8_t* memory, float* to) {
        Chunk chunk;
        fill_chunk(a, *at.tile, at.group, at.index, chunk);
        const int32_t* numbers = nullptr;
        chunk.next_blocks = next == nullptr ? 0 : chunk_blocks(a, *next->tile, next->index, &numbers);
        for (int b = 0; b < chunk.next_blocks; ++b)
            chunk.next_keys[b] = a.keys + (numbers[b] * a.groups + next->group) * kPanel * d * item_bytes(a.type);
        chunk.queries = reinterpret_cast<float*>(memory + scratch);
        kernels_.attend(chunk, memory, {to, to + vectors, to + 2 * vectors});
    };
    // A thread takes neighbours, so that it knows what comes next.
    const auto in_runs = [&](int64_t count, const auto& work) {
        const int64_t run = std::max<int64_t>(1, count / (8 * pool_.size()));
        pool_.run((count + run - 1) / run, [&](int64_t i, int worker) {
            work(i * run, std::min(count, (i + 1) * run), workers + own * static_cast<size_t>(worker));
        });
    };
    const auto merge_into = [&](const QueryTile& tile, const float* from, float* to) {
        for (int64_t m = 0; m < tile.rows * share; ++m)
            kernels_.merge(to + m, to + vectors + m, to + 2 * vectors + m * d, from[m],
                           from[vectors + m], from + 2 * vectors + m * d, static_cast<int>(d));
    };
    const auto clear = [&](float* all) {
        std::fill(all, all + vectors, -std::numeric_limits<float>::infinity());
        std::fill(all + vectors, all + part, 0.0f);
    };
    const auto finish = [&](const QueryTile& tile, int64_t group, const float* all) {
        for (int64_t m = 0; m < tile.rows * share; ++m) {
            const int64_t head = group * share + m % share;
            float factor = 1.0f, sum = all[vectors + m];
            if (a.sinks != nullptr) {  // a score of its own per head, with no value
                const float top = std::max(all[m], a.sinks[head]);
                factor = std::exp(all[m] - top);
                sum = sum * factor + std::exp(a.sinks[head] - top);
            }
            float* to = a.out + (tile.first + m / share) * a.out_stride + head * d;
            const float* from = all + 2 * vectors + m * d;
            for (int64_t k = 0; k < d; ++k) to[k] = from[k] * factor / sum;
        }
    };

    if (!split) {
        in_runs(units, [&](int64_t first, int64_t last, uint8_t* memory) {
            float* all = reinterpret_cast<float*>(memory + scratch) + vectors * d;
            for (int64_t unit = first; unit < last; ++unit) {
                const QueryTile& tile = tiles[static_cast<size_t>(unit / a.groups)];
                const QueryTile& after = tiles[static_cast<size_t>(std::min(unit + 1, units - 1) / a.groups)];
                const int64_t group = unit % a.groups;
                const Place other = {&after, (unit + 1) % a.groups, after.first_chunk};
                gather_queries(a, tile, group, reinterpret_cast<float*>(memory + scratch));
                clear(all);
                for (int64_t index = tile.first_chunk; index < tile.last_chunk; ++index) {
                    const Place same = {&tile, group, index + 1};
                    compute({&tile, group, index},
                            index + 1 < tile.last_chunk ? &same : unit + 1 < last ? &other : nullptr, memory,
                            all + part);
                    merge_into(tile, all + part, all);
                }
                finish(tile, group, all);
            }
        });
        return;
    }
    std::vector<Place> places;
    for (const auto& tile : tiles)
        for (int64_t index = tile.first_chunk; index < tile.last_chunk; ++index)
            for (int64_t group = 0; group < a.groups; ++group) places.push_back({&tile, group, index});
    in_runs(static_cast<int64_t>(places.size()), [&](int64_t first, int64_t last, uint8_t* memory) {
        for (int64_t task = first; task < last; ++task) {
            const Place& at = places[static_cast<size_t>(task)];
            gather_queries(a, *at.tile, at.group, reinterpret_cast<float*>(memory + scratch));
            compute(at, task + 1 < last ? &at + 1 : nullptr, memory, parts + task * part);
        }
    });
    pool_.run(units, [&](int64_t unit, int worker) {
        const QueryTile& tile = tiles[static_cast<size_t>(unit / a.groups)];
        const int64_t group = unit % a.groups;
        float* all = reinterpret_cast<float*>(workers + own * static_cast<size_t>(worker) + scratch) + vectors * d;
        clear(all);
        for (int64_t i = 0; i < tile.last_chunk - tile.first_chunk; ++i)
            merge_into(tile, parts + ((tile.offset + i) * a.groups + group) * part, all);
        finish(tile, group, all);
    });
}

}  // namespace moebatch
