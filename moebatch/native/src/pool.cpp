#include "pool.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moebatch {

namespace {

constexpr int kSpins = 2000;  // some tens of microseconds

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) : owner_(static_cast<int>(getpid())) {
    for (int worker = 1; worker < threads; ++worker) {
        helpers_.emplace_back([this, worker] { help(worker); });
    }
}

Pool::~Pool() {
    if (owner_ != static_cast<int>(getpid())) {
        for (auto& helper : helpers_) helper.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
        round_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void Pool::dispatch(int64_t tasks, Call call, const void* context) {
    if (tasks <= 0) return;
    if (tasks == 1 || helpers_.empty() || owner_ != static_cast<int>(getpid())) {
        for (int64_t task = 0; task < tasks; ++task) call(context, task, 0);
        return;
    }
    std::lock_guard<std::mutex> caller(callers_);
    bool asleep = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_ = tasks;
        call_ = call;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(helpers_.size()), std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_release);
        asleep = sleeping_ > 0;
    }
    if (asleep) wake_.notify_all();
    work(0);
    // Helpers end within one task of each other; a preempted one may take longer.
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < kSpins) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void Pool::work(int worker) {
    for (;;) {
        const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks_) return;
        call_(context_, task, worker);
    }
}

bool Pool::wait_for_round(uint64_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
        if (round_.load(std::memory_order_acquire) != seen) return !stop_.load();
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleeping_;
    wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
    --sleeping_;
    return !stop_.load();
}

void Pool::help(int worker) {
    uint64_t seen = 0;
    while (wait_for_round(seen)) {
        ++seen;
        work(worker);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace moebatch
