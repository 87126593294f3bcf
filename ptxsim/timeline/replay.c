// Replay: gives times to a trace. Warps issue the machine instructions that they executed, in order, as ptxas scheduled
// them (stall counts, scoreboards); four schedulers for each SM, one instruction a cycle each; pipes with a time until
// which they are busy; asynchronous units with a time until which they are taken. A barrier's phase completes with the
// last of its arrivals. All times are cycles; what a number costs comes from the chip's parameters.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SMS 16
#define PARTITIONS 4
#define PIPES 16
#define SCOREBOARDS 6
#define NODES 8
#define NO_SCOREBOARD 7
#define EXECUTED 0x80000000u
#define NEVER (INT64_MAX / 2)

enum { ARRIVE, WAIT, LOAD, STORE, REDUCTION, REMOTE_STORE, PRODUCT, WGMMA, COPY, COMMIT };
enum { FMA, ALU, SPECIAL };  // pipes, as in units.py
enum { PLAIN, SHARED_READ, SHARED_WRITE, TMEM_READ, TMEM_WRITE, BRANCH };
enum { ON_TIME, ON_BARRIER, ON_SCOREBOARD, ON_PIPE, ON_SELECTION };

typedef struct {
  int32_t kind, pipe, occupancy, latency, read_latency, stall, wait_mask, write_scoreboard, read_scoreboard, bytes;
} Instruction;

typedef struct {
  int32_t kind, warp, position, node, source, rank, count, m, n, format, group, a_in_place, column;
} Operation;

typedef struct {
  double arrive, wake, block, sync_issue;  // barriers
  double tensor_start, commit, pair, tensor_rate[4], shared_rate, tmem_read_rate, tmem_write_rate;
  double load_rate, load_latency, store_rate, reduction_rate, store_latency, remote_latency, branch_taken;
  double fill_share;  // of the shared memory's port that arriving loads take
  double is_greedy;
  double stolen_by_fma, alu_beside_wgmma, special_beside_wgmma;  // products whose sums are in registers
} Parameters;

typedef struct {
  int32_t remaining;
  int64_t time;  // of the last arrival so far
} Node;

typedef struct {
  int32_t sm, partition, num_waited;
  int64_t begin, count, next, first_operation, end_operation, operation;
  int64_t ready, sleep;  // may issue from; no need to look before
  int64_t clear[SCOREBOARDS];
  int32_t producer[SCOREBOARDS], num_nodes[SCOREBOARDS], nodes[SCOREBOARDS][NODES], waited[NODES];
  uint8_t cause;
  int32_t blame;
  int is_done;
} Warp;

typedef struct {
  const Parameters* p;
  const Instruction* code;
  const uint32_t* streams;
  Operation* operations;
  int32_t num_operations, num_warps, num_sms;
  Warp* warps;
  Node* nodes;
  int64_t *issued, *ready_at;  // of each executed instruction
  uint8_t* causes;
  int32_t* blames;
  double *op_begin, *op_end;  // of each operation; op_end < 0: not over
  int32_t *first_arrival, *next_arrival;  // arrivals that wait for an operation's end
  int32_t* companion;  // of each quarter of a wgmma: another one of the same product, −1: none
  int32_t* queue[SMS];  // tensor-core work, in order
  int64_t head[SMS], tail[SMS];
  double tensor_free[SMS], simt_free[SMS], debt[SMS], stolen[SMS], load_free[SMS], store_free[SMS];
  double tmem_read_free[SMS][PARTITIONS], tmem_write_free[SMS][PARTITIONS];
  int64_t pipe_free[SMS][PARTITIONS][PIPES];
  int32_t last[SMS][PARTITIONS], is_pair[SMS];
  int32_t parts[SMS][8][64], num_parts[SMS][8][4];  // wgmma: quarters issued, by warpgroup and warp of it
  int64_t now;
  int has_moved;
} State;

static double larger(double a, double b) { return a > b ? a : b; }

// ---- barriers and completions

