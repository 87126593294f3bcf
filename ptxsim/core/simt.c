// The SIMT core: runs one warp through the warp-local part of a decoded PTX program until it needs the machine (a "system"
// instruction: barriers, copies, tensor cores …), ends, faults or has used its budget.
//
// Registers are uint64_t [register][32 lanes]; register 0 is never named, so that an unused operand field reads nothing.
// A warp whose lanes are at one instruction has one program counter (`at`). After a divergent branch each lane has its
// own, and the group of lanes with the least one goes first; lanes at an instruction that needs the whole warp are parked
// there until no other lane can run.
#include "numerics.h"

typedef struct {
  uint16_t op;
  uint8_t is_negated, count;  // of the guard; elements of a vector operand
  int32_t guard, d, a, b, c;  // registers; guard −1: none
  int64_t immediate;
  int32_t vector[8];
  int32_t target;  // of a branch
  uint8_t space, element_bytes, is_signed, needs_warp;
  uint8_t is_selection;  // selp: only the chosen source has to be written
  uint8_t is_move;
  uint16_t reads, writes;  // bit sets of operand slots: d, a, b, c, vector[0] … vector[7]
} Instruction;

typedef struct {
  uint32_t pc[32];
  uint32_t live, blocked, parked, active, executing;  // lane sets
  uint32_t at, is_diverged, may_pass;
  uint64_t executed;  // instructions
  uint32_t fault, touched;
  uint64_t fault_address;
  uint32_t num_pending;  // tcgen05.ld that have not ended
  uint8_t* pending;  // the number of such a load for each register that it fills, or that holds a copy; else 0
  uint32_t* written;  // lanes that have written each register; NULL: not checked
  uint8_t* reserved;  // registers that a wgmma under way uses: 1 its result, 2 its operand; NULL: none
  uint8_t* local;  // local memory: [32 lanes][local_size]
  uint64_t local_size;
  uint32_t* trace;  // program counters executed, bit 31: by at least one lane; NULL: not kept
  uint64_t trace_count, trace_capacity;
} Warp;

typedef struct {
  uint32_t instruction, address, bytes, lane;  // bytes: bit 31 is set for a store
} Access;

typedef struct {
  uint8_t* shared[16];  // one window for each CTA of the cluster
  uint64_t shared_size;
  Access* log;  // of accesses to shared memory; NULL: none
  uint64_t log_count, log_capacity;
  uint64_t num_ranges;
  uint64_t* ranges;  // first, end of the global memory that may be touched, sorted; none: anything
} Context;

enum { OUT_OF_BUDGET, SYSTEM, EXITED, BLOCKED, FAULT, TOUCHED, RESERVED };
enum { GENERIC, SHARED, LOCAL, GLOBAL };
enum { NO_FAULT, OUTSIDE_SHARED, NULL_ADDRESS, OUTSIDE_GLOBAL, UNWRITTEN_REGISTER, MISALIGNED, BAD_OPCODE, OUTSIDE_LOCAL };
enum {
  OP_SYSTEM, OP_BRANCH, OP_RETURN, OP_LOAD, OP_STORE, OP_PACK, OP_UNPACK, OP_SHUFFLE, OP_BALLOT, OP_ALL, OP_ANY,
  OP_ELECT, OP_REDUX, OP_MOVE128, OP_MATCH_ANY, OP_NOTHING, OP_LOP3, OP_FUNNEL, OP_ACTIVE_MASK, OP_ARITHMETIC = 32
};
#define RANK_SHIFT 24
#define SLOTS 12
#define SHARED_LIMIT (1u << 28)  // local memory begins here, in its own and in the generic space
#define LOCAL_WINDOW (1u << 18)
#define WINDOW_MASK 0xfc0000u  // offsets in a window are less than 256 KiB
#define ALL_LANES 0xffffffffu
#define HAS_ARRIVED 128  // in `pending`: the values are there, but nothing has waited for them

#define FOR_LANES(...)                                        \
  if (ex == ALL_LANES) {                                      \
    _Pragma("GCC ivdep") for (int l = 0; l < 32; l++) {       \
      __VA_ARGS__                                             \
    }                                                         \
  } else {                                                    \
    for (int l = 0; l < 32; l++)                              \
      if ((ex >> l) & 1) {                                    \
        __VA_ARGS__                                           \
      }                                                       \
  }
