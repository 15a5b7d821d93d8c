// Logarithms of features of single coordinates, and the decoding of linear attention with positive features: a state (see
// positive.cu) takes tokens one by one.

// Logarithms of features of single coordinates of root · x. map: 0 elu + 1, 1 relu + eps, 2 softmax over the coordinates
// of queries and exponentials of keys, 3 square. One warp per row; out: [batch][heads][n][d].
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

// Adds one token to a state. `f` and `e` have m numbers each.
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

// One block per key head: adds `n` tokens one by one.
extern "C" __global__ void __launch_bounds__(256) absorb_tokens(acc* state, const acc* a, View v, int n, int m, int dv) {
  extern __shared__ __align__(16) unsigned char raw[];
  acc *f = (acc*)raw, *e = f + m;
  const int hk = blockIdx.x, b = blockIdx.y, kv = gridDim.x;
  acc* own = state + (i64)(b * kv + hk) * m * (dv + 2);
  const acc* keys = a + (i64)(b * kv + hk) * n * m;
  for (int j = 0; j < n; j++) absorb(own, keys + (i64)j * m, row_of<elem>(v, b, hk, j), m, dv, f, e);
}
