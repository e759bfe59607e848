// A pool of threads that sleeps when it has nothing to do.
//
// The caller takes part as worker 0. Tasks are taken one by one from a counter, so that uneven tasks
// keep all workers busy. A worker that finds no work spins for some tens of microseconds (the next
// kernel usually comes sooner) and then sleeps until it is called. The caller never waits for a
// worker that has not woken up in time: it does the work itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moebatch {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(helpers_.size()) + 1; }

    // Calls f(task, worker) for every task in [0, tasks); returns when all have ended.
    template <class F>
    void run(int64_t tasks, const F& f) {
        dispatch(tasks, [](const void* context, int64_t task, int worker) {
            (*static_cast<const F*>(context))(task, worker);
        }, &f);
    }

  private:
    using Call = void (*)(const void* context, int64_t task, int worker);

    void dispatch(int64_t tasks, Call call, const void* context);
    void help(int worker);
    void work(int worker);
    uint64_t wait_for_round(uint64_t seen);
    bool waits(uint64_t seen) const;

    std::vector<std::thread> helpers_;
    std::mutex callers_;  // one run at a time
    std::mutex mutex_;
    std::condition_variable wake_;
    int owner_;           // process id: after a fork there are no helpers
    int sleeping_ = 0;    // guarded by mutex_
    // The round's number, whether it takes helpers, and how many it has.
    std::atomic<uint64_t> state_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int64_t> next_{0};
    int64_t tasks_ = 0;
    Call call_ = nullptr;
    const void* context_ = nullptr;
};

}  // namespace moebatch
