// The emulator's scheduler: one fiber a CUDA thread. It is compiled without sanitizers, so that its own work is no
// event to them; for the same reason it shares no template instance with instrumented files. What it tells them:
//
// address  where each fiber's stack lies.
// thread   each fiber is a thread of its own that no switch orders. A barrier releases on arrival and acquires on
//          leaving, on tags that alternate: with one tag, a thread that ran ahead to the next barrier would seem
//          ordered before one still leaving this one, and a missing second barrier would go unseen. Blocks are not
//          ordered among each other, as on a GPU, but for every fourth or second, which share their fibers since those
//          cost much to make; tags and shared memory stay allocated until the launch, or many blocks, have ended.
#include "host_cuda.h"

#undef __forceinline__
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

attngeo::emulator::Index threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
#define ATTNGEO_WEAK __attribute__((weak))
ATTNGEO_WEAK void* __tsan_get_current_fiber();
ATTNGEO_WEAK void* __tsan_create_fiber(unsigned flags);
ATTNGEO_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
ATTNGEO_WEAK void __tsan_acquire(void* tag);
ATTNGEO_WEAK void __tsan_release(void* tag);
ATTNGEO_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
ATTNGEO_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
}

namespace attngeo::emulator {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kLanes = 32;
constexpr size_t kStack = 256 * 1024;
constexpr size_t kGuardPage = 4096;
constexpr size_t kGuard = 256;       // bytes on each side of a block's shared memory
constexpr int kSets = 4;             // of fibers that blocks take in turn; a fiber is a megabyte to the sanitizer
constexpr int kSetsOfLarge = 2;      // blocks with more than
constexpr int kLarge = 256;          // so many threads
constexpr int kMostBlocks = 256;     // that are kept
constexpr int kMostMasks = 8;        // different masks that one warp may use
constexpr unsigned kNoSync = 1;      // flag: this switch orders nothing

enum State { kReady, kAtBarrier, kInWarp, kFinished };

struct Fiber {
  ucontext_t context;
  char* stack;
  void* tsan;
  void* fake_stack;
  State state;
  Site site;
  unsigned mask;
  bool predicate;
  int source;
  uint64_t value;
};

// Lanes of one warp that meet under one mask. Some lanes may meet under a smaller mask while others wait for them.
struct Meeting {
  unsigned mask, arrived;
  Site site;
  unsigned turn;
  char tags[2];
};

struct Warp {
  Meeting meetings[kMostMasks];
  int masks;
};

// What belongs to one block; kept until the blocks that it could race with have ended.
struct Block {
  Block* before;
  char* shared_raw;
  Warp warps[kMostThreads / kLanes];
  char start_tag;
  char barrier_tags[2];
};

struct Runtime {
  uint64_t seed = 0, random = 0;
  int64_t limit = 227 * 1024;
  int64_t last_blocks = 0;

  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
  int64_t block_number = 0;
  int64_t shared_bytes = 0;
  int threads = 0, ready = 0, waiting = 0, finished = 0;
  unsigned turn = 0;
  Site barrier_site{};
  int predicates[2] = {0, 0};
  int blocks_kept = 0;
  char end_tag = 0;

  ucontext_t context;
  void* tsan = nullptr;
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;

