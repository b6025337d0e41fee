/* The outer step's two passes over memory for CPU tensors: plain C without Python's headers, called through ctypes.
 *
 *   statistics: the sums u.u, m.m and u.m of a span, in one read of u and m;
 *   update:     g = a*u + b*m;  m = mu*m + gain*g;  p -= lr*(g + mu*m), in one read of p, m, u and one write of p, m.
 *
 * The caller cuts blocks into spans of fixed length. Sums are flushed to double every STRIPE elements, so a sum over millions
 * of floats is nearly as good as one in double, and no result depends on the number of threads.
 *
 * It is linked without an OpenMP runtime: the loader lends it the one torch already runs on, so that both share one thread pool. */
#include <stdint.h>

#define STRIPE 4096
#define THREADS_FROM 65536 /* elements in all; below that, waking the other threads takes longer than the work */

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_CPU
#endif

static int many(const int64_t *n, int64_t spans) {
    int64_t sum = 0;
    for (int64_t s = 0; s < spans; s++) sum += n[s];
    return sum >= THREADS_FROM;
}

#define DEFINE(T, NAME)                                                                                                 \
    EACH_CPU static void statistics_##NAME(const T *restrict u, const T *restrict m, int64_t n, double *restrict out) {   \
        double uu = 0, mm = 0, um = 0;                                                                                  \
        for (int64_t start = 0; start < n; start += STRIPE) {                                                           \
            const int64_t stop = start + STRIPE < n ? start + STRIPE : n;                                               \
            T uu_part = 0, mm_part = 0, um_part = 0;                                                                    \
            _Pragma("omp simd reduction(+ : uu_part, mm_part, um_part)") for (int64_t i = start; i < stop; i++) {       \
                uu_part += u[i] * u[i];                                                                                 \
                mm_part += m[i] * m[i];                                                                                 \
                um_part += u[i] * m[i];                                                                                 \
            }                                                                                                           \
            uu += (double)uu_part, mm += (double)mm_part, um += (double)um_part;                                        \
        }                                                                                                               \
        out[0] = uu, out[1] = mm, out[2] = um;                                                                          \
    }                                                                                                                   \
                                                                                                                        \
    EACH_CPU static void update_##NAME(T *restrict p, T *restrict m, const T *restrict u, int64_t n, const double *rule) { \
        const T a = (T)rule[0], b = (T)rule[1], lr = (T)rule[2], mu = (T)rule[3], gain = (T)rule[4];                    \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                           \
            const T g = a * u[i] + b * m[i];                                                                            \
            const T next = mu * m[i] + gain * g;                                                                        \
            m[i] = next;                                                                                                \
            p[i] -= lr * (g + mu * next);                                                                               \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    void heloco_statistics_##NAME(T *const *u, T *const *m, const int64_t *n, int64_t spans, double *out) {              \
        _Pragma("omp parallel for schedule(static) if (many(n, spans))") for (int64_t s = 0; s < spans; s++)            \
            statistics_##NAME(u[s], m[s], n[s], out + 3 * s);                                                           \
    }                                                                                                                   \
                                                                                                                        \
    void heloco_update_##NAME(T *const *p, T *const *m, T *const *u, const int64_t *n, int64_t spans, const double *rules) { \
        _Pragma("omp parallel for schedule(static) if (many(n, spans))") for (int64_t s = 0; s < spans; s++)            \
            update_##NAME(p[s], m[s], u[s], n[s], rules + 5 * s);                                                       \
    }

DEFINE(float, f32)
DEFINE(double, f64)
