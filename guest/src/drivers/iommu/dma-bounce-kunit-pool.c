// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of bounced DMA: memory of pools
 */

#include <kunit/test.h>
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/iova.h>
#include <linux/jiffies.h>
#include <linux/slab.h>

#include "dma-bounce-calibrate.h"
#include "dma-bounce-debugfs.h"
#include "dma-bounce-kunit.h"
#include "dma-bounce-lend.h"
#include "dma-bounce-map.h"
#include "dma-bounce-pages.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-single.h"

static unsigned int chunks(struct dma_bounce_pool *pool)
{
	unsigned int n;

	mutex_lock(&pool->slots.mutex);
	n = pool->nchunks;
	mutex_unlock(&pool->slots.mutex);
	return n;
}

static bool chunks_become(struct dma_bounce_pool *pool, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < 300 && chunks(pool) != n; i++)
		msleep(20);
	return chunks(pool) == n;
}

/* The allocator alone */

static void no_work(struct dma_bounce_slots *slots)
{
}

static struct dma_bounce_slot *take(struct dma_bounce_slots *slots, enum dma_bounce_kind kind,
				    unsigned int class)
{
	return dma_bounce_slots_get(slots, kind, class, DMA_BOUNCE_LIST);
}

static void allocator_test(struct kunit *test)
{
	struct dma_bounce_slots *slots = kunit_kzalloc(test, sizeof(*slots), GFP_KERNEL);
	u8 *memory = kunit_kzalloc(test, SZ_1M, GFP_KERNEL);
	struct dma_bounce_slot *slot[16], *extra;
	struct dma_bounce_chunk *chunk;
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, slots);
	KUNIT_ASSERT_NOT_NULL(test, memory);
	dma_bounce_slots_init(slots, no_work);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_open(slots, SZ_4K, SZ_4M, 20), -EINVAL);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_open(slots, SZ_1G, SZ_4M, 12), -EINVAL);
	KUNIT_ASSERT_EQ(test, dma_bounce_slots_open(slots, SZ_1G, SZ_4M, 20), 0);
	chunk = dma_bounce_chunk_alloc(DMA_BOUNCE_WRITE, 4, SZ_1M, NUMA_NO_NODE);
	KUNIT_ASSERT_NOT_NULL(test, chunk);
	dma_bounce_chunk_publish(slots, chunk, memory, SZ_1G + SZ_1M, SZ_1M);

	rcu_read_lock();
	KUNIT_EXPECT_NULL(test, take(slots, DMA_BOUNCE_READ, 4));
	KUNIT_EXPECT_NULL(test, take(slots, DMA_BOUNCE_WRITE, 3));
	for (i = 0; i < 16; i++) {
		slot[i] = take(slots, DMA_BOUNCE_WRITE, 4);
		KUNIT_EXPECT_NOT_NULL(test, slot[i]);
		if (!slot[i])
			goto out_unlock;
		KUNIT_EXPECT_EQ(test, slot[i]->mapped, DMA_BOUNCE_LIST);
		KUNIT_EXPECT_TRUE(test, IS_ALIGNED(dma_bounce_slot_iova(slot[i]), SZ_64K));
		KUNIT_EXPECT_NULL(test, dma_bounce_slots_find(slots,
							      dma_bounce_slot_iova(slot[i])));
		slot[i]->len = 1;
		KUNIT_EXPECT_PTR_EQ(test, dma_bounce_slots_find(slots,
								dma_bounce_slot_iova(slot[i]) +
								SZ_64K - 1), slot[i]);
	}
	extra = take(slots, DMA_BOUNCE_WRITE, 4);
	KUNIT_EXPECT_NULL(test, extra);
	/* A CPU first hands out the slot returned last. The thread may have changed CPUs. */
	dma_bounce_slots_put(slots, slot[3]);
	dma_bounce_slots_put(slots, slot[7]);
	extra = take(slots, DMA_BOUNCE_WRITE, 4);
	KUNIT_EXPECT_TRUE(test, extra == slot[7] || extra == slot[3]);
	dma_bounce_slots_put(slots, extra);
