// SPDX-License-Identifier: GPL-2.0-only
/*
 * Random load on the allocator of bounce slots, in user space
 *
 * Threads take slots, write to them, check the written bytes, and return the slots. They change
 * their CPUs all the time. Meanwhile another thread adds chunks, withdraws idle chunks, and
 * divides them into other slots. It also retires chunks in use, and frees their memory. Each step
 * checks that no page is in two slots, and that addresses lead to their slots. AddressSanitizer
 * checks that freed memory is not touched. At the end, no slot may be lost. The exit status is 1
 * if a check fails.
 *
 * Usage: stress SECONDS [SEED]
 */

#include "shim.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "../../src/drivers/iommu/dma-bounce-slots.h"

#define THREADS		6
#define CHUNK_SHIFT	20
#define CHUNK		(1UL << CHUNK_SHIFT)
#define PLACES		24
#define BASE		0xc0000000UL
#define PAGE		4096UL
#define HELD		24

#define CHECK(cond) do { if (!(cond)) fail(__LINE__, #cond); } while (0)

static struct dma_bounce_slots slots;
static bool stop;
static pthread_barrier_t barrier;
static unsigned long long seed;
/* Owner of each page of the range: a thread's number, or 0 */
static u32 owners[PLACES * CHUNK / PAGE];
static unsigned long notified, asked, gets, misses, adds, withdrawals, drains, deaths, orphans, recycled;

static void fail(int line, const char *what)
{
	fprintf(stderr, "stress.c:%d: check failed: %s (seed %llu)\n", line, what, seed);
	fflush(stdout);
	_exit(1);
}