#define REGISTER(index) (registers + ((int64_t)(index) << 5))

static int fail(Warp* w, uint32_t fault, uint64_t address) {
  w->fault = fault;
  w->fault_address = address;
  return FAULT;
}

// ---- lanes

static void take_lowest(Warp* w, uint32_t candidates) {
  uint32_t lowest = ~0u, group = 0;
  for (int l = 0; l < 32; l++)
    if ((candidates >> l) & 1 && w->pc[l] < lowest) lowest = w->pc[l];
  for (int l = 0; l < 32; l++) group |= (uint32_t)((candidates >> l) & 1 && w->pc[l] == lowest) << l;
  w->active = group;
  w->at = lowest;
  if (group == w->live) w->is_diverged = 0;
}

// Chooses the lanes that run next; none when all wait for the machine. When only parked lanes are left the lowest group
// of them may pass; a lane that waits for the machine keeps the others parked.
static void select_group(Warp* w) {
  uint32_t ready = w->live & ~w->blocked;
  if (!w->is_diverged) {
    w->active = ready;
    return;
  }
  w->parked &= w->live;
  if (ready & ~w->parked) {
    take_lowest(w, ready & ~w->parked);
  } else if ((w->blocked & w->live) || !w->parked) {
    w->active = 0;
  } else {
    w->parked = 0;
    take_lowest(w, w->live);
    w->may_pass = 1;
  }
}

void warp_advance(Warp* w) {
  if (!w->is_diverged) {
    w->at++;
    return;
  }
  for (int l = 0; l < 32; l++)
    if ((w->active >> l) & 1) w->pc[l] = w->at + 1;
}

void warp_diverge(Warp* w) {
  if (w->is_diverged) return;
  for (int l = 0; l < 32; l++) w->pc[l] = w->at;
  w->is_diverged = 1;
}

// ---- operands

static inline int32_t operand(const Instruction* i, int slot) {
  switch (slot) {
    case 0: return i->d;
    case 1: return i->a;
    case 2: return i->b;
    case 3: return i->c;
    default: return i->vector[slot - 4];
  }
}

// The pending tcgen05.ld whose values the instruction needs, or 0. Moves need them to be there but do not wait: ptxas
// makes them names of the same machine registers, so that the load goes on behind them.
static int touched_load(Warp* w, const Instruction* i) {
  uint8_t carried = 0;
  if (i->guard >= 0 && w->pending[i->guard]) return w->pending[i->guard] & ~HAS_ARRIVED;
  for (int slot = 0; slot < SLOTS; slot++) {
    int is_read = (i->reads >> slot) & 1, is_written = (i->writes >> slot) & 1;
    uint8_t load = is_read || is_written ? w->pending[operand(i, slot)] : 0;
    if (!load) continue;
    if (!(load & HAS_ARRIVED) || (is_read && !i->is_move)) return load & ~HAS_ARRIVED;
    if (is_read) carried = load;
  }
  for (int slot = 0; slot < SLOTS; slot++)
    if ((i->writes >> slot) & 1) w->pending[operand(i, slot)] = carried;
  return 0;
}

// A register that the instruction must not use while a wgmma is under way, or 0.
static int32_t reserved_register(const Warp* w, const Instruction* i) {
  if (i->guard >= 0 && w->reserved[i->guard] & 1) return i->guard;
  for (int slot = 0; slot < SLOTS; slot++) {
    int32_t named = operand(i, slot);
    int is_read = (i->reads >> slot) & 1, is_written = (i->writes >> slot) & 1;
    if (named > 0 && ((is_read && w->reserved[named] & 1) || (is_written && w->reserved[named]))) return named;
  }
  return 0;
}

