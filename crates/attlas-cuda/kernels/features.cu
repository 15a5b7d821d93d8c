// Logarithms of positive features. Those of random features are projections on directions, a block of 16 rows at a time.
#define BLOCK_ROWS 16

// Projections in single precision are summed in double: the error of a logarithm is the relative error of its feature.
#if ELEM >= 2
typedef double sum;
#else
typedef float sum;
#endif
DEV float root_of(float x) { return sqrtf(x); }
DEV double root_of(double x) { return sqrt(x); }

// Clamps to the largest number; NaN stays.
DEV acc saturated(sum x) {
#if ELEM == 3
  const double most = 1.7976931348623157e308;
#else
  const float most = 3.4028234663852886e38f;
#endif
  return x > (sum)most ? (acc)most : (acc)x;
}

// out[l] = constants[l] ± ⟨directions of l, x⟩ − ‖N x‖²/2, where `norms` further columns after the directions give N x;
// without them, N is √norm_scale times the identity. relu: the logarithm of the positive part + eps instead. map:
// [batch · key heads or 1][d][directions + norms], constants: [..][directions], out: [batch][heads][n][features].
// If `opposite` is set, features of the opposite directions follow those of all directions; `group` heads share a map.
// `fitted`, if given, has for each map a factor of the projections, one of the squared norms of the directions
// (`lengths`), and a constant.
extern "C" __global__ void __launch_bounds__(256) project_features(View x, const sum* __restrict__ map, const sum* __restrict__ constants, const sum* __restrict__ fitted, const sum* __restrict__ lengths, acc* __restrict__ out, int n, int d, int heads, int group, int directions, int norms, int opposite, int relu, sum norm_scale, sum eps) {
  extern __shared__ __align__(16) unsigned char raw[];
  sum *rows = (sum*)raw, *squares = rows + d * BLOCK_ROWS, *half = squares + 256 * (norms ? BLOCK_ROWS : 0);
  const int tid = threadIdx.x, h = blockIdx.y, b = blockIdx.z, first = blockIdx.x * BLOCK_ROWS, width = directions + norms;
  const i64 own = (i64)b * (heads / group) + h / group;
  const sum* w = map + own * d * width;
  const int features = opposite ? 2 * directions : directions;
  for (int e = tid; e < d * BLOCK_ROWS; e += 256) {
    const int r = e / d, c = e % d;
    rows[c * BLOCK_ROWS + r] = first + r < n ? (sum)widen(row_of<elem>(x, b, h, first + r)[c]) : (sum)0;
  }
  __syncthreads();
  // Half the squared norms of the rows.
  sum part[BLOCK_ROWS] = {};
  if (norms) {
    for (int l = directions + tid; l < width; l += 256) {
      sum p[BLOCK_ROWS] = {};
      for (int c = 0; c < d; c++) {
        const sum y = w[(i64)c * width + l];
#pragma unroll
        for (int r = 0; r < BLOCK_ROWS; r++) p[r] += y * rows[c * BLOCK_ROWS + r];
      }
#pragma unroll
      for (int r = 0; r < BLOCK_ROWS; r++) part[r] += p[r] * p[r];
    }
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r++) squares[tid * BLOCK_ROWS + r] = part[r];
    __syncthreads();
  }
  if (tid < BLOCK_ROWS) {
    sum s = 0;
    if (norms) for (int t = 0; t < 256; t++) s += squares[t * BLOCK_ROWS + tid];
    else { for (int c = 0; c < d; c++) s += rows[c * BLOCK_ROWS + tid] * rows[c * BLOCK_ROWS + tid]; s *= norm_scale; }
    half[tid] = (sum)0.5 * s;
  }
  __syncthreads();
  for (int l = tid; l < directions; l += 256) {
    sum p[BLOCK_ROWS] = {};
    for (int c = 0; c < d; c++) {
      const sum y = w[(i64)c * width + l];
#pragma unroll
      for (int r = 0; r < BLOCK_ROWS; r++) p[r] += y * rows[c * BLOCK_ROWS + r];
    }
    sum constant = constants[own * directions + l], factor = 1;
    if (fitted) { factor = fitted[3 * own]; constant += fitted[3 * own + 1] * lengths[own * directions + l] + fitted[3 * own + 2]; }
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r++) {
      p[r] *= factor;
      if (first + r >= n) continue;
      acc* to = out + (((i64)b * heads + h) * n + first + r) * features + l;
      if (relu) {
        const sum y = p[r] < 0 ? eps : p[r] + eps;
        *to = saturated(log_of(y));
        continue;
      }
      const sum common = constant - half[r];
      // A row whose norm overflows has no features.
      const bool zero = common == (sum)NEG_INF;
      *to = zero && p[r] == p[r] ? (acc)NEG_INF : saturated(common + p[r]);
      if (opposite) to[directions] = zero && p[r] == p[r] ? (acc)NEG_INF : saturated(common - p[r]);
    }
  }
}

