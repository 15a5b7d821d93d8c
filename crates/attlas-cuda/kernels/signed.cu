// Linear attention with features of either sign: values f with one logarithmic scale e per token, φ = eᵉ f. A state of
// m features: the largest scale of a key, and relative to it the sums of features, of their sizes, and of features
// times values: [1] [m] [m] [m][dv] in the type of sums. Rows read the keys before their segment from such sums and
// those inside one by one.
#define SEGMENT 64
#define ROWS 8
#define TURNS (32 * ROWS / 64)
#define MAPPED 4

#if ELEM >= 2
typedef double sum;
#else
typedef float sum;
#endif
DEV float root_of(float x) { return sqrtf(x); }
DEV double root_of(double x) { return sqrt(x); }
DEV void phase(float x, float& s, float& c) { s = 0; c = 1; if (!(x == NEG_INF || x == -NEG_INF)) { s = sinf(x); c = cosf(x); } }
DEV void phase(double x, double& s, double& c) { s = 0; c = 1; if (!(x == NEG_INF || x == -NEG_INF)) { s = sin(x); c = cos(x); } }
DEV float sign_of(float x) { return x != x ? x : __float_as_uint(x) >> 31 ? -1.f : 1.f; }
DEV double sign_of(double x) { return x != x ? x : (u64)__double_as_longlong(x) >> 63 ? -1.0 : 1.0; }
#if ELEM >= 2
#define BOUND 1e300
#else
#define BOUND 1e37f
#endif
DEV sum bounded(sum x) { return x < -BOUND ? (sum)-BOUND : x > BOUND ? (sum)BOUND : x; }
DEV acc saturated(sum x) {
#if ELEM == 3
  const double most = 1.7976931348623157e308;
#else
  const float most = 3.4028234663852886e38f;
#endif
  return x > (sum)most ? (acc)most : x < -(sum)most ? (acc)-most : (acc)x;
}

// Features of some rows; map: [batch · key heads][d][bases + weights], the bases first. kind: 0 cosines and sines, 1 the mixture
// by angle, 2 by distance. out: [batch][heads][n][m], scales: [..][n]. Dynamic shared memory: MAPPED · (d + bases + weights).
extern "C" __global__ void __launch_bounds__(32 * MAPPED) signed_features(View x, const sum* __restrict__ map, acc* __restrict__ out, acc* __restrict__ scales, int n, int d, int heads, int group, int bases, int weights, int m, int kind, int of_keys, sum scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int width = bases + weights, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z, row = blockIdx.x * MAPPED + warp;
  sum *own = (sum*)raw + warp * (d + width), *p = own + d;
  const sum* w = map + ((i64)b * (heads / group) + h / group) * d * width;
  if (row >= n) return;
  const elem* from = row_of<elem>(x, b, h, row);
  sum norm = 0;
  for (int c = lane; c < d; c += 32) { const sum y = widen(from[c]); own[c] = y; norm += y * y; }
  norm = scale * warp_sum(norm);
  __syncwarp();
  sum top = 0;
  for (int l = lane; l < width; l += 32) {
    sum y = 0;
    for (int c = 0; c < d; c++) y += own[c] * w[(i64)c * width + l];
    p[l] = y;
    if (l < bases) top = larger(top, y < 0 ? -y : y);
  }
  top = warp_max(top);
  __syncwarp();
  const i64 at = ((i64)b * heads + h) * n + row;
  acc* to = out + at * m;
  const sum one = 1, half = bounded(norm) * (sum)0.5;
  if (kind == 0) {
    const sum factor = one / root_of((sum)bases);
    for (int l = lane; l < bases; l += 32) { sum s, c; phase(p[l], s, c); to[l] = (acc)(factor * c); to[bases + l] = (acc)(factor * s); }
    if (lane == 0) scales[at] = saturated((sum)0.5 * norm);
    return;
  }
  const sum cut = top > BOUND ? (sum)BOUND : top, shift = larger(half, cut - half);
  const sum hyp = one / root_of((sum)(2 * bases)), trig = exp_of(half - shift) / root_of((sum)bases), minus = of_keys ? -one : one;
  for (int i = lane; i < m; i += 32) {
    // Block i / (2 bases) of features is the hyperbolic or the trigonometric one times a weight.
    const int block = i / (2 * bases), l = i % (2 * bases), base = l < bases ? l : l - bases;
    bool is_hyp; sum factor;
    if (kind == 1) {
      const sum size = one / root_of((sum)(2 * weights));
      if (block < 2) { is_hyp = block == 0; factor = root_of((sum)0.5); }
      else if (block < 2 + weights) { is_hyp = false; factor = size * sign_of(p[bases + block - 2]); }
      else { is_hyp = true; factor = minus * size * sign_of(p[bases + block - 2 - weights]); }
    } else {
      const sum size = one / root_of((sum)weights);
      if (block == 0) { is_hyp = true; factor = one; }
      else {
        // Of each weight: cosine with one block and the other, then sine.
        const int t = (block - 1) / 4, e = (block - 1) % 4;
        sum s, c; phase(p[bases + t], s, c);
        is_hyp = e & 1; factor = size * (e < 2 ? c : s) * (is_hyp ? minus : one);
      }
    }
    sum y;
    if (is_hyp) { const sum q = bounded(p[base]); y = hyp * exp_of((l < bases ? q : -q) - half - shift); }
    else { sum s, c; phase(p[base], s, c); y = trig * (l < bases ? c : s); }
    to[i] = (acc)(factor * y);
  }
  if (lane == 0) scales[at] = saturated(shift);
}