// A register that was never written may be copied and computed with, if nothing depends on it: the result is unwritten
// too. It may not guard an instruction, form an address, or be stored.
static int check_written(Warp* w, const Instruction* i, uint32_t ex) {
  if (i->guard >= 0 && w->active & ~w->written[i->guard]) return fail(w, UNWRITTEN_REGISTER, i->guard);
  if (i->op != OP_LOAD && i->op != OP_STORE) return 0;
  for (int slot = 0; slot < SLOTS; slot++) {
    if (!((i->reads >> slot) & 1)) continue;
    int32_t named = operand(i, slot);
    if (named > 0 && ex & ~w->written[named]) return fail(w, UNWRITTEN_REGISTER, named);
  }
  return 0;
}

static uint32_t known_sources(const Warp* w, const Instruction* i, const uint64_t* registers) {
  uint32_t known = ALL_LANES;
  if (i->op == OP_LOAD) return known;  // what memory holds is the business of others
  if (i->is_selection) {
    const uint64_t* choice = registers + ((int64_t)i->c << 5);
    uint32_t first = 0;
    for (int l = 0; l < 32; l++) first |= (uint32_t)(choice[l] & 1) << l;
    return ((w->written[i->a] & first) | (w->written[i->b] & ~first)) & w->written[i->c];
  }
  for (int slot = 0; slot < SLOTS; slot++)
    if ((i->reads >> slot) & 1 && operand(i, slot) > 0) known &= w->written[operand(i, slot)];
  return known;
}

static void mark_written(Warp* w, const Instruction* i, const uint64_t* registers, uint32_t ex) {
  if (!i->writes) return;
  uint32_t known = known_sources(w, i, registers);
  for (int slot = 0; slot < SLOTS; slot++) {
    if (!((i->writes >> slot) & 1)) continue;
    uint32_t* written = &w->written[operand(i, slot)];
    *written = (*written & ~ex) | (known & ex);
  }
}

// ---- memory

// Generic addresses of shared memory are shared addresses. The host's own may be as low, but seldom in a window.
static int in_shared(int space, uint64_t address) {
  return space == SHARED || (space == GENERIC && address < SHARED_LIMIT && !(address & WINDOW_MASK));
}

static uint8_t* resolve(Context* x, Warp* w, int space, uint64_t address, int bytes, int lane) {
  if (address & (bytes - 1)) {
    fail(w, MISALIGNED, address);
    return 0;
  }
  uint64_t offset = address - SHARED_LIMIT;
  if (space == LOCAL || (space == GENERIC && w->local_size && offset < LOCAL_WINDOW)) {
    if (offset >= w->local_size || offset + bytes > w->local_size) {
      fail(w, OUTSIDE_LOCAL, address);
      return 0;
    }
    return w->local + lane * w->local_size + offset;
  }
  if (address < 1024 && space != SHARED) {
    fail(w, NULL_ADDRESS, address);
    return 0;
  }
  if (in_shared(space, address)) {
    uint32_t rank = (address >> RANK_SHIFT) & 15;
    offset = address & ((1u << RANK_SHIFT) - 1);
    if (address >= SHARED_LIMIT || !x->shared[rank] || offset + bytes > x->shared_size) {
      fail(w, OUTSIDE_SHARED, address);
      return 0;
    }
    return x->shared[rank] + offset;
  }
  if (x->num_ranges) {
    uint64_t low = 0, high = x->num_ranges;
    while (low < high) {
      uint64_t middle = (low + high) / 2;
      if (x->ranges[2 * middle] <= address) low = middle + 1;
      else high = middle;
    }
    if (!low || address + bytes > x->ranges[2 * low - 1]) {
      fail(w, OUTSIDE_GLOBAL, address);
      return 0;
    }
  }
  return (uint8_t*)address;
}

static void log_access(Context* x, const Warp* w, int space, uint64_t address, uint32_t bytes, int lane, int is_store) {
  if (!x->log || !in_shared(space, address)) return;
  Access* access = &x->log[x->log_count++];
  access->instruction = w->at;
  access->address = (uint32_t)address;
  access->bytes = bytes | (uint32_t)is_store << 31;
  access->lane = lane;
}

static uint64_t extend(uint64_t value, int bytes) {  // sign-extended into a register of 16 bits or more
  int unused = 64 - 8 * bytes;
  value = (uint64_t)((int64_t)(value << unused) >> unused);
  return bytes < 2 ? value & 0xffff : (bytes < 4 ? value & 0xffffffffu : value);
}