// Powers of positive and negative parts: power · (ln |x| − ln divisor) of the coordinates of one sign, −∞ for the others;
// positive parts first, or negative ones if `swap` is set. powers, logs: [key heads or 1][d]; maps is their number.
extern "C" __global__ void pola_features(View x, const sum* __restrict__ powers, const sum* __restrict__ logs, acc* __restrict__ out, int n, int d, int heads, int group, int maps, int swap) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
  if (row >= n) return;
  const elem* from = row_of<elem>(x, b, h, row);
  const int own = h / group % maps * d;
  acc* to = out + (((i64)b * heads + h) * n + row) * 2 * d;
  for (int c = lane; c < d; c += 32) {
    const acc y = widen(from[c]);
    const acc f = (acc)powers[own + c] * (log_of(y < 0 ? -y : y) - (acc)logs[own + c]);
    to[swap ? d + c : c] = y <= 0 ? (acc)NEG_INF : f;
    to[swap ? c : d + c] = y >= 0 ? (acc)NEG_INF : f;
  }
}

// Fits the exponent of features to the queries and keys of a group: fitted[0] = √(1 − 4A), fitted[1] = A and fitted[2]
// = d/4 · ln(1 − 4A), for the A that is best at the mean of ‖x + y‖² over all pairs. One block per key head.
extern "C" __global__ void __launch_bounds__(1024) fit_exponent(View q, View k, sum* __restrict__ fitted, Sizes n, double scale) {
  __shared__ double part[32][4], total[2];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kv = gridDim.x, hk = blockIdx.x, b = blockIdx.y;
  if (threadIdx.x < 2) total[threadIdx.x] = 0;
  for (int c0 = 0; c0 < n.d; c0 += 32) {
    // Lane: a coordinate; sums and squares of queries, then of keys.
    double s[4] = {};
    const bool ok = c0 + lane < n.d;
    for (int h = hk * n.group; h < (hk + 1) * n.group; h++)
      for (int i = warp; i < n.nq; i += 32) { const double x = ok ? (double)widen(row_of<elem>(q, b, h, i)[c0 + lane]) : 0.0; s[0] += x; s[1] += x * x; }
    for (int i = warp; i < n.nk; i += 32) { const double x = ok ? (double)widen(row_of<elem>(k, b, hk, i)[c0 + lane]) : 0.0; s[2] += x; s[3] += x * x; }
    // One coordinate after the other, which fixes the order of the warps' sums.
    for (int c = 0; c < 32; c++) {
      if (lane == c) { part[warp][0] = s[0]; part[warp][1] = s[1]; part[warp][2] = s[2]; part[warp][3] = s[3]; }
      __syncthreads();
      if (threadIdx.x == 0) {
        double t[4] = {};
        for (int w = 0; w < 32; w++) for (int e = 0; e < 4; e++) t[e] += part[w][e];
        const double nq = max(1, n.nq * n.group), nk = max(1, n.nk);
        total[0] += t[1] / nq + t[3] / nk; total[1] += t[0] / nq * (t[2] / nk);
      }
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) {
    const double d = n.d, mean = scale * (total[0] + 2 * total[1]), z = mean != mean ? mean : fmin(fmax(mean, 0.0), 1e120);
    const double s = d + 2 * z, root = sqrt(s * s + 8 * d * z), a = -(2 * z + (8 * d * z + 4 * z * (d + z)) / (root + d)) / (16 * d);
    sum* to = fitted + 3 * ((i64)b * kv + hk);
    to[0] = (sum)sqrt(1 - 4 * a); to[1] = (sum)a; to[2] = (sum)(0.25 * d * log1p(-4 * a));
  }
}
