// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: pools that grow before their free slots run out, and thresholds
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/jiffies.h>
#include <linux/scatterlist.h>

#include "dma-bounce-calibrate.h"
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

/* Returns true if a buffer of @len bytes bounces, and a list of @len bytes, too. */
static bool bounces(struct kunit *test, size_t len, enum dma_data_direction dir)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr = bounce_kunit_map(test, 0, len, dir, 0);
	bool page = dma_bounce_owns(t->pool, addr), list;
	struct scatterlist sgl[2];

	dma_unmap_single(t->dev, addr, len, dir);
	sg_init_table(sgl, 2);
	sg_set_buf(&sgl[0], t->area, len / 2);
	sg_set_buf(&sgl[1], t->area + len, len - len / 2);
	KUNIT_ASSERT_GT(test, dma_map_sg(t->dev, sgl, 2, dir), 0);
	list = dma_bounce_owns(t->pool, sg_dma_address(sgl));
	dma_unmap_sg(t->dev, sgl, 2, dir);
	KUNIT_EXPECT_EQ(test, page, list);
	return page;
}

/* Expects that mappings bounce up to these sizes: device reads, device writes, device does both. */
static void expect_limits(struct kunit *test, size_t read, size_t write, size_t both)
{
	KUNIT_EXPECT_TRUE(test, bounces(test, read, DMA_TO_DEVICE));
	KUNIT_EXPECT_FALSE(test, bounces(test, read + 1, DMA_TO_DEVICE));
	KUNIT_EXPECT_TRUE(test, bounces(test, write, DMA_FROM_DEVICE));
	KUNIT_EXPECT_FALSE(test, bounces(test, write + 1, DMA_FROM_DEVICE));
	KUNIT_EXPECT_TRUE(test, bounces(test, both, DMA_BIDIRECTIONAL));
	KUNIT_EXPECT_FALSE(test, bounces(test, both + 1, DMA_BIDIRECTIONAL));
}

/* Each direction has its threshold. The smaller one applies to both directions. */
static void threshold_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_thresholds *own = &t->dev->iommu->bounce.threshold;

	bounce_kunit_warm(test, SZ_8K, DMA_TO_DEVICE);
	bounce_kunit_warm(test, SZ_8K, DMA_FROM_DEVICE);
	bounce_kunit_warm(test, SZ_8K, DMA_BIDIRECTIONAL);
	t->pool->threshold = (struct dma_bounce_thresholds) { .read = 7000, .write = 6000 };
	expect_limits(test, 7000, 6000, 6000);
	t->pool->threshold = (struct dma_bounce_thresholds) { .read = 6000, .write = 7000 };
	expect_limits(test, 6000, 7000, 6000);
	/* A threshold of the device replaces that of the domain. */
	own->write = 5000;
	expect_limits(test, 6000, 5000, 5000);
	own->read = 8000;
	expect_limits(test, 8000, 5000, 5000);
	own->write = 0;
	expect_limits(test, 8000, 7000, 7000);
	own->read = 0;
}

/* The boot option precedes the provider's advice, which precedes the measured thresholds. */
static void threshold_choice_test(struct kunit *test)
{
	static const struct {
		struct dma_bounce_thresholds option, advice, expect;
	} cases[] = {
		{ .advice = { SZ_16K, 0 }, .expect = { SZ_16K, SZ_16K } },
		{ .advice = { SZ_16K, SZ_8K }, .expect = { SZ_16K, SZ_8K } },
		{ .option = { SZ_4K, 0 }, .advice = { SZ_16K, SZ_8K }, .expect = { SZ_4K, SZ_4K } },
		{ .option = { SZ_4K, SZ_2K }, .advice = { SZ_16K, SZ_8K },
		  .expect = { SZ_4K, SZ_2K } },
		{ .option = { 0, SZ_2K }, .advice = { SZ_16K, SZ_8K },
		  .expect = { SZ_16K, SZ_2K } },
		{ .advice = { 0, SZ_8K }, .expect = { 12345, SZ_8K } },
		{ .expect = { 12345, 6789 } },
		{ .advice = { SZ_1M, SZ_2M },
		  .expect = { DMA_BOUNCE_MAX_SLOT, DMA_BOUNCE_MAX_SLOT } },
	};
	struct bounce_test *t = test->priv;
	struct dma_bounce_thresholds *now = &t->pool->threshold;
	unsigned int i;

	bounce_kunit_warm(test, SZ_8K, DMA_TO_DEVICE);
	t->pool->calibrated = (struct dma_bounce_thresholds) { .read = 12345, .write = 6789 };
	mutex_lock(&t->pool->slots.mutex);
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		t->pool->threshold_option = cases[i].option;
		dma_bounce_set_thresholds(t->pool, &cases[i].advice);
		KUNIT_EXPECT_EQ_MSG(test, now->read, cases[i].expect.read, "case %u", i);
		KUNIT_EXPECT_EQ_MSG(test, now->write, cases[i].expect.write, "case %u", i);
	}
	mutex_unlock(&t->pool->slots.mutex);
}

static struct kunit_case bounce_grow_cases[] = {
	KUNIT_CASE(ahead_test),
	KUNIT_CASE(constant_use_test),
	KUNIT_CASE(ahead_fails_test),
	KUNIT_CASE(ahead_takes_nothing_test),
	KUNIT_CASE(threshold_test),
	KUNIT_CASE(threshold_choice_test),
	{ }
};

static struct kunit_suite bounce_grow_suite = {
	.name		= "dma-bounce-grow",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_grow_cases,
};

kunit_test_suite(bounce_grow_suite);
