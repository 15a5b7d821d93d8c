// Linear attention with positive features given by their logarithms, the portable form of the family: sums over
// segments of keys, their prefixes, and rows that read the keys before their segment from the sums and those inside one
// by one. A state of m features: the largest logarithm of each (the shift), and relative to it the sum of the features
// and the sums of features times values: [m] [m] [m][dv] in the type of sums.
#define SEGMENT 64
#define ROWS 8
// Threads that share a column take the features in turns.
#define TURNS (32 * ROWS / 64)

// exp(x) relative to a shift of the same feature, 0 if no key had the feature.
DEV acc relative(acc x, acc shift) { return shift == (acc)NEG_INF ? (x != x ? x : (acc)0) : exp_of(x - shift); }

// The sums of one segment for 64 features and 64 columns of the values; a: [heads][nk][m], states: [heads][segments].
// grid: segments, tiles of features times tiles of columns, batch · key heads.
extern "C" __global__ void __launch_bounds__(256) segment_sums(const acc* __restrict__ a, View v, acc* __restrict__ states, Sizes n, int kv, int m) {
  __shared__ acc fs[16][64], vs[16][64], top[64];
  const int tid = threadIdx.x, tiles = (m + 63) / 64, l0 = blockIdx.y % tiles * 64, c0 = blockIdx.y / tiles * 64;
  const int first = blockIdx.x * SEGMENT, last = min(n.nk, first + SEGMENT);
  const acc* own = a + (i64)blockIdx.z * n.nk * m;
  acc* state = states + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * m * (n.dv + 2);
  if (tid < 64) {
    acc t = NEG_INF;
    if (l0 + tid < m) for (int j = first; j < last; j++) { const acc x = own[(i64)j * m + l0 + tid]; if (x > t) t = x; }
    top[tid] = t;
  }
  __syncthreads();
  acc s[4][4] = {}, z = 0;
  const int fl = tid >> 4, fc = tid & 15;      // features 4 fl and up, columns fc, fc + 16, …
  for (int j0 = first; j0 < last; j0 += 16) {
    for (int e = tid; e < 16 * 64; e += 256) {
      const int j = j0 + e / 64, i = e % 64;
      fs[e / 64][i] = j < last && l0 + i < m ? relative(own[(i64)j * m + l0 + i], top[i]) : (acc)0;
      vs[e / 64][i] = j < last && c0 + i < n.dv ? (acc)widen(row_of<elem>(v, blockIdx.z / kv, blockIdx.z % kv, j)[c0 + i]) : (acc)0;
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < 16; t++)
#pragma unroll
      for (int x = 0; x < 4; x++)
#pragma unroll
        for (int y = 0; y < 4; y++) s[x][y] += fs[t][fl * 4 + x] * vs[t][fc + y * 16];
    if (tid < 64) for (int t = 0; t < 16; t++) z += fs[t][tid];
    __syncthreads();
  }
#pragma unroll
  for (int x = 0; x < 4; x++)
#pragma unroll
    for (int y = 0; y < 4; y++) {
      const int l = l0 + fl * 4 + x, c = c0 + fc + y * 16;
      if (l < m && c < n.dv) state[2 * m + (i64)l * n.dv + c] = s[x][y];
    }
  if (c0 == 0 && tid < 64 && l0 + tid < m) { state[l0 + tid] = top[tid]; state[m + l0 + tid] = z; }
}

// In order over segments: a segment gets the sums of those before it; with `whole`, the first gets the sums of all.
// grid: features, batch · key heads; threads go over the columns, column 0 being the sum of the features alone.
extern "C" __global__ void __launch_bounds__(128) prefix_sums(acc* __restrict__ states, int segments, int m, int dv, int whole) {
  const int l = blockIdx.x;
  const i64 size = (i64)m * (dv + 2);
  acc* own = states + (i64)blockIdx.y * segments * size;
  for (int c = threadIdx.x; c < (dv + 1 + 127) / 128 * 128; c += 128) {
    const bool ok = c <= dv;
    acc* at = own + (c == 0 ? (i64)m + l : 2 * (i64)m + (i64)l * dv + c - 1);
    acc shift = NEG_INF, sum = 0;
    for (int s = 0; s < segments; s++) {
      const acc now = own[s * size + l], x = ok ? at[s * size] : (acc)0;
      if (!whole && ok) at[s * size] = sum;
      const acc both = now > shift ? now : shift;
      sum = (shift == both ? sum : sum == 0 ? sum : sum * exp_of(shift - both)) + (now == both ? x : x == 0 ? x : x * exp_of(now - both));
      shift = both;
    }
    if (whole && ok) at[0] = sum;
  }
  // The shifts last: every column has read them.
  __syncthreads();
  if (threadIdx.x == 0) {
    acc shift = NEG_INF;
    for (int s = 0; s < segments; s++) { const acc now = own[s * size + l]; if (!whole) own[s * size + l] = shift; if (now > shift) shift = now; }
    if (whole) own[l] = shift;
  }
}