out_unlock:
	rcu_read_unlock();
	KUNIT_EXPECT_FALSE(test, dma_bounce_chunk_withdraw(slots, chunk, 0, false));
	dma_bounce_chunk_retire(slots, chunk, DMA_BOUNCE_DRAINING);
	dma_bounce_slots_flush(slots, true);
	KUNIT_EXPECT_EQ(test, dma_bounce_chunk_used(slots, chunk), 14);
	rcu_read_lock();
	KUNIT_EXPECT_NULL(test, take(slots, DMA_BOUNCE_WRITE, 4));
	rcu_read_unlock();
	for (i = 0; i < 16; i++)
		if (slot[i]->len)
			dma_bounce_slots_put(slots, slot[i]);
	KUNIT_EXPECT_EQ(test, dma_bounce_chunk_used(slots, chunk), 0);
	/* All sixteen slots were taken, one of them twice. */
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_served(slots, DMA_BOUNCE_LIST), 17);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_served(slots, DMA_BOUNCE_SINGLE), 0);
	mutex_lock(&slots->mutex);
	dma_bounce_chunk_remove(slots, chunk);
	mutex_unlock(&slots->mutex);
	dma_bounce_slots_close(slots);
}

/* All CPUs together keep at most the limit, whatever the number of CPUs. */
static void cache_limit_test(struct kunit *test)
{
	static const u64 limits[] = { SZ_32M, SZ_2M, SZ_256K, 0 };
	struct bounce_test *t = test->priv;
	struct dma_bounce_slots *slots = &t->pool->slots;
	unsigned int i, class;
	dma_addr_t addr;
	u64 sum;

	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	for (i = 0; i < ARRAY_SIZE(limits); i++) {
		dma_bounce_slots_limit(slots, limits[i]);
		for (sum = 0, class = 0; class < DMA_BOUNCE_CLASSES; class++)
			sum += slots->cap[class] * dma_bounce_class_size(class);
		KUNIT_EXPECT_LE(test, sum * DMA_BOUNCE_KINDS * num_online_cpus(), limits[i]);
	}
	/* A CPU that may keep no slots takes a slot from the depot and returns it there. */
	dma_bounce_slots_flush(slots, true);
	addr = bounce_kunit_map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_cached(slots, DMA_BOUNCE_WRITE, 0), 0);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_cached(slots, DMA_BOUNCE_WRITE, 0), 0);
}

/* The size of the pool */

/* If the pool is full, mappings still succeed, and the device sees the right data. */
static void exhaustion_test(struct kunit *test)
{
	const unsigned int len = 256, n = AREA / len, slots = FAKE_CHUNK / SZ_4K;
	struct bounce_test *t = test->priv;
	unsigned int i, bounced = 0;
	dma_addr_t *addr;
	u8 byte;

	addr = kunit_kcalloc(test, n, sizeof(*addr), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, addr);
	fake_set_budget(t->fake, FAKE_CHUNK);
	bounce_kunit_fill(t);
	bounce_kunit_warm(test, len, DMA_BIDIRECTIONAL);
	for (i = 0; i < n; i++) {
		addr[i] = bounce_kunit_map(test, i * len, len, DMA_BIDIRECTIONAL, 0);
		bounced += dma_bounce_owns(t->pool, addr[i]);
	}
	KUNIT_EXPECT_EQ(test, bounced, slots);
	KUNIT_EXPECT_GE(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_FULL), n - slots);
	for (i = 0; i < n; i++) {
		KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr[i] + 77, &byte, 1));
		KUNIT_EXPECT_EQ(test, byte, t->area[i * len + 77]);
	}
	for (i = 0; i < n; i++)
		dma_unmap_single(t->dev, addr[i], len, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
}

static void miss(struct dma_bounce_pool *pool)
{
	dma_bounce_pool_missed(pool, DMA_BOUNCE_WRITE, 0);
}

/* A mapping that finds no slot while a chunk is being added does not request another chunk. */
static void late_miss_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	t->fake->adding = miss;
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	flush_work(&t->pool->work);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	t->fake->adding = NULL;
}

/*
 * If the budget is lowered, idle chunks are given back at once. Used chunks are given back when
 * their last mapping ends.
 */
