// SPDX-License-Identifier: GPL-2.0-only
/*
 * Step-by-step user-space tests of the bounce-slot allocator. They test when a depot asks for
 * another chunk, and what happens to the slots of CPUs that go offline. The exit status is 1 if a
 * check fails.
 */

#include "shim.h"

#include <stdio.h>

#include "../../src/drivers/iommu/dma-bounce-slots.h"

#define CHUNK_SHIFT	21
#define CHUNK		(1UL << CHUNK_SHIFT)
#define PLACES		8
#define BASE		0xc0000000UL
#define MANY		512
/* Classes of the largest slots (8 in a chunk) and the smallest slots (512 in a chunk) */
#define LARGE		(DMA_BOUNCE_CLASSES - 1)
#define SMALL		0

#define CHECK(cond) do { if (!(cond)) fail(__LINE__, #cond); } while (0)

static struct dma_bounce_slots slots;
static struct dma_bounce_slot *held[MANY];
static unsigned int nheld, notified;

static void fail(int line, const char *what)
{
	fprintf(stderr, "unit.c:%d: check failed: %s\n", line, what);
	exit(1);
}

static void on_notify(struct dma_bounce_slots *unused)
{
	(void)unused;
	notified++;
}

static void begin(u64 online)
{
	memset(&slots, 0, sizeof(slots));
	shim_online = online;
	shim_cpu = 0;
	nheld = 0;
	notified = 0;
	dma_bounce_slots_init(&slots, on_notify);
	CHECK(!dma_bounce_slots_open(&slots, BASE, PLACES * CHUNK, CHUNK_SHIFT));
}

/* Publishes a chunk of @size bytes at a place. */
static struct dma_bounce_chunk *add(unsigned long place, unsigned int class, size_t size)
{
	struct dma_bounce_chunk *chunk;

	chunk = dma_bounce_chunk_alloc(DMA_BOUNCE_RW, class, CHUNK, NUMA_NO_NODE);
	CHECK(chunk);
	dma_bounce_chunk_publish(&slots, chunk, NULL, BASE + place * CHUNK, size);
	return chunk;
}

static void end(void)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	for (place = 0; place < PLACES; place++) {
		chunk = dma_bounce_slots_chunk(&slots, place);
		if (chunk)
			dma_bounce_chunk_remove(&slots, chunk);
	}
	dma_bounce_slots_close(&slots);
}

static struct dma_bounce_slot *get(unsigned int class)
{
	struct dma_bounce_slot *slot;

	rcu_read_lock();
	slot = dma_bounce_slots_get(&slots, DMA_BOUNCE_RW, class, DMA_BOUNCE_SINGLE);
	rcu_read_unlock();
	return slot;
}

/* Takes slots until @n are held. */
static void take_to(unsigned int class, unsigned int n)
{
	while (nheld < n) {
		held[nheld] = get(class);
		CHECK(held[nheld++]);
	}
}

static void give_to(unsigned int n)
{
	while (nheld > n)
		dma_bounce_slots_put(&slots, held[--nheld]);
}

static bool *asks(unsigned int class)
{
	return &slots.depots[DMA_BOUNCE_RW][class].asks;
}

/*
 * With one chunk of few slots, the depot asks when a CPU takes the last slots, and asks again
 * later.
 */
static void few_slots_test(void)
{
	begin(1);
	add(0, LARGE, CHUNK);
	take_to(LARGE, 6);
	CHECK(!notified && !*asks(LARGE));
	take_to(LARGE, 7);
	CHECK(notified == 1 && *asks(LARGE));
	take_to(LARGE, 8);
	CHECK(!get(LARGE));
	give_to(0);
	take_to(LARGE, 8);
	CHECK(notified == 1);
	shim_jiffies += DMA_BOUNCE_ASK_AGAIN;
	CHECK(!get(LARGE));
	CHECK(!get(LARGE));
	CHECK(notified == 2);
	/* With another chunk, the depot stops asking until that chunk is nearly used up, too. */
	add(1, LARGE, CHUNK);
	CHECK(!*asks(LARGE));
	take_to(LARGE, 14);
	CHECK(notified == 2);
	take_to(LARGE, 15);
	CHECK(notified == 3 && *asks(LARGE));
	give_to(0);
	end();
}

