/* Numbers as codes of 8 or 4 bits, for CPU tensors: plain C without Python's headers, called through ctypes.
 *
 * A block is a matrix of rows. A row is cut into groups of GROUP numbers, the last of which may be shorter, and each group has
 * a scale. A row of 4-bit codes begins with a whole byte, and the lower half of a byte comes first. codes.py describes the codes
 * and gives the same bits with torch operations: so there is no fused multiplication (-ffp-contract=off), and every rounding
 * below is one that torch makes too.
 *
 * It is linked without an OpenMP runtime: the loader lends it the one torch already runs on. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GROUP 128
#define TINY 0x1p-100f /* smaller numbers travel as 0 */
#define THREADS_FROM 65536 /* numbers; below that, waking the other threads takes longer than the work */

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_CPU
#endif

enum kind { INT8 = 0, INT4 = 1, E3M0 = 2 };

typedef struct {
    int64_t rows, length;   /* of the block */
    int64_t first_row;      /* of the piece that is worked on; it counts for the noise alone */
    int kind;
    int is_random;          /* stochastic rounding */
    uint32_t seed;
    float decay;            /* of the residual: e = decay * e + x */
} task;

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= x >> 15;
    x *= 0x846ca68bU;
    return x ^ x >> 16;
}

/* A number in [0, 1) of 24 random bits for the element at this place of its block. */
static inline float noise(uint32_t seed, int64_t place) {
    const uint32_t high = mixed((uint32_t)(place >> 32) ^ seed);
    return (float)(mixed((uint32_t)place ^ high) >> 8) * 0x1p-24f;
}

static inline float group_scale(const float *restrict x, int count, int kind) {
    float largest = 0.0f, poison = 0.0f;
    for (int i = 0; i < count; i++) {
        const float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        poison += x[i] * 0.0f; /* NaN if one number is NaN or infinite */
    }
    if (poison != 0.0f) return NAN;
    if (largest < TINY) return 1.0f;
    return kind == E3M0 ? largest : largest / (kind == INT4 ? 7.0f : 127.0f);
}

static inline int integer_code(float quotient, float limit, float random, int is_random) {
    const float rounded = is_random ? floorf(quotient + random) : rintf(quotient);
    const float kept = rounded > limit ? limit : rounded < -limit ? -limit : rounded;
    return (int)kept;
}

/* Zero, or a power of two from 2^-6 to 1. Adding to the bits of a float lets what exceeds its mantissa raise its exponent. */
static inline int power_code(float quotient, float random, int is_random) {
    const float size = fabsf(quotient);
    const uint32_t raise = is_random ? (uint32_t)(random * 0x1p23f) : 0x400000U;
    const int power = (int)((as_bits(size) + raise) >> 23) - 120;
    const int small = size * 64.0f + (is_random ? random : 0.5f) >= 1.0f;
    const int code = size < 0x1p-6f ? small : power > 7 ? 7 : power;
    return code | (quotient < 0.0f && code ? 8 : 0);
}

static inline float value_of(int code, int kind) {
    if (kind == INT8) return (float)(int8_t)code;
    if (kind == INT4) return (float)((code ^ 8) - 8);
    const uint32_t power = code & 7 ? (uint32_t)((code & 7) + 120) << 23 : 0;
    return as_float(power | (uint32_t)(code & 8) << 28);
}

/* Always inlined with a constant kind, so that the compiler makes a loop without branches for each. */
static inline __attribute__((always_inline)) void encode_group(
    const task *t, int kind, int is_random, int64_t place, int count, float *restrict x, float *restrict residual,
    uint8_t *restrict codes, float *restrict scale
) {
    uint8_t each[GROUP + 1];
    if (residual)
        for (int i = 0; i < count; i++) x[i] = residual[i] * t->decay + x[i];
    *scale = group_scale(x, count, kind);
    const int is_finite = *scale == *scale;
    const float s = is_finite ? *scale : 1.0f, limit = kind == INT8 ? 127.0f : 7.0f;
    for (int i = 0; i < count; i++) {
        const float random = is_random ? noise(t->seed, place + i) : 0.0f;
        const float quotient = is_finite && fabsf(x[i]) >= TINY ? x[i] / s : 0.0f;
        each[i] = (uint8_t)(kind == E3M0 ? power_code(quotient, random, is_random)
                                         : integer_code(quotient, limit, random, is_random));
    }
    if (residual)
        for (int i = 0; i < count; i++) residual[i] = x[i] - value_of(kind == INT8 ? each[i] : each[i] & 15, kind) * *scale;
    if (kind == INT8) {
        memcpy(codes, each, (size_t)count);
        return;
    }
    each[count] = 0;
    for (int i = 0; i < (count + 1) / 2; i++) codes[i] = (uint8_t)((each[2 * i] & 15) | each[2 * i + 1] << 4);
}