  Block* block = nullptr;
  Fiber* running = nullptr;
  Fiber fibers[kMostThreads];
  int queue[kMostThreads];
  unsigned priority[kMostThreads];
  char* stacks[kSets][kMostThreads];
  void* tsan_fibers[kSets][kMostThreads];
};

Runtime state;

int thread_of(const Fiber& fiber) { return int(&fiber - state.fibers); }

[[noreturn]] __attribute__((format(printf, 2, 3))) void fault(const Fiber* fiber, const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "emulator: block %lld", static_cast<long long>(state.block_number));
  if (fiber != nullptr) {
    std::fprintf(stderr, " thread %d", thread_of(*fiber));
    if (fiber->site.what != nullptr) {
      std::fprintf(stderr, " at %s (%s:%d)", fiber->site.what, fiber->site.file, fiber->site.line);
    }
  }
  std::fputs(": ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

void acquire(char& tag) {
  if (__tsan_acquire != nullptr) __tsan_acquire(&tag);
}

void release(char& tag) {
  if (__tsan_release != nullptr) __tsan_release(&tag);
}

bool same(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.what, b.what) == 0 && std::strcmp(a.file, b.file) == 0;
}

unsigned draw(unsigned below) {
  state.random = state.random * 6364136223846793005u + 1442695040888963407u;
  return unsigned((state.random >> 33) % below);
}

void draw_priorities() {
  for (int i = 0; i < state.threads; ++i) {
    state.priority[i] = state.seed == 0 ? unsigned(i) : state.seed == 1 ? unsigned(state.threads - i) : draw(1u << 30);
  }
}

void make_ready(Fiber& fiber) {
  fiber.state = kReady;
  state.queue[state.ready++] = thread_of(fiber);
}

Fiber& next() {
  int chosen = 0;
  if (state.seed > 1 && state.seed % 2 == 0) {
    chosen = int(draw(unsigned(state.ready)));
  } else {
    for (int i = 1; i < state.ready; ++i) {
      if (state.priority[state.queue[i]] < state.priority[state.queue[chosen]]) chosen = i;
    }
  }
  Fiber& fiber = state.fibers[state.queue[chosen]];
  state.queue[chosen] = state.queue[--state.ready];
  return fiber;
}

void to_scheduler() {
  Fiber& me = *state.running;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(me.state == kFinished ? nullptr : &me.fake_stack, state.bottom, state.size);
  }
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(state.tsan, kNoSync);
  swapcontext(&me.context, &state.context);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(me.fake_stack, &state.bottom, &state.size);
  }
}

void resume(Fiber& fiber) {
  state.running = &fiber;
  threadIdx.x = unsigned(thread_of(fiber));
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&state.fake_stack, fiber.stack, kStack);
  }
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(fiber.tsan, kNoSync);
  swapcontext(&state.context, &fiber.context);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(state.fake_stack, nullptr, nullptr);
  }
}

void finish(Fiber& me) {
  me.state = kFinished;
  me.site = Site{};
  ++state.finished;
  if (state.waiting != 0) {
    fault(&me, "returned while others wait at %s:%d", state.barrier_site.file, state.barrier_site.line);
  }
  const Warp& warp = state.block->warps[thread_of(me) / kLanes];
  for (int i = 0; i < warp.masks; ++i) {
    const Meeting& meeting = warp.meetings[i];
    if (meeting.arrived != 0 && (meeting.mask >> (thread_of(me) % kLanes) & 1u) != 0) {
      fault(&me, "returned while its warp waits for it at %s (%s:%d)", meeting.site.what, meeting.site.file,
            meeting.site.line);
    }
  }
}

void enter() {
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &state.bottom, &state.size);
  }
  acquire(state.block->start_tag);
  state.body(state.argument);
  release(state.end_tag);
  finish(*state.running);
  to_scheduler();
}

char* new_stack() {
  void* memory = mmap(nullptr, kStack + kGuardPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardPage, PROT_NONE) != 0) fault(nullptr, "no memory for a stack");
  return static_cast<char*>(memory) + kGuardPage;
}

void prepare_fiber(Fiber& fiber, int set) {
  const int thread = thread_of(fiber);
  if (state.stacks[set][thread] == nullptr) {
    state.stacks[set][thread] = new_stack();
    if (__tsan_create_fiber != nullptr) state.tsan_fibers[set][thread] = __tsan_create_fiber(0);
  }
  fiber.stack = state.stacks[set][thread];
  fiber.tsan = state.tsan_fibers[set][thread];
  fiber.fake_stack = nullptr;
  fiber.site = Site{};
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
  make_ready(fiber);
}

void forget_blocks() {
  acquire(state.end_tag);
  state.blocks_kept = 0;
  while (state.block != nullptr) {
    Block* const block = state.block;
    state.block = block->before;
    std::free(block->shared_raw);
    std::free(block);
  }
}

// The address sanitizer guards exactly what malloc gives, so that there the block gets no guard of ours.
bool own_guards() { return __sanitizer_start_switch_fiber == nullptr || __tsan_create_fiber != nullptr; }

size_t guard() { return own_guards() ? kGuard : 0; }

void new_block() {
  // malloc and free, not a static object: the thread sanitizer forgets a tag when its memory is freed.
  Block* const block = static_cast<Block*>(std::calloc(1, sizeof(Block)));
  const size_t bytes = size_t(state.shared_bytes) + 2 * guard();
  block->shared_raw = static_cast<char*>(std::malloc(bytes));
  std::memset(block->shared_raw, 0xff, bytes);
  block->before = state.block;
  state.block = block;
}

