/* Arithmetic of the pretend NCCL. Types and operations have NCCL's numbers. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUM, PROD, MAX, MIN, AVG, OPS, NO_OP = -1 };
enum { TYPES = 10 };
static const char *const op_names[] = {"sum", "prod", "max", "min", "avg"};
static const char *const type_names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                         "uint64", "float16", "float32", "float64", "bfloat16"};
static const size_t type_sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static float from_half(uint16_t h) {
    int exponent = h >> 10 & 31, bits = h & 1023;
    float x = exponent == 31
                  ? bits ? NAN : INFINITY
                  : ldexpf((float)(bits + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
    return h & 0x8000 ? -x : x;
}

static uint16_t to_half(float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    float a = fabsf(x);
    uint32_t u;
    if (isnan(x)) return 0x7e00;
    if (a >= 65520) return sign | 0x7c00;
    if (a < 0x1p-14f) return sign | (uint16_t)rintf(a * 0x1p24f);
    memcpy(&u, &a, 4);
    return sign | (uint16_t)((u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13);
}

static float from_bfloat(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint16_t to_bfloat(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return isnan(x) ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#define SAME(x) (x)
/* Sums the parts of n ranks in the order of ranks: integers wrap in their own type, small floats
 * are added as float32. */
#define REDUCER(name, type, wide, floating, FROM, TO, KEEP)                                        \
    static void name(char *to, char *const *from, uint32_t n, size_t count, int op) {              \
        wide share = floating ? (wide)1 / (wide)n : 1;                                             \
        for (size_t i = 0; i < count; i++) {                                                       \
            wide sum = 0;                                                                          \
            for (uint32_t r = 0; r < n; r++) {                                                     \
                wide x = FROM(((const type *)from[r])[i]);                                         \
                if (op == AVG) x *= share;                                                         \
                if (r == 0 || (op == MAX && x > sum) || (op == MIN && x < sum)) sum = x;           \
                else if (op == PROD) sum = KEEP(sum * x);                                          \
                else if (op == SUM || op == AVG) sum = KEEP(sum + x);                              \
            }                                                                                      \
            ((type *)to)[i] = TO(!floating && op == AVG ? sum / (wide)n : sum);                    \
        }                                                                                          \
    }
REDUCER(reduce_i8, int8_t, int64_t, 0, SAME, (int8_t), (int8_t))
REDUCER(reduce_u8, uint8_t, uint64_t, 0, SAME, (uint8_t), (uint8_t))
REDUCER(reduce_i32, int32_t, int64_t, 0, SAME, (int32_t), (int32_t))
REDUCER(reduce_u32, uint32_t, uint64_t, 0, SAME, (uint32_t), (uint32_t))
REDUCER(reduce_i64, int64_t, int64_t, 0, SAME, SAME, SAME)
REDUCER(reduce_u64, uint64_t, uint64_t, 0, SAME, SAME, SAME)
REDUCER(reduce_f16, uint16_t, float, 1, from_half, to_half, SAME)
REDUCER(reduce_f32, float, float, 1, SAME, SAME, SAME)
REDUCER(reduce_f64, double, double, 1, SAME, SAME, SAME)
REDUCER(reduce_bf16, uint16_t, float, 1, from_bfloat, to_bfloat, SAME)
static void (*const reducers[])(char *, char *const *, uint32_t, size_t, int) = {
    reduce_i8,  reduce_u8,  reduce_i32, reduce_u32, reduce_i64,
    reduce_u64, reduce_f16, reduce_f32, reduce_f64, reduce_bf16};