static void budget_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr, other;
	unsigned long start;
	u8 bytes[512];

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	bounce_kunit_warm(test, 4096, DMA_TO_DEVICE);
	bounce_kunit_warm(test, 8192, DMA_BIDIRECTIONAL);
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_ASSERT_EQ(test, chunks(t->pool), 3);
	start = jiffies;
	fake_set_budget(t->fake, FAKE_CHUNK);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 1));
	/* The other chunks are idle, so they are given back at once. */
	KUNIT_EXPECT_TRUE(test, time_before(jiffies, start + HZ));
	fake_set_budget(t->fake, 0);
	msleep(100);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	/* Until the last mapping ends, the chunk's other slots are not handed out. */
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 8, bytes, sizeof(bytes)));
	other = bounce_kunit_map(test, 8192, 4096, DMA_FROM_DEVICE, 0);
	dma_unmap_single(t->dev, other, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	memset(t->expect + 8, SECRET, sizeof(bytes));
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
	KUNIT_EXPECT_EQ(test, t->pool->drained, 1);
	/* After the budget is raised, the pool is used again. */
	fake_set_budget(t->fake, SZ_4M);
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
}

/* Idle chunks are given back, a chunk in use is not. */
static void idle_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	t->pool->idle_ms = 20;
	bounce_kunit_warm(test, 8192, DMA_TO_DEVICE);
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 1));
	msleep(300);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
	KUNIT_EXPECT_GE(test, t->pool->shrunk, 2);
}

/* A lowered idle time applies at once, and not only after the previous idle time. */
static void idle_lowered_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;

	dma_bounce_pool_set_idle(t->pool, DMA_BOUNCE_MAX_IDLE_MS);
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	dma_bounce_pool_set_idle(t->pool, 20);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
}

/* A chunk that cannot be unmapped keeps its place, and is given back later. */
static void stuck_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr, other;
	u8 byte = SECRET;
	unsigned int i;

	bounce_kunit_fill(t);
	t->pool->idle_ms = 20;
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	WRITE_ONCE(t->fake->refuse_del, true);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	for (i = 0; i < 300 && !READ_ONCE(t->fake->refused); i++)
		msleep(20);
	KUNIT_EXPECT_GT(test, t->fake->refused, 0);
	other = bounce_kunit_map_bounced(test, 8192, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_NE(test, addr / FAKE_CHUNK, other / FAKE_CHUNK);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, other + 5, &byte, 1));
	dma_unmap_single(t->dev, other, 4096, DMA_FROM_DEVICE);
	t->expect[8197] = byte;
	bounce_kunit_expect_area(test);
	WRITE_ONCE(t->fake->refuse_del, false);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
}

/* The pool skips a place at which the provider never adds a chunk. */
static void refused_place_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr;

	t->fake->refuse_add = FAKE_WINDOW_IOVA;
	bounce_kunit_fill(t);
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_NE(test, addr / FAKE_CHUNK, FAKE_WINDOW_IOVA / FAKE_CHUNK);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	bounce_kunit_warm(test, 8192, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 2);
}

/* If the domain loses its memory, buffers that are still mapped are no longer copied. */
static void orphan_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	dma_addr_t addr, other;
	u8 byte = SECRET;

	bounce_kunit_fill(t);
	addr = bounce_kunit_map_bounced(test, 8192, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, &byte, 1));
	dma_bounce_stop(&t->fake->domain);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 0);
	KUNIT_EXPECT_FALSE(test, fake_device_write(t->fake, addr, &byte, 1));
	dma_sync_single_for_cpu(t->dev, addr, 4096, DMA_FROM_DEVICE);
	dma_bounce_start(&t->fake->domain);
	/* New chunks use other places as long as the orphan exists. */
	other = bounce_kunit_map_bounced(test, 16384, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_NE(test, addr / FAKE_CHUNK, other / FAKE_CHUNK);
	dma_unmap_single(t->dev, other, 4096, DMA_FROM_DEVICE);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_EQ(test, t->pool->orphaned, 1);
}

