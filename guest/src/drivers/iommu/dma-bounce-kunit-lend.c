// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: memory that was lent before
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>

#include "dma-bounce-kunit.h"
#include "dma-bounce-pool.h"

/* Returns the number of blocked chunks. */
static unsigned int blocked_chunks(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place = 0;
	unsigned int n = 0;

	mutex_lock(&pool->slots.mutex);
	while ((chunk = dma_bounce_next_chunk(pool, &place)))
		n += chunk->state == DMA_BOUNCE_BLOCKED;
	mutex_unlock(&pool->slots.mutex);
	return n;
}

/*
 * A chunk whose pages something holds is not used until the pages are released. Then it is given
 * back. Meanwhile, the pool uses another chunk.
 */
static void held_chunk_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;
	unsigned int i;

	t->fake->held = FAKE_WINDOW_IOVA;
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_TO_DEVICE, 0);
	KUNIT_EXPECT_GE(test, addr, FAKE_WINDOW_IOVA + FAKE_CHUNK);
	KUNIT_EXPECT_EQ(test, blocked_chunks(t->pool), 1);
	KUNIT_EXPECT_EQ(test, t->pool->blocked, 1);
	dma_bounce_pool_retry(t->pool);
	msleep(100);
	KUNIT_EXPECT_EQ(test, blocked_chunks(t->pool), 1);
	WRITE_ONCE(t->fake->held, 0);
	dma_bounce_pool_retry(t->pool);
	for (i = 0; i < 3000 && blocked_chunks(t->pool); i++)
		msleep(20);
	KUNIT_EXPECT_EQ(test, blocked_chunks(t->pool), 0);
	dma_unmap_single(t->dev, addr, 4096, DMA_TO_DEVICE);
}

static struct kunit_case bounce_lend_cases[] = {
	KUNIT_CASE(held_chunk_test),
	{ }
};

static struct kunit_suite bounce_lend_suite = {
	.name		= "dma-bounce-lend",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_lend_cases,
};

kunit_test_suite(bounce_lend_suite);
