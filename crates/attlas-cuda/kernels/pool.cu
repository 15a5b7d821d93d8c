// Representative rows: means of segments of tokens, attention to them with a bias, and the small matrices between
// averaged queries and averaged keys.

// n tokens in `count` segments: the first count − n % count have n / count tokens, the others one more.
DEV int segment_start(int n, int count, int s) { const int small = n / count, large = n % count; return s * small + max(0, s - (count - large)); }

// Means of segments, summed in double precision. `group` heads of the result share a head of x. grid: count, heads,
// batch.
extern "C" __global__ void __launch_bounds__(256) pool_rows(View x, View out, int n, int count, int d, int group) {
  __shared__ double part[8][32];
  const int s = blockIdx.x, h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = segment_start(n, count, s), last = segment_start(n, count, s + 1);
  for (int c0 = 0; c0 < d; c0 += 32) {
    double sum = 0;
    if (c0 + lane < d) for (int i = first + warp; i < last; i += 8) sum += (double)widen(row_of<elem>(x, b, h / group, i)[c0 + lane]);
    part[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c0 + lane < d) {
      for (int w = 1; w < 8; w++) sum += part[w][lane];
      row_of<elem>(out, b, h, s)[c0 + lane] = narrow((acc)(sum * (1.0 / (last - first))));
    }
    __syncthreads();
  }
}

// Every row against all nk representatives, one warp per row; the first `split` have the bias `low`, the others `high`.
template <int HOW> DEV void weighted(const View& q, const View& k, const View& v, const View& out, acc* lse, const Sizes& n, acc scale, int split, acc low_bias, acc high_bias) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z, hk = h / n.group, row = blockIdx.x * (blockDim.x >> 5) + warp;
  if (row >= n.nq) return;
  acc* own = (acc*)raw + warp * n.d;
  const elem* query = row_of<elem>(q, b, h, row);
  for (int c = lane; c < n.d; c += 32) own[c] = widen(query[c]);
  __syncwarp();
  for (int c0 = 0; c0 < n.dv; c0 += COLUMNS * 32) {
    Running s; start(s);
    for (int j0 = 0; j0 < n.nk; j0 += 32) {
      const int j = j0 + lane; acc logit = NEG_INF; const elem* value = 0;
      if (j < n.nk) {
        const elem* key = row_of<elem>(k, b, hk, j); acc x = 0;
        for (int c = 0; c < n.d; c++) x += own[c] * widen(key[c]);
        logit = x * scale + (j < split ? low_bias : high_bias); value = row_of<elem>(v, b, hk, j);
      }
      add(s, logit, value, c0, n.dv, lane);
    }
    put<HOW>(s, out, lse, ((i64)b * n.heads + h) * n.nq + row, b, h, row, c0, n.dv, lane);
  }
}
extern "C" __global__ void weighted_rows(View q, View k, View v, View out, acc* lse, Sizes n, acc scale, int split, acc low_bias, acc high_bias) {
  weighted<DIRECT>(q, k, v, out, lse, n, scale, split, low_bias, high_bias);
}
extern "C" __global__ void weighted_rows_join(View q, View k, View v, View out, acc* lse, Sizes n, acc scale, int split, acc low_bias, acc high_bias) {
  weighted<JOINED>(q, k, v, out, lse, n, scale, split, low_bias, high_bias);
}

extern "C" __global__ void shift_lse(acc* lse, i64 rows, acc by) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows) lse[i] += by;
}

// The softmax of averaged queries against averaged keys, in double precision: [batch · heads][mq][mk]. One warp per
// row.
extern "C" __global__ void landmark_weights(View q, View k, double* __restrict__ weights, int heads, int mq, int mk, int d, double scale, int split, double low_bias, double high_bias) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
  if (row >= mq) return;
  const elem* query = row_of<elem>(q, b, h, row);
  double* to = weights + (((i64)b * heads + h) * mq + row) * mk;
  double m = NEG_INF, l = 0;
  for (int j = lane; j < mk; j += 32) {
    const elem* key = row_of<elem>(k, b, h, j);
    double x = 0;
    for (int c = 0; c < d; c++) x += scale * (double)widen(query[c]) * (double)widen(key[c]);
    x += j < split ? low_bias : high_bias;
    to[j] = x; m = larger(m, x);
  }
  m = warp_max(m);
  for (int j = lane; j < mk; j += 32) { const double x = exp(to[j] - m); to[j] = x; l += x; }
  l = warp_sum(l);
  for (int j = lane; j < mk; j += 32) to[j] /= l;
}