/* CPUs may keep slots of a dead chunk, but do not hand these slots out. */
static void dead_slot_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_slots *slots = &t->pool->slots;
	struct dma_bounce_chunk *chunk;
	u64 full, served;
	dma_addr_t addr;

	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	full = dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_FULL);
	served = dma_bounce_slots_served(slots, DMA_BOUNCE_SINGLE);
	mutex_lock(&slots->mutex);
	chunk = dma_bounce_slots_chunk(slots, 0);
	if (chunk)
		dma_bounce_chunk_retire(slots, chunk, DMA_BOUNCE_DEAD);
	mutex_unlock(&slots->mutex);
	KUNIT_ASSERT_NOT_NULL(test, chunk);
	KUNIT_EXPECT_GT(test, dma_bounce_slots_cached(slots, DMA_BOUNCE_WRITE, 0), 0);
	addr = bounce_kunit_map(test, 0, 4096, DMA_FROM_DEVICE, 0);
	KUNIT_EXPECT_FALSE(test, dma_bounce_owns(t->pool, addr));
	KUNIT_EXPECT_EQ(test, dma_bounce_pool_stat(t->pool, DMA_BOUNCE_FB_FULL), full + 1);
	KUNIT_EXPECT_EQ(test, dma_bounce_slots_served(slots, DMA_BOUNCE_SINGLE), served);
	dma_unmap_single(t->dev, addr, 4096, DMA_FROM_DEVICE);
	/* The slot that the allocator did not hand out was returned, so it is no orphan. */
	dma_bounce_stop(&t->fake->domain);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 0);
	KUNIT_EXPECT_EQ(test, t->pool->orphaned, 0);
}

/* Nothing is copied to or from a dead chunk, even if the device still reaches it. */
static void dead_copy_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	u8 bytes[64], seen[64];
	dma_addr_t addr;

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = bounce_kunit_map_bounced(test, 8192, 512, DMA_BIDIRECTIONAL, 0);
	WRITE_ONCE(t->fake->refuse_del, true);
	dma_bounce_stop(&t->fake->domain);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr, bytes, sizeof(bytes)));
	dma_sync_single_for_cpu(t->dev, addr, 512, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
	dma_sync_single_for_device(t->dev, addr, 512, DMA_BIDIRECTIONAL);
	KUNIT_EXPECT_TRUE(test, fake_device_read(t->fake, addr, seen, sizeof(seen)));
	KUNIT_EXPECT_MEMEQ(test, seen, bytes, sizeof(seen));
	WRITE_ONCE(t->fake->refuse_del, false);
	dma_unmap_single(t->dev, addr, 512, DMA_BIDIRECTIONAL);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
}

/* Buffers for one mapping, which untrusted devices need if no slot is free */
static void single_use_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	phys_addr_t phys = virt_to_phys(t->area) + 4000;
	u8 bytes[200], *page;
	dma_addr_t addr;
	unsigned int i;

	bounce_kunit_fill(t);
	memset(bytes, SECRET, sizeof(bytes));
	addr = dma_bounce_single_map(t->pool, DMA_BIT_MASK(32), phys, 200, DMA_BIDIRECTIONAL, 0);
	KUNIT_ASSERT_NE(test, addr, DMA_MAPPING_ERROR);
	KUNIT_EXPECT_LE(test, addr, DMA_BIT_MASK(32));
	KUNIT_EXPECT_EQ(test, offset_in_page(addr), 4000);
	/* The page contains the mapped bytes, and zeroes elsewhere. */
	page = fake_device_page(t->fake, addr >> PAGE_SHIFT, IOMMU_READ);
	KUNIT_ASSERT_NOT_NULL(test, page);
	for (i = 0; i < 4000; i++)
		KUNIT_ASSERT_EQ(test, page[i], 0);
	KUNIT_EXPECT_MEMEQ(test, page + 4000, t->area + 4000, 96);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, addr + 50, bytes, 100));
	KUNIT_EXPECT_TRUE(test, dma_bounce_single_sync(t->pool, addr + 100, 50, DMA_FROM_DEVICE,
						       false));
	memset(t->expect + 4100, SECRET, 50);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_FALSE(test, dma_bounce_single_sync(t->pool, addr - SZ_64K, 1, DMA_FROM_DEVICE,
							false));
	KUNIT_EXPECT_TRUE(test, dma_bounce_single_unmap(t->pool, addr, 0));
	memset(t->expect + 4050, SECRET, 100);
	bounce_kunit_expect_area(test);
	KUNIT_EXPECT_FALSE(test, dma_bounce_single_unmap(t->pool, addr, 0));
	KUNIT_EXPECT_NULL(test, fake_device_page(t->fake, addr >> PAGE_SHIFT, IOMMU_READ));
}

