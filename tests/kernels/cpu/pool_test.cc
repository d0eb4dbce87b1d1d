#include "kernels/cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace sluice {
namespace {

struct CountUnits {
  std::atomic<int64_t>* run;
  int64_t units;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {units, 3}; }
  void Run(int, int64_t begin, int64_t end, WorkerScratch&) { run->fetch_add(end - begin); }
};

struct Mark {
  std::atomic<int>* runs;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1000, 7}; }
  void Run(int, int64_t begin, int64_t end, WorkerScratch&) {
    for (int64_t i = begin; i < end; ++i) runs[i].fetch_add(1);
  }
};

TEST(CpuPool, EveryUnitRunsOnce) {
  CpuPool pool(3);
  CpuStream stream(&pool, StreamPriority::kAttention);
  std::vector<std::atomic<int>> runs(1000);
  for (int i = 0; i < 20; ++i) stream.Submit(Mark{runs.data()});
  stream.Synchronize();
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 20);
}

struct Phased {
  std::atomic<int64_t>* done;  // units of all phases so far
  std::atomic<bool>* good;
  int64_t before;  // units of earlier operations
  static constexpr int kPhases = 4;
  static int64_t Units(int phase) {
    constexpr int64_t kUnits[] = {10, 0, 20, 5};
    return kUnits[phase];
  }
  PhaseSize Start(int phase, int) { return {Units(phase), 1}; }
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch&) {
    int64_t least = before;
    for (int i = 0; i < phase; ++i) least += Units(i);
    const int64_t seen = done->load();
    if (seen < least || seen >= least + Units(phase)) good->store(false);
    done->fetch_add(end - begin);
  }
};

TEST(CpuPool, PhasesAndOperationsDoNotOverlap) {
  CpuPool pool(4);
  CpuStream stream(&pool, StreamPriority::kAttention);
  std::atomic<int64_t> done{0};
  std::atomic<bool> good{true};
  int64_t each = 0;
  for (int phase = 0; phase < 4; ++phase) each += Phased::Units(phase);
  for (int i = 0; i < 50; ++i) stream.Submit(Phased{&done, &good, i * each});
  stream.Synchronize();
  EXPECT_TRUE(good);
  EXPECT_EQ(done, 50 * each);
}

// Each unit waits for the other: only two workers at once get through.
struct Meet {
  std::atomic<int>* here;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {2, 1}; }
  void Run(int, int64_t, int64_t, WorkerScratch&) {
    here->fetch_add(1);
    while (here->load() < 2) std::this_thread::yield();
  }
};

TEST(CpuPool, IdleWorkersJoinAnOperation) {
  CpuPool pool(2);
  CpuStream stream(&pool, StreamPriority::kAttention);
  std::atomic<int> here{0};
  stream.Submit(Meet{&here});
  stream.Synchronize();
  EXPECT_EQ(here, 2);
}

struct Shared {
  std::atomic<bool> in_piece_ten{false};
  std::atomic<bool> submitted{false};
  std::atomic<int64_t> pieces{0};
  std::atomic<int64_t> pieces_at_attention{-1};
};

struct Copy {
  Shared* shared;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1000, 1}; }
  void Run(int, int64_t begin, int64_t, WorkerScratch&) {
    if (begin == 10) {
      shared->in_piece_ten = true;
      while (!shared->submitted) std::this_thread::yield();
    }
    shared->pieces.fetch_add(1);
  }
};

struct Attention {
  Shared* shared;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1, 1}; }
  void Run(int, int64_t, int64_t, WorkerScratch&) {
    shared->pieces_at_attention = shared->pieces.load();
  }
};

TEST(CpuPool, AttentionGoesBeforeTheNextPieceOfACopy) {
  CpuPool pool(1);
  CpuStream copy(&pool, StreamPriority::kCopy);
  CpuStream attention(&pool, StreamPriority::kAttention);
  Shared shared;
  copy.Submit(Copy{&shared});
  while (!shared.in_piece_ten) std::this_thread::yield();
  attention.Submit(Attention{&shared});
  shared.submitted = true;
  attention.Synchronize();
  EXPECT_EQ(shared.pieces_at_attention, 11);
  copy.Synchronize();
  EXPECT_EQ(shared.pieces, 1000);
}

// A stream that always has more to do hands the worker on after each operation.
class Repeat : public HostTask {
 public:
  void Run() override {
    ++runs;
    if (!stop->load()) {
      stream->Enqueue(this);
    } else {
      running->fetch_sub(1);
    }
    if (total->fetch_add(1) + 1 == limit) stop->store(true);
  }
  CpuStream* stream = nullptr;
  std::atomic<bool>* stop = nullptr;
  std::atomic<int64_t>* total = nullptr;
  std::atomic<int>* running = nullptr;
  int64_t limit = 0;
  int64_t runs = 0;
};

