// Attention to the keys of the largest scores: scores of some rows for all keys, the choice of each row, and attention
// to the chosen keys. Rows run in batches, which bounds the memory of scores. Row i is aligned to key i + nk − nq.

// Rows mapped to `r` columns, in elements: out = x · map, map: [key heads][d][r] in the type of sums.
extern "C" __global__ void project_rows(View x, const acc* __restrict__ map, View out, int n, int d, int r, int group) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)n * r) return;
  const int h = blockIdx.y, b = blockIdx.z, row = (int)(i / r), j = (int)(i % r);
  const elem* from = row_of<elem>(x, b, h, row);
  const acc* own = map + (i64)(h / group) * d * r;
  acc s = 0;
  for (int c = 0; c < d; c++) s += widen(from[c]) * own[(i64)c * r + j];
  row_of<elem>(out, b, h, row)[j] = narrow(s);
}

// Products of `width` columns of 8 rows, which share a key head, with 128 keys.
// scores: [batch][heads][rows][nk]. grid: keys, rows · group, batch · key heads.
#define PAIRS 8
extern "C" __global__ void __launch_bounds__(128) rank_scores(View q, View k, acc* __restrict__ scores, Sizes n, int width, int first, int rows, int wide) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc* own = (acc*)raw;
  const int kv = n.heads / n.group, hk = blockIdx.z % kv, b = blockIdx.z / kv, p0 = blockIdx.y * PAIRS, pairs = min(PAIRS, rows * n.group - p0);
  for (int i = threadIdx.x; i < PAIRS * width; i += 128) {
    const int p = i / width, c = i % width, x = p0 + p;
    own[c * PAIRS + p] = p < pairs ? (acc)widen(row_of<elem>(q, b, hk * n.group + x / rows, first + x % rows)[c]) : (acc)0;
  }
  __syncthreads();
  const int j = blockIdx.x * 128 + threadIdx.x;
  if (j >= n.nk) return;
  const elem* key = row_of<elem>(k, b, hk, j);
  acc s[PAIRS] = {};
#if ELEM < 2
  if (wide) {
    for (int c = 0; c < width; c += 8) {
      const uint4 y = *(const uint4*)(key + c);
      const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const acc t = e & 1 ? high(words[e >> 1]) : low(words[e >> 1]);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) s[p] += own[(c + e) * PAIRS + p] * t;
      }
    }
  } else
#endif
    for (int c = 0; c < width; c++) {
      const acc t = widen(key[c]);
#pragma unroll
      for (int p = 0; p < PAIRS; p++) s[p] += own[c * PAIRS + p] * t;
    }
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const int x = p0 + p;
    if (p < pairs) scores[(((i64)b * n.heads + hk * n.group + x / rows) * rows + x % rows) * n.nk + j] = s[p];
  }
}

// Maps a score to an integer of the same order; NaN is the largest.
#if ELEM == 3
typedef u64 rank;
DEV rank rank_of(double x) { const u64 u = (u64)__double_as_longlong(x + 0.0); return x != x ? ~0ull : u >> 63 ? ~u : u | 1ull << 63; }
#else
typedef u32 rank;
DEV rank rank_of(float x) { const u32 u = __float_as_uint(x + 0.f); return x != x ? ~0u : u >> 31 ? ~u : u | 1u << 31; }
#endif

// Choice of a row.
struct Choice {
  double fraction;      // share of the keys seen, rounded up, where keys is 0
  int keys;             // keys that are kept by their scores
  int min_len;          // rows that see fewer keys keep all
  int together;         // heads of a group choose by the largest of their scores
};
DEV int budget_of(const Choice& how, int n) { return min(n, how.keys > 0 ? how.keys : max(1, (int)ceil(how.fraction * (double)n))); }

