// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: pools that grow before their free slots run out
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/jiffies.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-kunit.h"
#include "dma-bounce-pool.h"

/* Bytes of a mapping, maximum number of mappings, and number of mappings that a chunk serves */
#define LEN		256
#define MAPPINGS	(AREA / LEN)
#define PER_CHUNK	(FAKE_CHUNK / SZ_4K)
/* Number of mappings that leaves few slots of a chunk free */
#define MANY		(PER_CHUNK - 2)

/**
 * struct mapper - mappings, the oldest first
 * @addr:	addresses of the mappings
 * @n:		number of mappings
 */
struct mapper {
	dma_addr_t	addr[MAPPINGS];
	unsigned int	n;
};

static unsigned int attempts;

static void count_attempt(struct dma_bounce_pool *pool)
{
	attempts++;
}

static struct mapper *new_mapper(struct kunit *test)
{
	struct mapper *mapper = kunit_kzalloc(test, sizeof(*mapper), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, mapper);
	return mapper;
}

/* Makes another mapping, and waits for the pool's work. Returns true if the mapping bounced. */
static bool map_one(struct kunit *test, struct mapper *mapper)
{
	struct bounce_test *t = test->priv;
	unsigned int i = mapper->n++;

	mapper->addr[i] = bounce_kunit_map(test, i * LEN, LEN, DMA_FROM_DEVICE, 0);
	flush_work(&t->pool->work);
	return dma_bounce_owns(t->pool, mapper->addr[i]);
}

static void unmap_one(struct kunit *test, struct mapper *mapper)
{
	struct bounce_test *t = test->priv;

	dma_unmap_single(t->dev, mapper->addr[--mapper->n], LEN, DMA_FROM_DEVICE);
}

/* Maps until there are @n mappings. Returns the number of new mappings that bounced. */
static unsigned int map_to(struct kunit *test, struct mapper *mapper, unsigned int n)
{
	unsigned int bounced = 0;

	while (mapper->n < n)
		bounced += map_one(test, mapper);
	return bounced;
}

static void unmap_all(struct kunit *test, struct mapper *mapper)
{
	while (mapper->n)
		unmap_one(test, mapper);
}

/* If demand grows steadily, each mapping finds a slot. */
static void ahead_test(struct kunit *test)
{
	struct mapper *mapper = new_mapper(test);
	struct bounce_test *t = test->priv;
	u64 full;

	bounce_kunit_warm(test, LEN, DMA_FROM_DEVICE);
	full = dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_FULL);
	/* Many slots are free, so no chunk is added. */
	KUNIT_EXPECT_EQ(test, map_to(test, mapper, PER_CHUNK / 2), PER_CHUNK / 2);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 1);
	KUNIT_EXPECT_EQ(test, map_to(test, mapper, PER_CHUNK * 3 / 2), PER_CHUNK);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 2);
	KUNIT_EXPECT_EQ(test, t->pool->ahead, 1);
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_FULL), full);
	unmap_all(test, mapper);
}

/* If the number of mappings stays constant, the pool adds one chunk and keeps it. */
static void constant_use_test(struct kunit *test)
{
	struct mapper *mapper = new_mapper(test);
	struct bounce_test *t = test->priv;
	unsigned int i, bounced = 0;

	t->pool->idle_ms = 50;
	bounce_kunit_warm(test, LEN, DMA_FROM_DEVICE);
	map_to(test, mapper, MANY);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 2);
	for (i = 0; i < 300; i++) {
		unmap_one(test, mapper);
		bounced += map_one(test, mapper);
		if (i % 10 == 0)
			msleep(20);
	}
	KUNIT_EXPECT_EQ(test, bounced, 300);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 2);
	KUNIT_EXPECT_EQ(test, t->pool->adds, 2);
	unmap_all(test, mapper);
	for (i = 0; i < 300 && READ_ONCE(t->pool->nchunks); i++)
		msleep(20);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 0);
}

/* If adding a chunk early fails, a mapping that finds no slot can still request a chunk. */
static void ahead_fails_test(struct kunit *test)
{
	struct mapper *mapper = new_mapper(test);
	struct bounce_test *t = test->priv;
	u64 failures;

	bounce_kunit_warm(test, LEN, DMA_FROM_DEVICE);
	failures = t->pool->failures;
	WRITE_ONCE(t->fake->most, 1);
	attempts = 0;
	t->fake->adding = count_attempt;
	KUNIT_EXPECT_EQ(test, map_to(test, mapper, MANY), MANY);
	t->fake->adding = NULL;
	KUNIT_EXPECT_GT(test, attempts, 0);
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 1);
	KUNIT_EXPECT_EQ(test, t->pool->failures, failures);
	KUNIT_EXPECT_FALSE(test, t->pool->starved);
	WRITE_ONCE(t->fake->most, 0);
	/* The pool does not ask the provider again immediately, so one mapping finds no slot. */
	map_to(test, mapper, PER_CHUNK + 1);
	KUNIT_EXPECT_TRUE(test, map_one(test, mapper));
	KUNIT_EXPECT_EQ(test, t->pool->nchunks, 2);
	unmap_all(test, mapper);
}

/* A pool that grows early takes no chunk of another size, and not the budget's last chunk. */
static void ahead_takes_nothing_test(struct kunit *test)
{
	struct mapper *mapper = new_mapper(test);
	struct bounce_test *t = test->priv;
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	fake_set_budget(t->fake, 2 * FAKE_CHUNK);
	bounce_kunit_warm(test, SZ_8K, DMA_FROM_DEVICE);
	bounce_kunit_warm(test, LEN, DMA_FROM_DEVICE);
	mutex_lock(&t->pool->slots.mutex);
	dma_bounce_slots_flush(&t->pool->slots, true);
	/* Make the chunks look as if they had been idle for long. */
	for (place = 0; (chunk = dma_bounce_next_chunk(t->pool, &place));)
		chunk->idle_since -= 2 * DMA_BOUNCE_IDLE;
	mutex_unlock(&t->pool->slots.mutex);
	KUNIT_EXPECT_EQ(test, map_to(test, mapper, PER_CHUNK), PER_CHUNK);
	KUNIT_EXPECT_EQ(test, t->pool->adds, 2);
	KUNIT_EXPECT_EQ(test, t->pool->recycled, 0);
	KUNIT_EXPECT_FALSE(test, map_one(test, mapper));
	KUNIT_EXPECT_TRUE(test, map_one(test, mapper));
	KUNIT_EXPECT_EQ(test, t->pool->recycled, 1);
	unmap_all(test, mapper);
}

static struct kunit_case bounce_grow_cases[] = {
	KUNIT_CASE(ahead_test),
	KUNIT_CASE(constant_use_test),
	KUNIT_CASE(ahead_fails_test),
	KUNIT_CASE(ahead_takes_nothing_test),
	{ }
};

static struct kunit_suite bounce_grow_suite = {
	.name		= "dma-bounce-grow",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_grow_cases,
};

kunit_test_suite(bounce_grow_suite);