TEST(CpuPool, StreamsOfOnePriorityGetEqualShares) {
  for (const int workers : {1, 2}) {
    CpuPool pool(workers);
    constexpr int kStreams = 64;
    std::vector<std::unique_ptr<CpuStream>> streams;
    std::vector<Repeat> tasks(kStreams);
    std::atomic<bool> stop{false};
    std::atomic<int64_t> total{0};
    std::atomic<int> running{kStreams};
    for (int i = 0; i < kStreams; ++i) {
      streams.push_back(std::make_unique<CpuStream>(&pool, StreamPriority::kAttention));
      tasks[i].stream = streams[i].get();
      tasks[i].stop = &stop;
      tasks[i].total = &total;
      tasks[i].running = &running;
      tasks[i].limit = 200 * kStreams;
    }
    // All start behind a gate, so that none has a head start.
    struct Hold : HostTask {
      void Run() override {
        while (!open) std::this_thread::yield();
      }
      std::atomic<bool> open{false};
    };
    std::vector<std::unique_ptr<CpuStream>> gates;
    std::vector<Hold> holds(workers);
    for (Hold& hold : holds) {
      gates.push_back(std::make_unique<CpuStream>(&pool, StreamPriority::kAttention));
      gates.back()->Enqueue(&hold);
    }
    for (int i = 0; i < kStreams; ++i) streams[i]->Enqueue(&tasks[i]);
    for (Hold& hold : holds) hold.open = true;
    while (running > 0) std::this_thread::yield();
    std::vector<int64_t> runs;
    for (const Repeat& task : tasks) runs.push_back(task.runs);
    std::sort(runs.begin(), runs.end());
    // One worker takes the streams strictly in turn. Of two, one may be kept from running by the
    // machine now and then, together with the stream that it holds just then.
    const int64_t least = runs[workers == 1 ? 0 : kStreams / 4];
    EXPECT_GE(least, workers == 1 ? runs.back() - 2 : runs.back() * 3 / 4)
        << workers << " workers: " << runs.front() << ", " << least << " to " << runs.back();
  }
}

struct Long {
  std::atomic<int64_t>* run;
  std::atomic<bool>* submitted;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1000, 1}; }
  void Run(int, int64_t begin, int64_t, WorkerScratch&) {
    run->store(begin + 1);
    while (begin == 5 && !submitted->load()) std::this_thread::yield();
  }
};

struct Short {
  std::atomic<int64_t>* run;
  std::atomic<int64_t>* seen;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1, 1}; }
  void Run(int, int64_t, int64_t, WorkerScratch&) { seen->store(run->load()); }
};

// A long operation does not keep a short one of another stream waiting for its end.
TEST(CpuPool, ALongOperationGivesWayBetweenClaims) {
  CpuPool pool(1);
  CpuStream long_stream(&pool, StreamPriority::kAttention);
  CpuStream short_stream(&pool, StreamPriority::kAttention);
  std::atomic<int64_t> run{0}, seen{0};
  std::atomic<bool> submitted{false};
  long_stream.Submit(Long{&run, &submitted});
  while (run < 6) std::this_thread::yield();
  short_stream.Submit(Short{&run, &seen});
  submitted = true;
  short_stream.Synchronize();
  EXPECT_EQ(seen, 6);
  long_stream.Synchronize();
}

// Two streams that need each other's worker, enqueued at once while a worker may just be on its way
// to sleep: neither may be left to wait for the other's end.
TEST(CpuPool, BothWorkersAreFoundWhateverTheyAreDoing) {
  CpuPool pool(2);
  CpuStream first(&pool, StreamPriority::kAttention);
  CpuStream second(&pool, StreamPriority::kAttention);
  for (int i = 0; i < 300; ++i) {
    std::atomic<int> here{0};
    struct MeetTask : HostTask {
      void Run() override {
        here->fetch_add(1);
        while (here->load() < 2) std::this_thread::yield();
      }
      std::atomic<int>* here = nullptr;
    };
    MeetTask a, b;
    a.here = b.here = &here;
    first.Enqueue(&a);
    second.Enqueue(&b);
    first.Synchronize();
    second.Synchronize();
    EXPECT_EQ(here, 2);
  }
}

TEST(CpuPool, EmptyOperationsComplete) {
  CpuPool pool(1);
  CpuStream stream(&pool, StreamPriority::kCopy);
  std::atomic<int64_t> run{0};
  for (int i = 0; i < 10; ++i) stream.Submit(CountUnits{&run, i % 2});
  stream.Synchronize();
  EXPECT_EQ(stream.completed(), 10u);
  EXPECT_EQ(run, 5);
}

TEST(CpuPool, ManyStreamsComeAndGo) {
  CpuPool pool(3);
  std::vector<std::thread> threads;
  std::atomic<int64_t> run{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        CpuStream stream(&pool, i % 2 == 0 ? StreamPriority::kAttention : StreamPriority::kCopy);
        for (int j = 0; j < 5; ++j) stream.Submit(CountUnits{&run, 50});
        if (i % 3 == 0) stream.Synchronize();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(run, 4 * 100 * 5 * 50);
}

}  // namespace
}  // namespace sluice
