// Included before every C++ file of llama.cpp (see environment). GCC 12 tells its optimiser that _tile_loadconfig reads
// 8 of the 64 bytes of a tile configuration; at -O3 it drops the stores to the rest, every tile has no rows, and the
// first AMX instruction is illegal. Here the read is declared whole.
#pragma once

#include <immintrin.h>

#ifdef __AMX_TILE__
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