#define ENCODE(NAME, KIND, RANDOM)                                                                                     \
    EACH_CPU static void encode_##NAME(const task *t, int64_t place, int count, float *restrict x,                     \
                                       float *restrict residual, uint8_t *restrict codes, float *restrict scale) {     \
        encode_group(t, KIND, RANDOM, place, count, x, residual, codes, scale);                                        \
    }
ENCODE(int8, INT8, 0)
ENCODE(int4, INT4, 0)
ENCODE(e3m0, E3M0, 0)
ENCODE(int8_random, INT8, 1)
ENCODE(int4_random, INT4, 1)
ENCODE(e3m0_random, E3M0, 1)

typedef void encoder(const task *, int64_t, int, float *restrict, float *restrict, uint8_t *restrict, float *restrict);
static encoder *const ENCODERS[2][3] = {
    {encode_int8, encode_int4, encode_e3m0}, {encode_int8_random, encode_int4_random, encode_e3m0_random}};

static int64_t row_bytes(int64_t length, int kind) { return kind == INT8 ? length : (length + 1) / 2; }

/* Rows of numbers -> codes and scales. With a residual e: the codes of decay*e + x, and e becomes what they leave out. */
void heloco_encode(const task *t, const float *x, float *residual, uint8_t *codes, float *scales) {
    const int64_t groups = (t->length + GROUP - 1) / GROUP, bytes = row_bytes(t->length, t->kind);
    encoder *const encode = ENCODERS[t->is_random != 0][t->kind];
    _Pragma("omp parallel for schedule(static) if (t->rows * t->length >= THREADS_FROM)")
    for (int64_t index = 0; index < t->rows * groups; index++) {
        const int64_t row = index / groups, from = index % groups * GROUP;
        const int count = (int)(t->length - from < GROUP ? t->length - from : GROUP);
        const int64_t at = row * t->length + from;
        float numbers[GROUP];
        memcpy(numbers, x + at, (size_t)count * sizeof *x);
        encode(t, t->first_row * t->length + at, count, numbers, residual ? residual + at : 0,
               codes + row * bytes + (t->kind == INT8 ? from : from / 2), scales + index);
    }
}

#define DECODE(NAME, KIND)                                                                                              \
    EACH_CPU static void decode_##NAME(const uint8_t *restrict codes, int count, float scale, float *restrict out) {    \
        if (KIND == INT8) {                                                                                             \
            for (int i = 0; i < count; i++) out[i] = value_of(codes[i], KIND) * scale;                                  \
            return;                                                                                                     \
        }                                                                                                               \
        float low[GROUP / 2], high[GROUP / 2];                                                                          \
        const int pairs = count / 2;                                                                                    \
        for (int i = 0; i < pairs; i++) low[i] = value_of(codes[i] & 15, KIND) * scale;                                 \
        for (int i = 0; i < pairs; i++) high[i] = value_of(codes[i] >> 4, KIND) * scale;                                \
        for (int i = 0; i < pairs; i++) out[2 * i] = low[i], out[2 * i + 1] = high[i];                                  \
        if (count & 1) out[count - 1] = value_of(codes[pairs] & 15, KIND) * scale;                                      \
    }
DECODE(int8, INT8)
DECODE(int4, INT4)
DECODE(e3m0, E3M0)

typedef void decoder(const uint8_t *restrict, int, float, float *restrict);
static decoder *const DECODERS[3] = {decode_int8, decode_int4, decode_e3m0};

/* The numbers of one group from its `skip`-th on. */
static void decode_part(decoder *decode, int kind, const uint8_t *codes, int skip, int count, float scale, float *out) {
    if (kind == INT8) {
        decode(codes + skip, count, scale, out);
    } else if (skip % 2 == 0) {
        decode(codes + skip / 2, count, scale, out);
    } else {
        float first[2];
        decode(codes + skip / 2, 2, scale, first);
        *out = first[1];
        decode(codes + skip / 2 + 1, count - 1, scale, out + 1);
    }
}

/* `count` numbers of a block from its `first`-th on, counted row by row. */
void heloco_decode(const uint8_t *codes, const float *scales, int64_t length, int kind, int64_t first, int64_t count, float *out) {
    const int64_t groups = (length + GROUP - 1) / GROUP, bytes = row_bytes(length, kind);
    const int64_t first_row = first / length, first_group = first_row * groups + first % length / GROUP;
    const int64_t last = first + count - 1, last_group = last / length * groups + last % length / GROUP;
    decoder *const decode = DECODERS[kind];
    if (count <= 0) return;
    _Pragma("omp parallel for schedule(static) if (count >= THREADS_FROM)")
    for (int64_t index = first_group; index <= last_group; index++) {
        const int64_t row = index / groups, from = index % groups * GROUP, at = row * length + from;
        const int64_t end = at + (length - from < GROUP ? length - from : GROUP);
        const int64_t begin = at < first ? first : at, stop = end > first + count ? first + count : end;
        decode_part(decode, kind, codes + row * bytes + (kind == INT8 ? from : from / 2), (int)(begin - at),
                    (int)(stop - begin), scales[index], out + (begin - first));
    }
}