static int load(Warp* w, const Instruction* i, uint64_t* registers, Context* x, uint32_t ex) {
  const uint64_t* base = REGISTER(i->a);
  int bytes = i->element_bytes * i->count;
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint64_t address = base[l] + i->immediate;
    if (i->space == SHARED) address = (uint32_t)address;
    uint8_t* source = resolve(x, w, i->space, address, bytes, l);
    if (!source) return FAULT;
    log_access(x, w, i->space, address, bytes, l, 0);
    for (int k = 0; k < i->count; k++) {
      uint64_t value = 0;
      memcpy(&value, source + k * i->element_bytes, i->element_bytes);
      REGISTER(i->vector[k])[l] = i->is_signed && i->element_bytes < 8 ? extend(value, i->element_bytes) : value;
    }
  }
  return 0;
}

static int store(Warp* w, const Instruction* i, uint64_t* registers, Context* x, uint32_t ex) {
  const uint64_t* base = REGISTER(i->a);
  int bytes = i->element_bytes * i->count;
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint64_t address = base[l] + i->immediate;
    if (i->space == SHARED) address = (uint32_t)address;
    uint8_t* target = resolve(x, w, i->space, address, bytes, l);
    if (!target) return FAULT;
    log_access(x, w, i->space, address, bytes, l, 1);
    for (int k = 0; k < i->count; k++) memcpy(target + k * i->element_bytes, &REGISTER(i->vector[k])[l], i->element_bytes);
  }
  return 0;
}

// ---- between lanes

static void shuffle(const Instruction* i, uint64_t* registers, uint32_t ex) {  // PTX ISA 9.7.9.6
  uint64_t *d = REGISTER(i->d), *a = REGISTER(i->a), *b = REGISTER(i->b), *c = REGISTER(i->c), values[32];
  uint64_t* in_range = i->vector[0] > 0 ? REGISTER(i->vector[0]) : 0;
  memcpy(values, a, sizeof values);
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    int distance = b[l] & 31, clamp = c[l] & 31, segment = (c[l] >> 8) & 31;
    int last = (l & segment) | (clamp & ~segment & 31), first = l & segment, from, is_valid;
    switch (i->immediate) {
      case 0: from = l - distance, is_valid = from >= last; break;  // up: the clamp is the lower end
      case 1: from = l + distance, is_valid = from <= last; break;
      case 2: from = l ^ distance, is_valid = from <= last; break;
      default: from = first | (distance & ~segment & 31), is_valid = from <= last;
    }
    d[l] = values[(is_valid ? from : l) & 31] & 0xffffffffu;
    if (in_range) in_range[l] = is_valid;
  }
}

static uint64_t combine(int kind, uint64_t x, uint64_t y) {
  switch (kind) {
    case 0: return (x + y) & 0xffffffffu;
    case 1: return x & y;
    case 2: return x | y;
    case 3: return x ^ y;
    case 4: return (int32_t)y < (int32_t)x ? y : x;
    case 5: return (int32_t)y > (int32_t)x ? y : x;
    case 6: return y < x ? y : x;
    case 7: return y > x ? y : x;
    case 8: return UF(fmin_(F(x), F(y)));
    case 9: return UF(fmax_(F(x), F(y)));
    case 10: return UF(fminn_(F(x), F(y)));
    default: return UF(fmaxn_(F(x), F(y)));
  }
}

static void reduce(const Instruction* i, uint64_t* registers, uint32_t ex) {  // immediate: kind, +16 for absolute values
  uint64_t *a = REGISTER(i->a), *d = REGISTER(i->d), result = 0;
  int is_first = 1;
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint64_t value = a[l] & (i->immediate & 16 ? 0x7fffffffu : 0xffffffffu);
    result = is_first ? value : combine(i->immediate & 15, result, value);
    is_first = 0;
  }
  FOR_LANES(d[l] = result;)
}