static void arrive(State* s, int32_t node, double time) {
  Node* n = &s->nodes[node];
  int64_t rounded = (int64_t)ceil(time);
  if (rounded > n->time) n->time = rounded;
  n->remaining--;
  s->has_moved = 1;
}

static void complete(State* s, int32_t operation, double begin, double end) {
  s->op_begin[operation] = begin;
  s->op_end[operation] = end;
  for (int32_t a = s->first_arrival[operation]; a >= 0; a = s->next_arrival[a]) arrive(s, s->operations[a].node, end);
  s->first_arrival[operation] = -1;
  s->has_moved = 1;
}

static void arrive_through(State* s, int32_t arrival, const Operation* o) {
  if (o->source < 0) {
    arrive(s, o->node, s->now + s->p->arrive);
  } else if (s->op_end[o->source] >= 0) {
    arrive(s, o->node, s->op_end[o->source]);
  } else {
    s->next_arrival[arrival] = s->first_arrival[o->source];
    s->first_arrival[o->source] = arrival;
  }
}

// ---- shared memory: SIMT accesses go first, operands of the tensor core take what is left

static double access_shared(State* s, int sm, double bytes) {
  double cycles = larger(1, bytes / s->p->shared_rate), begin = larger(s->simt_free[sm], s->now);
  s->simt_free[sm] = begin + cycles;
  if (s->tensor_free[sm] > s->now) s->debt[sm] += cycles;
  return s->simt_free[sm];
}

// ---- tensor core

static double product_cycles(const State* s, const Operation* o, double* operand_bytes) {
  static const double elements[4] = {16, 8, 32, 64};  // of the contraction, by format
  double rows = (double)o->m / o->group;
  double full = o->kind == WGMMA || o->group == 2 ? rows : larger(rows, 128);  // a pair splits N where M is small
  *operand_bytes = (o->a_in_place ? 0 : rows * o->count) + (double)o->n / o->group * o->count;
  return 2 * full * o->n * elements[o->format] / s->p->tensor_rate[o->format];
}

static void run_product(State* s, int sm, int32_t index) {
  const Operation* o = &s->operations[index];
  double bytes, end = s->now, ideal = product_cycles(s, o, &bytes);
  int last = o->group == 2 ? sm ^ 1 : sm;
  for (int each = sm;; each = last) {
    double port = bytes / s->p->shared_rate, needed = port + s->debt[each], duration = larger(ideal, needed);
    if (s->tensor_free[each] == s->now) duration += s->stolen[each];  // else the product before has ended meanwhile
    s->debt[each] = s->stolen[each] = 0;
    end = larger(end, s->now + duration);
    if (each == last) break;
  }
  s->tensor_free[sm] = s->tensor_free[last] = end;
  s->is_pair[sm] = o->group == 2;
  for (; index >= 0; index = s->companion[index]) complete(s, index, s->now, end);
}

static void run_tensor_queue(State* s, int sm) {
  while (s->head[sm] < s->tail[sm]) {
    int32_t index = s->queue[sm][s->head[sm]];
    const Operation* o = &s->operations[index];
    double start = s->op_begin[index];  // when it has reached the unit
    if (o->kind == COMMIT) {
      double end = larger(s->tensor_free[sm], start) + s->p->commit + (s->is_pair[sm] ? s->p->pair : 0);
      complete(s, index, start, end);
    } else {
      if (start > s->now || s->tensor_free[sm] > s->now) return;
      if (o->group == 2 && s->tensor_free[sm ^ 1] > s->now) return;
      if (o->kind == COPY) {
        double end = s->now + o->count / s->p->shared_rate;
        s->tensor_free[sm] = end;
        if (o->group == 2) s->tensor_free[sm ^ 1] = end;
        complete(s, index, s->now, end);
      } else {
        run_product(s, sm, index);
      }
    }
    s->head[sm]++;
  }
}