// A scale relative to a reference; 0 if there is none.
DEV acc weight_of(acc scale, acc reference) { return exp_of(scale - (reference == (acc)NEG_INF ? (acc)0 : reference)); }

// The sums of one segment for 64 features and 64 columns of the values. grid: segments, tiles of features times tiles of
// columns, batch · key heads.
extern "C" __global__ void __launch_bounds__(256) segment_sums(const acc* __restrict__ a, const acc* __restrict__ scales, View v, acc* __restrict__ states, Sizes n, int kv, int m) {
  __shared__ acc fs[16][64], vs[16][64];
  const int tid = threadIdx.x, tiles = (m + 63) / 64, l0 = blockIdx.y % tiles * 64, c0 = blockIdx.y / tiles * 64;
  const int first = blockIdx.x * SEGMENT, last = min(n.nk, first + SEGMENT);
  const acc *own = a + (i64)blockIdx.z * n.nk * m, *e = scales + (i64)blockIdx.z * n.nk;
  acc* state = states + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * ((i64)m * (n.dv + 2) + 1);
  acc top = NEG_INF;
  for (int j = first; j < last; j++) if (e[j] > top) top = e[j];
  acc s[4][4] = {}, z = 0, size = 0;
  const int fl = tid >> 4, fc = tid & 15;
  for (int j0 = first; j0 < last; j0 += 16) {
    for (int i = tid; i < 16 * 64; i += 256) {
      const int j = j0 + i / 64, x = i % 64;
      fs[i / 64][x] = j < last && l0 + x < m ? own[(i64)j * m + l0 + x] * weight_of(e[j], top) : (acc)0;
      vs[i / 64][x] = j < last && c0 + x < n.dv ? (acc)widen(row_of<elem>(v, blockIdx.z / kv, blockIdx.z % kv, j)[c0 + x]) : (acc)0;
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < 16; t++)
#pragma unroll
      for (int x = 0; x < 4; x++)
#pragma unroll
        for (int y = 0; y < 4; y++) s[x][y] += fs[t][fl * 4 + x] * vs[t][fc + y * 16];
    if (tid < 64) for (int t = 0; t < 16; t++) { const acc f = fs[t][tid]; z += f; size += f < 0 ? -f : f; }
    __syncthreads();
  }
#pragma unroll
  for (int x = 0; x < 4; x++)
#pragma unroll
    for (int y = 0; y < 4; y++) {
      const int l = l0 + fl * 4 + x, c = c0 + fc + y * 16;
      if (l < m && c < n.dv) state[1 + 2 * m + (i64)l * n.dv + c] = s[x][y];
    }
  if (c0 == 0 && tid < 64 && l0 + tid < m) { state[1 + l0 + tid] = z; state[1 + m + l0 + tid] = size; }
  if (blockIdx.y == 0 && tid == 0) state[0] = top;
}