// c = a · b of m × m matrices, then c = factor · (diagonal · I − c) if `from` is set. All threads of the block.
DEV void square_product(const double* a, const double* b, double* c, int m, bool from, double diagonal, double factor) {
  for (int i = threadIdx.x; i < m * m; i += blockDim.x) {
    const int r = i / m, x = i % m;
    double s = 0;
    for (int e = 0; e < m; e++) s += a[(i64)r * m + e] * b[(i64)e * m + x];
    c[i] = factor * (from ? (r == x ? diagonal : 0.0) - s : s);
  }
  __syncthreads();
}

// Steps towards the inverse of each of gridDim.x matrices of m rows, from its transpose over the product of its norms.
// kind: 0 third order by four products, 1 second order, 2 third order by three products, 3 seventh order. The result is
// in z; room: four more matrices for each.
extern "C" __global__ void __launch_bounds__(1024) invert(const double* __restrict__ matrices, double* __restrict__ inverses, double* __restrict__ room, int m, int kind, int steps) {
  __shared__ double norms[2];
  const i64 size = (i64)m * m;
  const double* c = matrices + blockIdx.x * size;
  double *z = inverses + blockIdx.x * size, *x = room + blockIdx.x * 4 * size, *y = x + size, *t = y + size, *next = t + size;
  for (int i = threadIdx.x; i < m; i += blockDim.x) {
    double column = 0, row = 0;
    for (int j = 0; j < m; j++) { column += fabs(c[(i64)j * m + i]); row += fabs(c[(i64)i * m + j]); }
    t[i] = column; next[i] = row;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    const double* all = threadIdx.x ? next : t;
    double most = 0;
    for (int i = 0; i < m; i++) most = larger(most, all[i]);
    norms[threadIdx.x] = most;
  }
  __syncthreads();
  const double bound = norms[0] * norms[1];
  for (int i = threadIdx.x; i < m * m; i += blockDim.x) z[i] = bound == 0 ? 0.0 : c[(i64)(i % m) * m + i / m] / bound;
  __syncthreads();
  for (int step = 0; step < steps && bound != 0; step++) {
    square_product(c, z, x, m, false, 0, 1);
    // y becomes the factor by which z is multiplied from the right.
    if (kind == 3) {
      for (int i = threadIdx.x; i < m * m; i += blockDim.x) x[i] = (i / m == i % m ? 1.0 : 0.0) - x[i];
      __syncthreads();
      square_product(x, x, y, m, false, 0, 1);
      square_product(y, y, t, m, false, 0, 1);
      for (int i = threadIdx.x; i < m * m; i += blockDim.x) { t[i] += x[i]; y[i] += x[i] + (i / m == i % m ? 1.0 : 0.0); }
      __syncthreads();
      square_product(t, y, next, m, false, 0, 1);
      for (int i = threadIdx.x; i < m; i += blockDim.x) next[(i64)i * m + i] += 1.0;
      __syncthreads();
      square_product(z, next, y, m, false, 0, 1);
    } else {
      const double first = kind == 0 ? 7 : kind == 1 ? 2 : 3;
      for (int i = threadIdx.x; i < m * m; i += blockDim.x) t[i] = (i / m == i % m ? first : 0.0) - x[i];
      __syncthreads();
      if (kind == 0) { square_product(x, t, next, m, true, 15, 1); square_product(x, next, t, m, true, 13, 1); }
      if (kind == 2) { square_product(x, t, next, m, true, 3, 1); for (int i = threadIdx.x; i < m * m; i += blockDim.x) t[i] = next[i]; __syncthreads(); }
      square_product(z, t, y, m, false, 0, kind == 0 ? 0.25 : 1.0);
    }
    for (int i = threadIdx.x; i < m * m; i += blockDim.x) z[i] = y[i];
    __syncthreads();
  }
}

// out = inverse · u, both of m rows, in elements. u: [batch · heads][m][dv] in the type of sums. grid: m, heads, batch.
extern "C" __global__ void apply_inverse(const double* __restrict__ inverses, const acc* __restrict__ u, View out, int heads, int m, int dv) {
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const i64 head = (i64)b * heads + h;
  for (int c = threadIdx.x; c < dv; c += blockDim.x) {
    double s = 0;
    for (int j = 0; j < m; j++) s += inverses[head * m * m + (i64)i * m + j] * (double)u[(head * m + j) * dv + c];
    row_of<elem>(out, b, h, i)[c] = narrow((acc)s);
  }
}
