/* The outer step's two passes over memory for CPU tensors: plain C without Python's headers, called through ctypes.
 *
 *   sums:    u.u, m.m and u.m of a piece, in one read of u and m;
 *   update:  g = a*u + b*m;  m = mu*m + gain*g;  p -= lr*(g + mu*m), in one read of p, m, u and one write of p, m.
 *
 * portable.py gives the same bits. So the order of all additions is fixed, and no multiplication is fused with an addition
 * (-ffp-contract=off). Products are taken in double, where those of two floats are exact. A piece is filled up with zeros to
 * ROWS rows of equal length, which is a multiple of LANES:
 *
 *   1. the rows are added by halving: rows 0 to 3 and 4 to 7, then 0 to 1 and 2 to 3, then 0 and 1;
 *   2. the row that is left is cut into groups of LANES elements, which are added in pairs of neighbours, then pairs of pairs,
 *      and so on; a group that has no neighbour stays as it is;
 *   3. the lanes are added by halving.
 *
 * The caller cuts blocks into pieces of a fixed length and adds their sums in pairs too.
 *
 * It is linked without an OpenMP runtime: the loader lends it the one torch already runs on, so that both share one thread pool. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define LANES 16
#define ROWS 8
#define SUMS (3 * LANES) /* of a group: u.u, m.m and u.m of each lane */
#define LEVELS 32        /* more than the binary digits of any number of groups */
#define RUN 32 /* pieces, of a contribution in a mapped file, that a thread reads before it gives their memory back */
#define THREADS_FROM 65536 /* elements in all; below that, waking the other threads takes longer than the work */

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_CPU
#endif

typedef uint16_t bf16;
typedef struct { uint16_t bits; } f16;

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float from_float(float x) { return x; }
static inline double from_double(double x) { return x; }
static inline float from_bf16(bf16 x) { return as_float((uint32_t)x << 16); }

/* The exponent is moved from a bias of 15 to one of 127 by a multiplication, which is right for subnormal numbers too. */
static inline float from_f16(f16 x) {
    const uint32_t size = (uint32_t)(x.bits & 0x7fff);
    const uint32_t bits = as_bits(as_float(size << 13) * 0x1p112f);
    const uint32_t special = size >= 0x7c00 ? 0x7f800000 : 0; /* Inf or NaN */
    return as_float(bits | special | (uint32_t)(x.bits & 0x8000) << 16);
}

static int many(const int64_t *n, int64_t pieces) {
    int64_t sum = 0;
    for (int64_t s = 0; s < pieces; s++) sum += n[s];
    return sum >= THREADS_FROM;
}

/* Gives whole pages of a mapped file back after they were read; `page`: their size, or 0 if u is no mapped file. */
static void give_back(const char *first, const char *end, int64_t page) {
#ifdef __linux__
    if (!page) return;
    const uintptr_t begin = ((uintptr_t)first + page - 1) / page * page, stop = (uintptr_t)end / page * page;
    if (begin < stop) madvise((void *)begin, stop - begin, MADV_DONTNEED);
#else
    (void)first, (void)end, (void)page;
#endif
}

static inline void add(double *restrict to, const double *restrict from) {
    for (int i = 0; i < SUMS; i++) to[i] += from[i];
}

#define HALVED(P) (((P(0) + P(4)) + (P(2) + P(6))) + ((P(1) + P(5)) + (P(3) + P(7))))
#define U_AT(r) ((double)READ(u[lane + (r) * row]))
#define M_AT(r) ((double)m[lane + (r) * row])
#define UU(r) (U_AT(r) * U_AT(r))
#define MM(r) (M_AT(r) * M_AT(r))
#define UM(r) (U_AT(r) * M_AT(r))

