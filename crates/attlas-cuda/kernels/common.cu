// Types and device functions of all kernels. No header is included: only NVRTC compiles these sources. ELEM names the
// element: 0 bf16, 1 f16, 2 f32, 3 f64. Sums are f32, and f64 for f64.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV static __device__ __forceinline__
#define FULL 0xffffffffu

#if ELEM == 0
typedef u16 elem;
typedef float acc;
#define MMA_TYPE "bf16"
DEV float widen(u16 x) { return __uint_as_float((u32)x << 16); }
DEV u16 narrow(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
// Two elements in a word, the first in the low half.
DEV u32 pack(float lo, float hi) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
DEV float low(u32 x) { return __uint_as_float(x << 16); }
DEV float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
#define EXPONENT 0x7f80u
#define ONES 0x3f803f80u
#elif ELEM == 1
typedef u16 elem;
typedef float acc;
#define MMA_TYPE "f16"
DEV float widen(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEV u16 narrow(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEV u32 pack(float lo, float hi) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
DEV float low(u32 x) { return widen((u16)x); }
DEV float high(u32 x) { return widen((u16)(x >> 16)); }
#define EXPONENT 0x7c00u
#define ONES 0x3c003c00u
#elif ELEM == 2
typedef float elem;
typedef float acc;
DEV float widen(float x) { return x; }
DEV float narrow(float x) { return x; }
#else
typedef double elem;
typedef double acc;
DEV double widen(double x) { return x; }
DEV double narrow(double x) { return x; }
#endif

#define NEG_INF (__int_as_float(0xff800000))
#define NOT_A_NUMBER (__int_as_float(0x7fffffff))
#define LN_2 0.6931471805599453

// A [batch, heads, rows, columns] tensor: its address and the elements between neighbours; columns are contiguous.
struct View {
  void* p;
  i64 batch, head, row;
};
template <class T> DEV T* row_of(const View& x, int b, int h, i64 r) { return (T*)x.p + b * x.batch + h * x.head + r * x.row; }

// Sizes of a problem; query head h reads key head h / group.
struct Sizes {
  int heads, group, nq, nk, d, dv;
};

// Rows [row, row_end) against keys [key, key_end); if `diagonal` is set, row i sees keys up to i + offset.
struct Tile {
  int row, row_end, key, key_end, offset;
};

DEV float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float exp_of(float x) { return expf(x); }
DEV double exp_of(double x) { return exp(x); }
DEV float log_of(float x) { return logf(x); }
DEV double log_of(double x) { return log(x); }
DEV float larger(float a, float b) { return a > b || a != a ? a : b; }
DEV double larger(double a, double b) { return a > b || a != a ? a : b; }
template <class T> DEV T warp_sum(T x) {
#pragma unroll
  for (int s = 16; s; s >>= 1) x += __shfl_xor_sync(FULL, x, s);
  return x;
}
template <class T> DEV T warp_max(T x) {
#pragma unroll
  for (int s = 16; s; s >>= 1) x = larger(x, __shfl_xor_sync(FULL, x, s));
  return x;
}

// Merges a normalised part of a row with the previous parts: output and natural log-sum-exp. Returns the weights of the
// old and the new part and the joint log-sum-exp.
template <class T> DEV void join(T before, T now, T& keep, T& add, T& both) {
  const T none = NEG_INF;
  if (now == none) { keep = 1; add = 0; both = before; return; }
  if (before == none) { keep = 0; add = 1; both = now; return; }
  const T m = larger(before, now), a = exp_of(before - m), b = exp_of(now - m), s = a + b;
  keep = a / s; add = b / s; both = m + log_of(s);
}

#if ELEM < 2
DEV u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from)); }
// Zeros where `ok` is false.
DEV void copy16(u32 to, const void* from, bool ok) {
  int n = ok ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEV void load_matrix(u32& a, u32& b, u32& c, u32& d, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(p));
}
DEV void load_transposed(u32& a, u32& b, u32& c, u32& d, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(p));
}
DEV void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Sum and maximum over the four threads of an accumulator row.
DEV float quad_sum(float x) { x += __shfl_xor_sync(FULL, x, 1); return x + __shfl_xor_sync(FULL, x, 2); }
DEV float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(FULL, x, 1)); return fmaxf(x, __shfl_xor_sync(FULL, x, 2)); }
// True if one of two packed elements is not finite; also gives the word with those elements set to zero.
DEV bool spoilt(u32 x) { return (x & EXPONENT) == EXPONENT || (x >> 16 & EXPONENT) == EXPONENT; }
DEV u32 without_spoilt(u32 x) {
  if ((x & EXPONENT) == EXPONENT) x &= 0xffff0000u;
  if ((x >> 16 & EXPONENT) == EXPONENT) x &= 0xffffu;
  return x;
}
#endif