static unsigned long long next_random(unsigned long long *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void on_notify(struct dma_bounce_slots *unused)
{
	(void)unused;
	__atomic_add_fetch(&notified, 1, __ATOMIC_RELAXED);
}

/* Threads that use slots */

struct held {
	struct dma_bounce_slot *slot;
	dma_addr_t iova;
	size_t size;
	u8 fill;
	unsigned int touched;
};

static u32 *owner_of(dma_addr_t iova)
{
	CHECK(iova >= BASE && iova < BASE + PLACES * CHUNK);
	return &owners[(iova - BASE) / PAGE];
}

static void own(dma_addr_t iova, size_t size, u32 from, u32 to)
{
	size_t i;

	for (i = 0; i < size / PAGE; i++)
		CHECK(__atomic_exchange_n(owner_of(iova) + i, to, __ATOMIC_RELAXED) == from);
}

static void take(u32 me, struct held *held, unsigned long long *state)
{
	unsigned int kind = next_random(state) % DMA_BOUNCE_KINDS;
	unsigned int class = next_random(state) % DMA_BOUNCE_CLASSES;
	unsigned int mapped = next_random(state) % DMA_BOUNCE_MAPPED_TYPES;
	struct dma_bounce_slot *slot;
	u8 *va;

	rcu_read_lock();
	slot = dma_bounce_slots_get(&slots, kind, class, mapped);
	if (!slot) {
		__atomic_add_fetch(&misses, 1, __ATOMIC_RELAXED);
		rcu_read_unlock();
		/* Let the thread that adds chunks run. */
		sched_yield();
		return;
	}
	CHECK(slot->chunk->kind == kind && slot->chunk->class == class && slot->mapped == mapped);
	held->slot = slot;
	held->iova = dma_bounce_slot_iova(slot);
	held->size = dma_bounce_slot_size(slot);
	held->fill = next_random(state);
	held->touched = 64 + next_random(state) % (held->size - 64);
	CHECK(!(held->iova & (held->size - 1)));
	own(held->iova, held->size, 0, me);
	CHECK(!READ_ONCE(slot->len));
	WRITE_ONCE(slot->len, held->touched);
	if (READ_ONCE(slot->chunk->state) != DMA_BOUNCE_DEAD) {
		va = dma_bounce_slot_va(slot);
		memset(va, held->fill, 64);
		va[held->touched - 1] = held->fill;
	}
	rcu_read_unlock();
	__atomic_add_fetch(&gets, 1, __ATOMIC_RELAXED);
}

static void give(u32 me, struct held *held, unsigned long long *state)
{
	struct dma_bounce_slot *slot = held->slot;
	unsigned int i;
	u8 *va;

	rcu_read_lock();
	CHECK(dma_bounce_slots_own(&slots, held->iova));
	CHECK(dma_bounce_slots_find(&slots, held->iova + next_random(state) % held->size) == slot);
	CHECK(slot->len == held->touched);
	if (READ_ONCE(slot->chunk->state) != DMA_BOUNCE_DEAD) {
		va = dma_bounce_slot_va(slot);
		for (i = 0; i < 64; i++)
			CHECK(va[i] == held->fill);
		CHECK(va[held->touched - 1] == held->fill);
	}
	own(held->iova, held->size, me, 0);
	dma_bounce_slots_put(&slots, slot);
	rcu_read_unlock();
	held->slot = NULL;
}

static void *user(void *arg)
{
	u32 me = (uintptr_t)arg + 1;
	unsigned long long state = seed * 1000003 + me * 7919 + 1;
	struct held held[HELD] = {};
	unsigned int i, depth;

	rcu_read_lock();
	rcu_read_unlock();
	pthread_barrier_wait(&barrier);
	while (!READ_ONCE(stop)) {
		/* From time to time, two threads share a CPU. */
		if (next_random(&state) % 8 == 0)
			shim_cpu = next_random(&state) % THREADS;
		/* Mostly hold few slots, so that slots return to the depot. */
		depth = next_random(&state) % 16 ? 4 : HELD;
		i = next_random(&state) % depth;
		if (held[i].slot)
			give(me, &held[i], &state);
		else
			take(me, &held[i], &state);
		/* A lookup of any address must be safe, whether or not it finds a slot. */
		rcu_read_lock();
		dma_bounce_slots_find(&slots, BASE + next_random(&state) % (PLACES * CHUNK));
		rcu_read_unlock();
	}
	for (i = 0; i < HELD; i++)
		if (held[i].slot)
			give(me, &held[i], &state);
	return NULL;
}

/* The thread that changes the set of chunks */

static void free_memory(struct dma_bounce_chunk *chunk)
{
	free(chunk->va);
	chunk->va = NULL;
}

static void add_chunk(unsigned int kind, unsigned int class, unsigned long long *state)
{
	/* A provider may give smaller chunks than requested. */
	size_t size = next_random(state) % 4 ? CHUNK : DMA_BOUNCE_MAX_SLOT;
	struct dma_bounce_chunk *chunk;
	unsigned long place;
	void *va;

	for (place = 0; place < PLACES; place++)
		if (!dma_bounce_slots_chunk(&slots, place))
			break;
	if (place == PLACES)
		return;
	chunk = dma_bounce_chunk_alloc(kind, class, CHUNK, NUMA_NO_NODE);
	CHECK(chunk);
	/* Vary the limit of CPUs' stacks. With a low limit, CPUs keep no large slots. */
	if (next_random(state) % 8 == 0)
		dma_bounce_slots_limit(&slots, next_random(state) % 2 ? UINT64_MAX :
				       next_random(state) % (256ULL * SZ_1M));
	if (next_random(state) % 32 == 0) {
		dma_bounce_chunk_discard(chunk);
		return;
	}
	va = malloc(size);
	CHECK(va);
	dma_bounce_chunk_publish(&slots, chunk, va, BASE + place * CHUNK, size);
	adds++;
}

static void withdraw(struct dma_bounce_chunk *chunk, unsigned long long *state)
{
	struct dma_bounce_chunk *anew = NULL;

	if (!dma_bounce_chunk_withdraw(&slots, chunk, next_random(state) % 20,
				       next_random(state) % 2))
		return;
	CHECK(!dma_bounce_chunk_used(&slots, chunk));
	if (next_random(state) % 2)
		anew = dma_bounce_chunk_alloc(chunk->kind,
					      next_random(state) % DMA_BOUNCE_CLASSES, chunk->size,
					      NUMA_NO_NODE);
	if (anew) {
		dma_bounce_chunk_publish(&slots, anew, chunk->va, chunk->iova, chunk->size);
		recycled++;
	} else {
		free_memory(chunk);
		withdrawals++;
	}
	dma_bounce_chunk_remove(&slots, chunk);
}

static void reap(void)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	for (place = 0; place < PLACES; place++) {
		chunk = dma_bounce_slots_chunk(&slots, place);
		if (!chunk || chunk->state == DMA_BOUNCE_LIVE || dma_bounce_chunk_used(&slots, chunk))
			continue;
		if (chunk->state == DMA_BOUNCE_DRAINING)
			free_memory(chunk);
		CHECK(!chunk->va);
		dma_bounce_chunk_remove(&slots, chunk);
	}
}

/* Frees the memory of all chunks, even if their slots are in use. */
static void kill_all(void)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	for (place = 0; place < PLACES; place++) {
		chunk = dma_bounce_slots_chunk(&slots, place);
		if (chunk)
			dma_bounce_chunk_retire(&slots, chunk, DMA_BOUNCE_DEAD);
	}
	dma_bounce_slots_flush(&slots, true);
	synchronize_rcu();
	for (place = 0; place < PLACES; place++) {
		chunk = dma_bounce_slots_chunk(&slots, place);
		if (chunk && chunk->va) {
			orphans += dma_bounce_chunk_used(&slots, chunk);
			free_memory(chunk);
		}
	}
	reap();
	deaths++;
}

/* Adds a chunk for a depot that asks for one. Returns false if no depot asks. */
static bool answer(unsigned long long *state)
{
	unsigned int kind, class;

	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
			if (!xchg(&slots.depots[kind][class].asks, false))
				continue;
			add_chunk(kind, class, state);
			asked++;
			return true;
		}
	}
	return false;
}