/* With one chunk of many slots, the depot asks when the free slots are as few as a CPU may keep. */
static void many_slots_test(void)
{
	begin(1);
	add(0, SMALL, CHUNK);
	take_to(SMALL, 480);
	CHECK(!notified);
	take_to(SMALL, 481);
	CHECK(notified == 1 && *asks(SMALL));
	give_to(0);
	end();
}

/* A depot with very few slots does not ask: such small chunks mean that memory is short. */
static void small_chunk_test(void)
{
	begin(1);
	add(0, LARGE, CHUNK / 2);
	take_to(LARGE, 4);
	CHECK(!get(LARGE) && !notified);
	give_to(0);
	end();
}

/* Slots that another CPU keeps count as free. */
static void kept_slots_test(void)
{
	begin(3);
	add(0, SMALL, CHUNK);
	take_to(SMALL, DMA_BOUNCE_CACHE_SLOTS);
	shim_cpu = 1;
	give_to(0);
	shim_cpu = 0;
	take_to(SMALL, 448);
	/* 32 slots are in the depot or in this CPU's stack. */
	CHECK(!notified);
	take_to(SMALL, 449);
	CHECK(notified == 1);
	give_to(0);
	end();
}

/* With @spare set, an idle chunk is kept as long as few slots would be free without it. */
static void spare_chunk_test(void)
{
	struct dma_bounce_chunk *first, *second;

	begin(1);
	first = add(0, LARGE, CHUNK);
	second = add(1, LARGE, CHUNK);
	take_to(LARGE, 6);
	dma_bounce_slots_flush(&slots, true);
	shim_jiffies += 100;
	CHECK(!dma_bounce_chunk_withdraw(&slots, first, 10, false));
	CHECK(!dma_bounce_chunk_withdraw(&slots, second, 10, true));
	give_to(0);
	dma_bounce_slots_flush(&slots, true);
	shim_jiffies += 9;
	CHECK(!dma_bounce_chunk_withdraw(&slots, second, 10, true));
	shim_jiffies += 1;
	CHECK(dma_bounce_chunk_withdraw(&slots, second, 10, true));
	dma_bounce_chunk_remove(&slots, second);
	/* Without @spare, the chunk is withdrawn. */
	second = add(1, LARGE, CHUNK);
	take_to(LARGE, 6);
	dma_bounce_slots_flush(&slots, true);
	shim_jiffies += 10;
	CHECK(!dma_bounce_chunk_withdraw(&slots, second, 10, true));
	CHECK(dma_bounce_chunk_withdraw(&slots, second, 10, false));
	dma_bounce_chunk_remove(&slots, second);
	give_to(0);
	end();
}

/* Slots of online CPUs can be taken. Slots of offline CPUs return only by flushing. */
static void offline_test(void)
{
	begin(1ULL << 40 | 1);
	add(0, LARGE, CHUNK);
	take_to(LARGE, 8);
	shim_cpu = 40;
	give_to(7);
	shim_cpu = 0;
	/* CPU 40 is found although no CPU between it and CPU 0 is online. */
	take_to(LARGE, 8);
	shim_cpu = 40;
	give_to(7);
	shim_cpu = 0;
	shim_online = 1;
	CHECK(!get(LARGE));
	dma_bounce_slots_flush(&slots, false);
	CHECK(!get(LARGE));
	dma_bounce_slots_flush(&slots, false);
	take_to(LARGE, 8);
	give_to(0);
	end();
}

int main(void)
{
	few_slots_test();
	many_slots_test();
	small_chunk_test();
	kept_slots_test();
	spare_chunk_test();
	offline_test();
	return 0;
}