#define DEFINE(T, U, NAME)                                                                                              \
    static inline void group_##NAME(const U *restrict u, const T *restrict m, int64_t row, double *restrict sums) {     \
        _Pragma("omp simd") for (int lane = 0; lane < LANES; lane++) {                                                  \
            sums[lane] = HALVED(UU);                                                                                    \
            sums[lane + LANES] = HALVED(MM);                                                                            \
            sums[lane + 2 * LANES] = HALVED(UM);                                                                        \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    /* The same where the piece ends, `left` elements after the group's first. */                                       \
    static inline void last_##NAME(const U *u, const T *m, int64_t row, int64_t left, double *restrict sums) {          \
        U u_filled[ROWS * LANES] = {0};                                                                                 \
        T m_filled[ROWS * LANES] = {0};                                                                                 \
        for (int r = 0; r < ROWS && left > 0; r++, u += row, m += row, left -= row) {                                   \
            const size_t count = left < LANES ? (size_t)left : LANES;                                                   \
            memcpy(u_filled + r * LANES, u, count * sizeof *u);                                                         \
            memcpy(m_filled + r * LANES, m, count * sizeof *m);                                                         \
        }                                                                                                               \
        group_##NAME(u_filled, m_filled, LANES, sums);                                                                  \
    }                                                                                                                   \
                                                                                                                        \
    EACH_CPU static void sums_##NAME(const U *restrict u, const T *restrict m, int64_t n, double *restrict out) {       \
        double waiting[LEVELS][SUMS], now[SUMS];                                                                        \
        const int64_t groups = (n + ROWS * LANES - 1) / (ROWS * LANES), row = groups * LANES;                           \
        for (int64_t g = 0; g < groups; g++) {                                                                          \
            const int64_t at = g * LANES;                                                                               \
            if (n >= at + (ROWS - 1) * row + LANES)                                                                     \
                group_##NAME(u + at, m + at, row, now);                                                                 \
            else                                                                                                        \
                last_##NAME(u + at, m + at, row, n - at, now);                                                          \
            int level = 0;                                                                                              \
            for (; g >> level & 1; level++) add(now, waiting[level]);                                                   \
            memcpy(waiting[level], now, sizeof now);                                                                    \
        }                                                                                                               \
        memset(now, 0, sizeof now);                                                                                     \
        for (int level = 0; groups >> level; level++)                                                                   \
            if (groups >> level & 1) add(now, waiting[level]);                                                          \
        for (int half = LANES / 2; half; half /= 2)                                                                     \
            for (int kind = 0; kind < 3; kind++)                                                                        \
                for (int lane = 0; lane < half; lane++) now[kind * LANES + lane] += now[kind * LANES + lane + half];    \
        for (int kind = 0; kind < 3; kind++) out[kind] = now[kind * LANES];                                             \
    }                                                                                                                   \
                                                                                                                        \
    EACH_CPU static void update_##NAME(T *restrict p, T *restrict m, const U *restrict u, int64_t n, const double *rule) { \
        const T a = (T)rule[0], b = (T)rule[1], lr = (T)rule[2], mu = (T)rule[3], gain = (T)rule[4];                    \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                           \
            const T g = a * (T)READ(u[i]) + b * m[i];                                                                   \
            const T next = mu * m[i] + gain * g;                                                                        \
            m[i] = next;                                                                                                \
            p[i] -= lr * (g + mu * next);                                                                               \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    void heloco_sums_##NAME(U *const *u, T *const *m, const int64_t *n, int64_t pieces, double *out, int64_t page) {    \
        const int64_t run = page ? RUN : 1;                                                                             \
        _Pragma("omp parallel for schedule(static) if (many(n, pieces))") for (int64_t r = 0; r < pieces; r += run) {   \
            const int64_t end = r + run < pieces ? r + run : pieces;                                                    \
            const U *first = u[r];                                                                                      \
            for (int64_t s = r; s < end; s++) {                                                                         \
                sums_##NAME(u[s], m[s], n[s], out + 3 * s);                                                             \
                if (s + 1 < end && u[s + 1] == u[s] + n[s]) continue;                                                   \
                give_back((const char *)first, (const char *)(u[s] + n[s]), page);                                      \
                if (s + 1 < end) first = u[s + 1];                                                                      \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    void heloco_update_##NAME(T *const *p, T *const *m, U *const *u, const int64_t *n, int64_t pieces,                  \
                              const double *rules, int64_t page) {                                                      \
        const int64_t run = page ? RUN : 1;                                                                             \
        _Pragma("omp parallel for schedule(static) if (many(n, pieces))") for (int64_t r = 0; r < pieces; r += run) {   \
            const int64_t end = r + run < pieces ? r + run : pieces;                                                    \
            const U *first = u[r];                                                                                      \
            for (int64_t s = r; s < end; s++) {                                                                         \
                update_##NAME(p[s], m[s], u[s], n[s], rules + 5 * s);                                                   \
                if (s + 1 < end && u[s + 1] == u[s] + n[s]) continue;                                                   \
                give_back((const char *)first, (const char *)(u[s] + n[s]), page);                                      \
                if (s + 1 < end) first = u[s + 1];                                                                      \
            }                                                                                                           \
        }                                                                                                               \
    }

#define READ from_float
DEFINE(float, float, f32_f32)
#undef READ
#define READ from_bf16
DEFINE(float, bf16, f32_bf16)
#undef READ
#define READ from_f16
DEFINE(float, f16, f32_f16)
#undef READ
#define READ from_double
DEFINE(double, double, f64_f64)
