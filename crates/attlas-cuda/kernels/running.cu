// A row's softmax, 32 keys at a time by one warp.

// Columns of a row of values that a lane accumulates at one time: COLUMNS * 32 of them; wider values take more passes.
#define COLUMNS 8

// A row's running maximum, sum and output.
struct Running {
  acc m, l, o[COLUMNS];
};

DEV void start(Running& s) {
  s.m = NEG_INF; s.l = 0;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) s.o[c] = 0;
}

// Adds one key per lane: its logit, −∞ for none, and the row of its value.
DEV void add(Running& s, acc logit, const elem* value, int c0, int dv, int lane) {
  const acc m = larger(s.m, warp_max(logit)), z = m == NEG_INF ? (acc)0 : m;
  const acc shrink = exp_of(s.m - z), p = logit == NEG_INF ? (acc)0 : exp_of(logit - z);
  s.m = m; s.l = s.l * shrink + warp_sum(p);
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) s.o[c] *= shrink;
  u32 seen = __ballot_sync(FULL, logit != NEG_INF);      // NaN is seen
  while (seen) {
    const int j = __ffs(seen) - 1; seen &= seen - 1;
    const acc w = __shfl_sync(FULL, p, j);
    const elem* v = (const elem*)__shfl_sync(FULL, (u64)value, j);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) { const int x = c0 + c * 32 + lane; if (x < dv) s.o[c] += w * widen(v[x]); }
  }
}

// Form of a written row: as elements, in the type of sums merged with existing parts, or in that type as the first
// part.
enum { DIRECT = 0, JOINED = 1, FIRST = 2 };

// Writes the columns [c0, c0 + 256) of a row.
template <int HOW> DEV void put(const Running& s, const View& out, acc* lse, i64 row_index, int b, int h, int row, int c0, int dv, int lane) {
  const acc inv = s.l > 0 ? 1 / s.l : (s.l == s.l && s.m == NEG_INF ? (acc)0 : (acc)NOT_A_NUMBER);
  const acc now = s.m == NEG_INF ? (acc)NEG_INF : s.m + log_of(s.l);
  acc keep = 0, gain = 1, both = now;
  if (HOW == JOINED) join(lse[row_index], now, keep, gain, both);
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int x = c0 + c * 32 + lane;
    if (x >= dv) continue;
    const acc o = s.o[c] * inv;
    if (HOW == DIRECT) { row_of<elem>(out, b, h, row)[x] = narrow(o); continue; }
    acc* to = row_of<acc>(out, b, h, row) + x;
    *to = HOW == FIRST || keep == 0 ? o : gain == 0 ? *to : keep * *to + gain * o;
  }
  __syncwarp();
  if (lane == 0 && lse && c0 + COLUMNS * 32 >= dv) lse[row_index] = both;
}