void check_shared_guards() {
  const char* const raw = state.block->shared_raw;
  const size_t end = guard() + size_t(state.shared_bytes);
  for (size_t i = 0; i < guard(); ++i) {
    if (raw[i] != char(0xff)) fault(nullptr, "wrote at byte -%zu of its shared memory", guard() - i);
    if (raw[end + i] != char(0xff)) {
      fault(nullptr, "wrote at byte %zu of its shared memory, which has %zu", end - guard() + i, end - guard());
    }
  }
}

[[noreturn]] void deadlock() {
  for (int i = 0; i < state.threads; ++i) {
    const Fiber& fiber = state.fibers[i];
    if (fiber.state == kInWarp) fault(&fiber, "waits for ever: not every lane of mask %#x comes", fiber.mask);
  }
  for (int i = 0; i < state.threads; ++i) {
    if (state.fibers[i].state == kAtBarrier) fault(&state.fibers[i], "a barrier that only some threads reach");
  }
  std::abort();
}

// Blocks in the order of the seed, as the threads: nothing may depend on it.
unsigned* order_of_blocks(unsigned first, unsigned count) {
  unsigned* const order = static_cast<unsigned*>(std::malloc(count * sizeof(unsigned)));
  for (unsigned i = 0; i < count; ++i) order[i] = state.seed == 1 ? first + count - 1 - i : first + i;
  if (state.seed > 1) {
    state.random = state.seed * 0x9e3779b97f4a7c15u + 1;
    for (unsigned i = count - 1; i > 0; --i) {
      const unsigned other = draw(i + 1), kept = order[i];
      order[i] = order[other];
      order[other] = kept;
    }
  }
  return order;
}

void run_block(int set) {
  new_block();
  state.ready = state.waiting = state.finished = 0;
  state.turn = 0;
  state.predicates[0] = state.predicates[1] = 0;
  state.random = (state.seed + 1) * 0x9e3779b97f4a7c15u + uint64_t(state.block_number);
  draw_priorities();
  release(state.block->start_tag);
  for (int i = 0; i < state.threads; ++i) prepare_fiber(state.fibers[i], __tsan_create_fiber == nullptr ? 0 : set);
  while (state.ready != 0) resume(next());
  if (state.finished != state.threads) deadlock();
  check_shared_guards();
}

// Lanes of the running thread's warp meet; the last to come sets every lane's value.
void meet(unsigned mask, Site site, bool orders_memory, void (*exchange)(Fiber* lanes, unsigned mask)) {
  Fiber& me = *state.running;
  me.site = site;
  me.mask = mask;
  const int first = thread_of(me) / kLanes * kLanes, own = thread_of(me) - first;
  if ((mask >> own & 1u) == 0) fault(&me, "its lane %d is not in its mask %#x", own, mask);
  Warp& warp = state.block->warps[first / kLanes];
  Meeting* meeting = nullptr;
  for (int i = 0; i < warp.masks; ++i) {
    if (warp.meetings[i].mask == mask) meeting = &warp.meetings[i];
  }
  if (meeting == nullptr) {
    if (warp.masks == kMostMasks) fault(&me, "more different masks in a warp than the emulator keeps");
    meeting = &warp.meetings[warp.masks++];
    meeting->mask = mask;
  }
  if (meeting->arrived == 0) {
    meeting->site = site;
    for (int i = 0; i < kLanes; ++i) {
      if ((mask >> i & 1u) != 0 && (first + i >= state.threads || state.fibers[first + i].state == kFinished)) {
        fault(&me, "mask %#x names lane %d, which is not running", mask, i);
      }
    }
  } else if (!same(meeting->site, site)) {
    fault(&me, "others of its mask wait at %s (%s:%d)", meeting->site.what, meeting->site.file, meeting->site.line);
  }
  meeting->arrived |= 1u << own;
  char& tag = meeting->tags[meeting->turn & 1u];
  if (orders_memory) release(tag);
  me.state = kInWarp;
  if (meeting->arrived == mask) {
    if (exchange != nullptr) exchange(state.fibers + first, mask);
    meeting->arrived = 0;
    ++meeting->turn;
    for (int i = 0; i < kLanes; ++i) {
      if ((mask >> i & 1u) != 0) make_ready(state.fibers[first + i]);
    }
  }
  to_scheduler();
  if (orders_memory) acquire(tag);
}

