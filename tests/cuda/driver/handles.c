/* Handles: kind, generation and position in one integer, in the range of user-space addresses. A handle of a destroyed
 * object is recognised even after its place was given to another one. */
#include <stdlib.h>

#include "standin.h"

#define POSITION_BITS 20
#define GENERATION_BITS 20
#define POSITION_MASK ((UINT64_C(1) << POSITION_BITS) - 1)
#define GENERATION_MASK ((UINT64_C(1) << GENERATION_BITS) - 1)
#define PREFIX (UINT64_C(0x5) << 44)

struct place {
    void *object;
    uint32_t generation;
    uint32_t kind;
    uint32_t next_free;
};

static struct place *places;
static uint32_t used = 1; /* position 0 stays empty: it ends the list of free places */
static uint32_t capacity;
static uint32_t first_free;
static uint64_t live[KINDS];

static struct place *place_of(CUhandle handle)
{
    uint32_t position = handle & POSITION_MASK;
    if (handle >> 44 != PREFIX >> 44 || position == 0 || position >= used) return NULL;
    struct place *place = &places[position];
    bool same = place->object && ((handle >> POSITION_BITS) & GENERATION_MASK) == place->generation &&
                ((handle >> (POSITION_BITS + GENERATION_BITS)) & 0xf) == place->kind;
    return same ? place : NULL;
}

void *object_create(enum kind kind, size_t size, CUhandle *handle)
{
    uint32_t position = first_free;
    if (position) {
        first_free = places[position].next_free;
    } else {
        if (used > POSITION_MASK) abort();
        if (used >= capacity) {
            capacity = capacity ? capacity * 2 : 1024;
            places = realloc(places, capacity * sizeof *places);
        }
        position = used++;
        places[position].generation = 0;
    }
    struct place *place = &places[position];
    place->object = calloc(1, size);
    place->kind = kind;
    place->generation = (place->generation + 1) & GENERATION_MASK;
    live[kind]++;
    *handle = PREFIX | (uint64_t)kind << (POSITION_BITS + GENERATION_BITS) |
              (uint64_t)place->generation << POSITION_BITS | position;
    return place->object;
}

void *object_find(CUhandle handle, enum kind kind)
{
    struct place *place = place_of(handle);
    return place && place->kind == kind ? place->object : NULL;
}

void object_destroy(CUhandle handle)
{
    struct place *place = place_of(handle);
    if (!place) return;
    live[place->kind]--;
    free(place->object);
    place->object = NULL;
    place->next_free = first_free;
    first_free = (uint32_t)(place - places);
}

uint64_t objects_live(enum kind kind) { return live[kind]; }

void objects_each(enum kind kind, void (*visit)(void *object))
{
    for (uint32_t position = 1; position < used; position++)
        if (places[position].object && places[position].kind == kind) visit(places[position].object);
}