// A wgmma starts when the four warps of its warpgroup have issued it.
static void issue_quarter(State* s, const Warp* w, int32_t index) {
  int group = s->operations[index].column & 7, quarter = w->partition;
  int32_t slot = s->num_parts[w->sm][group][quarter]++ & 15;
  s->parts[w->sm][group][slot * 4 + quarter] = index;
  for (int other = 0; other < 4; other++)
    if (s->num_parts[w->sm][group][other] < s->num_parts[w->sm][group][quarter]) return;
  for (int other = 0, last = index; other < 4; other++)
    if (other != quarter) last = s->companion[last] = s->parts[w->sm][group][slot * 4 + other];
  s->queue[w->sm][s->tail[w->sm]++] = index;
}

// ---- what an instruction starts

static void transfer(State* s, const Warp* w, int32_t index) {
  const Operation* o = &s->operations[index];
  const Parameters* p = s->p;
  if (o->kind == LOAD) {
    double begin = larger(s->load_free[o->rank], s->now);
    s->load_free[o->rank] = begin + o->count / p->load_rate;
    if (p->fill_share > 0) s->debt[o->rank] += p->fill_share * o->count / p->shared_rate;
    complete(s, index, begin, s->load_free[o->rank] + p->load_latency);
  } else if (o->kind == REMOTE_STORE) {
    complete(s, index, s->now, s->now + p->remote_latency);
  } else {
    double begin = larger(s->store_free[w->sm], s->now);
    double cycles = o->count / (o->kind == REDUCTION ? p->reduction_rate : p->store_rate);
    s->store_free[w->sm] = begin + cycles;
    access_shared(s, w->sm, o->count);
    complete(s, index, begin, begin + cycles + p->store_latency);
  }
}

static void add_wait(Warp* w, const Instruction* i, int32_t node) {
  int sb = i->write_scoreboard;
  if (sb < SCOREBOARDS && w->num_nodes[sb] < NODES) {
    w->nodes[sb][w->num_nodes[sb]++] = node;
  } else if (w->num_waited < NODES) {
    w->waited[w->num_waited++] = node;
  }
}

static void start_operations(State* s, Warp* w, const Instruction* i) {
  for (; w->operation < w->end_operation; w->operation++) {
    int32_t index = (int32_t)w->operation;
    const Operation* o = &s->operations[index];
    if (o->position != w->next) return;
    switch (o->kind) {
      case ARRIVE: arrive_through(s, index, o); break;
      case WAIT: add_wait(w, i, o->node); break;
      case PRODUCT:
      case COPY:
      case COMMIT:
        s->op_begin[index] = s->now + s->p->tensor_start;
        s->queue[w->sm][s->tail[w->sm]++] = index;
        break;
      case WGMMA:
        s->op_begin[index] = s->now + s->p->tensor_start;
        issue_quarter(s, w, index);
        break;
      default: transfer(s, w, index);
    }
  }
}

static double result_time(State* s, const Warp* w, const Instruction* i) {
  const Parameters* p = s->p;
  double *unit, rate;
  switch (i->kind) {
    case SHARED_READ:
    case SHARED_WRITE: return access_shared(s, w->sm, i->bytes) + i->latency;
    case TMEM_READ: unit = &s->tmem_read_free[w->sm][w->partition], rate = p->tmem_read_rate; break;
    case TMEM_WRITE: unit = &s->tmem_write_free[w->sm][w->partition], rate = p->tmem_write_rate; break;
    default: return s->now + i->latency;
  }
  *unit = larger(*unit, s->now) + i->bytes / rate;
  return *unit + i->latency;
}

// ---- warps

static int is_over(const State* s, const int32_t* nodes, int count, double wake, int64_t* time, int32_t* blame) {
  for (int k = 0; k < count; k++) {
    const Node* n = &s->nodes[nodes[k]];
    if (n->remaining > 0) {
      *blame = nodes[k];
      return 0;
    }
    if (n->time + (int64_t)wake > *time) *time = n->time + (int64_t)wake, *blame = nodes[k];
  }
  return 1;
}