static void manage(unsigned long long *state)
{
	struct dma_bounce_chunk *chunk;

	mutex_lock(&slots.mutex);
	WRITE_ONCE(shim_jiffies, shim_jiffies + 1);
	chunk = dma_bounce_slots_chunk(&slots, next_random(state) % PLACES);
	switch (next_random(state) % 256) {
	case 0:
		kill_all();
		break;
	case 1 ... 12:
		if (chunk && chunk->state == DMA_BOUNCE_LIVE) {
			dma_bounce_chunk_retire(&slots, chunk, DMA_BOUNCE_DRAINING);
			dma_bounce_slots_flush(&slots, true);
			drains++;
		}
		break;
	case 13 ... 30:
		dma_bounce_slots_flush(&slots, false);
		break;
	case 31 ... 90:
		if (chunk)
			withdraw(chunk, state);
		break;
	case 91 ... 120:
		reap();
		break;
	default:
		if (!answer(state))
			add_chunk(next_random(state) % DMA_BOUNCE_KINDS,
				  next_random(state) % DMA_BOUNCE_CLASSES, state);
	}
	mutex_unlock(&slots.mutex);
}

/* After all slots were returned, no chunk has used slots, and the depots' sums are right. */
static void check_nothing_lost(void)
{
	unsigned int kind, class, sum[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES] = {};
	struct dma_bounce_chunk *chunk;
	unsigned long place, served = 0;
	size_t i;

	for (i = 0; i < DMA_BOUNCE_MAPPED_TYPES; i++)
		served += dma_bounce_slots_served(&slots, i);
	CHECK(served == gets);
	dma_bounce_slots_flush(&slots, true);
	reap();
	for (place = 0; place < PLACES; place++) {
		chunk = dma_bounce_slots_chunk(&slots, place);
		if (!chunk)
			continue;
		CHECK(chunk->state == DMA_BOUNCE_LIVE && !dma_bounce_chunk_used(&slots, chunk));
		sum[chunk->kind][chunk->class] += chunk->nslots;
		for (i = 0; i < chunk->nslots; i++)
			CHECK(!chunk->slots[i].len);
	}
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
			CHECK(slots.depots[kind][class].nslots == sum[kind][class]);
			CHECK(slots.depots[kind][class].nfree == sum[kind][class]);
			CHECK(!dma_bounce_slots_cached(&slots, kind, class));
		}
	}
	for (i = 0; i < sizeof(owners) / sizeof(owners[0]); i++)
		CHECK(!owners[i]);
}

int main(int argc, char **argv)
{
	unsigned int seconds = argc > 1 ? atoi(argv[1]) : 0;
	pthread_t threads[THREADS];
	unsigned long long state;
	time_t end;
	uintptr_t i;

	if (!seconds || argc > 3) {
		fprintf(stderr, "usage: stress SECONDS [SEED]\n");
		return 2;
	}
	seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (unsigned long long)time(NULL);
	state = seed * 2 + 1;
	dma_bounce_slots_init(&slots, on_notify);
	CHECK(dma_bounce_slots_open(&slots, BASE + PAGE, PLACES * CHUNK, CHUNK_SHIFT) == -EINVAL);
	CHECK(dma_bounce_slots_open(&slots, BASE, PLACES * CHUNK, DMA_BOUNCE_MAX_SHIFT - 1) == -EINVAL);
	CHECK(dma_bounce_slots_open(&slots, -CHUNK, 2 * CHUNK, CHUNK_SHIFT) == -EINVAL);
	CHECK(!dma_bounce_slots_open(&slots, BASE, PLACES * CHUNK, CHUNK_SHIFT));
	CHECK(!dma_bounce_slots_own(&slots, BASE - 1));
	CHECK(!dma_bounce_slots_own(&slots, BASE + PLACES * CHUNK));
	pthread_barrier_init(&barrier, NULL, THREADS + 1);
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, user, (void *)i));
	pthread_barrier_wait(&barrier);
	for (end = time(NULL) + seconds; time(NULL) < end;) {
		manage(&state);
		/* Slots are taken far more often than chunks change. */
		usleep(20);
	}
	WRITE_ONCE(stop, true);
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	check_nothing_lost();
	printf("seed %llu: %lu slots taken, %lu misses; chunks: %lu added (%lu because a depot asked), %lu withdrawn, %lu reused, %lu drained; all chunks freed %lu times, %lu orphans\n",
	       seed, gets, misses, adds, asked, withdrawals, recycled, drains, deaths, orphans);
	/* Each case must have occurred. */
	CHECK(gets && misses && withdrawals && recycled && drains && deaths && orphans && notified &&
	      asked);
	kill_all();
	dma_bounce_slots_close(&slots);
	return 0;
}