// In order over segments: a segment gets the sums of those before it; with `whole`, the first gets the sums of all. The
// references stay until `prefix_references`. grid: numbers of a state / 128, batch · key heads.
extern "C" __global__ void __launch_bounds__(128) prefix_sums(acc* __restrict__ states, int segments, i64 size, int whole) {
  const i64 i = (i64)blockIdx.x * 128 + threadIdx.x + 1;
  if (i >= size) return;
  acc* own = states + (i64)blockIdx.y * segments * size;
  acc reference = NEG_INF, sum = 0;
  for (int s = 0; s < segments; s++) {
    const acc now = own[s * size], x = own[s * size + i], both = now > reference ? now : reference;
    if (!whole) own[s * size + i] = sum;
    sum = (reference == both ? sum : sum == 0 ? sum : sum * exp_of(reference - both)) + (now == both ? x : x == 0 ? x : x * exp_of(now - both));
    reference = both;
  }
  if (whole) own[i] = sum;
}
extern "C" __global__ void prefix_references(acc* __restrict__ states, int segments, i64 size, int whole) {
  acc* own = states + (i64)blockIdx.x * segments * size;
  acc reference = NEG_INF;
  for (int s = 0; s < segments; s++) { const acc now = own[s * size]; if (!whole) own[s * size] = reference; if (now > reference) reference = now; }
  if (whole) own[0] = reference;
}

// Eight rows of one head in one segment, a warp each. policy, for a row whose denominator is at most `least` times its
// value without cancellation: 0 divide by it nevertheless, 1 divide by that share instead, 2 write zeros. a: features
// of keys, b: of queries, e and t: their scales. Dynamic shared memory: ROWS · (m + SEGMENT + 3 + 64 TURNS) numbers.
extern "C" __global__ void __launch_bounds__(32 * ROWS) answer_rows(const acc* __restrict__ states, const acc* __restrict__ a, const acc* __restrict__ e, const acc* __restrict__ b, const acc* __restrict__ t, View v, View out, acc* lse, Sizes n, int kv, int segments, int m, int causal, int policy, acc least) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc *w = (acc*)raw, *p = w + ROWS * m, *den = p + ROWS * SEGMENT, *mend = den + ROWS, *keep = mend + ROWS, *part = keep + ROWS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, bi = blockIdx.z, h = blockIdx.y, hk = bi * kv + h / n.group;
  const int offset = causal ? n.nk - n.nq : 0, base = (offset >= 0 ? offset / ROWS : -((-offset + ROWS - 1) / ROWS)) * ROWS + blockIdx.x * ROWS;
  const int place = base + warp, row = place - offset;
  const bool ok = row >= 0 && row < n.nq;
  const i64 at = ((i64)bi * n.heads + h) * n.nq + row;
  const int slot = causal && base > 0 ? base / SEGMENT : 0, first = slot * SEGMENT;
  const acc* state = states + ((i64)hk * segments + slot) * ((i64)m * (n.dv + 2) + 1);
  const acc *keys = a + (i64)hk * n.nk * m, *scales = e + (i64)hk * n.nk, none = NEG_INF;
  const int inside = causal && ok ? max(0, place + 1 - first) : 0;
  const bool sees = ok && place >= 0 && n.nk > 0;
  acc share = 0;      // of the sums before the segment
  if (sees) {
    acc reference = state[0];
    for (int j = 0; j < inside; j++) { const acc x = scales[first + j]; if (x > reference) reference = x; }
    share = state[0] == reference ? (acc)1 : state[0] == none ? (acc)0 : exp_of(state[0] - reference);
    acc value = 0, size = 0;
    for (int l = lane; l < m; l += 32) {
      const acc x = b[at * m + l], y = x < 0 ? -x : x;
      w[l * ROWS + warp] = x; value += x * state[1 + l]; size += y * state[1 + m + l];
    }
    value *= share; size *= share;
    for (int j = 0; j < inside; j++) {
      const acc f = weight_of(scales[first + j], reference);
      acc s = 0, u = 0;
      for (int l = lane; l < m; l += 32) { const acc x = b[at * m + l] * (keys[(i64)(first + j) * m + l] * f); s += x; u += x < 0 ? -x : x; }
      value += s; size += u;
      s = warp_sum(s);
      if (lane == 0) p[j * ROWS + warp] = s;
    }
    value = warp_sum(value); size = warp_sum(size);
    const acc floor = least * size;
    const bool unstable = value <= floor;
    const acc by = unstable && policy == 1 ? floor : value;
    const bool empty = by == 0 || (unstable && policy == 2);
    if (lane == 0) {
      den[warp] = empty ? (acc)0 : by; mend[warp] = unstable;
      if (lse) lse[at] = empty || by < 0 ? none : t[at] + reference + log_of(by);
    }
  } else {
    for (int l = lane; l < m; l += 32) w[l * ROWS + warp] = 0;
    if (lane == 0) { den[warp] = 0; mend[warp] = 0; if (ok && lse) lse[at] = none; }
  }
  if (lane == 0) keep[warp] = share;
  __syncthreads();
  const int most = causal ? max(0, min(n.nk, base + ROWS) - first) : 0, turn = threadIdx.x >> 6, column = threadIdx.x & 63;
  // Rows with a non-finite number, if the policy writes zeros: found before anything is written.
  __shared__ int lost[ROWS];
  if (threadIdx.x < ROWS) lost[threadIdx.x] = 0;
  bool any = false;
  for (int r = 0; r < ROWS; r++) any |= mend[r] != 0;
  for (int pass = any ? 0 : 1; pass < 2; pass++) {
    for (int start = 0; start < n.dv; start += 64) {
      const int c = start + column;
      acc x[ROWS] = {};
      if (c < n.dv) {
        if (base + ROWS > 0)
          for (int l = turn; l < m; l += TURNS) {
            const acc s = state[1 + 2 * (i64)m + (i64)l * n.dv + c];
#pragma unroll
            for (int r = 0; r < ROWS; r++) x[r] += w[l * ROWS + r] * s;
          }
#pragma unroll
        for (int r = 0; r < ROWS; r++) x[r] = keep[r] == 0 ? (acc)0 : x[r] * keep[r];
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
        acc y = 0;
        for (int i = 0; i < TURNS; i++) y += part[(i * ROWS + r) * 64 + column];
        y = den[r] == 0 ? (acc)0 : y / den[r];
        const bool finite = y - y == 0;
        if (pass == 0) { if (c < n.dv && !finite && mend[r] != 0) lost[r] = 1; }
        else if (c < n.dv && own >= 0 && own < n.nq) row_of<elem>(out, bi, h, own)[c] = narrow(lost[r] ? (acc)0 : y);
      }
      __syncthreads();
    }
  }
}

