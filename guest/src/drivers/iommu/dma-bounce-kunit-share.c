// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: domains that share the memory of one provider
 */

#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-device.h"
#include "dma-bounce-kunit.h"
#include "dma-bounce-pool.h"

#define SLOTS_PER_CHUNK		(FAKE_CHUNK / DMA_BOUNCE_MAX_SLOT)
/* Maximum number of chunks whose slots a domain takes in these tests */
#define MOST			8
/* Number of chunks that together have so few slots that the depot asks for no chunk in advance */
#define FEW			((DMA_BOUNCE_LOW_PART - 1) / SLOTS_PER_CHUNK)

/**
 * struct taker - slots that were taken from the pool of a domain
 * @pool:	the pool
 * @slot:	the slots
 * @n:		number of slots
 */
struct taker {
	struct dma_bounce_pool	*pool;
	struct dma_bounce_slot	*slot[MOST * SLOTS_PER_CHUNK];
	unsigned int		n;
};

static unsigned int live(struct dma_bounce_pool *pool)
{
	unsigned int n;

	mutex_lock(&pool->slots.mutex);
	n = pool->nchunks - pool->ndraining;
	mutex_unlock(&pool->slots.mutex);
	return n;
}

/*
 * Takes the slots of @chunks more chunks. Gives up after 3 s. Returns the number of chunks whose
 * slots were taken so far.
 */
static unsigned int take(struct taker *taker, unsigned int chunks)
{
	unsigned int i, want = taker->n + chunks * SLOTS_PER_CHUNK;
	struct dma_bounce_slot *slot;

	for (i = 0; i < 150 && taker->n < want; i++) {
		if (!taker->pool->slots.len) {
			dma_bounce_pool_first_use(taker->pool, DMA_BIT_MASK(64));
			msleep(20);
			continue;
		}
		rcu_read_lock();
		slot = dma_bounce_pool_get(taker->pool, DMA_BOUNCE_RW, DMA_BOUNCE_MAX_SLOT,
					   DMA_BOUNCE_SINGLE);
		if (slot)
			taker->slot[taker->n++] = slot;
		rcu_read_unlock();
		if (!slot)
			msleep(20);
	}
	return taker->n / SLOTS_PER_CHUNK;
}

static void put(struct taker *taker, unsigned int chunks)
{
	unsigned int i;

	for (i = 0; i < chunks * SLOTS_PER_CHUNK && taker->n; i++)
		dma_bounce_slots_put(&taker->pool->slots, taker->slot[--taker->n]);
}

static int share_init(struct kunit *test)
{
	int ret = bounce_kunit_init(test);
	struct bounce_test *t = test->priv;

	if (!ret)
		t->other = fake_domain_create(t->fake);
	return ret ?: t->other ? 0 : -ENOMEM;
}

static void share_exit(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	if (t && t->other)
		fake_domain_destroy(t->other);
	bounce_kunit_exit(test);
}

static struct taker *new_taker(struct kunit *test, struct dma_bounce_pool *pool)
{
	struct taker *taker = kunit_kzalloc(test, sizeof(*taker), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, taker);
	taker->pool = pool;
	return taker;
}

/* All domains together give the provider's surplus back once, and not once for each domain. */
static void surplus_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);

	KUNIT_EXPECT_EQ(test, take(a, FEW), FEW);
	KUNIT_EXPECT_EQ(test, take(b, FEW), FEW);
	KUNIT_EXPECT_EQ(test, live(a->pool) + live(b->pool), 2 * FEW);
	fake_set_most(t->fake, 3);
	msleep(200);
	/* All chunks are in use. Three of them are retired. The next call retires no more. */
	KUNIT_EXPECT_EQ(test, live(a->pool) + live(b->pool), 3);
	fake_set_most(t->fake, 3);
	msleep(200);
	KUNIT_EXPECT_EQ(test, live(a->pool) + live(b->pool), 3);
	put(a, MOST);
	put(b, MOST);
	msleep(200);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->fake->given), 3);
}

/* Idle chunks of any domain are given back first. */
static void idle_first_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);

	KUNIT_EXPECT_EQ(test, take(a, FEW), FEW);
	KUNIT_EXPECT_EQ(test, take(b, FEW), FEW);
	put(a, MOST);
	fake_set_most(t->fake, FEW);
	msleep(200);
	KUNIT_EXPECT_EQ(test, live(a->pool), 0);
	KUNIT_EXPECT_EQ(test, live(b->pool), FEW);
	put(b, MOST);
}

