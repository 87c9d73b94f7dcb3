// Enough of CUDA to run kernel bodies on the host, one block after another, for tests on machines without a GPU.
// Threads are fibers that change places only at a barrier, in an order that alternates, so that a missing barrier
// shows as a wrong value; a barrier that only some threads reach stops the program.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

namespace emulator {

struct Index {
  unsigned x = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool finished = false;
};

inline Index thread_index, block_index;
inline ucontext_t scheduler;
inline Fiber* running = nullptr;
inline std::function<void()> body;

inline void enter() {
  body();
  running->finished = true;
  swapcontext(&running->context, &scheduler);
}

inline void barrier() { swapcontext(&running->context, &scheduler); }

// Run `kernel` as `blocks` blocks of `threads` threads.
inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
  body = std::move(kernel);
  std::vector<Fiber> fibers(threads);
  for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
    for (Fiber& fiber : fibers) {
      fiber.finished = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    unsigned finished = 0;
    for (unsigned round = 0; finished == 0; ++round) {
      for (unsigned step = 0; step < threads; ++step) {
        thread_index.x = round % 2 == 0 ? step : threads - 1 - step;
        running = &fibers[thread_index.x];
        swapcontext(&scheduler, &running->context);
        finished += running->finished ? 1 : 0;
      }
    }
    if (finished != threads) {
      std::fprintf(stderr, "block %u: a barrier that only some threads reach\n", block_index.x);
      std::abort();
    }
  }
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads emulator::barrier
