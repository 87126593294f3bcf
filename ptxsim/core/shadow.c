// Shadow memory: for each granule of shared or tensor memory who wrote it last and who has read it since; and the test
// whether an access is ordered behind them. What the fields mean and what is reported: ptxsim/checks.
#include <stdint.h>
#include <string.h>

enum { NOBODY = -1, OPERATION = -2, ATOMICALLY = -3 };  // in place of a writer
enum { MANY = -2 };  // in place of a reader: see `readers`
enum { UNORDERED_WRITE, UNORDERED_READ, NO_PROXY_FENCE, NEVER_WRITTEN };
#define FOREVER INT32_MAX  // the epoch of an access that has not ended
#define STORE_BIT 0x80000000u
#define MAX_PROBLEMS 64
#define RANK_SHIFT 24

typedef struct {
  int32_t *writer, *write_epoch, *write_line;  // [granules]
  int32_t *reader, *read_epoch;  // [granules] the one reader since the last write; NOBODY; MANY
  int32_t* readers;  // [granules][actors] epochs of the readers where there are MANY
  int64_t granules, actors, granule_bytes;
  int32_t num_warps, has_proxies;
} Shadow;

typedef struct {
  int32_t actor, epoch, line, is_async;  // actor OPERATION: epoch is the operation's number
  const int32_t *ordered, *proxied;  // the clock behind it
  const uint8_t* operations;  // bits of the operations known to be complete
  int64_t num_operations;
} Access;

typedef struct {
  int32_t kind, is_write, line, other_actor, other_epoch, other_line;
  int64_t granule;
  int64_t shadow;
} Problem;

typedef struct {
  int32_t count, shadow;
  Problem problems[MAX_PROBLEMS];
} Problems;

typedef struct {
  uint32_t instruction, address, bytes, lane;
} LogEntry;

// Keeps the first granule of each kind and pair of accesses.
static void add(Problems* out, int kind, int is_write, const Access* by, int32_t actor, int32_t epoch, int32_t line,
                int64_t granule) {
  for (int32_t k = out->count; k-- > 0;) {
    const Problem* known = &out->problems[k];
    if (known->kind == kind && known->line == by->line && known->other_actor == actor && known->other_line == line) return;
  }
  if (out->count == MAX_PROBLEMS) return;
  out->problems[out->count++] = (Problem){kind, is_write, by->line, actor, epoch, line, granule, out->shadow};
}

static inline int is_complete(const Access* by, int32_t operation) {
  return operation < by->num_operations && (by->operations[operation >> 3] >> (operation & 7)) & 1;
}

static inline int write_is_ordered(const Shadow* s, const Access* by, int64_t g) {
  int32_t writer = s->writer[g];
  if (writer >= 0) return s->write_epoch[g] <= by->ordered[writer];
  return writer != OPERATION || is_complete(by, s->write_epoch[g]);
}

static void read_granule(Shadow* s, const Access* by, int64_t g, Problems* out) {
  int32_t writer = s->writer[g];
  if (!write_is_ordered(s, by, g)) {
    add(out, UNORDERED_WRITE, 0, by, writer, s->write_epoch[g], s->write_line[g], g);
  } else if (by->is_async && s->has_proxies && writer >= 0 && writer < s->num_warps &&
             s->write_epoch[g] > by->proxied[writer]) {
    add(out, NO_PROXY_FENCE, 0, by, writer, s->write_epoch[g], s->write_line[g], g);
  }
  if (writer == NOBODY) add(out, NEVER_WRITTEN, 0, by, NOBODY, 0, 0, g);
}

static inline void record_read(Shadow* s, const Access* by, int64_t g) {
  if (by->actor < 0) return;
  if (s->reader[g] == by->actor || s->reader[g] == NOBODY) {
    s->reader[g] = by->actor;
    s->read_epoch[g] = by->epoch;
    return;
  }
  int32_t* readers = s->readers + g * s->actors;
  if (s->reader[g] != MANY) {
    memset(readers, 0, s->actors * sizeof *readers);
    readers[s->reader[g]] = s->read_epoch[g];
    s->reader[g] = MANY;
  }
  readers[by->actor] = by->epoch;
}