static void vote(const Instruction* i, uint64_t* registers, uint32_t ex) {  // immediate 1: of the negated predicate
  uint64_t *a = REGISTER(i->a), *d = REGISTER(i->d);
  uint32_t ayes = 0;
  for (int l = 0; l < 32; l++) ayes |= (uint32_t)((ex >> l) & 1 && (a[l] != 0) != i->immediate) << l;
  uint64_t result = i->op == OP_BALLOT ? ayes : (i->op == OP_ALL ? ayes == ex : ayes != 0);
  FOR_LANES(d[l] = result;)
}

static void match_any(const Instruction* i, uint64_t* registers, uint32_t ex) {
  uint64_t *a = REGISTER(i->a), *d = REGISTER(i->d), values[32];
  memcpy(values, a, sizeof values);
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint32_t equal = 0;
    for (int k = 0; k < 32; k++) equal |= (uint32_t)((ex >> k) & 1 && values[k] == values[l]) << k;
    d[l] = equal;
  }
}

static void elect(const Instruction* i, uint64_t* registers, uint32_t ex) {
  int leader = __builtin_ctz(ex);
  uint64_t* is_leader = REGISTER(i->vector[0]);
  FOR_LANES(is_leader[l] = l == leader;)
  if (i->d > 0) {
    uint64_t* d = REGISTER(i->d);
    FOR_LANES(d[l] = leader;)
  }
}

// ---- within a lane

static void pack(const Instruction* i, uint64_t* registers, uint32_t ex) {  // immediate: bits of an element
  uint64_t *d = REGISTER(i->d), mask = i->immediate >= 64 ? ~0ull : (1ull << i->immediate) - 1;
  const uint64_t *first = REGISTER(i->vector[0]), *second = REGISTER(i->vector[1]);
  if (i->count == 2) {
    FOR_LANES(d[l] = (first[l] & mask) | ((second[l] & mask) << i->immediate);)
    return;
  }
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint64_t value = 0;
    for (int k = 0; k < i->count; k++) value |= (REGISTER(i->vector[k])[l] & mask) << (k * i->immediate);
    d[l] = value;
  }
}

static void unpack(const Instruction* i, uint64_t* registers, uint32_t ex) {
  uint64_t *a = REGISTER(i->a), mask = i->immediate >= 64 ? ~0ull : (1ull << i->immediate) - 1;
  for (int k = 0; k < i->count; k++) {
    if (i->vector[k] <= 0) continue;
    uint64_t* d = REGISTER(i->vector[k]);
    int shift = k * i->immediate;
    FOR_LANES(d[l] = (a[l] >> shift) & mask;)
  }
}