/* A chunk that is used as a whole has no slots, is never copied, and is kept when idle. */
static void whole_chunk_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_chunk *chunk;
	dma_addr_t iova, addr;
	u8 byte = SECRET, *va;
	u64 backed;

	bounce_kunit_fill(t);
	t->pool->idle_ms = 20;
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	mutex_lock(&t->pool->slots.mutex);
	backed = t->pool->backed;
	chunk = dma_bounce_chunk_lend(t->pool);
	mutex_unlock(&t->pool->slots.mutex);
	KUNIT_ASSERT_FALSE(test, IS_ERR(chunk));
	KUNIT_EXPECT_EQ(test, t->pool->backed, backed + chunk->size);
	iova = chunk->iova;
	va = chunk->va;
	/* The other chunk is given back because it is idle. */
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 1));
	msleep(300);
	KUNIT_EXPECT_EQ(test, chunks(t->pool), 1);
	KUNIT_EXPECT_TRUE(test, fake_device_write(t->fake, iova + 5, &byte, 1));
	KUNIT_EXPECT_EQ(test, va[5], byte);
	addr = bounce_kunit_map_bounced(test, 0, 4096, DMA_BIDIRECTIONAL, 0);
	KUNIT_EXPECT_NE(test, addr / FAKE_CHUNK, iova / FAKE_CHUNK);
	dma_unmap_single(t->dev, addr, 4096, DMA_BIDIRECTIONAL);
	KUNIT_EXPECT_TRUE(test, __dma_bounce_sync_single(t->dev, iova, 4096, DMA_FROM_DEVICE,
							 false));
	KUNIT_EXPECT_TRUE(test, __dma_bounce_unmap_page(t->dev, iova, 0));
	KUNIT_EXPECT_EQ(test, va[5], byte);
	bounce_kunit_expect_area(test);
	mutex_lock(&t->pool->slots.mutex);
	dma_bounce_chunk_del(t->pool, chunk);
	mutex_unlock(&t->pool->slots.mutex);
	KUNIT_EXPECT_FALSE(test, fake_device_write(t->fake, iova + 5, &byte, 1));
	KUNIT_EXPECT_TRUE(test, chunks_become(t->pool, 0));
}

/* Only chunks are mapped in the provider's range of IOVA. */
static void provider_range_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct iova_domain *iovad = t->pool->iovad;
	unsigned long first = iova_pfn(iovad, FAKE_WINDOW_IOVA), pages;
	unsigned long last = iova_pfn(iovad, FAKE_WINDOW_IOVA + FAKE_WINDOW_LEN - 1);
	struct iova *iova;

	for (pages = 1; pages <= last - first + 1; pages *= 2) {
		/* The allocator takes the highest free IOVA first. */
		iova = alloc_iova(iovad, pages, last, true);
		KUNIT_ASSERT_NOT_NULL(test, iova);
		KUNIT_EXPECT_LT(test, iova->pfn_hi, first);
		__free_iova(iovad, iova);
	}
	/* The pool uses this range for its chunks. */
	bounce_kunit_warm(test, 4096, DMA_FROM_DEVICE);
	KUNIT_EXPECT_EQ(test, t->pool->slots.base, FAKE_WINDOW_IOVA);
}

/* A pool of the kernel's pages takes one IOVA range, even if it tries twice to become ready. */
static void page_range_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_limits first = {}, again = {};

	t->pool->mask = DMA_BIT_MASK(32);
	KUNIT_ASSERT_EQ(test, dma_bounce_page_ops.limits(&t->fake->domain, &first), 0);
	KUNIT_ASSERT_EQ(test, dma_bounce_page_ops.limits(&t->fake->domain, &again), 0);
	KUNIT_EXPECT_EQ(test, first.iova, again.iova);
	KUNIT_EXPECT_TRUE(test, IS_ALIGNED(first.iova | first.len, first.chunk_size));
	KUNIT_EXPECT_LE(test, first.iova + first.len - 1, DMA_BIT_MASK(32));
}

/* If there is no IOVA for the pool size of the command line, the pool has the default size. */
static void page_range_fallback_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct iova_domain *iovad = t->pool->iovad;
	struct iova *range;

	t->pool->mask = DMA_BIT_MASK(28);
	range = dma_bounce_page_range(&t->fake->domain, SZ_1G);
	KUNIT_ASSERT_NOT_NULL(test, range);
	KUNIT_EXPECT_EQ(test, iova_size(range), SZ_64M >> iova_shift(iovad));
	KUNIT_EXPECT_LE(test, range->pfn_hi, DMA_BIT_MASK(28) >> iova_shift(iovad));
	__free_iova(iovad, range);

	/* If there is no IOVA for the default size either, there is no pool. */
	t->pool->mask = DMA_BIT_MASK(25);
	KUNIT_EXPECT_NULL(test, dma_bounce_page_range(&t->fake->domain, SZ_1G));
	KUNIT_EXPECT_NULL(test, dma_bounce_page_range(&t->fake->domain, SZ_64M));
}

