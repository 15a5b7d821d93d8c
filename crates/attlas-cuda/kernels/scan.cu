// Linear attention with positive features given by their logarithms, token by token: the plain form of the family and
// the whole of its decoding. A state holds, for each of m features, the largest logarithm seen (the shift), the sum of
// features relative to it, and the sum of features times values: [m] [m] [m][dv] in the type of sums.

// Logarithms of features of single coordinates of root · x. map: 0 elu + 1, 1 relu + eps, 2 softmax over the coordinates
// of queries and exponentials of keys, 3 square. One warp a row; out: [batch][heads][n][d].
extern "C" __global__ void log_features(View x, acc* out, int n, int d, int heads, int map, int of_queries, acc root, acc eps) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
  if (row >= n) return;
  const elem* from = row_of<elem>(x, b, h, row);
  acc* to = out + (((i64)b * heads + h) * n + row) * d;
  acc total = 0;
  if (map == 2 && of_queries) {
    acc m = NEG_INF, s = 0;
    for (int c = lane; c < d; c += 32) m = larger(m, root * widen(from[c]));
    m = warp_max(m);
    for (int c = lane; c < d; c += 32) s += exp_of(root * widen(from[c]) - m);
    total = m + log_of(warp_sum(s));
  }
  for (int c = lane; c < d; c += 32) {
    const acc y = root * widen(from[c]);
    acc f = y;
    if (map == 0) f = y > 0 ? log_of(1 + y) : y;
    else if (map == 1) f = y != y ? y : log_of((y > 0 ? y : (acc)0) + eps);
    else if (map == 2) f = y - total;
    else f = 2 * log_of(y < 0 ? -y : y);
    to[c] = f;
  }
}

extern "C" __global__ void clear_state(acc* state, int m, int dv) {
  acc* own = state + (i64)blockIdx.x * m * (dv + 2);
  for (int i = threadIdx.x; i < m * (dv + 2); i += blockDim.x) own[i] = i < m ? (acc)NEG_INF : (acc)0;
}

// One row of queries against a state. All threads of the block; `w` has room for m numbers, `red` for 33.
DEV void read_state(const acc* state, const acc* b, View out, int bi, int h, int row, acc* lse, int m, int dv, acc eps, acc* w, acc* red) {
  const acc *shift = state, *z = state + m, *s = state + 2 * m;
  const int tid = threadIdx.x, warps = blockDim.x >> 5;
  acc t = NEG_INF;
  for (int l = tid; l < m; l += blockDim.x) t = larger(t, b[l] + shift[l]);
  t = warp_max(t);
  __syncthreads();
  if ((tid & 31) == 0) red[tid >> 5] = t;
  __syncthreads();
  t = red[0];
  for (int i = 1; i < warps; i++) t = larger(t, red[i]);
  const acc base = t == NEG_INF ? (acc)0 : t;
  acc den = 0;
  for (int l = tid; l < m; l += blockDim.x) { w[l] = exp_of(b[l] + shift[l] - base); den += w[l] * z[l]; }
  den = warp_sum(den);
  __syncthreads();
  if ((tid & 31) == 0) red[tid >> 5] = den;
  __syncthreads();
  den = red[0];
  for (int i = 1; i < warps; i++) den += red[i];
  const acc none = NEG_INF;
  acc now = t == none || den == 0 ? none : t + log_of(den), share = 1;
  if (eps > 0 && now != none) { acc gain; const acc alone = now; join(log_of(eps), alone, gain, share, now); }
  for (int c = tid; c < dv; c += blockDim.x) {
    acc x = 0;
    for (int l = 0; l < m; l++) x += w[l] * s[(i64)l * dv + c];
    row_of<elem>(out, bi, h, row)[c] = narrow(now == none ? (acc)0 : share * x / den);
  }
  if (lse && tid == 0) *lse = now;
  __syncthreads();
}

// Adds one token to a state. `f` and `e` have room for m numbers each.
DEV void absorb(acc* state, const acc* a, const elem* value, int m, int dv, acc* f, acc* e) {
  acc *shift = state, *z = state + m, *s = state + 2 * m;
  for (int l = threadIdx.x; l < m; l += blockDim.x) {
    const acc old = shift[l], now = larger(old, a[l]);
    f[l] = now == NEG_INF ? (acc)1 : exp_of(old - now); e[l] = now == NEG_INF ? (acc)0 : exp_of(a[l] - now);
    shift[l] = now; z[l] = z[l] * f[l] + e[l];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m * dv; i += blockDim.x) { const int l = i / dv; s[i] = s[i] * f[l] + e[l] * widen(value[i % dv]); }
  __syncthreads();
}

// One block a key head: absorbs `nk` tokens and, with a causal mask, answers the queries that stand at each of them.
// Rows before the first token are zeros.
extern "C" __global__ void __launch_bounds__(256) scan_tokens(acc* state, const acc* a, View v, const acc* b, View out, acc* lse, Sizes n, int m, int causal, acc eps) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc *f = (acc*)raw, *e = f + m, *red = e + m;
  const int hk = blockIdx.x, bi = blockIdx.y, kv = gridDim.x;
  acc* own = state + (i64)(bi * kv + hk) * m * (n.dv + 2);
  const acc* keys = a + (i64)(bi * kv + hk) * n.nk * m;
  if (causal)
    for (int g = 0; g < n.group; g++) {
      const int h = hk * n.group + g;
      for (int i = threadIdx.x; i < max(0, n.nq - n.nk) * n.dv; i += blockDim.x) row_of<elem>(out, bi, h, i / n.dv)[i % n.dv] = narrow(0);
      if (lse) for (int i = threadIdx.x; i < n.nq - n.nk; i += blockDim.x) lse[((i64)bi * n.heads + h) * n.nq + i] = NEG_INF;
    }
  for (int j = 0; j < n.nk; j++) {
    absorb(own, keys + (i64)j * m, row_of<elem>(v, bi, hk, j), m, n.dv, f, e);
    const int row = j - (n.nk - n.nq);
    if (causal && row >= 0)
      for (int g = 0; g < n.group; g++) {
        const int h = hk * n.group + g;
        const i64 at = ((i64)bi * n.heads + h) * n.nq + row;
        read_state(own, b + at * m, out, bi, h, row, lse ? lse + at : 0, m, n.dv, eps, f, red);
      }
  }
}

// Every query against the state of all keys; one block a row.
extern "C" __global__ void __launch_bounds__(128) read_rows(const acc* state, const acc* b, View out, acc* lse, Sizes n, int m, acc eps) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc *w = (acc*)raw, *red = w + m;
  const int row = blockIdx.x, h = blockIdx.y, bi = blockIdx.z;
  const i64 at = ((i64)bi * n.heads + h) * n.nq + row;
  read_state(state + (i64)(bi * (n.heads / n.group) + h / n.group) * m * (n.dv + 2), b + at * m, out, bi, h, row, lse ? lse + at : 0, m, n.dv, eps, w, red);
}