static void lop3(const Instruction* i, uint64_t* registers, uint32_t ex) {
  uint64_t *a = REGISTER(i->a), *b = REGISTER(i->b), *c = REGISTER(i->c), *d = REGISTER(i->d);
  for (int l = 0; l < 32; l++) {
    if (!((ex >> l) & 1)) continue;
    uint32_t x = a[l], y = b[l], z = c[l], result = 0;
    for (int k = 0; k < 8; k++)
      if ((i->immediate >> k) & 1) result |= (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
    d[l] = result;
  }
}

static void funnel_shift(const Instruction* i, uint64_t* registers, uint32_t ex) {  // immediate: 1 right, 2 clamp
  uint64_t *a = REGISTER(i->a), *b = REGISTER(i->b), *c = REGISTER(i->c), *d = REGISTER(i->d);
  FOR_LANES(uint64_t pair = (a[l] & 0xffffffffu) | (b[l] << 32); uint32_t amount = c[l];
            amount = i->immediate & 2 ? (amount > 32 ? 32 : amount) : amount & 31;
            d[l] = (i->immediate & 1 ? pair >> amount : (pair << amount) >> 32) & 0xffffffffu;)
}

static void move128(const Instruction* i, uint64_t* registers, uint32_t ex) {
  for (int half = 0; half < 2; half++) {
    uint64_t *source = REGISTER(i->vector[half]), *d = REGISTER(i->vector[2 + half]);
    FOR_LANES(d[l] = source[l];)
  }
}

// ---- control

// Returns 1 when lanes are left that go on in this call.
static int leave(Warp* w, uint32_t ex, uint32_t active) {
  w->live &= ~ex;
  if (!w->live) return 0;
  if (w->is_diverged) {
    for (int l = 0; l < 32; l++)
      if ((active >> l) & 1) w->pc[l] = w->at + 1;
    select_group(w);
    return w->active != 0;
  }
  w->active &= ~ex;
  w->at++;
  return w->active != 0;
}

static void branch(Warp* w, uint32_t taken, uint32_t active, int32_t target) {
  warp_diverge(w);
  for (int l = 0; l < 32; l++)
    if ((active >> l) & 1) w->pc[l] = (taken >> l) & 1 ? (uint32_t)target : w->at + 1;
  select_group(w);
}

static uint32_t guarded(const Instruction* i, uint64_t* registers, uint32_t active) {
  if (i->guard < 0) return active;
  const uint64_t* guard = REGISTER(i->guard);
  uint32_t passed = 0;
  for (int l = 0; l < 32; l++) passed |= (uint32_t)((guard[l] != 0) != i->is_negated) << l;
  return active & passed;
}

int warp_run(Warp* w, const Instruction* program, uint64_t* registers, Context* x, int64_t budget) {
  if (!w->live) return EXITED;
  select_group(w);
  if (!w->active) return BLOCKED;
  for (;;) {
    if (budget-- <= 0 || (x->log && x->log_count + 32 > x->log_capacity)) return OUT_OF_BUDGET;
    if (w->is_diverged) select_group(w);
    if (!w->active) return BLOCKED;
    const Instruction* i = program + w->at;
    if (w->is_diverged && i->needs_warp && !w->may_pass) {
      w->parked |= w->active;
      budget++;
      continue;
    }
    w->may_pass = 0;
    uint32_t active = w->active, ex = guarded(i, registers, active);
    if (w->num_pending) {
      int load_index = touched_load(w, i);
      if (load_index) {
        w->touched = load_index;
        w->may_pass = 1;
        return TOUCHED;
      }
    }
    if (w->reserved) {
      int32_t named = reserved_register(w, i);
      if (named) {
        w->touched = named;
        w->may_pass = 1;
        return RESERVED;
      }
    }
    if (w->written && check_written(w, i, ex)) return FAULT;
    w->executed++;
    if (w->trace && w->trace_count < w->trace_capacity) w->trace[w->trace_count++] = w->at | (uint32_t)!!ex << 31;
    if (!ex && i->op != OP_BRANCH) {
      warp_advance(w);
      continue;
    }
    switch (i->op) {
      case OP_SYSTEM:
        w->executing = ex;
        return SYSTEM;
      case OP_BRANCH:
        if (ex == active && !w->is_diverged) {
          w->at = i->target;
          continue;
        }
        if (!ex) break;
        branch(w, ex, active, i->target);
        continue;
      case OP_RETURN:
        if (leave(w, ex, active)) continue;
        return w->live ? BLOCKED : EXITED;
      case OP_LOAD:
        if (load(w, i, registers, x, ex)) return FAULT;
        break;
      case OP_STORE:
        if (store(w, i, registers, x, ex)) return FAULT;
        break;
      case OP_PACK: pack(i, registers, ex); break;
      case OP_UNPACK: unpack(i, registers, ex); break;
      case OP_SHUFFLE: shuffle(i, registers, ex); break;
      case OP_BALLOT:
      case OP_ALL:
      case OP_ANY: vote(i, registers, ex); break;
      case OP_ELECT: elect(i, registers, ex); break;
      case OP_REDUX: reduce(i, registers, ex); break;
      case OP_MOVE128: move128(i, registers, ex); break;
      case OP_MATCH_ANY: match_any(i, registers, ex); break;
      case OP_LOP3: lop3(i, registers, ex); break;
      case OP_FUNNEL: funnel_shift(i, registers, ex); break;
      case OP_ACTIVE_MASK: {
        uint64_t* d = REGISTER(i->d);
        FOR_LANES(d[l] = ex;)
        break;
      }
      case OP_NOTHING: break;
//@ARITHMETIC@
      default: return fail(w, BAD_OPCODE, i->op);
    }
    if (w->written) mark_written(w, i, registers, ex);
    warp_advance(w);
  }
}