// An actor's own reads are in order, but for those that have not ended: a tcgen05.st may overtake a tcgen05.ld.
static inline int read_is_ordered(const Access* by, int32_t reader, int32_t epoch) {
  return reader == by->actor ? epoch != FOREVER : epoch <= by->ordered[reader];
}

static void write_granule(Shadow* s, const Access* by, int64_t g, Problems* out) {
  int32_t writer = s->writer[g];
  int is_own = by->actor >= 0 && writer == by->actor;  // an actor's own writes are in order
  if (!is_own && !write_is_ordered(s, by, g))
    add(out, UNORDERED_WRITE, 1, by, writer, s->write_epoch[g], s->write_line[g], g);
  if (s->reader[g] >= 0) {
    if (!read_is_ordered(by, s->reader[g], s->read_epoch[g])) add(out, UNORDERED_READ, 1, by, s->reader[g], 0, 0, g);
  } else if (s->reader[g] == MANY) {
    const int32_t* readers = s->readers + g * s->actors;
    for (int32_t actor = 0; actor < s->actors; actor++)
      if (!read_is_ordered(by, actor, readers[actor])) add(out, UNORDERED_READ, 1, by, actor, 0, 0, g);
  }
}

// Who is ordered behind this write is ordered behind the reads before it, too: they are forgotten.
static inline void record_write(Shadow* s, const Access* by, int64_t g) {
  s->writer[g] = by->actor;
  s->write_epoch[g] = by->epoch;
  s->write_line[g] = by->line;
  s->reader[g] = NOBODY;
}

static inline void touch(Shadow* s, const Access* by, int64_t g, int is_write, Problems* out) {
  if (is_write) {
    write_granule(s, by, g, out);
    record_write(s, by, g);
  } else {
    read_granule(s, by, g, out);
    record_read(s, by, g);
  }
}

// Granules `first` … + `count`. only_record: the access was looked at before.
int shadow_span(Shadow* s, const Access* by, int64_t first, int64_t count, int is_write, int only_record, Problems* out) {
  out->count = 0;
  for (int64_t g = first; g < first + count; g++) {
    if (!only_record) touch(s, by, g, is_write, out);
    else if (is_write) record_write(s, by, g);
    else record_read(s, by, g);
  }
  return out->count;
}

// Chunks of `bytes` at byte offsets.
int shadow_chunks(Shadow* s, const Access* by, const int64_t* offsets, int64_t count, int64_t bytes, int is_write,
                  Problems* out) {
  out->count = 0;
  for (int64_t k = 0; k < count; k++) {
    int64_t first = offsets[k] / s->granule_bytes, end = (offsets[k] + bytes + s->granule_bytes - 1) / s->granule_bytes;
    for (int64_t g = first; g < end; g++) touch(s, by, g, is_write, out);
  }
  return out->count;
}

// A warp's accesses to shared memory as the SIMT core has logged them. shadows: one for each CTA of the cluster; lines:
// PTX line of each instruction.
int shadow_log(Shadow** shadows, Access* by, const LogEntry* log, int64_t count, const int32_t* lines, Problems* out) {
  out->count = 0;
  for (int64_t k = 0; k < count; k++) {
    const LogEntry* entry = &log[k];
    int is_write = (entry->bytes & STORE_BIT) != 0;
    int64_t offset = entry->address & ((1u << RANK_SHIFT) - 1), bytes = entry->bytes & ~STORE_BIT;
    out->shadow = entry->address >> RANK_SHIFT;
    Shadow* s = shadows[out->shadow];
    by->line = lines[entry->instruction];
    int64_t end = (offset + bytes + s->granule_bytes - 1) / s->granule_bytes;
    for (int64_t g = offset / s->granule_bytes; g < end; g++) touch(s, by, g, is_write, out);
  }
  return out->count;
}