/* A domain that finds no memory gets idle chunks of other domains. */
static void starved_idle_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);

	t->fake->most = 4;
	KUNIT_EXPECT_EQ(test, take(a, 4), 4);
	put(a, MOST);
	KUNIT_EXPECT_EQ(test, take(b, 3), 3);
	put(b, MOST);
}

/* Takes all free slots. */
static void grab(struct taker *taker)
{
	struct dma_bounce_slot *slot;

	rcu_read_lock();
	while (taker->n < ARRAY_SIZE(taker->slot)) {
		slot = dma_bounce_pool_get(taker->pool, DMA_BOUNCE_RW, DMA_BOUNCE_MAX_SLOT,
					   DMA_BOUNCE_SINGLE);
		if (!slot)
			break;
		taker->slot[taker->n++] = slot;
	}
	rcu_read_unlock();
}

/*
 * If no chunk is idle, a domain that finds no memory gets chunks in use, until both domains have
 * about the same number.
 */
static void starved_busy_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);
	unsigned int i;

	t->fake->most = 6;
	KUNIT_EXPECT_EQ(test, take(a, 6), 6);
	dma_bounce_pool_first_use(b->pool, DMA_BIT_MASK(64));
	/* Both domains use all their slots all the time. */
	for (i = 0; i < 300 && live(b->pool) < 2; i++) {
		put(a, MOST);
		grab(a);
		if (b->pool->slots.len) {
			put(b, MOST);
			grab(b);
		}
		msleep(20);
	}
	KUNIT_EXPECT_GE(test, live(b->pool), 2);
	KUNIT_EXPECT_GE(test, live(a->pool), 2);
	put(a, MOST);
	put(b, MOST);
}

/* If chunks of a domain cannot be given back, other domains give up chunks instead. */
static void stuck_domain_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);

	KUNIT_EXPECT_EQ(test, take(a, FEW), FEW);
	KUNIT_EXPECT_EQ(test, take(b, FEW), FEW);
	put(a, MOST);
	t->fake->refuse_del = true;
	/* The first call tries to give the idle chunks back, and fails. */
	fake_set_most(t->fake, 4);
	fake_set_most(t->fake, 4);
	KUNIT_EXPECT_EQ(test, live(b->pool), 1);
	t->fake->refuse_del = false;
	put(b, MOST);
}

/* A draining chunk whose slots stay mapped does not keep other domains from getting chunks. */
static void mapped_for_long_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct taker *a = new_taker(test, t->pool), *b = new_taker(test, t->other->domain.bounce);
	struct dma_bounce_chunk *first = NULL;
	struct dma_bounce_slot *slot;
	unsigned int i, n, kept;

	t->fake->most = 6;
	KUNIT_EXPECT_EQ(test, take(a, 6), 6);
	dma_bounce_pool_first_use(b->pool, DMA_BIT_MASK(64));
	for (i = 0; i < 300 && !live(b->pool); i++) {
		for (n = kept = 0; n < a->n; n++) {
			slot = a->slot[n];
			if (!first && READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DRAINING)
				first = slot->chunk;
			if (slot->chunk == first)
				a->slot[kept++] = slot;
			else
				dma_bounce_slots_put(&a->pool->slots, slot);
		}
		a->n = kept;
		grab(a);
		if (b->pool->slots.len)
			grab(b);
		msleep(20);
	}
	KUNIT_EXPECT_GE(test, live(b->pool), 1);
	put(a, MOST);
	put(b, MOST);
}

/* Each pool enables the static key once more, so the hooks are disabled without pools. */
static void key_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	int before = static_key_count(&dma_bounce_key.key);

	KUNIT_EXPECT_GE(test, before, 2);
	fake_domain_destroy(t->other);
	t->other = NULL;
	KUNIT_EXPECT_EQ(test, static_key_count(&dma_bounce_key.key), before - 1);
	t->other = fake_domain_create(t->fake);
	KUNIT_ASSERT_NOT_NULL(test, t->other);
	KUNIT_EXPECT_EQ(test, static_key_count(&dma_bounce_key.key), before);
}

static struct kunit_case bounce_share_cases[] = {
	KUNIT_CASE(surplus_test),
	KUNIT_CASE(idle_first_test),
	KUNIT_CASE(starved_idle_test),
	KUNIT_CASE(starved_busy_test),
	KUNIT_CASE(stuck_domain_test),
	KUNIT_CASE(mapped_for_long_test),
	KUNIT_CASE(key_test),
	{ }
};

static struct kunit_suite bounce_share_suite = {
	.name		= "dma-bounce-share",
	.init		= share_init,
	.exit		= share_exit,
	.test_cases	= bounce_share_cases,
};

kunit_test_suite(bounce_share_suite);