// The keys of one row in increasing order; −1 keys for all visible ones. Ties go to the smaller index. lists:
// [batch][heads][rows][room]. grid: rows, heads, batch.
#define WARPS 16
extern "C" __global__ void __launch_bounds__(32 * WARPS) rank_select(const acc* __restrict__ scores, u32* __restrict__ lists, int* __restrict__ counts, Sizes n, int first, int rows, int causal, int room, double fraction, int keys, int min_len, int together) {
  const Choice how = {fraction, keys, min_len, together};
  __shared__ u32 count[256], sums[WARPS], found[2];
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, r = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const i64 slot = ((i64)b * n.heads + h) * rows + r;
  const int seen = causal ? max(0, min(n.nk, first + r + n.nk - n.nq + 1)) : n.nk;
  const int budget = budget_of(how, seen);
  if (seen < how.min_len || budget >= seen) { if (tid == 0) counts[slot] = -1; return; }
  const int voters = how.together ? n.group : 1, h0 = how.together ? h / n.group * n.group : h;
  const acc* own = scores + (((i64)b * n.heads + h0) * rows + r) * n.nk;
  auto at = [&](int j) {
    acc x = own[j];
    for (int g = 1; g < voters; g++) x = larger(x, own[(i64)g * rows * n.nk + j]);
    return rank_of(x);
  };
  // The digits of the rank of the last kept key, from the highest on.
  rank bound = 0; u32 left = budget;
  for (int shift = (int)sizeof(rank) * 8 - 8; shift >= 0; shift -= 8) {
    if (tid < 256) count[tid] = 0;
    __syncthreads();
    for (int j = tid; j < seen; j += 32 * WARPS) {
      const rank x = at(j);
      if (shift == (int)sizeof(rank) * 8 - 8 || x >> (shift + 8) == bound >> (shift + 8)) atomicAdd(&count[(x >> shift) & 255], 1u);
    }
    __syncthreads();
    if (w == 0) {
      // Lane i has the digits 255 − 8 i and the seven below; `above` counts those over them.
      u32 mine[8], total = 0;
#pragma unroll
      for (int e = 0; e < 8; e++) { mine[e] = count[255 - 8 * lane - e]; total += mine[e]; }
      u32 above = total;
#pragma unroll
      for (int s = 1; s < 32; s <<= 1) { const u32 y = __shfl_up_sync(FULL, above, s); if (lane >= s) above += y; }
      above -= total;
      if (above < left && above + total >= left) {
#pragma unroll
        for (int e = 0; e < 8; e++) { if (above < left && above + mine[e] >= left) { found[0] = 255 - 8 * lane - e; found[1] = left - above; break; } above += mine[e]; }
      }
    }
    __syncthreads();
    bound |= (rank)found[0] << shift; left = found[1];
    __syncthreads();
  }
  // The first `left` of the keys at the bound are kept. Each warp has a span of keys.
  const int span = (seen + 32 * WARPS - 1) / (32 * WARPS) * 32, from = w * span, to = min(seen, from + span);
  u32 ties = 0;
  for (int j0 = from; j0 < to; j0 += 32) ties += __popc(__ballot_sync(FULL, j0 + lane < to && at(j0 + lane) == bound));
  if (lane == 0) sums[w] = ties;
  __syncthreads();
  u32 before = 0;
  for (int i = 0; i < w; i++) before += sums[i];
  __syncthreads();
  u32 places = 0;
  u32* list = lists + slot * room;
  for (int pass = 0; pass < 2; pass++) {
    u32 tied = before, taken = 0;
    for (int j0 = from; j0 < to; j0 += 32) {
      const int j = j0 + lane;
      const rank x = j < to ? at(j) : 0;
      const u32 equal = __ballot_sync(FULL, j < to && x == bound), lower = (1u << lane) - 1;
      const bool ranked = x > bound || (x == bound && tied + __popc(equal & lower) < left);
      const u32 takes = __ballot_sync(FULL, j < to && ranked);
      if (pass == 1 && (takes >> lane & 1)) list[places + taken + __popc(takes & lower)] = j;
      tied += __popc(equal); taken += __popc(takes);
    }
    if (pass == 1) break;
    if (lane == 0) sums[w] = taken;
    __syncthreads();
    u32 all = 0;
    for (int i = 0; i < WARPS; i++) { if (i < w) places += sums[i]; all += sums[i]; }
    if (tid == 0) counts[slot] = (int)all;
  }
}

// Attention of one row to the keys of its list, by 8 warps that alternate and are merged in order.
#define GATHER 8
extern "C" __global__ void __launch_bounds__(32 * GATHER) attend_lists(View q, View k, View v, View out, acc* lse, const u32* __restrict__ lists, const int* __restrict__ counts, Sizes n, int first, int rows, int causal, int room, acc scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc *own = (acc*)raw, *so = own + n.d, *sm = so + GATHER * COLUMNS * 32;
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, r = blockIdx.x, h = blockIdx.y, b = blockIdx.z, hk = h / n.group, row = first + r;
  const i64 slot = ((i64)b * n.heads + h) * rows + r, at = ((i64)b * n.heads + h) * n.nq + row;
  const int seen = causal ? max(0, min(n.nk, row + n.nk - n.nq + 1)) : n.nk;
  const int kept = counts[slot], count = kept < 0 ? seen : kept;
  const u32* list = kept < 0 ? 0 : lists + slot * room;
  const elem* query = row_of<elem>(q, b, h, row);
  for (int c = tid; c < n.d; c += 32 * GATHER) own[c] = widen(query[c]);
  for (int c0 = 0; c0 < n.dv; c0 += COLUMNS * 32) {
    __syncthreads();
    Running s; start(s);
    for (int i0 = w * 32; i0 < count; i0 += 32 * GATHER) {
      const int i = i0 + lane; acc logit = NEG_INF; const elem* value = 0;
      if (i < count) {
        const int j = list ? (int)list[i] : i;
        const elem* key = row_of<elem>(k, b, hk, j); acc x = 0;
        for (int c = 0; c < n.d; c++) x += own[c] * widen(key[c]);
        logit = x * scale; value = row_of<elem>(v, b, hk, j);
      }
      add(s, logit, value, c0, n.dv, lane);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) so[w * COLUMNS * 32 + c * 32 + lane] = s.o[c];
    if (lane == 0) { sm[2 * w] = s.m; sm[2 * w + 1] = s.l; }
    __syncthreads();
    acc m = NEG_INF, l = 0;
    for (int i = 0; i < GATHER; i++) m = larger(m, sm[2 * i]);
    const acc z = m == NEG_INF ? (acc)0 : m;
    for (int i = 0; i < GATHER; i++) l += exp_of(sm[2 * i] - z) * sm[2 * i + 1];
    const int c = c0 + tid;
    if (c < n.dv) {
      acc x = 0;
      for (int i = 0; i < GATHER; i++) x += exp_of(sm[2 * i] - z) * so[i * COLUMNS * 32 + tid];
      row_of<elem>(out, b, h, row)[c] = narrow(l > 0 ? x / l : l == l && m == NEG_INF ? (acc)0 : (acc)NOT_A_NUMBER);
    }
    if (tid == 0 && lse) lse[at] = m == NEG_INF ? m : m + log_of(l);
  }
}