// Whether the warp can issue now; if not, why, and when to look again.
static int can_issue(State* s, Warp* w) {
  const Instruction* i = &s->code[s->streams[w->begin + w->next] & ~EXECUTED];
  int64_t until = w->ready;
  int32_t blame = -1, producer = -1;
  if (w->num_waited && !is_over(s, w->waited, w->num_waited, s->p->block, &until, &blame)) until = NEVER;
  for (int sb = 0; sb < SCOREBOARDS && until < NEVER; sb++) {
    if (!((i->wait_mask >> sb) & 1)) continue;
    if (w->num_nodes[sb] && !is_over(s, w->nodes[sb], w->num_nodes[sb], s->p->wake, &until, &blame)) until = NEVER;
    if (w->clear[sb] > until) until = w->clear[sb], producer = w->producer[sb];
  }
  if (until > s->now) {
    if (producer >= 0 && until < NEVER) w->cause = ON_SCOREBOARD, w->blame = producer;
    else if (blame >= 0) w->cause = ON_BARRIER, w->blame = blame;
    w->sleep = until;
    return 0;
  }
  if (s->pipe_free[w->sm][w->partition][i->pipe] > s->now) {
    if (w->cause == ON_TIME) w->cause = ON_PIPE, w->blame = i->pipe;
    w->sleep = s->pipe_free[w->sm][w->partition][i->pipe];
    return 0;
  }
  w->num_waited = 0;
  for (int sb = 0; sb < SCOREBOARDS; sb++)
    if ((i->wait_mask >> sb) & 1) w->num_nodes[sb] = 0;
  return 1;
}

static void set_scoreboard(Warp* w, int scoreboard, double time, int32_t producer) {
  if (scoreboard >= SCOREBOARDS) return;
  int64_t rounded = (int64_t)ceil(time);
  if (rounded > w->clear[scoreboard]) w->clear[scoreboard] = rounded, w->producer[scoreboard] = producer;
}

// Cycles that an instruction keeps its pipe. Products whose sums are in registers (wgmma) want the register file too.
static int64_t occupancy_beside_products(State* s, const Warp* w, const Instruction* i) {
  if (s->tensor_free[w->sm] <= s->now) return i->occupancy;
  if (i->pipe == FMA) s->stolen[w->sm] += s->p->stolen_by_fma / PARTITIONS;
  double factor = i->pipe == ALU ? s->p->alu_beside_wgmma : i->pipe == SPECIAL ? s->p->special_beside_wgmma : 1;
  return (int64_t)ceil(i->occupancy * factor);
}

static void issue(State* s, Warp* w) {
  int64_t place = w->begin + w->next;
  uint32_t entry = s->streams[place];
  int32_t index = (int32_t)(entry & ~EXECUTED);
  const Instruction* i = &s->code[index];
  s->ready_at[place] = w->ready;
  s->issued[place] = s->now;
  s->causes[place] = s->now > w->ready ? w->cause : ON_TIME;
  s->blames[place] = w->blame;
  s->pipe_free[w->sm][w->partition][i->pipe] = s->now + occupancy_beside_products(s, w, i);
  w->ready = s->now + (i->stall > 0 ? i->stall : 1);
  if (entry & EXECUTED) {
    double result = result_time(s, w, i);
    set_scoreboard(w, i->write_scoreboard, result, index);
    set_scoreboard(w, i->read_scoreboard, s->now + i->read_latency, index);
    start_operations(s, w, i);
  }
  w->next++;
  if (i->kind == BRANCH && w->next < w->count && (s->streams[w->begin + w->next] & ~EXECUTED) != (uint32_t)index + 1)
    w->ready += (int64_t)s->p->branch_taken;
  w->sleep = w->ready;
  w->cause = ON_TIME, w->blame = -1;
  if (w->next >= w->count) w->is_done = 1;
  s->has_moved = 1;
}