// All threads of the block meet; returns how many brought a predicate.
int meet_block(bool predicate, Site site) {
  Fiber& me = *state.running;
  me.site = site;
  if (state.finished != 0) fault(&me, "a barrier after other threads have returned");
  if (state.waiting == 0) {
    state.barrier_site = site;
  } else if (!same(state.barrier_site, site)) {
    fault(&me, "others wait at another barrier, %s:%d", state.barrier_site.file, state.barrier_site.line);
  }
  const unsigned parity = state.turn & 1u;
  if (state.waiting == 0) state.predicates[parity] = 0;
  state.predicates[parity] += predicate ? 1 : 0;
  release(state.block->barrier_tags[parity]);
  me.state = kAtBarrier;
  if (++state.waiting == state.threads) {
    state.waiting = 0;
    ++state.turn;
    draw_priorities();
    for (int i = 0; i < state.threads; ++i) make_ready(state.fibers[i]);
  }
  to_scheduler();
  acquire(state.block->barrier_tags[parity]);
  return state.predicates[parity];
}

void exchange_values(Fiber* lanes, unsigned mask) {
  uint64_t values[kLanes] = {};
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    const int source = lanes[i].source < 0 ? i : lanes[i].source;
    if ((mask >> source & 1u) == 0) fault(&lanes[i], "reads lane %d, which is not in mask %#x", source, mask);
    values[i] = lanes[source].value;
  }
  for (int i = 0; i < kLanes; ++i) lanes[i].value = (mask >> i & 1u) != 0 ? values[i] : lanes[i].value;
}

void exchange_ballots(Fiber* lanes, unsigned mask) {
  uint64_t votes = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1u) != 0 && lanes[i].predicate) votes |= uint64_t(1) << i;
  }
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1u) != 0) lanes[i].value = votes;
  }
}

}  // namespace

void set_order(uint64_t seed) { state.seed = seed; }

void set_shared_memory_limit(int64_t bytes) { state.limit = bytes; }

int64_t shared_memory_limit() { return state.limit; }

void run_last_blocks_only(int64_t count) { state.last_blocks = count; }

const char* run(void (*body)(const void*), const void* context, int64_t blocks, int threads, int64_t shared_bytes) {
  if (blocks == 0) return nullptr;
  if (blocks < 0 || blocks > 2147483647) return "too many blocks for one launch: split the batch";
  if (threads < 1 || threads > kMostThreads) return "invalid number of threads";
  if (shared_bytes < 0 || shared_bytes > state.limit) return "more shared memory than the device has";
  state.body = body;
  state.argument = context;
  state.threads = threads;
  state.shared_bytes = shared_bytes;
  if (__tsan_get_current_fiber != nullptr) state.tsan = __tsan_get_current_fiber();
  blockDim.x = unsigned(threads);
  gridDim.x = unsigned(blocks);
  const int64_t count = state.last_blocks != 0 && state.last_blocks < blocks ? state.last_blocks : blocks;
  unsigned* const order = order_of_blocks(unsigned(blocks - count), unsigned(count));
  for (int64_t i = 0; i < count; ++i) {
    blockIdx.x = order[i];
    state.block_number = order[i];
    if (__tsan_create_fiber == nullptr || state.blocks_kept++ == kMostBlocks) forget_blocks();
    run_block(int(i % (threads > kLarge ? kSetsOfLarge : kSets)));
  }
  std::free(order);
  forget_blocks();
  return nullptr;
}

void* shared_memory() { return state.block->shared_raw + guard(); }

unsigned lane() { return threadIdx.x % kLanes; }

void barrier(Site site) { meet_block(false, site); }

int barrier_count(bool predicate, Site site) { return meet_block(predicate, site); }

void warp_barrier(unsigned mask, Site site) { meet(mask, site, true, nullptr); }

uint64_t shuffle(unsigned mask, uint64_t value, int source, Site site) {
  Fiber& me = *state.running;
  me.value = value;
  me.source = source;
  meet(mask, site, false, exchange_values);
  return me.value;
}

unsigned ballot(unsigned mask, bool predicate, Site site) {
  Fiber& me = *state.running;
  me.predicate = predicate;
  meet(mask, site, false, exchange_ballots);
  return unsigned(me.value);
}

}  // namespace attngeo::emulator