extern "C" __global__ void clear_state(acc* state, i64 size) {
  acc* own = state + blockIdx.x * size;
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) own[i] = i == 0 ? (acc)NEG_INF : (acc)0;
}

// One block per key head: adds `n` tokens one by one.
extern "C" __global__ void __launch_bounds__(256) absorb_tokens(acc* state, const acc* a, const acc* scales, View v, int n, int m, int dv) {
  const int hk = blockIdx.x, b = blockIdx.y, kv = gridDim.x;
  acc* own = state + (i64)(b * kv + hk) * ((i64)m * (dv + 2) + 1);
  for (int j = 0; j < n; j++) {
    const i64 at = (i64)(b * kv + hk) * n + j;
    const acc old = own[0], e = scales[at], now = e > old ? e : old, fade = old == now ? (acc)1 : exp_of(old - now), gain = weight_of(e, now);
    __syncthreads();
    const elem* value = row_of<elem>(v, b, hk, j);
    for (int i = threadIdx.x; i < m * (dv + 2); i += blockDim.x) {
      const int part = i / m;
      acc x;
      if (part == 0) x = a[at * m + i] * gain;
      else if (part == 1) { x = a[at * m + i - m] * gain; x = x < 0 ? -x : x; }
      else { const int l = (i - 2 * m) / dv; x = a[at * m + l] * gain * widen(value[(i - 2 * m) % dv]); }
      own[1 + i] = own[1 + i] * fade + x;
    }
    if (threadIdx.x == 0) own[0] = now;
    __syncthreads();
  }
}