// Eight rows of one head in one segment, a warp each: the sums of the keys before the segment, then the keys of the
// segment up to the row's position by the logarithms of their kernel. Without a mask: the sums of all keys, in slot 0.
// Columns [c0, c1) of the values. eps is added to denominators, times the row's number of keys if `each` is set. a:
// features of keys, b: of queries. Dynamic shared memory: ROWS · (m + SEGMENT + 1 + TURNS · 64) numbers.
extern "C" __global__ void __launch_bounds__(32 * ROWS) answer_rows(const acc* __restrict__ states, const acc* __restrict__ a, const acc* __restrict__ b, View v, View out, acc* lse, Sizes n, int kv, int segments, int m, int causal, int c0, int c1, acc eps, int each) {
  extern __shared__ __align__(16) unsigned char raw[];
  // Weights of features and of keys, rows side by side; the divisor of each row; partial sums of 64 columns.
  acc *w = (acc*)raw, *p = w + ROWS * m, *gain = p + ROWS * SEGMENT, *part = gain + ROWS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, bi = blockIdx.z, h = blockIdx.y, hk = bi * kv + h / n.group;
  const int offset = causal ? n.nk - n.nq : 0, base = (offset >= 0 ? offset / ROWS : -((-offset + ROWS - 1) / ROWS)) * ROWS + blockIdx.x * ROWS;
  const int place = base + warp, row = place - offset;
  const bool ok = row >= 0 && row < n.nq;
  const i64 at = ((i64)bi * n.heads + h) * n.nq + row;
  const int slot = causal && base > 0 ? base / SEGMENT : 0, first = slot * SEGMENT;
  const acc* state = states + ((i64)hk * segments + slot) * m * (n.dv + 2);
  const acc* keys = a + (i64)hk * n.nk * m;
  const acc none = NEG_INF;
  const int inside = causal && ok ? max(0, place + 1 - first) : 0;
  if (ok && place >= 0) {
    const acc* own = b + at * m;
    acc best = none;
    for (int l = lane; l < m; l += 32) { const acc x = own[l] + state[l]; best = larger(best, x); w[l * ROWS + warp] = x; }
    best = warp_max(best);
    for (int j = 0; j < inside; j++) {
      const acc* key = keys + (i64)(first + j) * m;
      acc t = none, s = 0;
      for (int l = lane; l < m; l += 32) t = larger(t, own[l] + key[l]);
      t = warp_max(t);
      const acc z = t == none ? (acc)0 : t;
      for (int l = lane; l < m; l += 32) s += exp_of(own[l] + key[l] - z);
      s = warp_sum(s);
      const acc x = t == none ? none : t + log_of(s);
      if (lane == 0) p[j * ROWS + warp] = x;
      best = larger(best, x);
    }
    __syncwarp();
    const acc z = best == none ? (acc)0 : best;
    acc den = 0, more = 0;
    for (int l = lane; l < m; l += 32) { const acc x = exp_of(w[l * ROWS + warp] - z); w[l * ROWS + warp] = x; den += x * state[m + l]; }
    for (int j = lane; j < inside; j += 32) { const acc x = exp_of(p[j * ROWS + warp] - z); p[j * ROWS + warp] = x; more += x; }
    den = warp_sum(den) + warp_sum(more);
    acc now = best == none || den == 0 ? none : best + log_of(den), share = 1;
    const acc extra = eps * (each ? (acc)(causal ? place + 1 : n.nk) : (acc)1);
    if (extra > 0 && now != none) { acc rest; const acc alone = now; join(log_of(extra), alone, rest, share, now); }
    if (lane == 0) {
      gain[warp] = now == none ? (acc)0 : share / den;
      if (lse) lse[at] = now;
    }
  } else {
    for (int l = lane; l < m; l += 32) w[l * ROWS + warp] = 0;
    if (lane == 0) { gain[warp] = 0; if (ok && lse) lse[at] = none; }
  }
  __syncthreads();
  const int most = causal ? max(0, min(n.nk, base + ROWS) - first) : 0, turn = threadIdx.x >> 6, column = threadIdx.x & 63;
  for (int start = c0; start < c1; start += 64) {
    const int c = start + column;
    acc x[ROWS] = {};
    if (c < c1) {
      if (base + ROWS > 0)
        for (int l = turn; l < m; l += TURNS) {
          const acc s = state[2 * (i64)m + (i64)l * n.dv + c];
#pragma unroll
          for (int r = 0; r < ROWS; r++) x[r] += w[l * ROWS + r] * s;
        }
      for (int j = turn; j < most; j += TURNS) {
        const acc y = widen(row_of<elem>(v, bi, h / n.group, first + j)[c]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) if (first + j <= base + r && base + r - offset >= 0) x[r] += p[j * ROWS + r] * y;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) part[(turn * ROWS + r) * 64 + column] = x[r];
    __syncthreads();
    for (int r = turn; r < ROWS; r += TURNS) {
      const int own = base + r - offset;
      acc sum = 0;
      for (int t = 0; t < TURNS; t++) sum += part[(t * ROWS + r) * 64 + column];
      if (c < c1 && own >= 0 && own < n.nq) row_of<elem>(out, bi, h, own)[c] = narrow(gain[r] == 0 ? (acc)0 : sum * gain[r]);
    }
    __syncthreads();
  }
}