/* All domains share a limit of guest pages. At the limit, a chunk must be given back first. */
static void page_limit_test(struct kunit *test)
{
	const struct dma_bounce_ops *ops = &dma_bounce_page_ops;
	size_t first_size = SZ_2M, size = SZ_2M, again_size = SZ_2M;
	struct bounce_test *t = test->priv;
	struct iommu_domain *domain = &t->fake->domain;
	long others = dma_bounce_page_limit() - SZ_512K;
	void *first, *none, *again;

	/* Make it look as if other domains have all but 512 KiB of the limit. */
	others -= atomic_long_read(&dma_bounce_page_total);
	atomic_long_add(others, &dma_bounce_page_total);
	first = ops->add(domain, SZ_1G, &first_size, IOMMU_WRITE);
	none = ops->add(domain, SZ_1G + SZ_2M, &size, IOMMU_WRITE);
	if (!IS_ERR(first))
		KUNIT_EXPECT_TRUE(test, ops->del(domain, SZ_1G, first, first_size));
	again = ops->add(domain, SZ_1G, &again_size, IOMMU_WRITE);
	if (!IS_ERR(again))
		KUNIT_EXPECT_TRUE(test, ops->del(domain, SZ_1G, again, again_size));
	if (!IS_ERR(none))
		ops->del(domain, SZ_1G + SZ_2M, none, size);
	atomic_long_sub(others, &dma_bounce_page_total);
	KUNIT_EXPECT_FALSE(test, IS_ERR(first));
	KUNIT_EXPECT_EQ(test, first_size, SZ_512K);
	KUNIT_EXPECT_TRUE(test, IS_ERR(none));
	KUNIT_EXPECT_FALSE(test, IS_ERR(again));
	KUNIT_EXPECT_EQ(test, again_size, SZ_512K);
}

static void calibrate_test(struct kunit *test)
{
	struct bounce_test *t = test->priv;
	struct dma_bounce_thresholds *measured = &t->pool->calibrated;

	bounce_kunit_warm(test, 4096, DMA_TO_DEVICE);
	dma_bounce_calibrate(t->pool);
	KUNIT_EXPECT_GE(test, measured->read, PAGE_SIZE);
	KUNIT_EXPECT_LE(test, measured->read, DMA_BOUNCE_MAX_SLOT);
	KUNIT_EXPECT_GE(test, measured->write, PAGE_SIZE);
	KUNIT_EXPECT_LE(test, measured->write, DMA_BOUNCE_MAX_SLOT);
	KUNIT_EXPECT_GT(test, t->fake->maps, 0);
}

static struct kunit_case bounce_pool_cases[] = {
	KUNIT_CASE(allocator_test),
	KUNIT_CASE(cache_limit_test),
	KUNIT_CASE(late_miss_test),
	KUNIT_CASE(exhaustion_test),
	KUNIT_CASE(budget_test),
	KUNIT_CASE(idle_test),
	KUNIT_CASE(idle_lowered_test),
	KUNIT_CASE(stuck_test),
	KUNIT_CASE(refused_place_test),
	KUNIT_CASE(orphan_test),
	KUNIT_CASE(dead_slot_test),
	KUNIT_CASE(dead_copy_test),
	KUNIT_CASE(single_use_test),
	KUNIT_CASE(whole_chunk_test),
	KUNIT_CASE(provider_range_test),
	KUNIT_CASE(page_range_test),
	KUNIT_CASE(page_range_fallback_test),
	KUNIT_CASE(page_limit_test),
	KUNIT_CASE(calibrate_test),
	{ }
};

static struct kunit_suite bounce_pool_suite = {
	.name		= "dma-bounce-pool",
	.init		= bounce_kunit_init,
	.exit		= bounce_kunit_exit,
	.test_cases	= bounce_pool_cases,
};

kunit_test_suite(bounce_pool_suite);