// The scheduler of one partition: greedy, it begins with the warp of its last choice, else with the one behind.
static int schedule(State* s, int sm, int partition, int64_t* next) {
  Warp* chosen = 0;
  int count = s->num_warps, alive = 0, is_greedy = s->p->is_greedy >= 0.5, last = s->last[sm][partition];
  for (int k = is_greedy ? -1 : 0; k < count; k++) {
    int index = k < 0 ? last : is_greedy ? k : (last + 1 + k) % count;
    Warp* w = &s->warps[index];
    if (w->is_done || w->sm != sm || w->partition != partition || (k >= 0 && w == chosen)) continue;
    alive = 1;
    if (w->sleep > s->now && w->sleep < NEVER) {
      if (w->sleep < *next) *next = w->sleep;
      continue;
    }
    if (!can_issue(s, w)) {
      if (w->sleep < *next) *next = w->sleep;
      continue;
    }
    if (chosen) {
      if (w->cause == ON_TIME) w->cause = ON_SELECTION;
      *next = s->now + 1;
    } else {
      chosen = w;
      s->last[sm][partition] = index;
    }
  }
  if (chosen) {
    issue(s, chosen);
    *next = s->now + 1;
  }
  return alive;
}

static int64_t run(State* s, int64_t limit) {
  for (s->now = 0; s->now < limit;) {
    int64_t next = NEVER;
    int alive = 0;
    s->has_moved = 0;
    for (int sm = 0; sm < s->num_sms; sm++) {
      run_tensor_queue(s, sm);
      for (int partition = 0; partition < PARTITIONS; partition++) alive |= schedule(s, sm, partition, &next);
    }
    if (!alive) return s->now;
    for (int sm = 0; sm < s->num_sms; sm++) {
      if (s->head[sm] == s->tail[sm]) continue;
      double start = larger(s->op_begin[s->queue[sm][s->head[sm]]], s->tensor_free[sm]);
      if (s->operations[s->queue[sm][s->head[sm]]].group == 2) start = larger(start, s->tensor_free[sm ^ 1]);
      int64_t time = (int64_t)ceil(start);
      if (time <= s->now) time = s->now + 1;
      if (time < next) next = time;
    }
    if (s->has_moved) next = s->now + 1;
    if (next >= NEVER) return -s->now - 1;  // nothing can move any more
    s->now = next;
  }
  return -s->now - 1;
}

// spans: for each warp its SM, its partition, first entry of its stream and entries, first operation and end.
// Returns the cycles, or −1 − cycles when warps are stuck.
int64_t replay(const double* parameters, const Instruction* code, const uint32_t* streams, const int64_t* spans,
               int32_t num_warps, int32_t num_sms, Operation* operations, int32_t num_operations, Node* nodes,
               int64_t* issued, int64_t* ready_at, uint8_t* causes, int32_t* blames, double* op_begin, double* op_end) {
  State* s = calloc(1, sizeof(State));
  s->p = (const Parameters*)parameters;
  s->code = code, s->streams = streams, s->operations = operations, s->nodes = nodes;
  s->num_warps = num_warps, s->num_sms = num_sms, s->num_operations = num_operations;
  s->issued = issued, s->ready_at = ready_at, s->causes = causes, s->blames = blames;
  s->op_begin = op_begin, s->op_end = op_end;
  s->warps = calloc(num_warps, sizeof(Warp));
  s->first_arrival = malloc((num_operations + 1) * sizeof(int32_t));
  s->next_arrival = malloc((num_operations + 1) * sizeof(int32_t));
  s->companion = malloc((num_operations + 1) * sizeof(int32_t));
  for (int k = 0; k < num_operations; k++)
    s->first_arrival[k] = s->next_arrival[k] = s->companion[k] = -1, op_end[k] = -1;
  for (int sm = 0; sm < SMS; sm++) s->queue[sm] = malloc((num_operations + 1) * sizeof(int32_t));
  for (int k = 0; k < num_warps; k++) {
    Warp* w = &s->warps[k];
    const int64_t* span = spans + 6 * k;
    w->sm = (int32_t)span[0], w->partition = (int32_t)span[1], w->begin = span[2], w->count = span[3];
    w->operation = span[4], w->end_operation = span[5], w->is_done = span[3] == 0, w->blame = -1;
  }
  int64_t cycles = run(s, (int64_t)1 << 32);
  for (int sm = 0; sm < SMS; sm++) free(s->queue[sm]);
  free(s->first_arrival), free(s->next_arrival), free(s->companion), free(s->warps), free(s);
  return cycles;
}
